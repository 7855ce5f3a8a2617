package daemon

import (
	"cmp"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
)

// eventLog records the events of a task until it is ready, for all requests that wait for it: a request that joins late
// reads them from the start. Its methods are safe for concurrent use.
type eventLog struct {
	list  wakeup.Value[[]api.Event]
	ready <-chan struct{} // of the task; acquire sets it before the task starts
}

// add appends e, and sets its time if it has none. Once the task is ready it does nothing, because no request waits any
// more.
func (l *eventLog) add(e api.Event) {
	if wakeup.IsClosed(l.ready) {
		return
	}
	e.Time = cmp.Or(e.Time, time.Now())
	l.list.Update(func(list *[]api.Event) { *list = append(*list, e) })
}

// since returns the events from index i on, and a channel that is closed when there are more.
func (l *eventLog) since(i int) ([]api.Event, <-chan struct{}) {
	list, more := l.list.Get()
	return list[i:len(list):len(list)], more
}
