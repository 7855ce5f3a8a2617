package daemon

import (
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
)

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
