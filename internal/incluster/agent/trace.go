//go:build linux

package agent

import (
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/protocol/httpmatch"
	"kubevpn/pkg/protocol/interceptor"
)

// Bounds of traces. A trace ID is 32 hexadecimal digits.
const (
	traceTimeout   = 30 * time.Second
	maxTraces      = 64 // of all owners
	maxTraced      = 8  // requests of a trace
	maxTraceClaims = 64 // of a request
	maxWanted      = 64 // matches of an announcement
	maxOlder       = 16 // connections
	traceLength    = 32
)

// tracer records how the agent handles requests whose trace IDs owners have announced, and no other requests. Its
// methods may be called concurrently.
type tracer struct {
	mu     sync.Mutex
	traces map[string]*trace // by ID
}

type trace struct {
	owner    string // hash
	wanted   []*httpmatch.Match
	until    time.Time
	requests []api.TracedRequest
}

// announce begins a trace of an owner, or prolongs it.
func (t *tracer) announce(id, owner string, wanted []*httpmatch.Match, now time.Time) *api.Error {
	if len(id) != traceLength || strings.Trim(id, "0123456789abcdef") != "" {
		return api.Errorf(api.ExitUsage, "a trace ID has %d hexadecimal digits", traceLength)
	}
	t.expire(now)
	t.mu.Lock()
	defer t.mu.Unlock()
	tr := t.traces[id]
	switch {
	case tr == nil && len(t.traces) >= maxTraces:
		return api.Errorf(api.ExitConflict, "the agent traces %d requests already", maxTraces)
	case tr == nil:
		tr = &trace{owner: owner}
		t.traces[id] = tr
	case tr.owner != owner:
		return api.Errorf(api.ExitConflict, "another owner traces this ID")
	}
	tr.wanted, tr.until = wanted, now.Add(traceTimeout)
	return nil
}

// expire forgets the traces whose time is over.
func (t *tracer) expire(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.DeleteFunc(t.traces, func(_ string, tr *trace) bool { return now.After(tr.until) })
}

// get returns a copy of an announced trace whose time is not over.
func (t *tracer) get(id string) (tr trace, announced bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if found := t.traces[id]; found != nil && time.Now().Before(found.until) {
		return trace{owner: found.owner, wanted: found.wanted, requests: slices.Clone(found.requests)}, true
	}
	return trace{}, false
}

// add notes a request of a trace.
func (t *tracer) add(id string, r api.TracedRequest) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if tr := t.traces[id]; tr != nil && len(tr.requests) < maxTraced {
		tr.requests = append(tr.requests, r)
	}
}

// traceID returns the trace ID of a request.
func traceID(r *http.Request) string {
	if id := r.Header.Get(api.TraceHeader); id != "" {
		return id
	}
	// version-traceID-parentID-flags
	_, rest, _ := strings.Cut(r.Header.Get(api.TraceParent), "-")
	id, _, _ := strings.Cut(rest, "-")
	return id
}

// trace announces a trace ID of an owner, and returns the requests of that trace.
func (l *leader) trace(o *api.AgentOrder, by *owner) (*api.AgentTrace, error) {
	var wanted []*httpmatch.Match
	for _, spec := range o.Wanted[:min(len(o.Wanted), maxWanted)] {
		m, err := httpmatch.New(spec)
		if err != nil {
			return nil, api.Errorf(api.ExitUsage, "the match: %w", err)
		}
		wanted = append(wanted, m)
	}
	if err := l.traces.announce(o.Trace, by.hash, wanted, time.Now()); err != nil {
		return nil, err
	}
	noted, _ := l.traces.get(o.Trace)
	t := &api.AgentTrace{Requests: noted.requests}
	l.mu.Lock()
	defer l.mu.Unlock()
	var ports []port
	for _, c := range l.claims {
		if c.owner == by {
			ports = append(ports, c.at()...)
		}
	}
	if kernel := l.receiver.kernel; kernel != nil && len(ports) > 0 {
		older, err := kernel.Open(ports) // those that do not pass through the agent
		if err != nil {
			l.log.Debug("cannot list open connections", "err", err)
		}
		t.Older = older[:min(len(older), maxOlder)]
	}
	return t, nil
}

// traced records a request if its trace was announced. It is interceptor.Config.Trace.
func (l *leader) traced(f interceptor.Flow, r *http.Request, claims []interceptor.Claim, to *interceptor.Claim) {
	id := traceID(r)
	tr, announced := l.traces.get(id)
	if !announced || len(tr.requests) >= maxTraced {
		return
	}
	note := api.TracedRequest{Port: f.Dst.Port(), To: -1}
	for _, m := range tr.wanted {
		if m.Matches(r) {
			note.Fits = append(note.Fits, m.String())
		}
	}
	for n := range claims[:min(len(claims), maxTraceClaims)] {
		c := &claims[n]
		hash, _, _ := strings.Cut(c.ID, "/") // newTable
		d := api.TracedClaim{Mine: hash == tr.owner, Match: c.Match.String(), Away: c.Target.Away(),
			Differences: c.Match.Differences(r)}
		if o := l.owner(hash); o != nil {
			d.Owner = o.name
		}
		if c == to {
			note.To = n
		}
		if r.Header.Get(api.TraceHeader) != id {
			// A program that propagates traces has made this request. The owner must not see its headers.
			for m := range d.Differences {
				d.Differences[m].Got = ""
			}
		}
		note.Claims = append(note.Claims, d)
	}
	l.traces.add(id, note)
}
