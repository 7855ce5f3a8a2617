package agent

import (
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/protocol/interceptor"
)

// Bounds of traces. A trace ID is 32 hexadecimal digits.
const (
	traceTimeout   = 30 * time.Second
	maxTraces      = 64 // of all owners
	maxTraced      = 8  // requests of a trace
	maxTraceClaims = 64 // of a request
	maxOlder       = 16 // connections
	traceLength    = 32
)

// tracer records how the agent handles requests whose trace IDs owners have announced, and no other requests. Its
// methods may be called concurrently.
type tracer struct {
	announced atomic.Int32 // len(traces): most requests come while it is 0

	mu     sync.Mutex
	traces map[string]*trace // by ID
}

type trace struct {
	owner    string // hash
	until    time.Time
	requests []*api.TracedRequest
	began    []time.Time
}

// announce begins a trace of an owner, or prolongs it.
func (t *tracer) announce(id, owner string, now time.Time) *api.Error {
	if len(id) != traceLength || strings.Trim(id, "0123456789abcdef") != "" {
		return api.Errorf(api.ExitUsage, "a trace ID has %d hexadecimal digits", traceLength)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.drop(now)
	tr := t.traces[id]
	switch {
	case tr == nil && len(t.traces) >= maxTraces:
		return api.Errorf(api.ExitConflict, "the agent traces %d requests already", maxTraces)
	case tr == nil:
		if t.traces == nil {
			t.traces = make(map[string]*trace)
		}
		tr = &trace{owner: owner}
		t.traces[id] = tr
	case tr.owner != owner:
		return api.Errorf(api.ExitConflict, "another owner traces this ID")
	}
	tr.until = now.Add(traceTimeout)
	t.announced.Store(int32(len(t.traces)))
	return nil
}

// expire forgets the traces whose time is over.
func (t *tracer) expire(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.drop(now)
}

// drop is expire with mu held.
func (t *tracer) drop(now time.Time) {
	for id, tr := range t.traces {
		if now.After(tr.until) {
			delete(t.traces, id)
		}
	}
	t.announced.Store(int32(len(t.traces)))
}

// noted returns the requests of an announced trace.
func (t *tracer) noted(id string) []api.TracedRequest {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []api.TracedRequest
	if tr := t.traces[id]; tr != nil {
		for _, r := range tr.requests {
			all = append(all, *r)
		}
	}
	return all
}

// traceID returns the trace ID of a request.
func traceID(r *http.Request) string {
	if id := r.Header.Get(api.TraceHeader); id != "" {
		return id
	}
	// version-traceID-parentID-flags
	if parts := strings.Split(r.Header.Get(api.TraceParent), "-"); len(parts) >= 2 {
		return parts[1]
	}
	return ""
}

// begin records a request if its trace was announced. It is interceptor.Config.Trace, except for describe.
func (t *tracer) begin(f interceptor.Flow, r *http.Request, claims []interceptor.Claim, to *interceptor.Claim,
	describe func(c *interceptor.Claim, owner string) api.TracedClaim) (ended func()) {
	if t.announced.Load() == 0 {
		return nil
	}
	id, now := traceID(r), time.Now()
	t.mu.Lock()
	tr := t.traces[id]
	if tr == nil || now.After(tr.until) || len(tr.requests) >= maxTraced {
		t.mu.Unlock()
		return nil
	}
	note := &api.TracedRequest{Client: f.Client, Port: f.Dst.Port(), To: -1}
	tr.requests = append(tr.requests, note)
	owner := tr.owner
	t.mu.Unlock()
	var tried []api.TracedClaim
	chosen := -1
	for n := range claims[:min(len(claims), maxTraceClaims)] {
		c := describe(&claims[n], owner)
		if c.Differences = claims[n].Match.Differences(r); &claims[n] == to {
			chosen = n
		}
		if r.Header.Get(api.TraceHeader) != id {
			// A program that propagates traces has made this request. The owner must not see its headers.
			for m := range c.Differences {
				c.Differences[m].Got = ""
			}
		}
		tried = append(tried, c)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	note.Claims, note.To = tried, chosen
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		note.Ended, note.Seconds = true, time.Since(now).Seconds()
	}
}

// trace announces a trace ID of an owner, and returns the requests of that trace.
func (l *leader) trace(id string, by *owner) (*api.AgentTrace, error) {
	if err := l.traces.announce(id, by.hash, time.Now()); err != nil {
		return nil, err
	}
	t := &api.AgentTrace{Requests: l.traces.noted(id)}
	l.mu.Lock()
	defer l.mu.Unlock()
	var ports []port
	for _, c := range l.claims {
		if c.owner == by {
			for _, p := range c.ports {
				ports = append(ports, portOf(p))
			}
		}
	}
	older, err := l.receiver.older(ports)
	if err != nil {
		l.log.Debug("cannot list open connections", "err", err)
	}
	t.Older = older[:min(len(older), maxOlder)]
	return t, nil
}

// traced is interceptor.Config.Trace.
func (l *leader) traced(f interceptor.Flow, r *http.Request, claims []interceptor.Claim,
	to *interceptor.Claim) (ended func()) {
	return l.traces.begin(f, r, claims, to, func(c *interceptor.Claim, owner string) api.TracedClaim {
		hash, _, _ := strings.Cut(c.ID, "/") // newTable
		d := api.TracedClaim{Mine: hash == owner, Match: c.Match.String(), Mirror: c.Mirror, Away: c.Target.Away()}
		if o := l.owner(hash); o != nil {
			d.Owner = o.name
		}
		return d
	})
}

// older returns the clients of open connections that do not pass through the agent. Call with the leader's lock held.
func (r *receiver) older(ports []port) ([]netip.AddrPort, error) {
	if r.kernel == nil || len(ports) == 0 {
		return nil, nil
	}
	return r.kernel.Open(ports)
}
