package daemon

import (
	"context"
	"errors"
	"time"

	"kubevpn/internal/api"
)

// task is what a connection and an intercept have in common: a request begins it, others may join, and it stays when
// they have gone. Its fields below the line are guarded by the mutex of whoever owns it.
type task struct {
	what   string          // "connection", for messages
	ready  <-chan struct{} // closed once it does what was asked for; stays closed
	feed   *feed
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when nothing is left of it
	err    error         // why it ended; read after done

	waiters int        // requests that are concerned with it
	kept    bool       // it stays without them
	ending  bool       // cancel was called
	failed  *api.Error // it ended by itself after it had been ready
}

func newTask(what string, ready <-chan struct{}, feed *feed, cancel context.CancelCauseFunc) task {
	return task{what: what, ready: ready, feed: feed, cancel: cancel, done: make(chan struct{}), waiters: 1}
}

func (t *task) wasReady() bool { return isClosed(t.ready) }

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// follow passes the task's events on until it is ready (nil), has ended (why), or ctx ends.
func (t *task) follow(ctx context.Context, emit func(api.Event)) error {
	for i := 0; ; {
		// In this order: what was said before the end is read before the end is seen.
		ended, ready := isClosed(t.done), t.wasReady()
		events, more := t.feed.since(i)
		for _, e := range events {
			emit(e)
		}
		i += len(events)
		switch {
		case ended:
			return t.cause()
		case ready:
			return nil
		}
		select {
		case <-more:
		case <-t.done:
		case <-t.ready:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// cause is what whoever waits for a task that has ended is told.
func (t *task) cause() error {
	if errors.Is(t.err, errDisconnected) {
		return api.Errorf(api.ExitLost, "another command ended the %s", t.what)
	}
	return t.err
}

// end cancels the task; its owner's mutex is held.
func (t *task) end(cause error) {
	t.ending = true
	t.cancel(cause)
}

// unwait takes a waiter away, and ends the task if nobody is left who wants it: it reports whether it did. The owner's
// mutex is held.
func (t *task) unwait() bool {
	t.waiters--
	abandoned := t.waiters == 0 && !t.kept && t.failed == nil
	if abandoned {
		t.end(errDisconnected)
	}
	return abandoned
}

// await waits until nothing is left of the task, and reports whether that happened in time.
func (t *task) await(patience time.Duration) bool {
	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	select {
	case <-t.done:
		return true
	case <-timeout.C:
		return false
	}
}
