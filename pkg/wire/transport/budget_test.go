package transport

import (
	"sync"
	"testing"
)

// Each session may hold as much as is left, so that no number of greedy ones takes all.
func TestBudgetLeavesSomethingForAnotherSession(t *testing.T) {
	b := NewBudget(1200, 0)
	for n, want := range []int64{600, 300, 150} {
		s := share{pool: &b.streams}
		for s.take(1) {
		}
		if got := s.held.Load(); got != want {
			t.Errorf("greedy session %d holds %d streams, want %d", n, got, want)
		}
	}
}

// The session's end already returned the shares that its goroutines still release.
func TestSettledShareDoesNotCount(t *testing.T) {
	b := NewBudget(0, 1<<20)
	s := share{pool: &b.bytes}
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
