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
func (f *eventLog) add(e api.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return
	}
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	f.events = append(f.events, e)
	f.more.Send()
}

// since returns the events from index i on, and a channel that is closed when there are more.
func (f *eventLog) since(i int) ([]api.Event, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.events[i:len(f.events):len(f.events)], f.more.Next()
}

// close makes add do nothing. The events can still be read.
func (f *eventLog) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
}
