package transport

import (
	"sync"
	"sync/atomic"
	"testing"
)

// Each session may hold as much as is left, so that no number of greedy ones takes all.
func TestBudgetLeavesSomethingForAnotherSession(t *testing.T) {
	b := NewBudget(1200, 0)
	for n, want := range []int64{600, 300, 150} {
		s := share{pool: &b.streams}
		s.join(new(atomic.Int64))
		for s.take(1) {
		}
		if got := s.held(); got != want {
			t.Errorf("greedy session %d holds %d streams, want %d", n, got, want)
		}
	}
}

// The session's end already returned the shares that its goroutines still release.
func TestSettledShareDoesNotCount(t *testing.T) {
	b := NewBudget(0, 1<<20)
	s := share{pool: &b.bytes}
	s.join(new(atomic.Int64))
	var work sync.WaitGroup
	for range 8 {
		work.Go(func() {
			for range 1000 {
				s.add(3)
				s.add(-2)
			}
		})
	}
	s.settle()
	work.Wait()
	if _, used := b.Used(); used != 0 {
		t.Errorf("%d bytes are in use after the only session has ended", used)
	}
}

// A user with many greedy sessions gets one part of the budget, and gives back what each session holds.
func TestSessionsOfOneUserShareOnePart(t *testing.T) {
	b := NewBudget(1200, 0)
	var user, other atomic.Int64
	var all []*share
	for range 100 {
		s := &share{pool: &b.streams}
		s.join(new(atomic.Int64))
		s.take(1) // before the user is known
		s.join(&user)
		for s.take(1) {
		}
		all = append(all, s)
	}
	if used, _ := b.Used(); used > 700 {
		t.Errorf("100 sessions of one user hold %d of 1200", used)
	}
	s := &share{pool: &b.streams}
	s.join(&other)
	for s.take(1) {
	}
	if s.held() < 200 {
		t.Errorf("another user gets %d of 1200", s.held())
	}
	for _, s := range append(all, s) {
		s.settle()
		s.settle()
	}
	if used, _ := b.Used(); used != 0 || user.Load() != 0 || other.Load() != 0 {
		t.Errorf("%d remain, of the users %d and %d", used, user.Load(), other.Load())
	}
}
