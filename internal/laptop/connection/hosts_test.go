package connection

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	mdns "github.com/miekg/dns"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/protocol/dns"
)

func noHosts() *hosts { return newTestHosts(nil) }

func newTestHosts(warn func(string), extra ...string) *hosts {
	r := new(api.ConnectRequest)
	r.ExtraDomains, r.ExcludeDomains = extra, []string{"old.corp.test"}
	return newHosts(r, new(flows), func() string { return "k8s.corp.test" }, warn, slog.New(slog.DiscardHandler))
}

// zoneFile is a cluster DNS that answers from records, and counts the queries.
type zoneFile struct {
	t       *testing.T
	asked   atomic.Int32
	records []string
}

func (z *zoneFile) ServeDNS(_ context.Context, q *mdns.Msg) (*mdns.Msg, error) {
	z.asked.Add(1)
	m := new(mdns.Msg).SetReply(q)
	name := q.Question[0].Name
	for _, text := range z.records {
		rr, err := mdns.NewRR(text)
		if err != nil {
			z.t.Error(err)
			continue
		}
		if rr.Header().Name != name {
			continue
		}
		m.Answer = append(m.Answer, rr)
		if alias, ok := rr.(*mdns.CNAME); ok {
			name = alias.Target
		}
	}
	return m, nil
}

func question(name string) *mdns.Msg { return new(mdns.Msg).SetQuestion(mdns.Fqdn(name), mdns.TypeA) }

func TestAddressesOfExtraDomainsAreFound(t *testing.T) {
	h := newTestHosts(nil, "corp.test")
	for name, tt := range map[string]struct {
		asked   string
		records []string
		want    string
	}{
		"both families":               {"db.corp.test.", []string{"db.corp.test. 60 IN A 10.20.1.5", "db.corp.test. 60 IN AAAA fd00:20::5"}, "10.20.1.5 1m0s; fd00:20::5 1m0s"},
		"the domain itself":           {"Corp.Test.", []string{"Corp.Test. 60 IN A 10.20.1.5"}, "10.20.1.5 1m0s"},
		"a short TTL":                 {"db.corp.test.", []string{"db.corp.test. 0 IN A 10.20.1.5"}, "10.20.1.5 10s"},
		"a long TTL":                  {"db.corp.test.", []string{"db.corp.test. 86400 IN A 10.20.1.5"}, "10.20.1.5 1h0m0s"},
		"an alias to elsewhere":       {"db.corp.test.", []string{"db.corp.test. 60 IN CNAME rds.example.com.", "rds.example.com. 30 IN A 10.20.1.5"}, "10.20.1.5 30s"},
		"an alias of a Service":       {"out.default.svc.k8s.corp.test.", []string{"out.default.svc.k8s.corp.test. 5 IN CNAME db.corp.test.", "db.corp.test. 60 IN A 10.20.1.5"}, "10.20.1.5 1m0s"},
		"a name of the cluster":       {"web.default.svc.k8s.corp.test.", []string{"web.default.svc.k8s.corp.test. 5 IN A 10.96.0.9"}, ""},
		"an excluded name":            {"x.old.corp.test.", []string{"x.old.corp.test. 5 IN A 10.20.1.5"}, ""},
		"another domain":              {"xcorp.test.", []string{"xcorp.test. 5 IN A 10.20.1.5"}, ""},
		"a mapped address is of IPv4": {"db.corp.test.", []string{"db.corp.test. 60 IN AAAA ::ffff:10.20.1.5"}, "10.20.1.5 1m0s"},
	} {
		t.Run(name, func(t *testing.T) {
			m := new(mdns.Msg)
			for _, text := range tt.records {
				rr, err := mdns.NewRR(text)
				if err != nil {
					t.Fatal(err)
				}
				m.Answer = append(m.Answer, rr)
			}
			var got []string
			for _, r := range h.find(tt.asked, m) {
				got = append(got, fmt.Sprint(r.addr, " ", r.ttl))
			}
			if strings.Join(got, "; ") != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
}

// settled is a hosts with one host, which a plan has routed.
func settled(t *testing.T, ttl time.Duration) (h *hosts, a netip.Addr) {
	h, a = newTestHosts(nil, "corp.test"), netip.MustParseAddr("10.20.1.5")
	h.add([]hostRecord{{a, "db.corp.test", ttl}})
	h.settle(planned{Hosts: map[netip.Addr]string{a: ""}, Routes: prefixes("10.20.1.5/32")})
	if s := h.shown(); len(s) != 1 || s[0] != (api.Host{Address: a, Name: "db.corp.test", Routed: true}) {
		t.Fatalf("%+v", s)
	}
	return h, a
}

// gone sweeps after d, and reports whether there is no host.
func (h *hosts) gone(d time.Duration) bool {
	time.Sleep(d)
	h.sweep()
	return len(h.wanted()) == 0
}

func TestHostStaysForItsTTLAndItsLastFlow(t *testing.T) {
	const from = "198.19.4.9"
	src, dst := netip.MustParseAddrPort(from+":40000"), netip.MustParseAddrPort("10.20.1.5:80")
	out := func(flags byte) []byte { return tcpPacket(from, "10.20.1.5", 80, flags) }
	in := func(flags byte) []byte {
		b := ports(80, 40000, 20)
		b[12], b[13] = 5<<4, flags
		return datagram("10.20.1.5", from, packet.ProtoTCP, b)
	}
	see := func(t *testing.T, h *hosts, packets ...[]byte) {
		for _, b := range packets {
			b = b[packet.VirtioLen:]
			header, err := packet.Parse(b)
			if err != nil {
				t.Fatal(err)
			}
			remote := header.Dst
			if remote.String() == from {
				remote = header.Src
			}
			h.see(&header, b, remote)
		}
	}
	opened := [][]byte{out(tcpSYN), in(tcpSYN | tcpACK), out(tcpACK)}
	for name, tt := range map[string]struct {
		packets [][]byte
		gone    bool // a minute later, when only the TTL has passed
		later   bool // another hour later
	}{
		"no flow":                   {nil, true, true},
		"an open TCP flow":          {opened, false, false},
		"one that both ends closed": {append(slices.Clone(opened), out(tcpFIN|tcpACK), in(tcpFIN|tcpACK), out(tcpACK)), true, true},
		"one that is half closed":   {append(slices.Clone(opened), in(tcpFIN|tcpACK), out(tcpACK)), false, true},
		"one that was reset":        {append(slices.Clone(opened), in(tcpRST)), true, true},
		"one that was refused":      {[][]byte{out(tcpSYN), in(tcpRST | tcpACK)}, true, true},
		"one that nobody answers":   {[][]byte{out(tcpSYN), out(tcpSYN)}, false, true},
		"a port that is used again": {append(slices.Clone(opened), out(tcpSYN)), false, true},
		"a datagram":                {[][]byte{udpPacket(from, "10.20.1.5", 40000, 53)}, false, true},
		"a ping":                    {[][]byte{icmpPacket(from, "10.20.1.5", 8)}, false, true},
		"what the host begins":      {[][]byte{in(tcpSYN), udpPacket("10.20.1.5", from, 53, 40000), in(tcpACK)}, true, true},
		"flows to another host":     {[][]byte{tcpPacket(from, "10.20.1.6", 80, tcpSYN)}, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, _ := settled(t, 30*time.Second)
				see(t, h, tt.packets...)
				if h.gone(29 * time.Second) {
					t.Error("it is gone before its TTL has passed")
				}
				if got := h.gone(31 * time.Second); got != tt.gone {
					t.Errorf("after the TTL: gone %v, want %v", got, tt.gone)
				}
				if got := h.gone(time.Hour); got != tt.later {
					t.Errorf("after an hour: gone %v, want %v", got, tt.later)
				}
				if tt.later && len(h.flows) > 0 {
					t.Errorf("flows are left: %v", h.flows)
				}
			})
		})
	}
	t.Run("streams of the netstack", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			h, _ := settled(t, 30*time.Second)
			first, second := h.streams.begin(packet.ProtoTCP, src, dst), h.streams.begin(packet.ProtoTCP, src, dst)
			first.end()
			first.end()
			if h.gone(24*time.Hour) || len(h.streams.list()) > 0 {
				t.Error("it is gone while a stream opens, or the stream is listed")
			}
			second.end()
			if !h.gone(0) {
				t.Error("it stays without a stream")
			}
			h.streams.begin(packet.ProtoTCP, src, dst).end()
		})
	})
	t.Run("gvisor takes the place of the system netstack", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			h, _ := settled(t, 30*time.Second)
			see(t, h, opened...)
			f := h.streams.begin(packet.ProtoUDP, src, dst)
			h.endWhole()
			if h.gone(time.Minute) {
				t.Error("it is gone while a stream is open")
			}
			f.end()
			if !h.gone(0) {
				t.Error("it stays for a flow that gvisor resets")
			}
		})
	})
	t.Run("a packet keeps a flow of datagrams", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			h, _ := settled(t, 30*time.Second)
			for range 60 {
				see(t, h, udpPacket(from, "10.20.1.5", 40000, 53))
				if h.gone(time.Minute) {
					t.Fatal("it is gone")
				}
			}
		})
	})
	t.Run("an answer restarts the TTL", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			h, a := settled(t, 30*time.Second)
			time.Sleep(20 * time.Second)
			h.add([]hostRecord{{a, "db.corp.test", 30 * time.Second}})
			if h.gone(29*time.Second) || !h.gone(2*time.Second) {
				t.Error("not 30 s after the last answer")
			}
		})
	})
}

func TestHostsAreBounded(t *testing.T) {
	var warned []string
	h := newTestHosts(func(w string) { warned = append(warned, w) }, "corp.test")
	var found []hostRecord
	for n := range maxHosts + 10 {
		found = append(found, hostRecord{netip.AddrFrom4([4]byte{10, 20, byte(n >> 8), byte(n)}), "db.corp.test", time.Minute})
	}
	if waits := h.add(found); len(waits) != maxHosts || len(h.wanted()) != maxHosts || len(warned) != 1 {
		t.Errorf("%d answers wait, %d hosts, warnings %q", len(waits), len(h.wanted()), warned)
	}
	h.settle(planned{Hosts: map[netip.Addr]string{found[0].addr: "it is loopback"}})
	last := found[len(found)-1]
	if waits := h.add([]hostRecord{last}); len(waits) != 1 || slices.Contains(h.wanted(), found[0].addr) || !slices.Contains(h.wanted(), last.addr) {
		t.Errorf("a host without a route makes no room: %v", h.wanted())
	}
	h, _ = settled(t, time.Minute)
	for n := range maxFlows + 10 {
		b := udpPacket("198.19.4.9", "10.20.1.5", uint16(n), uint16(n>>8))[packet.VirtioLen:]
		header, err := packet.Parse(b)
		if err != nil {
			t.Fatal(err)
		}
		h.see(&header, b, header.Dst)
	}
	if len(h.flows) > maxFlows {
		t.Errorf("%d flows", len(h.flows))
	}
}

// refusing is a Network that does not set a route.
type refusing struct {
	linked
	never netip.Prefix
}

func (n *refusing) SetLink(ctx context.Context, link api.Link) (api.NetworkApplied, error) {
	if slices.Contains(link.Routes, n.never) {
		return api.NetworkApplied{}, errors.New("10.20.1.7/32 overlaps\n10.20.1.0/24 of another connected cluster")
	}
	return n.linked.SetLink(ctx, link)
}

// The route is there when the answer is, and goes after its TTL.
func TestAnswerWaitsForItsRoute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &refusing{never: netip.MustParsePrefix("10.20.1.7/32")}
		c := newProxied(t, n)
		c.cfg.Request.ExtraDomains, c.hosts.extra = []string{"corp.test"}, []string{"corp.test"}
		c.cfg.Request.ExcludeCIDRs = prefixes("10.20.9.0/24")
		c.view.Update(func(v *view) {
			v.lease = api.Lease{Addrs: addrs("198.19.0.9"), Resolver: netip.MustParseAddr("198.19.0.53")}
			v.state = api.ManagerState{PodCIDRs: prefixes("10.244.0.0/16"), StatedPodCIDRs: prefixes("10.244.0.0/16"),
				DNSDomain: "cluster.local", DNSServers: addrs("10.96.0.10")}
		})
		const static = "10.96.0.10/32 10.244.0.0/16"
		cluster := &zoneFile{t: t, records: []string{
			"db.corp.test. 60 IN A 10.20.1.5", "pod.corp.test. 60 IN A 10.244.1.9", "www.corp.test. 60 IN A 203.0.113.10",
			"gone.corp.test. 60 IN A 10.20.9.1", "other.corp.test. 60 IN A 10.20.1.7", "local.corp.test. 60 IN A 127.0.0.1",
			"rich.corp.test. 86400 IN A 10.20.1.8",
		}}
		c.hosts.next = cluster
		if err := c.routes.bringUp(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- c.routes.maintain(ctx) }()
		for _, tt := range []struct{ name, routes, reason string }{
			{"db", "10.20.1.5/32 " + static, ""},
			{"pod", "10.20.1.5/32 " + static, ""},
			{"www", "10.20.1.5/32 " + static, "it is outside of private address space; --extra-cidr 203.0.113.10 routes it"},
			{"gone", "10.20.1.5/32 " + static, "it is excluded"},
			{"other", "10.20.1.5/32 " + static, "10.20.1.7/32 overlaps 10.20.1.0/24 of another connected cluster"},
			{"local", "10.20.1.5/32 " + static, "it is loopback"},
			{"rich", "10.20.1.5/32 10.20.1.8/32 " + static, ""},
		} {
			m, err := c.hosts.ServeDNS(t.Context(), question(tt.name+".corp.test"))
			if err != nil || len(m.Answer) != 1 || m.Answer[0].Header().Ttl > 3600 {
				t.Fatalf("%s: %v, %v", tt.name, m, err)
			}
			a, _ := dns.Address(m.Answer[0])
			if got := text(c.Status().CIDRs); got != tt.routes {
				t.Errorf("%s: the routes are %s, want %s", tt.name, got, tt.routes)
			}
			want := api.Host{Address: a, Name: tt.name + ".corp.test", Routed: tt.reason == "", Reason: tt.reason}
			if hosts := c.Status().DNS.Hosts; !slices.Contains(hosts, want) {
				t.Errorf("the status lacks %+v: %+v", want, hosts)
			}
		}
		if got := cluster.asked.Load(); got != 7 {
			t.Errorf("%d queries at cluster DNS, want one for each", got)
		}
		time.Sleep(time.Minute + 2*hostTick)
		if got := text(c.Status().CIDRs); got != "10.20.1.8/32 "+static {
			t.Errorf("after the TTL, the routes are %s", got)
		}
		time.Sleep(time.Hour)
		if got := text(c.Status().CIDRs); got != static || len(c.Status().DNS.Hosts) != 0 {
			t.Errorf("at last, the routes are %s", got)
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		short, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		if m, err := c.hosts.ServeDNS(short, question("db.corp.test")); err == nil {
			t.Errorf("an answer without a route: %v", m)
		}
	})
}

// A Service may lead out of the cluster, and not into this machine's own network.
func TestServiceLeadsOutOfTheCluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &refusing{never: netip.MustParsePrefix("10.20.1.7/32")}
		c := newProxied(t, n)
		c.cfg.Request.ExcludeCIDRs = prefixes("10.20.9.0/24")
		c.view.Update(func(v *view) {
			v.lease = api.Lease{Addrs: addrs("198.19.0.9"), Resolver: netip.MustParseAddr("198.19.0.53")}
			v.state = api.ManagerState{PodCIDRs: prefixes("10.244.0.0/16"), StatedPodCIDRs: prefixes("10.244.0.0/16"),
				DNSDomain: "cluster.local", DNSServers: addrs("10.96.0.10")}
		})
		const under = ".default.svc.cluster.local"
		c.hosts.next = &zoneFile{t: t, records: []string{
			"pod" + under + ". 5 IN A 10.244.1.9", "db" + under + ". 5 IN A 10.20.1.5", "alias" + under + ". 5 IN CNAME db.corp.test.",
			"db.corp.test. 60 IN A 10.20.1.6", "six" + under + ". 5 IN AAAA fd00:20::5", "away" + under + ". 5 IN A 203.0.113.10",
			"asked" + under + ". 5 IN A 10.20.9.1", "local" + under + ". 5 IN A 127.0.0.1", "cloud" + under + ". 5 IN A 169.254.169.254",
			"taken" + under + ". 5 IN A 10.20.1.7", "mixed" + under + ". 5 IN A 127.0.0.1", "mixed" + under + ". 5 IN A 10.244.1.9",
		}}
		if err := c.routes.bringUp(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- c.routes.maintain(ctx) }()
		for _, tt := range []struct{ name, answer, routed, says string }{
			{"pod", "10.244.1.9", "", ""},
			{"db", "10.20.1.5", "10.20.1.5/32", ""},
			{"alias", "10.20.1.6", "10.20.1.6/32", ""},
			{"six", "fd00:20::5", "fd00:20::5/128", ""},
			{"away", "203.0.113.10", "", ""}, // the same host without the tunnel
			{"asked", "10.20.9.1", "", ""},   // the user excluded it
			{"local", "", "", "127.0.0.1, which is not routed into the cluster: it is loopback"},
			{"cloud", "", "", "169.254.169.254, which is not routed into the cluster: it is link-local"},
			{"taken", "", "", "10.20.1.7, which is not routed into the cluster: 10.20.1.7/32 overlaps 10.20.1.0/24 of another connected cluster; --exclude-cidr 10.20.1.7"},
			{"mixed", "10.244.1.9", "", "127.0.0.1"},
		} {
			var got []string
			m, err := c.hosts.ServeDNS(t.Context(), question(tt.name+under))
			if err == nil {
				for _, rr := range m.Answer {
					if a, ok := dns.Address(rr); ok {
						got = append(got, a.String())
					}
				}
			}
			if strings.Join(got, " ") != tt.answer || (err != nil) != (tt.answer == "") {
				t.Errorf("%s: %v, %v", tt.name, got, err)
			}
			if cidrs := text(c.Status().CIDRs); !strings.Contains(cidrs, tt.routed) {
				t.Errorf("%s: the routes are %s", tt.name, cidrs)
			}
			if warnings := c.Status().Warnings; !strings.Contains(strings.Join(warnings, "\n"), tt.says) {
				t.Errorf("%s: the warnings are %q", tt.name, warnings)
			}
		}
		time.Sleep(time.Minute + 2*hostTick)
		if got := text(c.Status().CIDRs); strings.Contains(got, "10.20.1") {
			t.Errorf("after the TTL, the routes are %s", got)
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
