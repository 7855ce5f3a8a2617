package osdns

import (
	"context"

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

// release returns a function that stops the goroutine and waits for its end. Call release with the mutex held, and the
// function without it.
func (w *watcher) release() (end func()) {
	if w.end == nil {
		return func() {}
	}
	end, w.end = w.end, nil
	return end
}
