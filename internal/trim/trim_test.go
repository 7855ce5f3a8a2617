package trim

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

func TestRun(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	runtime.GC()
	debug.FreeOSMemory() // what other tests have left
	before := look()
	go func() { done <- run(ctx, 100*time.Millisecond) }()
	fill()
	if now := look(); now.held < before.held+32<<20 {
		t.Fatalf("the test holds %d bytes after %d", now.held, before.held)
	}
	var now seen
	testenv.Until(t, "memory goes back", func() bool {
		now = look()
		return now.held < before.held+worthwhile
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A busy program keeps its buffers: it would only make them anew.
func TestBusy(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	done, work := make(chan error, 1), make(chan struct{})
	var busy sync.WaitGroup
	busy.Go(func() {
		for range work {
		}
	})
	fill()
	before := look()
	floor := before.held
	go func() { done <- run(ctx, 20*time.Millisecond) }()
	for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); {
		work <- struct{}{}
		fill()
	}
	if now := look(); now.held < floor/2 {
		t.Errorf("%d bytes of %d are left", now.held, floor)
	}
	close(work)
	busy.Wait()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
