package dns

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/miekg/dns"
)

// watcher is an Observer that wants the queries that the test chooses.
type watcher struct {
	mu              sync.Mutex
	inside, outside bool
	seen            []Query
}

func (w *watcher) Wants(outside bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return outside && w.outside || !outside && w.inside
}

func (w *watcher) want(inside, outside bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.inside, w.outside = inside, outside
}

func (w *watcher) Observe(q Query) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen = append(w.seen, q)
}

// take returns the queries since the last call, without times.
func (w *watcher) take() (lines []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, q := range w.seen {
		lines = append(lines, fmt.Sprintf("%s %s: %s %s %s, %v %q of %d, server %v, took %v", q.Name, q.Type, q.From, q.Zone,
			q.Domain, q.Rcode, q.Answers, q.Records, q.Server.IsValid(), q.Took > 0))
	}
	w.seen = nil
	return lines
}

// observedZone has an index in which web is a Service, and answers for every name under its domains.
func observedZone(t *testing.T, down *atomic.Bool) Zone {
	inner := handlerFunc(func(ctx context.Context, q *dns.Msg) (*dns.Msg, error) {
		if down.Load() {
			return nil, errTunnelDown
		}
		name, m := q.Question[0].Name, new(dns.Msg).SetReply(q)
		switch {
		case strings.HasPrefix(name, "gone."), strings.HasPrefix(name, "git."):
			m.Rcode = dns.RcodeNameError
		case strings.HasPrefix(name, "out."):
			m.Answer = []dns.RR{rr(t, name+" 30 IN CNAME www.example.com.")}
		case strings.HasPrefix(name, "many."):
			for i := range 20 {
				m.Answer = append(m.Answer, rr(t, fmt.Sprintf("%s 30 IN A 10.96.1.%d", name, i)))
			}
		default:
			m.Answer = []dns.RR{rr(t, name+" 30 IN A 10.96.0.80")}
		}
		return m, nil
	})
	index := new(Index)
	index.Apply(true, map[string][]string{"default": {"web", "out"}, "corp": {"git"}}, nil)
	return Zone{Name: "c1", Domain: "cluster.local", Extra: []string{"corp.test"}, Services: index,
		Cluster: NewCache(inner, down.Load)}
}

func TestObserverLearnsWhoAnswered(t *testing.T) {
	outside := newFakeServer(t, ".", "www.example.com. 30 IN A 192.0.2.1\nprinter. 30 IN A 192.0.2.2")
	w, down := &watcher{inside: true, outside: true}, new(atomic.Bool)
	r, addr := newResolverWith(t, Config{Upstreams: []netip.AddrPort{outside.addr}, Logger: quiet(), Observer: w}, serverTimeout)
	if err := r.SetZones([]Zone{observedZone(t, down)}); err != nil {
		t.Fatal(err)
	}
	const tail = ", server false, took true"
	for _, tt := range []struct{ name, want string }{
		{"Web", `web A: cluster c1 cluster.local, NOERROR ["CNAME web.default.svc.cluster.local." "A 10.96.0.80"] of 2` + tail},
		{"web", `web A: cache c1 cluster.local, NOERROR ["CNAME web.default.svc.cluster.local." "A 10.96.0.80"] of 2` + tail},
		{"db.corp.test", `db.corp.test A: cluster c1 corp.test, NOERROR ["A 10.96.0.80"] of 1` + tail},
		{"gone.default.svc", `gone.default.svc A: cluster c1 cluster.local, NXDOMAIN [] of 0` + tail},
		{"out", `out A: cluster c1 cluster.local, NOERROR ["CNAME out.default.svc.cluster.local." "CNAME www.example.com." ` +
			`"A 192.0.2.1"] of 3` + tail},
		{"many.corp.test", `many.corp.test A: cluster c1 corp.test, NOERROR ["A 10.96.1.0" "A 10.96.1.1" "A 10.96.1.2" ` +
			`"A 10.96.1.3" "A 10.96.1.4" "A 10.96.1.5" "A 10.96.1.6" "A 10.96.1.7"] of 20` + tail},
		{"printer", `printer A: nameserver  , NOERROR ["A 192.0.2.2"] of 1, server true, took true`},
	} {
		query(t, "udp", addr, newQuery(tt.name, dns.TypeA))
		if got := w.take(); len(got) != 1 || got[0] != tt.want {
			t.Errorf("%s:\n%q\nwant\n%q", tt.name, got, tt.want)
		}
	}
	down.Store(true)
	r.zones(t.Context())[0].cluster.(*Cache).expire(t)
	query(t, "udp", addr, newQuery("web", dns.TypeA))
	query(t, "udp", addr, newQuery("new.corp.test", dns.TypeA))
	want := []string{
		`web A: stale c1 cluster.local, NOERROR ["CNAME web.default.svc.cluster.local." "A 10.96.0.80"] of 2` + tail,
		`new.corp.test A: nobody c1 corp.test, SERVFAIL [] of 0` + tail,
	}
	if got := w.take(); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// expire makes all kept answers older than their TTL.
func (c *Cache) expire(t *testing.T) {
	t.Helper()
	for _, key := range c.answers.Keys() {
		kept, _ := c.answers.Peek(key)
		kept.since = kept.since.Add(-kept.ttl)
		c.answers.Add(key, kept)
	}
}

// Names that leave the machine are private: an observer that wants only those of clusters must not learn them.
func TestObserverLearnsOnlyWhatItWants(t *testing.T) {
	outside := newFakeServer(t, ".", "www.example.com. 30 IN A 192.0.2.1\ngit.corp. 30 IN A 192.0.2.3")
	w := new(watcher)
	r, addr := newResolverWith(t, Config{Upstreams: []netip.AddrPort{outside.addr}, Logger: quiet(), Observer: w}, serverTimeout)
	if err := r.SetZones([]Zone{observedZone(t, new(atomic.Bool))}); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		inside, outside bool
		want            string
	}{{false, false, "[]"}, {true, false, "[web]"}, {false, true, "[www.example.com git.corp printer]"}} {
		w.want(tt.inside, tt.outside)
		for _, name := range []string{"web", "www.example.com", "git.corp", "printer"} { // git.corp is also a Service's
			query(t, "udp", addr, newQuery(name, dns.TypeA))
		}
		var names []string
		w.mu.Lock()
		for _, q := range w.seen {
			names = append(names, q.Name)
		}
		w.seen = nil
		w.mu.Unlock()
		if got := fmt.Sprint(names); got != tt.want {
			t.Errorf("wants %+v, learns %s", tt, got)
		}
	}
	r.SetUpstreams(nil)
	w.want(true, false)
	query(t, "udp", addr, newQuery("git.corp", dns.TypeA))
	query(t, "udp", addr, newQuery("www.example.com", dns.TypeA))
	noIndex := observedZone(t, new(atomic.Bool)) // for a name without a dot the Resolver asks a cluster, then a nameserver
	noIndex.Services = nil
	if err := r.SetZones([]Zone{noIndex}); err != nil {
		t.Fatal(err)
	}
	query(t, "udp", addr, newQuery("gone", dns.TypeA))
	if got := w.take(); len(got) != 0 {
		t.Errorf("without a nameserver outside: %q", got)
	}
}

func BenchmarkObserve(b *testing.B) {
	for name, w := range map[string]Observer{"nobody": nil, "wants_nothing": &watcher{}, "wants_all": discardQueries{}} {
		b.Run(name, func(b *testing.B) {
			r := New(Config{Logger: quiet(), Observer: w})
			zs := benchZones(b)
			r.current.Store(&zs)
			q, err := newQuery("web", dns.TypeA).Pack()
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				r.handle(b.Context(), "udp", q, nil)
			}
		})
	}
}

type discardQueries struct{}

func (discardQueries) Wants(bool) bool { return true }
func (discardQueries) Observe(Query)   {}
