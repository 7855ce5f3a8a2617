package dns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeServer is a DNS server on loopback, with UDP and TCP on one port. It answers from a zone file and records every
// question.
type fakeServer struct {
	addr netip.AddrPort

	mu      sync.Mutex
	records map[string][]dns.RR // by lower-case name
	soa     dns.RR
	asked   []string                                    // "udp web.example. A", as the client wrote it
	answer  func(w dns.ResponseWriter, q *dns.Msg) bool // true: it has answered the query itself
}

func newFakeServer(t testing.TB, apex, zone string) *fakeServer {
	t.Helper()
	f := &fakeServer{records: map[string][]dns.RR{}}
	f.soa = rr(t, apex+" 30 IN SOA ns.dns."+strings.TrimPrefix(apex, ".")+" hostmaster.example. 1 2 3 4 5")
	for line := range strings.Lines(zone) {
		if line = strings.TrimSpace(line); line != "" {
			f.add(t, line)
		}
	}
	pc, l := listenBoth(t)
	f.addr = pc.LocalAddr().(*net.UDPAddr).AddrPort()
	for _, s := range []*dns.Server{{PacketConn: pc, Handler: f}, {Listener: l, Handler: f}} {
		started := make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		ended := make(chan error, 1)
		go func() { ended <- s.ActivateAndServe() }()
		<-started
		t.Cleanup(func() {
			if err := s.Shutdown(); err != nil {
				t.Error(err)
			}
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
	return f
}

// add adds records to the zone.
func (f *fakeServer) add(t testing.TB, records ...string) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, text := range records {
		r := rr(t, text)
		name := strings.ToLower(r.Header().Name)
		f.records[name] = append(f.records[name], r)
	}
}

// listenBoth listens on a loopback port over UDP and TCP.
func listenBoth(t testing.TB) (*net.UDPConn, net.Listener) {
	t.Helper()
	for range 20 {
		pc, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		l, err := net.Listen("tcp4", pc.LocalAddr().String())
		if err == nil {
			return pc, l
		}
		pc.Close()
	}
	t.Fatal("no port is free for both UDP and TCP")
	return nil, nil
}

func rr(t testing.TB, text string) dns.RR {
	t.Helper()
	r, err := dns.NewRR(text)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (f *fakeServer) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	asked := q.Question[0]
	f.mu.Lock()
	text := w.LocalAddr().Network() + " " + asked.Name + " " + dns.Type(asked.Qtype).String()
	if asked.Qclass != dns.ClassINET {
		text += " " + dns.Class(asked.Qclass).String()
	}
	f.asked = append(f.asked, text)
	answer := f.answer
	f.mu.Unlock()
	if answer != nil && answer(w, q) {
		return
	}
	m := f.reply(q)
	if w.LocalAddr().Network() == "udp" {
		size := dns.MinMsgSize
		if opt := q.IsEdns0(); opt != nil {
			size = int(opt.UDPSize())
		}
		m.Truncate(size)
	}
	if err := w.WriteMsg(m); err != nil {
		panic(err)
	}
}

// reply answers like CoreDNS: authoritative, aliases followed inside of the zone only, names in the asker's case.
func (f *fakeServer) reply(q *dns.Msg) *dns.Msg {
	m := new(dns.Msg).SetReply(q)
	m.Authoritative = true
	if q.IsEdns0() != nil {
		m.SetEdns0(4096, false)
	}
	asked := q.Question[0]
	name := strings.ToLower(asked.Name)
	f.mu.Lock()
	defer f.mu.Unlock()
	for range 20 {
		rrs, ok := f.records[name]
		if !ok {
			if len(m.Answer) == 0 {
				m.Rcode = dns.RcodeNameError
				m.Ns = []dns.RR{f.soa}
			}
			return m
		}
		var alias string
		for _, r := range rrs {
			r = dns.Copy(r)
			if name == strings.ToLower(asked.Name) {
				r.Header().Name = asked.Name
			}
			if c, ok := r.(*dns.CNAME); ok {
				alias = c.Target
				m.Answer = append(m.Answer, r)
			} else if r.Header().Rrtype == asked.Qtype || asked.Qtype == dns.TypeANY {
				m.Answer = append(m.Answer, r)
			}
		}
		if alias == "" || asked.Qtype == dns.TypeCNAME {
			break
		}
		name = strings.ToLower(alias)
	}
	if len(m.Answer) == 0 {
		m.Ns = []dns.RR{f.soa}
	}
	return m
}

// got returns the questions since the last call.
func (f *fakeServer) got() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	asked := f.asked
	f.asked = nil
	slices.Sort(asked)
	return asked
}

func (f *fakeServer) setAnswer(answer func(w dns.ResponseWriter, q *dns.Msg) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answer = answer
}

// clusterZone contains the records of the fake cluster DNS.
const clusterZone = `
	web.default.svc.cluster.local. 30 IN A 10.96.0.10
	web.billing.svc.cluster.local. 30 IN A 10.96.0.11
	web.dev.svc.cluster.local. 30 IN A 10.96.0.12
	dev.default.svc.cluster.local. 30 IN A 10.96.0.13
	lan.default.svc.cluster.local. 30 IN A 10.96.0.14
	wpad.default.svc.cluster.local. 30 IN A 10.96.0.15
	git.corp.svc.cluster.local. 30 IN A 10.96.0.16
	wiki.corp.svc.cluster.local. 30 IN A 10.96.0.17
	db-0.wiki.corp.svc.cluster.local. 30 IN A 10.244.0.17
	db.default.svc.cluster.local. 30 IN A 10.244.0.5
	db.default.svc.cluster.local. 30 IN A 10.244.0.6
	db-0.db.default.svc.cluster.local. 30 IN A 10.244.0.5
	db-1.db.default.svc.cluster.local. 30 IN A 10.244.0.6
	billing.billing.svc.cluster.local. 30 IN A 10.96.0.20
	billing.default.svc.cluster.local. 30 IN A 10.96.0.21
	_http._tcp.web.default.svc.cluster.local. 30 IN SRV 0 100 80 web.default.svc.cluster.local.
	_http._tcp.web.billing.svc.cluster.local. 30 IN SRV 0 100 80 web.billing.svc.cluster.local.
	10-244-0-5.default.pod.cluster.local. 30 IN A 10.244.0.5
	10.0.96.10.in-addr.arpa. 30 IN PTR web.default.svc.cluster.local.
	5.0.244.10.in-addr.arpa. 30 IN PTR db-0.db.default.svc.cluster.local.
	6.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.4.4.2.f.ip6.arpa. 30 IN PTR db-1.db.default.svc.cluster.local.
	dual.default.svc.cluster.local. 30 IN A 10.96.0.30
	dual.default.svc.cluster.local. 30 IN AAAA fd00:96::30
	dns-version.cluster.local. 28800 IN TXT "1.1.0"
	docs.default.svc.cluster.local. 30 IN CNAME www.example.com.
	alias.default.svc.cluster.local. 30 IN CNAME web.billing.svc.cluster.local.
	loop.default.svc.cluster.local. 30 IN CNAME loop.example.com.
	partial.default.svc.cluster.local. 30 IN CNAME web.billing.svc.
	nowhere.default.svc.cluster.local. 30 IN CNAME nothing.example.com.
`

// outsideZone contains the records of the fake upstream.
const outsideZone = `
	www.example.com. 300 IN CNAME cdn.example.net.
	cdn.example.net. 300 IN A 192.0.2.1
	www.google.com. 300 IN A 192.0.2.2
	web.dev. 300 IN A 192.0.2.3
	printer. 300 IN A 192.0.2.4
	printer.lan. 300 IN A 192.0.2.5
	git.corp. 300 IN A 192.0.2.6
	loop.example.com. 300 IN CNAME loop.default.svc.cluster.local.
	1.2.0.192.in-addr.arpa. 300 IN PTR cdn.example.net.
	dev. 300 IN NS ns.dev.
`

func clusterServices() *Index {
	x := new(Index)
	x.Apply(true, map[string][]string{
		"default": {"web", "db", "dual", "dev", "lan", "wpad", "billing", "docs", "alias", "loop", "nowhere", "partial", "stale"},
		"billing": {"web", "billing"},
		"dev":     {"web"},
		"corp":    {"git", "wiki", "gone"},
	}, nil)
	return x
}

var clusterPrefixes = []netip.Prefix{
	netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("f244::/16"),
}

// world is a Resolver that serves on loopback between one cluster and one upstream.
type world struct {
	resolver *Resolver
	addr     netip.AddrPort
	cluster  *fakeServer
	upstream *fakeServer
	zone     Zone
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{
		cluster:  newFakeServer(t, "cluster.local.", clusterZone),
		upstream: newFakeServer(t, ".", outsideZone),
	}
	w.zone = Zone{
		Domain:   "cluster.local",
		Services: clusterServices(),
		Reverse:  clusterPrefixes,
		Cluster:  newNameservers(t, "lab", w.cluster.addr),
	}
	w.resolver = New(Config{Upstreams: []netip.AddrPort{w.upstream.addr}, Logger: quiet()})
	w.resolver.upstream.timeout, w.resolver.timeout = time.Second, 3*time.Second
	t.Cleanup(func() { w.resolver.SetUpstreams(nil) })
	w.setZones(t, w.zone)
	w.addr = serve(t, w.resolver)
	return w
}

func (w *world) setZones(t testing.TB, zones ...Zone) {
	t.Helper()
	if err := w.resolver.SetZones(zones); err != nil {
		t.Fatal(err)
	}
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func newNameservers(t testing.TB, name string, addrs ...netip.AddrPort) *Nameservers {
	n := NewNameservers(NameserversConfig{Name: name, Addrs: addrs, Logger: quiet()})
	n.timeout = time.Second
	t.Cleanup(n.Close)
	return n
}

// serve runs the resolver on a loopback port until the test ends.
func serve(t testing.TB, r *Resolver) netip.AddrPort {
	t.Helper()
	pc, l := listenBoth(t)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Serve(ctx, []net.PacketConn{pc}, []net.Listener{l}) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	return pc.LocalAddr().(*net.UDPAddr).AddrPort()
}

// query sends one query and returns the reply.
func query(t testing.TB, network string, addr netip.AddrPort, q *dns.Msg) *dns.Msg {
	t.Helper()
	c := dns.Client{Net: network, Timeout: 5 * time.Second, UDPSize: 65535}
	m, _, err := c.Exchange(q, addr.String())
	if err != nil {
		t.Fatalf("%s query for %s: %v", network, q.Question[0].Name, err)
	}
	return m
}

func newQuery(name string, qtype uint16) *dns.Msg {
	return new(dns.Msg).SetQuestion(dns.Fqdn(name), qtype)
}

// text returns a reply as "NOERROR web. CNAME web.default.svc.cluster.local.; ...", without TTLs and classes.
func text(m *dns.Msg) string {
	var b strings.Builder
	b.WriteString(dns.RcodeToString[m.Rcode])
	if m.Truncated {
		b.WriteString(" TC")
	}
	for i, r := range m.Answer {
		h := r.Header()
		sep := ";"
		if i == 0 {
			sep = ""
		}
		fmt.Fprintf(&b, "%s %s %s %s", sep, h.Name, dns.Type(h.Rrtype), strings.TrimPrefix(r.String(), h.String()))
	}
	return b.String()
}

type handlerFunc func(context.Context, *dns.Msg) (*dns.Msg, error)

func (f handlerFunc) ServeDNS(ctx context.Context, q *dns.Msg) (*dns.Msg, error) { return f(ctx, q) }

// brokenTunnel is the handler of a cluster that cannot be reached.
func brokenTunnel(context.Context, *dns.Msg) (*dns.Msg, error) { return nil, errTunnelDown }

var errTunnelDown = errors.New("lab: the session is reconnecting")
