package daemon

import (
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
)

// eventLog records the events of a task until it is ready, for all requests that wait for it: a request that joins late
// reads them from the start. The zero value is ready. Its methods are safe for concurrent use.
type eventLog struct {
	mu     sync.Mutex
	events []api.Event
	more   wakeup.Broadcast // sent when there are more events
	closed bool
}

// add appends e, and sets its time if it has none. After close it does nothing, because no request waits any more.
func (l *eventLog) add(e api.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	l.events = append(l.events, e)
	l.more.Send()
}

// since returns the events from index i on, and a channel that is closed when there are more.
func (l *eventLog) since(i int) ([]api.Event, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.events[i:len(l.events):len(l.events)], l.more.Next()
}

// close makes add do nothing. The events can still be read.
func (l *eventLog) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}
