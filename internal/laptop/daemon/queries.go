package daemon

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"

	"kubevpn/internal/api"
	"kubevpn/pkg/protocol/dns"
)

const (
	maxQueries      = 256 // that the daemon remembers
	maxQueriesQueue = 256 // that wait for one follower
)

// queryLog remembers the last queries that went to a cluster. Queries to other nameservers are private: it does not
// remember them, and sends them only to followers that ask for all queries. It is safe for concurrent use.
type queryLog struct {
	all atomic.Int64 // followers of every query

	mu        sync.Mutex
	recent    []api.DNSQuery // the oldest first
	counts    map[queryResult]uint64
	followers map[*queryFollower]struct{}
}

// queryResult is the part of a query that is counted: few values are possible.
type queryResult struct{ from, rcode string }

// queryFollower receives queries. Those for which queue has no room are counted.
type queryFollower struct {
	queue  chan api.DNSQuery
	all    bool
	missed int // guarded by queryLog.mu
}

var _ dns.Observer = (*queryLog)(nil)

// Wants implements dns.Observer.
func (l *queryLog) Wants(outside bool) bool { return !outside || l.all.Load() > 0 }

// Observe implements dns.Observer.
func (l *queryLog) Observe(q dns.Query) {
	line := api.DNSQuery{
		Time: q.Time, Name: q.Name, Type: q.Type, Network: q.Network, From: q.From, Server: q.Server,
		Connection: q.Zone, Domain: q.Domain, Rcode: q.Rcode, Answers: q.Answers, Records: q.Records,
		Seconds: q.Took.Seconds(),
	}
	outside := q.Zone == ""
	l.mu.Lock()
	defer l.mu.Unlock()
	if !outside {
		if l.counts == nil {
			l.counts = map[queryResult]uint64{}
		}
		l.counts[queryResult{q.From, q.Rcode}]++
		if len(l.recent) == maxQueries {
			l.recent = slices.Delete(l.recent, 0, 1)
		}
		l.recent = append(l.recent, line)
	}
	for f := range l.followers {
		if outside && !f.all {
			continue
		}
		line.Missed = f.missed
		select {
		case f.queue <- line:
			f.missed = 0
		default:
			f.missed++
		}
	}
}

// follow returns the queries that the log remembers, and a follower of later ones, until end is called.
func (l *queryLog) follow(all bool) (recent []api.DNSQuery, f *queryFollower, end func()) {
	f = &queryFollower{queue: make(chan api.DNSQuery, maxQueriesQueue), all: all}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.followers == nil {
		l.followers = map[*queryFollower]struct{}{}
	}
	l.followers[f] = struct{}{}
	if all {
		l.all.Add(1)
	}
	return slices.Clone(l.recent), f, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.followers, f)
		if all {
			l.all.Add(-1)
		}
	}
}

// results returns how many queries for clusters had each result.
func (l *queryLog) results() map[queryResult]uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.counts)
}

// clear forgets the queries.
func (l *queryLog) clear() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.recent = nil
}

// handleDNS answers the queries that the log remembers, and then each new one if the client follows.
func (d *daemon) handleDNS(w http.ResponseWriter, r *http.Request) {
	recent, f, end := d.connections.queries.follow(follows(r) && r.FormValue(api.ParamAll) == "true")
	defer end()
	d.lines(w, r, func(ctx context.Context, send func(any)) {
		for _, q := range recent {
			send(q)
		}
		for follows(r) {
			select {
			case q := <-f.queue:
				send(q)
			case <-ctx.Done():
				return
			}
		}
	})
}
