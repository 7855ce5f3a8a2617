package footprint

import (
	"context"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kubevpn/internal/testenv"
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

func TestQuietProgramReturnsMemory(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	runtime.GC()
	debug.FreeOSMemory() // what other tests have left
	before := sample()
	fill()
	if now := sample(); now.held < before.held+32<<20 {
		t.Fatalf("the test holds %d bytes after %d", now.held, before.held)
	}
	go func() { done <- releaseMemory(ctx, 100*time.Millisecond, before) }()
	var now usage
	testenv.Until(t, "memory goes back", func() bool {
		now = sample()
		return now.held < before.held+worthwhile
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A busy program keeps its buffers: it would only make them anew.
func TestBusyProgramKeepsItsBuffers(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	done, work := make(chan error, 1), make(chan struct{})
	var busy sync.WaitGroup
	busy.Go(func() {
		for range work {
		}
	})
	fill()
	before := sample()
	floor := before.held
	go func() { done <- releaseMemory(ctx, 20*time.Millisecond, before) }()
	for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); {
		work <- struct{}{}
		fill()
	}
	if now := sample(); now.held < floor/2 {
		t.Errorf("%d bytes of %d are left", now.held, floor)
	}
	close(work)
	busy.Wait()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
