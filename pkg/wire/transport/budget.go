package transport

import (
	"sync"
	"sync/atomic"
)

// Budget bounds the memory that sessions hold on behalf of their other ends. It counts two things: streams that the
// other ends opened, and bytes that arrived and were not read or that were sent and are not acknowledged.
//
// The sessions of a user (Session.Admit) may together hold as much as is left; a session without a user counts alone.
// One user alone can use half of a budget, and two greedy ones a third each, so that something always remains for
// another. A user who has used half of that part gets no new streams. One who has used all of it loses the streams for
// which more data arrives. It is safe for concurrent use.
type Budget struct{ streams, bytes pool }

// NewBudget returns a Budget of that many streams and bytes.
func NewBudget(streams int, bytes int64) *Budget {
	b := new(Budget)
	b.streams.limit, b.bytes.limit = int64(streams), bytes
	return b
}

// Used returns the streams and bytes that sessions hold now.
func (b *Budget) Used() (streams int, bytes int64) {
	return int(b.streams.used.Load()), b.bytes.used.Load()
}

// pool is one quantity of a Budget.
type pool struct {
	limit int64
	used  atomic.Int64
}

// share is what one session holds of a pool. The sessions of one user have one part of it.
type share struct {
	*pool
	part atomic.Pointer[atomic.Int64] // what all sessions of the user hold, this one included

	mu      sync.Mutex
	own     int64
	settled bool // the session has ended: changes no longer count
}

// join makes the session one of those that share part.
func (s *share) join(part *atomic.Int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if before := s.part.Swap(part); before != nil {
		before.Add(-s.own)
	}
	part.Add(s.own)
}

// held returns what the user's sessions hold.
func (s *share) held() int64 { return s.part.Load().Load() }

// add changes what the session holds by n, which may be negative.
func (s *share) add(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.settled {
		return
	}
	s.own += n
	s.part.Load().Add(n)
	s.used.Add(n)
}

// fits reports whether the session may hold n more.
func (s *share) fits(n int64) bool { return s.held()+n <= s.limit-s.used.Load()-n }

// take adds n if it fits.
func (s *share) take(n int64) bool {
	if !s.fits(n) {
		return false
	}
	s.add(n)
	return true
}

// tight reports whether the user has used more than half of what it may hold.
func (s *share) tight() bool { return !s.fits(max(s.held(), initialWindow)) }

// settle gives everything back.
func (s *share) settle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.part.Load().Add(-s.own)
	s.used.Add(-s.own)
	s.own, s.settled = 0, true
}
