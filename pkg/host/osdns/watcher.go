package osdns

import (
	"context"
	"sync"

	"kubevpn/pkg/wakeup"
)

// watcher runs at most one goroutine. A mutex of its owner guards it. The goroutine may lock that mutex.
type watcher struct{ end func() } // nil: no goroutine runs

// start runs watch in a goroutine, unless one runs. Call with the mutex held.
func (w *watcher) start(watch func(context.Context)) {
	if w.end == nil {
		w.end = wakeup.Go(context.Background(), watch)
	}
}

// stop stops the goroutine and waits for its end. Call without the mutex, mu.
func (w *watcher) stop(mu *sync.Mutex) {
	mu.Lock()
	end := w.end
	w.end = nil
	mu.Unlock()
	if end != nil {
		end()
	}
}
