package dns

import (
	"context"
	"sync"

	"github.com/miekg/dns"
)

// flightKey is equal for identical questions to a cluster.
type flightKey struct {
	zone *zone
	queryKey
}

// flight is one exchange in progress. msg and err are set before done is closed.
type flight struct {
	done chan struct{}
	msg  *dns.Msg
	err  error
}

// flights lets identical questions that are in flight at the same time share one exchange. It keeps no answers.
type flights struct {
	mu  sync.Mutex
	now map[flightKey]*flight
}

// do calls ask, or waits for the same question's call in progress. If the caller of that one gave up, do calls ask
// itself.
func (fs *flights) do(ctx context.Context, key flightKey,
	ask func() (*dns.Msg, error)) (*dns.Msg, error) {
	fs.mu.Lock()
	if f, ok := fs.now[key]; ok {
		fs.mu.Unlock()
		select {
		case <-f.done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		if f.err == nil || ctx.Err() != nil {
			return f.msg, f.err
		}
		if !isGivenUp(f.err) {
			return nil, f.err
		}
		return ask()
	}
	f := &flight{done: make(chan struct{}), err: errSilent}
	if fs.now == nil {
		fs.now = make(map[flightKey]*flight)
	}
	fs.now[key] = f
	fs.mu.Unlock()
	defer func() {
		fs.mu.Lock()
		delete(fs.now, key)
		fs.mu.Unlock()
		close(f.done)
	}()
	f.msg, f.err = ask()
	return f.msg, f.err
}
