package footprint

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pool is where a busy program leaves its buffers.
var pool = sync.Pool{New: func() any { b := make([]byte, 1<<20); return &b }}

func fill() {
	var all []*[]byte
	for range 64 {
		b := pool.Get().(*[]byte)
		clear(*b)
		all = append(all, b)
	}
	for _, b := range all {
		pool.Put(b)
	}
}

func TestReleaseReturnsPooledBuffers(t *testing.T) {
	release() // what other tests have left
	before := sample()
	fill()
	if now := sample(); now.held < before.held+32<<20 {
		t.Fatalf("the test holds %d bytes after %d", now.held, before.held)
	}
	release()
	if now := sample(); now.held >= before.held+worthwhile {
		t.Errorf("the program holds %d bytes after the release, and held %d before", now.held, before.held)
	}
}

func TestMemoryIsReleasedOnlyWhenQuiet(t *testing.T) {
	const much = 2 * worthwhile
	tests := []struct {
		name   string
		start  uint64 // bytes at the start
		growth uint64 // bytes in an interval
		woken  uint64 // goroutines in an interval
		want   int    // releases in two intervals
	}{
		{"a quiet program that grew", 0, much, 1, 2},
		{"a quiet program that did not grow", 0, 0, 1, 0},
		{"a quiet program whose start left memory", much, 0, 1, 1},
		{"a busy program", 0, much, 10 * quiet * uint64(interval/time.Second), 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 2*interval+interval/2)
				defer cancel()
				now := usage{held: tt.start}
				released := 0
				program{
					sample: func() usage {
						now.held += tt.growth
						now.woken += tt.woken
						return now
					},
					release: func() { released++; now.held = 0 },
				}.watch(ctx)
				if released != tt.want {
					t.Errorf("%d releases, want %d", released, tt.want)
				}
			})
		})
	}
}
