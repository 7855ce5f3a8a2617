package daemon

import (
	"sync"
	"time"

	"kubevpn/internal/api"
)

// feed is what a connection said while it was being made, for everybody who waits for it: late comers read
// it from the start. Its methods may be called concurrently.
type feed struct {
	mu     sync.Mutex
	events []api.Event
	more   chan struct{} // closed when there are more events, then replaced
	closed bool
}

func newFeed() *feed { return &feed{more: make(chan struct{})} }

// add appends e, with its time set. After close it does nothing: nobody waits any more.
func (f *feed) add(e api.Event) {
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
func (f *feed) since(i int) ([]api.Event, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.events[i:len(f.events):len(f.events)], f.more
}

// close ends the feed; what is in it can still be read.
func (f *feed) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
}
