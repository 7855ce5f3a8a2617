package daemon

import (
	"sync"
	"time"

	"kubevpn/internal/api"
)

// eventLog records the events of a task until it is ready, for all requests that wait for it: a request that joins late
// reads them from the start. Its methods are safe for concurrent use.
type eventLog struct {
	mu     sync.Mutex
	events []api.Event
	more   chan struct{} // closed when there are more events, then replaced
	closed bool
}

func newEventLog() *eventLog { return &eventLog{more: make(chan struct{})} }

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
	close(f.more)
	f.more = make(chan struct{})
}

// since returns the events from index i on, and a channel that is closed when there are more.
func (f *eventLog) since(i int) ([]api.Event, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.events[i:len(f.events):len(f.events)], f.more
}

// close makes add do nothing. The events can still be read.
func (f *eventLog) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
}
