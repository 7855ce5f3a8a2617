package daemon

import (
	"context"
	"errors"
	"log/slog"
	"time"

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

func (t *task) wasReady() bool { return isClosed(t.ready) }

func (t *task) isOver() bool { return t.over.Err() != nil }

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

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

// eventLog records the events of a task until it is ready, for all requests that wait for it: a request that joins late
// reads them from the start. The zero value is ready. Its methods are safe for concurrent use.
type eventLog struct{ recorded wakeup.Value[recordedEvents] }

type recordedEvents struct {
	list   []api.Event
	closed bool
}

// add appends e, and sets its time if it has none. After close it does nothing, because no request waits any more.
func (l *eventLog) add(e api.Event) {
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	l.recorded.Update(func(r *recordedEvents) {
		if !r.closed {
			r.list = append(r.list, e)
		}
	})
}

// since returns the events from index i on, and a channel that is closed when there are more.
func (l *eventLog) since(i int) ([]api.Event, <-chan struct{}) {
	r, more := l.recorded.Get()
	return r.list[i:len(r.list):len(r.list)], more
}

// close makes add do nothing. The events can still be read.
func (l *eventLog) close() {
	l.recorded.Update(func(r *recordedEvents) { r.closed = true })
}

// connectionTask runs one Connection.
type connectionTask struct {
	task
	id      string
	cluster string // ID of the cluster
	conn    Connection
	request api.ConnectRequest
	network *scopedNetwork
	proxy   *proxy // nil: programs reach the connection through its device
	left    error  // the error of the cleanup; read it after over
}

// status returns the status of the connection, with its ID.
func (t *connectionTask) status() api.Connection {
	c := t.conn.Status()
	c.ID = t.id
	if t.proxy != nil {
		c.SOCKS = t.proxy.status()
	}
	return c
}

func (t *connectionTask) run(ctx context.Context) error {
	run := t.conn.Run
	if t.proxy != nil {
		run = func(ctx context.Context) error { return t.proxy.run(ctx, t.conn, t.network.host.resolver) }
	}
	err := run(ctx)
	switch {
	case isClosed(t.network.host.helper.Done()):
		err = errHelperEnded() // the cause of the error of Run
	case err == nil && ctx.Err() == nil:
		err = api.Errorf(api.ExitLost, "the connection ended").
			WithHint("run `kubevpn connect` again; `kubevpn logs` has the details")
	}
	if t.left = t.network.close(); t.left != nil {
		t.logger.Error("cannot remove the network of a connection", "err", t.left)
	}
	return err
}
