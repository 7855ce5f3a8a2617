package dns

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

func TestClusterNamesFailAtOnceWhenTunnelIsDown(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.zone.Cluster = handlerFunc(brokenTunnel)
	w.setZones(t, w.zone)
	for _, test := range []struct{ name, want string }{
		{"web", "SERVFAIL"},
		{"web.default.svc.cluster.local", "SERVFAIL"},
		{"none.default.svc.cluster.local", "SERVFAIL"},
		{"x.y.svc", "SERVFAIL"},
		{"docs", "SERVFAIL"},
		{"www.google.com", "NOERROR www.google.com. A 192.0.2.2"},
		{"printer", "NOERROR printer. A 192.0.2.4"},
	} {
		q := newQuery(test.name, dns.TypeA)
		q.SetEdns0(1232, false)
		got := query(t, "udp", w.addr, q)
		if text(got) != test.want {
			t.Errorf("%s: got %s, want %s", test.name, text(got), test.want)
		}
		if test.want == "SERVFAIL" {
			ede, _ := got.IsEdns0().Option[0].(*dns.EDNS0_EDE)
			if ede == nil || ede.InfoCode != dns.ExtendedErrorCodeNoReachableAuthority || ede.ExtraText != "lab: the session is reconnecting" {
				t.Errorf("%s: extended error is %v", test.name, got.IsEdns0())
			}
		}
	}
	if diff := cmp.Diff([]string{"udp printer. A", "udp www.google.com. A"}, w.upstream.got()); diff != "" {
		t.Errorf("the upstream was asked (-want +got):\n%s", diff)
	}
}

func TestClusterNamesFailWithinBudgetWhenTunnelIsSilent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.cluster.setAnswer(func(dns.ResponseWriter, *dns.Msg) bool { return true })
	if got := text(query(t, "udp", w.addr, newQuery("web", dns.TypeA))); got != "SERVFAIL" {
		t.Errorf("got %s", got)
	}
	if got := text(query(t, "udp", w.addr, newQuery("www.google.com", dns.TypeA))); got != "NOERROR www.google.com. A 192.0.2.2" {
		t.Errorf("got %s", got)
	}
}

// A namespace has the name of a private top-level domain.
func TestPrivateDomainsAnswerBeforeTheCluster(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, test := range []struct {
		about, name, want string
		cluster, upstream []string
	}{
		{"the laptop's nameserver has the name", "git.corp", "NOERROR git.corp. A 192.0.2.6", nil, []string{"git.corp. A"}},
		{"only the cluster has the name", "wiki.corp",
			"NOERROR wiki.corp. CNAME wiki.corp.svc.cluster.local.; wiki.corp.svc.cluster.local. A 10.96.0.17",
			[]string{"wiki.corp.svc.cluster.local. A"}, []string{"wiki.corp. A"}},
		{"only the cluster has the pod", "db-0.wiki.corp",
			"NOERROR db-0.wiki.corp. CNAME db-0.wiki.corp.svc.cluster.local.; db-0.wiki.corp.svc.cluster.local. A 10.244.0.17",
			[]string{"db-0.wiki.corp.svc.cluster.local. A"}, []string{"db-0.wiki.corp. A"}},
		{"neither has the name", "gone.corp", "NXDOMAIN", []string{"gone.corp.svc.cluster.local. A"}, []string{"gone.corp. A"}},
		{"no such Service", "nas.corp", "NXDOMAIN", nil, []string{"nas.corp. A"}},
		{"the .svc form", "git.corp.svc",
			"NOERROR git.corp.svc. CNAME git.corp.svc.cluster.local.; git.corp.svc.cluster.local. A 10.96.0.16",
			[]string{"git.corp.svc.cluster.local. A"}, nil},
	} {
		for _, network := range []string{"udp", "tcp"} {
			t.Run(test.about+" over "+network, func(t *testing.T) {
				if got := text(query(t, network, w.addr, newQuery(test.name, dns.TypeA))); got != test.want {
					t.Errorf("got %s, want %s", got, test.want)
				}
				via := func(network string, names []string) (out []string) {
					for _, name := range names {
						out = append(out, network+" "+name)
					}
					return out
				}
				if diff := cmp.Diff(via("udp", test.cluster), w.cluster.got()); diff != "" {
					t.Errorf("cluster DNS was asked (-want +got):\n%s", diff)
				}
				if diff := cmp.Diff(via(network, test.upstream), w.upstream.got()); diff != "" {
					t.Errorf("the upstream was asked (-want +got):\n%s", diff)
				}
			})
		}
		m, err := w.resolver.ServeDNS(t.Context(), newQuery(test.name, dns.TypeA))
		if err != nil || text(m) != test.want {
			t.Errorf("%s: inside of the process: %v, %v, want %s", test.about, m, err, test.want)
		}
		w.cluster.got()
		w.upstream.got()
	}

	w.resolver.SetUpstreams(nil)
	t.Run("a nameserver that fails is not a nameserver that says no", func(t *testing.T) {
		if got := text(query(t, "udp", w.addr, newQuery("git.corp", dns.TypeA))); got != "SERVFAIL" {
			t.Errorf("got %s", got)
		}
		if got := w.cluster.got(); len(got) != 0 {
			t.Errorf("cluster DNS was asked %q", got)
		}
	})
}

func TestClusterNamesDoNotRequireAnUpstream(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.resolver.SetUpstreams(nil)
	if got := text(query(t, "udp", w.addr, newQuery("www.google.com", dns.TypeA))); got != "SERVFAIL" {
		t.Errorf("got %s", got)
	}
	if got := text(query(t, "udp", w.addr, newQuery("docs", dns.TypeA))); got != "SERVFAIL" { // an alias to outside
		t.Errorf("got %s", got)
	}
	want := "NOERROR web. CNAME web.default.svc.cluster.local.; web.default.svc.cluster.local. A 10.96.0.10"
	if got := text(query(t, "udp", w.addr, newQuery("web", dns.TypeA))); got != want {
		t.Errorf("got %s", got)
	}
}

func TestShortNamesFollowTheNamespace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.zone.Namespace = "billing"
	w.setZones(t, w.zone)
	want := "NOERROR web. CNAME web.billing.svc.cluster.local.; web.billing.svc.cluster.local. A 10.96.0.11"
	if got := text(query(t, "udp", w.addr, newQuery("web", dns.TypeA))); got != want {
		t.Errorf("got %s", got)
	}
	if got := text(query(t, "udp", w.addr, newQuery("db", dns.TypeA))); got != "NXDOMAIN" {
		t.Errorf("got %s", got)
	}
	if diff := cmp.Diff([]string{"udp db. A"}, w.upstream.got()); diff != "" {
		t.Errorf("the upstream was asked (-want +got):\n%s", diff)
	}
	w.setZones(t) // disconnected
	if got := text(query(t, "udp", w.addr, newQuery("web", dns.TypeA))); got != "NXDOMAIN" {
		t.Errorf("got %s", got)
	}
}

// The Services of the zone are unknown.
func TestZoneWithoutIndexAsksTheCluster(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.zone.Services = nil
	w.setZones(t, w.zone)
	for _, test := range []struct {
		name     string
		qtype    uint16
		want     string
		cluster  []string
		upstream []string
	}{
		{"web", dns.TypeA,
			"NOERROR web. CNAME web.default.svc.cluster.local.; web.default.svc.cluster.local. A 10.96.0.10",
			[]string{"udp web.default.svc.cluster.local. A"}, nil},
		{"web", dns.TypeAAAA, "NOERROR web. CNAME web.default.svc.cluster.local.",
			[]string{"udp web.default.svc.cluster.local. AAAA"}, nil},
		{"printer", dns.TypeA, "NOERROR printer. A 192.0.2.4",
			[]string{"udp printer.default.svc.cluster.local. A"}, []string{"udp printer. A"}},
		{"localhost", dns.TypeA, "NXDOMAIN", nil, []string{"udp localhost. A"}},
		{"com", dns.TypeDS, "NXDOMAIN", nil, []string{"udp com. DS"}},
		{"web.billing", dns.TypeA, "NXDOMAIN", nil, []string{"udp web.billing. A"}},
		{"web.billing.svc", dns.TypeA,
			"NOERROR web.billing.svc. CNAME web.billing.svc.cluster.local.; web.billing.svc.cluster.local. A 10.96.0.11",
			[]string{"udp web.billing.svc.cluster.local. A"}, nil},
		{"web.billing.svc.cluster.local", dns.TypeA, "NOERROR web.billing.svc.cluster.local. A 10.96.0.11",
			[]string{"udp web.billing.svc.cluster.local. A"}, nil},
	} {
		if got := text(query(t, "udp", w.addr, newQuery(test.name, test.qtype))); got != test.want {
			t.Errorf("%s: got %s, want %s", test.name, got, test.want)
		}
		if diff := cmp.Diff(test.cluster, w.cluster.got()); diff != "" {
			t.Errorf("%s: cluster DNS was asked (-want +got):\n%s", test.name, diff)
		}
		if diff := cmp.Diff(test.upstream, w.upstream.got()); diff != "" {
			t.Errorf("%s: the upstream was asked (-want +got):\n%s", test.name, diff)
		}
	}
}

// Two connections have the same cluster domain.
func TestFirstClusterWithTheServiceAnswers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other := newFakeServer(t, "cluster.local.", `
		web.default.svc.cluster.local. 30 IN A 10.97.0.10
		api.default.svc.cluster.local. 30 IN A 10.97.0.20
		10-20-0-5.default.pod.cluster.local. 30 IN A 10.20.0.5
		5.0.20.10.in-addr.arpa. 30 IN PTR api.default.svc.cluster.local.
		blind.default.svc.cluster.local. 30 IN A 10.97.0.30
	`)
	index := new(Index)
	index.Apply(true, map[string][]string{"default": {"web", "api"}}, nil)
	second := Zone{
		Domain: "cluster.local.", Services: index, Cluster: newNameservers(t, "second", other.addr),
		Reverse: []netip.Prefix{netip.MustParsePrefix("10.20.0.0/16"), netip.MustParsePrefix("10.244.0.0/16")},
	}
	check := func(name, want string) {
		t.Helper()
		got := query(t, "udp", w.addr, newQuery(name, map[bool]uint16{true: dns.TypePTR, false: dns.TypeA}[strings.HasSuffix(name, ".arpa")]))
		if text(got) != want {
			t.Errorf("%s: got %s, want %s", name, text(got), want)
		}
	}
	w.setZones(t, w.zone, second)
	check("web", "NOERROR web. CNAME web.default.svc.cluster.local.; web.default.svc.cluster.local. A 10.96.0.10")
	check("web.default.svc.cluster.local", "NOERROR web.default.svc.cluster.local. A 10.96.0.10")
	check("api", "NOERROR api. CNAME api.default.svc.cluster.local.; api.default.svc.cluster.local. A 10.97.0.20")
	check("api.default.svc.cluster.local", "NOERROR api.default.svc.cluster.local. A 10.97.0.20")
	check("api.default.svc", "NOERROR api.default.svc. CNAME api.default.svc.cluster.local.; api.default.svc.cluster.local. A 10.97.0.20")
	check("10-20-0-5.default.pod.cluster.local", "NOERROR 10-20-0-5.default.pod.cluster.local. A 10.20.0.5")
	check("10-20-0-5.default.pod", "NOERROR 10-20-0-5.default.pod. CNAME 10-20-0-5.default.pod.cluster.local.; 10-20-0-5.default.pod.cluster.local. A 10.20.0.5")
	check("5.0.20.10.in-addr.arpa", "NOERROR 5.0.20.10.in-addr.arpa. PTR api.default.svc.cluster.local.")
	check("5.0.244.10.in-addr.arpa", "NOERROR 5.0.244.10.in-addr.arpa. PTR db-0.db.default.svc.cluster.local.")
	check("none.default.svc.cluster.local", "NXDOMAIN")
	if diff := cmp.Diff(6, len(other.got())); diff != "" {
		t.Errorf("questions to the second cluster (-want +got):\n%s", diff)
	}

	// While the first cluster is down, the second does not answer its names.
	down := w.zone
	down.Cluster = handlerFunc(brokenTunnel)
	w.setZones(t, down, second)
	check("web", "SERVFAIL")
	check("api", "NOERROR api. CNAME api.default.svc.cluster.local.; api.default.svc.cluster.local. A 10.97.0.20")

	// The order decides.
	w.setZones(t, second, w.zone)
	check("web", "NOERROR web. CNAME web.default.svc.cluster.local.; web.default.svc.cluster.local. A 10.97.0.10")
	check("5.0.244.10.in-addr.arpa", "NXDOMAIN")

	// For a Service in no index, a zone without an index comes before one whose index lacks it.
	second.Services = nil
	w.setZones(t, w.zone, second)
	check("web", "NOERROR web. CNAME web.default.svc.cluster.local.; web.default.svc.cluster.local. A 10.96.0.10")
	check("blind", "NOERROR blind. CNAME blind.default.svc.cluster.local.; blind.default.svc.cluster.local. A 10.97.0.30")
	check("blind.default.svc.cluster.local", "NOERROR blind.default.svc.cluster.local. A 10.97.0.30")

	// Domains that contain one another.
	inner := second
	inner.Domain, inner.Cluster = "b.cluster.local", handlerFunc(brokenTunnel)
	w.setZones(t, w.zone, inner)
	check("web.default.svc.b.cluster.local", "SERVFAIL")
	check("web.default.svc.cluster.local", "NOERROR web.default.svc.cluster.local. A 10.96.0.10")

	for range 3 {
		w.upstream.got()
	}
	check("www.google.com", "NOERROR www.google.com. A 192.0.2.2")
}

// CHAOS queries under the cluster's domain stay inside.
func TestOtherClassesGoUpstream(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, name := range []string{"version.bind", "web", "web.default.svc.cluster.local"} {
		q := newQuery(name, dns.TypeTXT)
		q.Question[0].Qclass = dns.ClassCHAOS
		query(t, "udp", w.addr, q)
	}
	if diff := cmp.Diff([]string{"udp version.bind. TXT CH", "udp web. TXT CH"}, w.upstream.got()); diff != "" {
		t.Errorf("the upstream was asked (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"udp web.default.svc.cluster.local. TXT CH"}, w.cluster.got()); diff != "" {
		t.Errorf("cluster DNS was asked (-want +got):\n%s", diff)
	}
}

// Aliases lead from the cluster to the outside and back, up to the limit.
func TestAliasesAreFollowed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	// n aliases in turn inside and outside, then an address.
	chain := func(n int) string {
		for i := range n {
			from, to := fmt.Sprintf("c%d-%d.default.svc.cluster.local.", n, i), fmt.Sprintf("c%d-%d.example.com.", n, i+1)
			server := w.cluster
			if i%2 == 1 {
				from, to = fmt.Sprintf("c%d-%d.example.com.", n, i), fmt.Sprintf("c%d-%d.default.svc.cluster.local.", n, i+1)
				server = w.upstream
			}
			last := rr(t, strings.Replace(to+" 30 IN A 192.0.2.9", "CNAME", "", 1))
			server.mu.Lock()
			server.records[from] = []dns.RR{rr(t, from+" 30 IN CNAME "+to)}
			server.mu.Unlock()
			if i == n-1 {
				for _, s := range []*fakeServer{w.cluster, w.upstream} {
					s.mu.Lock()
					s.records[to] = []dns.RR{last}
					s.mu.Unlock()
				}
			}
		}
		return fmt.Sprintf("c%d-0.default.svc", n)
	}
	for n, want := range map[int]int{1: dns.RcodeSuccess, 2: dns.RcodeSuccess, 8: dns.RcodeSuccess, 9: dns.RcodeServerFailure} {
		got := query(t, "udp", w.addr, newQuery(chain(n), dns.TypeA))
		if got.Rcode != want {
			t.Errorf("%d aliases: %s", n, text(got))
		}
		if want == dns.RcodeSuccess && len(got.Answer) != n+2 {
			t.Errorf("%d aliases: %s", n, text(got))
		}
	}
}

// The cluster has looked up the alias's target itself, also with an empty result.
func TestResolvedAliasesAreNotFollowed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.cluster.setAnswer(func(rw dns.ResponseWriter, q *dns.Msg) bool {
		m := new(dns.Msg).SetReply(q)
		m.Answer = []dns.RR{rr(t, q.Question[0].Name+" 30 IN CNAME www.example.com.")}
		if q.Question[0].Qtype == dns.TypeA {
			m.Answer = append(m.Answer, rr(t, "www.example.com. 30 IN A 198.51.100.7"))
		} else {
			m.Ns = []dns.RR{rr(t, "example.com. 30 IN SOA ns.example.com. h.example.com. 1 2 3 4 5")}
		}
		return rw.WriteMsg(m) == nil
	})
	want := "NOERROR docs. CNAME docs.default.svc.cluster.local.; docs.default.svc.cluster.local. CNAME www.example.com.; www.example.com. A 198.51.100.7"
	if got := text(query(t, "udp", w.addr, newQuery("docs", dns.TypeA))); got != want {
		t.Errorf("got %s", got)
	}
	want = "NOERROR docs. CNAME docs.default.svc.cluster.local.; docs.default.svc.cluster.local. CNAME www.example.com."
	if got := text(query(t, "udp", w.addr, newQuery("docs", dns.TypeAAAA))); got != want {
		t.Errorf("got %s", got)
	}
	if got := w.upstream.got(); got != nil {
		t.Errorf("the upstream was asked %q", got)
	}
}

func TestIdenticalQuestionsShareOneExchange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		release := make(chan struct{})
		cluster := handlerFunc(func(_ context.Context, q *dns.Msg) (*dns.Msg, error) {
			asked++
			<-release
			m := new(dns.Msg).SetReply(q)
			m.Answer = []dns.RR{rr(t, q.Question[0].Name+" 30 IN A 10.96.0.10")}
			return m, nil
		})
		r := New(Config{Logger: quiet()})
		if err := r.SetZones([]Zone{{Domain: "cluster.local", Services: clusterServices(), Cluster: cluster}}); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				m, err := r.ServeDNS(t.Context(), newQuery("web", dns.TypeA))
				if err != nil || len(m.Answer) != 2 {
					t.Errorf("got %v, %v", m, err)
				}
			})
		}
		synctest.Wait()
		close(release)
		wg.Wait()
		if asked != 1 {
			t.Errorf("cluster DNS was asked %d times, want 1", asked)
		}
	})
}

func TestSharedExchangeSurvivesACallerThatGivesUp(t *testing.T) {
	t.Parallel()
	var fs flights
	key := flightKey{queryKey: queryKey{name: "web."}}
	begun, end := make(chan struct{}), make(chan struct{})
	want := new(dns.Msg)
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := fs.do(context.Background(), key, func() (*dns.Msg, error) {
			close(begun)
			<-end
			return nil, context.Canceled
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	})
	<-begun
	// The context of this caller ends while it waits.
	ended, cancel := context.WithCancelCause(context.Background())
	cancel(errTunnelDown)
	if _, err := fs.do(ended, key, func() (*dns.Msg, error) { return want, nil }); !errors.Is(err, errTunnelDown) {
		t.Errorf("got %v", err)
	}
	wg.Go(func() {
		if m, err := fs.do(context.Background(), key, func() (*dns.Msg, error) { return want, nil }); m != want || err != nil {
			t.Errorf("got %v, %v", m, err)
		}
	})
	close(end)
	wg.Wait()
	if len(fs.now) != 0 {
		t.Error("an exchange is remembered")
	}
}

func TestSetZonesRejectsInvalidZones(t *testing.T) {
	t.Parallel()
	r := New(Config{Logger: quiet()})
	cluster := handlerFunc(brokenTunnel)
	for want, zone := range map[string]Zone{
		`"" is not a domain`:     {Cluster: cluster},
		`"." is not a domain`:    {Domain: ".", Cluster: cluster},
		`"a..b" is not a domain`: {Domain: "a..b", Cluster: cluster},
		`zone "cluster.local" has no handler for its cluster's DNS`: {Domain: "cluster.local"},
		`zone "cluster.local" has an invalid reverse prefix`:        {Domain: "cluster.local", Cluster: cluster, Reverse: make([]netip.Prefix, 1)},
	} {
		if err := r.SetZones([]Zone{zone}); err == nil || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

func TestIndexAppliesChanges(t *testing.T) {
	t.Parallel()
	var x Index
	if x.Has("default", "web") {
		t.Error("the zero value is not empty")
	}
	x.Apply(false, map[string][]string{"a": {"one", "two", "two"}, "b": {"three"}, "c": nil}, nil)
	x.Apply(false, map[string][]string{"b": {"three", "four"}}, map[string][]string{"a": {"one", "nine"}, "z": {"x"}, "b": {"three"}})
	for name, want := range map[[2]string]bool{{"a", "one"}: false, {"a", "two"}: true, {"b", "three"}: true, {"b", "four"}: true, {"c", ""}: false} {
		if got := x.Has(name[0], name[1]); got != want {
			t.Errorf("%v: %v", name, got)
		}
	}
	if got := x.Namespaces(); !slices.Equal(got, []string{"a", "b"}) || x.Size() != 5 {
		t.Errorf("namespaces %q, size %d; want a and b with three Services", got, x.Size())
	}
	x.Apply(true, map[string][]string{"d": {"five"}}, nil)
	if !x.Has("d", "five") || x.Has("a", "two") {
		t.Error("reset kept a Service")
	}
	x.Apply(true, nil, nil)
	if len(x.names) != 0 {
		t.Error("reset kept Services")
	}
}

// The test changes zones, index and upstreams while queries run: each gets the right answer.
func TestQueriesSurviveChanges(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	index := w.zone.Services
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() {
		many := map[string][]string{}
		for i := range 10000 {
			ns := fmt.Sprintf("ns-%d", i%20)
			many[ns] = append(many[ns], fmt.Sprintf("service-%d", i))
		}
		for ctx.Err() == nil {
			index.Apply(false, many, nil)
			index.Apply(false, nil, many)
		}
	})
	wg.Go(func() {
		for ctx.Err() == nil {
			w.setZones(t, w.zone)
			time.Sleep(time.Millisecond) // paces the churn
		}
	})
	for range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				for name, want := range map[string]string{
					"web":     "NOERROR web. CNAME web.default.svc.cluster.local.; web.default.svc.cluster.local. A 10.96.0.10",
					"printer": "NOERROR printer. A 192.0.2.4",
				} {
					q := newQuery(name, dns.TypeA)
					q.SetEdns0(dns.DefaultMsgSize, false) // for the reason of a SERVFAIL
					if m := query(t, "udp", w.addr, q); text(m) != want {
						t.Errorf("got %v", m)
					}
				}
			}
		})
	}
	wg.Wait()
}

// Every nameserver gets the same queries, in the same number, as without the domains, except for names under them.
func TestExtraAndExcludedDomainsChangeNoOtherQuery(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.cluster.add(t, "db.corp.test. 30 IN A 10.20.1.5", "mail.corp.test. 30 IN A 10.20.1.6", "git.corp. 30 IN A 10.20.1.7")
	w.upstream.add(t, "mail.corp.test. 30 IN A 192.0.2.9")
	away := rr(t, "away.corp.test. 30 IN CNAME mail.corp.test.")
	w.cluster.setAnswer(func(writer dns.ResponseWriter, q *dns.Msg) bool {
		if q.Question[0].Name != away.Header().Name { // an alias that the nameserver does not follow
			return false
		}
		m := new(dns.Msg).SetReply(q)
		m.Answer = []dns.RR{away}
		return writer.WriteMsg(m) == nil
	})
	ask := func(names []string) (answers map[string]string, cluster, upstream []string) {
		answers = map[string]string{}
		for _, name := range names {
			for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA} {
				m := query(t, "udp", w.addr, newQuery(name, qtype))
				if qtype == dns.TypeA {
					answers[name] = text(m)
				}
			}
		}
		return answers, w.cluster.got(), w.upstream.got()
	}
	others := []string{"web", "web.billing", "web.default.svc.cluster.local", "none.default.svc.cluster.local", "www.google.com",
		"printer", "printer.lan", "wiki.corp", "corp.test.example.com", "notcorp.test", "docs"}
	answers, cluster, upstream := ask(others)

	zone := w.zone
	zone.Extra, zone.Exclude = []string{"Corp.Test", "corp."}, []string{"mail.corp.test", "wiki.corp"}
	w.setZones(t, zone)
	for name, want := range map[string]string{
		"db.corp.test":    "NOERROR db.corp.test. A 10.20.1.5",
		"DB.Corp.Test":    "NOERROR DB.Corp.Test. A 10.20.1.5",
		"none.corp.test":  "NXDOMAIN",
		"git.corp":        "NOERROR git.corp. A 10.20.1.7", // not the laptop's, nor the Service git in corp
		"mail.corp.test":  "NOERROR mail.corp.test. A 192.0.2.9",
		"x.wiki.corp":     "NXDOMAIN",
		"away.corp.test":  "NOERROR away.corp.test. CNAME mail.corp.test.; mail.corp.test. A 192.0.2.9",
		"corp.test":       "NXDOMAIN",
		"web.default.svc": "NOERROR web.default.svc. CNAME web.default.svc.cluster.local.; web.default.svc.cluster.local. A 10.96.0.10",
	} {
		if got, _, _ := ask([]string{name}); got[name] != want {
			t.Errorf("%s: %s, want %s", name, got[name], want)
		}
	}
	for _, tt := range []struct{ name, cluster, upstream string }{
		{"db.corp.test", "udp db.corp.test. A, udp db.corp.test. AAAA", ""},
		{"none.corp.test", "udp none.corp.test. A, udp none.corp.test. AAAA", ""},
		{"mail.corp.test", "", "udp mail.corp.test. A, udp mail.corp.test. AAAA"},
	} {
		_, cluster, upstream := ask([]string{tt.name})
		if got := strings.Join(cluster, ", "); got != tt.cluster {
			t.Errorf("%s: cluster DNS was asked %q, want %q", tt.name, got, tt.cluster)
		}
		if got := strings.Join(upstream, ", "); got != tt.upstream {
			t.Errorf("%s: the upstream was asked %q, want %q", tt.name, got, tt.upstream)
		}
	}
	zone.Extra, zone.Exclude = []string{"corp.test"}, []string{"mail.corp.test"}
	w.setZones(t, zone)
	gotAnswers, gotCluster, gotUpstream := ask(others)
	for what, diff := range map[string]string{
		"answers":                cmp.Diff(answers, gotAnswers),
		"queries at cluster DNS": cmp.Diff(cluster, gotCluster),
		"queries upstream":       cmp.Diff(upstream, gotUpstream),
	} {
		if diff != "" {
			t.Errorf("%s differ with an extra domain (-without +with):\n%s", what, diff)
		}
	}
}

func TestLongestDomainOfAllZonesAnswers(t *testing.T) {
	a := Zone{Domain: "cluster.local", Extra: []string{"corp.test"}, Cluster: handlerFunc(brokenTunnel)}
	b := Zone{Domain: "k8s.corp.test", Extra: []string{"lab.corp.test"}, Exclude: []string{"old.corp.test"}, Cluster: a.Cluster}
	r := New(Config{Logger: quiet()})
	if err := r.SetZones([]Zone{a, b}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"db.corp.test": "cluster.local", "x.lab.corp.test": "k8s.corp.test", "web.default.svc.k8s.corp.test": "k8s.corp.test",
		"x.old.corp.test": "cluster.local", "corp.test": "cluster.local", "xcorp.test": "",
	} {
		got := ""
		if asks := r.zones(t.Context()).route(question{key: name, qtype: dns.TypeA, qclass: dns.ClassINET}).asks; len(asks) > 0 {
			got = asks[0].zone.domain
		}
		if got != want {
			t.Errorf("%s is asked of %q, want %q", name, got, want)
		}
	}
}
