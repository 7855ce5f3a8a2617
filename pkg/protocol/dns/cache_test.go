package dns

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
)

// answering is a Handler with the same answer for every name.
type answering struct {
	rcode   int
	answer  []string // records, with "NAME" for the name
	ns      []string
	err     error
	asked   int
	blocked chan struct{} // if not nil, ServeDNS waits until it is closed
	begun   chan struct{} // closed when ServeDNS begins to wait
}

func (a *answering) ServeDNS(_ context.Context, q *dns.Msg) (*dns.Msg, error) {
	a.asked++
	if a.blocked != nil {
		close(a.begun)
		<-a.blocked
	}
	if a.err != nil {
		return nil, a.err
	}
	m := new(dns.Msg).SetReply(q)
	m.Rcode = a.rcode
	for _, text := range a.answer {
		m.Answer = append(m.Answer, mustRR(q.Question[0].Name+" "+text))
	}
	for _, text := range a.ns {
		m.Ns = append(m.Ns, mustRR(text))
	}
	return m, nil
}

func mustRR(text string) dns.RR {
	r, err := dns.NewRR(text)
	if err != nil {
		panic(err)
	}
	return r
}

func lookUp(t *testing.T, c *Cache, name string) *dns.Msg {
	t.Helper()
	q := new(dns.Msg).SetQuestion(name, dns.TypeA)
	m, err := c.ServeDNS(t.Context(), q)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if m.Id != q.Id {
		t.Errorf("%s: the answer has the ID %d, the query %d", name, m.Id, q.Id)
	}
	return m
}

const web = "web.default.svc.cluster.local."

func never() bool { return false }

func TestCacheKeepsAnswersForTheirTTL(t *testing.T) {
	const soa = "cluster.local. 30 IN SOA ns.dns.cluster.local. hostmaster.cluster.local. 1 2 3 4 7"
	for name, tt := range map[string]struct {
		next answering
		ttl  time.Duration // 0: not kept
	}{
		"positive":                      {answering{answer: []string{"9 IN A 10.96.0.5", "5 IN A 10.96.0.6"}}, 5 * time.Second},
		"NXDOMAIN":                      {answering{rcode: dns.RcodeNameError, ns: []string{soa}}, 7 * time.Second},
		"no data":                       {answering{ns: []string{soa}}, 7 * time.Second},
		"negative without SOA":          {answering{rcode: dns.RcodeNameError}, 0},
		"TTL of zero":                   {answering{answer: []string{"0 IN A 10.96.0.5"}}, 0},
		"SERVFAIL":                      {answering{rcode: dns.RcodeServerFailure, ns: []string{soa}}, 0},
		"large answer":                  {answering{answer: make([]string, 300)}, 0},
		"answer with a TTL of 68 years": {answering{answer: []string{"2147483647 IN A 10.96.0.5"}}, 1<<31*time.Second - time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				for i := range tt.next.answer {
					if tt.next.answer[i] == "" {
						tt.next.answer[i] = fmt.Sprintf("9 IN A 10.0.%d.%d", i/256, i%256)
					}
				}
				c := NewCache(&tt.next, never)
				lookUp(t, c, web)
				lookUp(t, c, "WEB.default.svc.Cluster.Local.")
				if want := 1; tt.ttl > 0 && tt.next.asked != want {
					t.Errorf("asked %d times, want %d", tt.next.asked, want)
				}
				if tt.ttl == 0 {
					if tt.next.asked != 2 {
						t.Errorf("asked %d times, want 2", tt.next.asked)
					}
					return
				}
				time.Sleep(tt.ttl - time.Second)
				m := lookUp(t, c, web)
				for _, rr := range append(m.Answer, m.Ns...) {
					if ttl := rr.Header().Ttl; ttl != 1 {
						t.Errorf("a second before the end, the TTL of %v is %d", rr, ttl)
					}
				}
				time.Sleep(time.Second)
				lookUp(t, c, web)
				if tt.next.asked != 2 {
					t.Errorf("after its TTL, the answer was asked for %d times in all, want 2", tt.next.asked)
				}
			})
		})
	}
}

func TestCacheTellsQueriesApart(t *testing.T) {
	next := &answering{answer: []string{"9 IN A 10.96.0.5"}}
	c := NewCache(next, never)
	for n, change := range []func(q *dns.Msg){
		func(*dns.Msg) {},
		func(q *dns.Msg) { q.Question[0].Qtype = dns.TypeAAAA },
		func(q *dns.Msg) { q.Question[0].Qclass = dns.ClassCHAOS },
		func(q *dns.Msg) { q.CheckingDisabled = true },
		func(q *dns.Msg) { q.RecursionDesired = false },
		func(q *dns.Msg) { q.SetEdns0(4096, true) },
	} {
		q := new(dns.Msg).SetQuestion(web, dns.TypeA)
		change(q)
		for range 2 {
			if _, err := c.ServeDNS(t.Context(), q); err != nil {
				t.Fatal(err)
			}
		}
		if next.asked != n+1 {
			t.Errorf("query %d: asked %d times, want %d", n, next.asked, n+1)
		}
	}
}

func TestCacheServesExpiredAnswersWhileInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		interrupted := false
		next := &answering{answer: []string{"5 IN A 10.96.0.5"}}
		c := NewCache(next, func() bool { return interrupted })
		lookUp(t, c, web)
		time.Sleep(6 * time.Second)
		interrupted, next.err = true, errors.New("no tunnel")
		if m := lookUp(t, c, web); m.Answer[0].Header().Ttl != staleTTL || next.asked != 1 || c.Stale() != 1 {
			t.Errorf("asked %d times, %d stale answers, got %v", next.asked, c.Stale(), m)
		}
		interrupted = false // the connection is up, but its servers do not answer
		if m := lookUp(t, c, web); m.Answer[0].Header().Ttl != staleTTL || next.asked != 2 {
			t.Errorf("asked %d times, got %v", next.asked, m)
		}
		time.Sleep(5*time.Second + maxStale)
		interrupted = true
		if m, err := c.ServeDNS(t.Context(), new(dns.Msg).SetQuestion(web, dns.TypeA)); err == nil {
			t.Errorf("%v after its TTL, an answer was served: %v", maxStale, m)
		}
	})
}

func TestCacheForgetsChangedServices(t *testing.T) {
	names := []string{web, "pod-0.web.default.svc.cluster.local.", "_http._tcp.web.default.svc.cluster.local.",
		"web.other.svc.cluster.local.", "myweb.default.svc.cluster.local.", "example.com."}
	for name, tt := range map[string]struct {
		changed map[string][]string
		again   int // names for which the cache asks again
	}{
		"one Service": {map[string][]string{"default": {"web"}}, 3},
		"others":      {map[string][]string{"other": {"db"}, "more": {"web"}}, 0},
		"none":        {map[string][]string{}, 0},
		"all":         {nil, len(names)},
		"many":        {map[string][]string{"more": make([]string, maxForgotten+1)}, len(names)},
	} {
		t.Run(name, func(t *testing.T) {
			next := &answering{answer: []string{"60 IN A 10.96.0.5"}}
			c := NewCache(next, never)
			for _, name := range names {
				lookUp(t, c, name)
			}
			c.Forget(tt.changed)
			for _, name := range names {
				lookUp(t, c, name)
			}
			if got := next.asked - len(names); got != tt.again {
				t.Errorf("%d names were asked for again, want %d", got, tt.again)
			}
		})
	}
}

// An answer that was in flight when the Service changed may be the old one.
func TestCacheForgetsQueriesInFlight(t *testing.T) {
	next := &answering{answer: []string{"60 IN A 10.96.0.5"}, blocked: make(chan struct{}), begun: make(chan struct{})}
	c := NewCache(next, never)
	done := make(chan struct{})
	go func() {
		defer close(done)
		lookUp(t, c, web)
	}()
	<-next.begun
	c.Forget(map[string][]string{"default": {"web"}})
	close(next.blocked)
	<-done
	next.blocked = nil
	lookUp(t, c, web)
	if next.asked != 2 {
		t.Errorf("asked %d times, want 2", next.asked)
	}
}

func TestCacheIsBounded(t *testing.T) {
	c := NewCache(&answering{answer: []string{"60 IN A 10.96.0.5"}}, never)
	for n := range 2 * maxCached {
		lookUp(t, c, fmt.Sprintf("s%d.default.svc.cluster.local.", n))
	}
	if n := len(c.answers.Keys()); n != maxCached {
		t.Errorf("%d answers are kept, want %d", n, maxCached)
	}
}
