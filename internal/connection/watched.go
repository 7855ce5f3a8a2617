package connection

import (
	"context"
	"sync"

	"kubevpn/pkg/wire/transport"
)

// watched is a variable whose changes goroutines can wait for. The zero value is ready. It is safe for concurrent use.
type watched[T any] struct {
	mu      sync.Mutex
	value   T
	changed chan struct{} // the next update closes it; nil: nobody waits
}

// load returns the value.
func (w *watched[T]) load() T {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.value
}

// get returns the value, and a channel that the next update closes.
func (w *watched[T]) get() (value T, changed <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.changed == nil {
		w.changed = make(chan struct{})
	}
	return w.value, w.changed
}

// update changes the value with f and wakes every waiting goroutine. f must not block.
func (w *watched[T]) update(f func(*T)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(&w.value)
	if w.changed != nil {
		close(w.changed)
		w.changed = nil
	}
}

// await returns the first value for which ok returns true, or ctx's error.
func (w *watched[T]) await(ctx context.Context, ok func(T) bool) (T, error) {
	for {
		value, changed := w.get()
		if ok(value) {
			return value, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return value, ctx.Err()
		}
	}
}

// signal wakes one goroutine. Signals that come before it wakes are joined to one.
type signal chan struct{}

func newSignal() signal { return make(signal, 1) }

func (s signal) raise() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// current is the transport session of the moment, or nil. A flow that opens while there is none waits for the next
// session.
type current struct{ session watched[*transport.Session] }

func (c *current) set(s *transport.Session) {
	c.session.update(func(now **transport.Session) { *now = s })
}

// clear removes s, unless another session has replaced it.
func (c *current) clear(s *transport.Session) {
	c.session.update(func(now **transport.Session) {
		if *now == s {
			*now = nil
		}
	})
}

// now returns the session, or nil.
func (c *current) now() *transport.Session { return c.session.load() }

// wait returns the session as soon as there is one, or ctx's error.
func (c *current) wait(ctx context.Context) (*transport.Session, error) {
	return c.session.await(ctx, func(s *transport.Session) bool { return s != nil })
}
