package daemon

import (
	"context"
	"errors"
	"log/slog"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
)

var (
	errStopped  = errors.New("stopped")  // the cause of a task that no request needs any more, or that a request ended
	errReplaced = errors.New("replaced") // the cause of an intercept that another one replaces
)

// task is one connection or one intercept, from the request that starts it until its cleanup has ended. The mutex of
// its registry guards the fields below the empty line.
type task struct {
	kind   string       // "connection" or "intercept", for messages
	logger *slog.Logger // names the task in each line
	ready  <-chan struct{}
	events *eventLog
	over   context.Context         // ends when the cleanup has ended, with the cause of its end
	finish context.CancelCauseFunc // ends over

	cancel  context.CancelCauseFunc
	waiters int        // requests that wait for it or need it
	pinned  bool       // it continues without waiters
	ending  bool       // cancel was called
	failed  *api.Error // it ended by itself after it had been ready
}

// newTask returns a task that a registry can start. The task closes ready once the connection or intercept works.
func newTask(kind string, logger *slog.Logger, ready <-chan struct{}, events *eventLog) task {
	over, finish := context.WithCancelCause(context.Background())
	return task{kind: kind, logger: logger, ready: ready, events: events, over: over, finish: finish}
}

func (t *task) base() *task { return t }

func (t *task) wasReady() bool { return wakeup.IsClosed(t.ready) }

func (t *task) isOver() bool { return t.over.Err() != nil }

// follow emits the events of the task. It returns nil when the task is ready, the cause when the task has ended, or the
// cause of ctx.
func (t *task) follow(ctx context.Context, emit func(api.Event)) error {
	for i := 0; ; {
		// In this order, because the task may add events before it ends.
		ended, ready := t.isOver(), t.wasReady()
		events, more := t.events.since(i)
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
		case <-t.over.Done():
		case <-t.ready:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// cause returns the error for a request that waits for a task that has ended.
func (t *task) cause() error {
	err := context.Cause(t.over)
	if errors.Is(err, errStopped) {
		return api.Errorf(api.ExitLost, "another command ended the %s", t.kind)
	}
	return err
}

// endLocked cancels the task.
func (t *task) endLocked(cause error) {
	t.ending = true
	t.cancel(cause)
}
