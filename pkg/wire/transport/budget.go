package transport

import (
	"math"
	"sync/atomic"
)

// Budget bounds the memory that sessions hold on behalf of their other ends. It counts two things: streams that the
// other ends opened, and bytes that arrived and were not read or that were sent and are not acknowledged.
//
// A session may hold as much as is left. One session alone can use half of a budget, and two greedy ones a third each,
// so that something always remains for another session. A session that has used half of its part gets no new streams.
// One that has used all of it loses the streams for which more data arrives. It is safe for concurrent use.
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

// share is what one session holds of a pool.
type share struct {
	*pool
	held atomic.Int64
}

// settled marks a share that no longer counts.
const settled = math.MinInt64 / 2

// add changes what the session holds by n, which may be negative.
func (s *share) add(n int64) {
	if s.held.Add(n) > settled/2 {
		s.used.Add(n)
	}
}

// fits reports whether the session may hold n more.
func (s *share) fits(n int64) bool { return s.held.Load()+n <= s.limit-s.used.Load()-n }

// take adds n if it fits.
func (s *share) take(n int64) bool {
	if !s.fits(n) {
		return false
	}
	s.add(n)
	return true
}

// tight reports whether the session has used more than half of what it may hold.
func (s *share) tight() bool { return !s.fits(max(s.held.Load(), initialWindow)) }

// settle gives everything back. Later changes do not count: the session has ended.
func (s *share) settle() { s.used.Add(-s.held.Swap(settled)) }
