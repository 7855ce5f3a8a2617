package connection

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/install"
)

// fakeGateways admits and adds gateways as the test specifies.
type fakeGateways struct {
	refusal error
	s       *Connection
	adds    []install.GatewayOptions
	failure error  // of Add
	gone    string // a pod that ends while a gateway is added to it

	manager sync.Mutex // held while the manager sends messages: the laptop handles them in one goroutine
}

// replace makes a connection use the gateways.
func (f *fakeGateways) replace(s *Connection) {
	f.s = s
	s.chooser.image = func(context.Context) (string, error) { return "registry.example/kubevpn:1", nil }
	s.chooser.mayAdd = func(context.Context, install.GatewayOptions) error { return f.refusal }
	s.chooser.add = f.add
}

func (f *fakeGateways) add(ctx context.Context, o install.GatewayOptions) error {
	f.adds = append(f.adds, o)
	if f.gone != "" && o.Pod == f.gone {
		return api.Errorf(api.ExitNotReady, "%w: %s is being deleted", install.ErrPodGone, o.Pod)
	}
	if f.failure != nil {
		return f.failure
	}
	f.manager.Lock()
	f.s.handshake.handle(api.ControlMessage{State: &api.ManagerState{Gateway: &api.Gateway{MTU: 1450, IPv4: true}}})
	f.manager.Unlock()
	select {
	case <-o.Ready:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

var iptablesProxy = client.KubeProxy{Mode: client.KubeProxyIPTables, By: "a test"}

func TestAddsAGatewayOnlyForTheSystemNetstack(t *testing.T) {
	refusal := api.Errorf(api.ExitPermission, "pod security says no")
	ipvs := client.KubeProxy{Mode: client.KubeProxyIPVS, By: "a test"}
	for _, tt := range []struct {
		name     string
		asked    string
		proxy    client.KubeProxy
		there    bool
		limited  bool
		refusal  error
		failure  error
		netstack string
		code     api.ExitCode
		adds     int
		relabel  bool
	}{
		{name: "auto", proxy: iptablesProxy, netstack: "system", adds: 1},
		{name: "auto_there", asked: "auto", proxy: iptablesProxy, there: true, refusal: refusal, netstack: "system"},
		{name: "auto_refused", asked: "auto", proxy: iptablesProxy, refusal: refusal, netstack: "gvisor"},
		{name: "auto_does_not_start", asked: "auto", proxy: iptablesProxy, failure: refusal, netstack: "gvisor", adds: 1},
		{name: "auto_ipvs", asked: "auto", proxy: ipvs, netstack: "gvisor"},
		{name: "auto_limited", asked: "auto", proxy: iptablesProxy, limited: true, netstack: "gvisor"},
		{name: "gvisor", asked: "gvisor", proxy: iptablesProxy, netstack: "gvisor"},
		{name: "system_limited", asked: "system", proxy: iptablesProxy, limited: true, code: api.ExitNetstack},
		{name: "system", asked: "system", proxy: ipvs, refusal: refusal, netstack: "system", adds: 1, relabel: true},
		{name: "system_refused", asked: "system", proxy: iptablesProxy, failure: refusal, code: api.ExitNetstack, adds: 1, relabel: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newTestConnection(t)
			s.cfg.Request.Netstack = tt.asked
			s.manager.location.Update(func(p *managerLocation) { p.pod, p.node = "m-1", "n1" })
			s.view.Update(func(v *view) { v.hello = &api.ManagerHello{Pod: "m-1"} })
			g := &fakeGateways{refusal: tt.refusal, failure: tt.failure}
			g.replace(s)
			if tt.limited {
				s.handshake.learn(api.ManagerState{GVisorOnly: true})
			}
			if tt.there {
				s.handshake.learn(api.ManagerState{Gateway: &api.Gateway{MTU: 1450, IPv4: true}})
			}
			s.chooser.look(t.Context(), func(_ context.Context, node string) client.KubeProxy {
				if node != "n1" {
					t.Errorf("asked for the kube-proxy of node %q", node)
				}
				return tt.proxy
			})
			err := s.chooser.choose(t.Context())
			if e := api.AsError(err); (e == nil) != (tt.code == 0) || e != nil && e.Code != tt.code {
				t.Fatalf("got %v, want code %d", err, tt.code)
			}
			st := s.Status()
			if st.Netstack != tt.netstack || st.ProxyMode != string(tt.proxy.Mode) || (st.NetstackReason == "") != (tt.netstack == "") {
				t.Errorf("got %s (%s), kube-proxy %s", st.Netstack, st.NetstackReason, st.ProxyMode)
			}
			if len(g.adds) != tt.adds || tt.adds > 0 && (g.adds[0].Pod != "m-1" || g.adds[0].Relabel != tt.relabel) {
				t.Errorf("asked for gateways: %+v", g.adds)
			}
		})
	}
}

// A lost gateway returns by itself, or is added again with --netstack system, or auto continues without it.
func TestLostGatewayIsAwaitedOrReplaced(t *testing.T) {
	for _, tt := range []struct {
		name      string
		asked     string
		pod       string        // of the manager, from then on
		then      string        // of the manager after that, because pod ends while a gateway is added to it
		back      time.Duration // when the gateway reports again; 0: never
		failure   error
		netstack  string
		code      api.ExitCode
		adds      int
		warnings  int
		undergone time.Duration // until it is settled
	}{
		{name: "restarted_in_its_pod", asked: "system", pod: "m-1", back: 2 * time.Second, netstack: "system", undergone: 2 * time.Second},
		{name: "dead_in_its_pod", asked: "system", pod: "m-1", netstack: "system", adds: 1, undergone: gatewayGrace},
		{name: "another_pod", asked: "system", pod: "m-2", netstack: "system", adds: 1},
		{name: "another_pod_which_goes_too", asked: "system", pod: "m-2", then: "m-3", netstack: "system", adds: 2},
		{name: "another_pod_refuses", asked: "system", pod: "m-2", failure: errors.New("no"), netstack: "system", code: api.ExitNetstack, adds: 1},
		{name: "auto_another_pod", asked: "auto", pod: "m-2", netstack: "gvisor", warnings: 1},
		{name: "auto_restarted", asked: "auto", pod: "m-1", back: 2 * time.Second, netstack: "system", undergone: 2 * time.Second},
		{name: "auto_dead", asked: "auto", pod: "m-1", netstack: "gvisor", warnings: 1, undergone: gatewayGrace},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newTestConnection(t)
				s.status.establish()
				s.cfg.Request.Netstack = tt.asked
				g := &fakeGateways{failure: tt.failure}
				if tt.then != "" {
					g.gone = tt.pod
				}
				g.replace(s)
				s.status.change(func(r *report) { r.attached, r.greeted = true, true })
				s.chooser.looked.Update(func(l **looked) { *l = &looked{proxy: iptablesProxy} })
				s.chooser.facts = facts{Asked: tt.asked, Proxy: iptablesProxy}
				s.greet("m-1")
				there := api.ControlMessage{State: &api.ManagerState{Gateway: &api.Gateway{MTU: 1450, IPv4: true}}}
				s.handshake.handle(there)
				s.chooser.adopt(choose(s.chooser.facts))
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- s.chooser.watch(ctx) }()
				synctest.Wait()

				began := time.Now()
				greets := func(pod string) { // without a gateway
					g.manager.Lock()
					defer g.manager.Unlock()
					s.greet(pod)
					s.handshake.handle(api.ControlMessage{State: &api.ManagerState{}})
					if tt.asked == api.NetstackAuto && tt.undergone == 0 {
						return // watch may have changed to gvisor already
					}
					if c := s.Status(); c.Status != api.StatusReconnecting || c.Error == nil || c.Error.Code != api.ExitNetstack {
						t.Errorf("without a gateway it is %s, %v", c.Status, c.Error)
					}
				}
				greets(tt.pod)
				if tt.then != "" {
					synctest.Wait()
					greets(tt.then)
				}
				if tt.back > 0 {
					time.Sleep(tt.back)
					s.handshake.handle(there)
				} else {
					time.Sleep(tt.undergone)
				}
				synctest.Wait()
				if took := time.Since(began); took != tt.undergone {
					t.Errorf("settled after %v, want %v", took, tt.undergone)
				}
				st := s.Status()
				if st.Netstack != tt.netstack || len(g.adds) != tt.adds || len(st.Warnings) != tt.warnings {
					t.Errorf("netstack %s (%s), %d added, warnings %q", st.Netstack, st.NetstackReason, len(g.adds), st.Warnings)
				}
				if want := cmp.Or(tt.then, tt.pod); tt.adds > 0 && g.adds[tt.adds-1].Pod != want {
					t.Errorf("added to %s, not %s", g.adds[tt.adds-1].Pod, want)
				}
				if tt.code != 0 {
					if e := api.AsError(<-ended); e == nil || e.Code != tt.code {
						t.Errorf("ended with %v", e)
					}
					cancel()
					return
				}
				if st.Status != api.StatusConnected || st.Error != nil {
					t.Errorf("status %s, %v", st.Status, st.Error)
				}
				if whole := s.packets.steering.Load().whole(addrs("10.244.0.2")[0]); whole != (tt.netstack == "system") {
					t.Errorf("packets to pods cross whole: %v", whole)
				}
				cancel()
				if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
					t.Errorf("ended with %v", err)
				}
			})
		})
	}
}

// The connection waits for a gateway that runs but does not serve the laptop's network yet, and adds none.
func TestGatewayMustServeTheLease(t *testing.T) {
	for _, tt := range []struct {
		name    string
		gateway api.Gateway
		waits   bool
	}{
		{"it_has_heard", api.Gateway{IPv4: true, IPv6: true, Addrs: addrs("198.18.0.1 198.19.0.1 fd4e::1")}, false},
		{"it_forwards_no_ipv6", api.Gateway{IPv4: true, Addrs: addrs("198.19.0.1")}, false},
		{"another_network", api.Gateway{IPv4: true, Addrs: addrs("198.18.0.1")}, true},
		{"one_family", api.Gateway{IPv4: true, IPv6: true, Addrs: addrs("198.19.0.1")}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newTestConnection(t)
				g := new(fakeGateways)
				g.replace(s)
				s.cfg.Request.Netstack = "system"
				s.greet("m-1")
				s.view.Update(func(v *view) { v.lease.Networks = prefixes("198.19.0.0/16 fd4e::/48") })
				s.handshake.handle(api.ControlMessage{State: &api.ManagerState{Gateway: &tt.gateway}})
				chosen := make(chan error, 1)
				go func() { chosen <- s.chooser.choose(t.Context()) }()
				synctest.Wait()
				if waits := len(chosen) == 0; waits != tt.waits {
					t.Errorf("it waits: %v", waits)
				}
				s.handshake.handle(api.ControlMessage{State: &api.ManagerState{Gateway: &api.Gateway{IPv4: true, IPv6: true, Addrs: addrs("198.19.0.1 fd4e::1")}}})
				if err := <-chosen; err != nil || len(g.adds) != 0 || s.Status().Netstack != "system" {
					t.Errorf("%v, %d added, %+v", err, len(g.adds), s.Status())
				}
			})
		})
	}
}

func TestWarningsNameMissingFamilies(t *testing.T) {
	for _, tt := range []struct {
		name    string
		cluster string // its pods
		gateway api.Gateway
		want    string
	}{
		{"all_of_it", "10.244.0.0/16 fd00:244::/64", api.Gateway{IPv4: true, IPv6: true}, ""},
		{"what_it_says", "10.244.0.0/16", api.Gateway{IPv4: true, IPv6: true, Warnings: []string{"a", "b"}}, "a|b"},
		{"no_ipv6", "10.244.0.0/16 fd00:244::/64", api.Gateway{IPv4: true, Warnings: []string{"no IPv6: off"}},
			"gvisor carries IPv6; the gateway says: no IPv6: off"},
		{"no_ipv6_and_none_needed", "10.244.0.0/16", api.Gateway{IPv4: true, Warnings: []string{"no IPv6: off"}}, ""},
		{"no_ipv4", "10.244.0.0/16", api.Gateway{IPv6: true}, "gvisor carries IPv4"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newTestConnection(t)
			s.hasGateway(tt.gateway, api.NetstackSystem)
			s.view.Update(func(v *view) { v.state.PodCIDRs = prefixes(tt.cluster) })
			s.routes.warnOfGateway(s.routes.known())
			if got := strings.Join(s.Status().Warnings, "|"); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

// quiet is a machine that takes links and remembers the last.
type quiet struct {
	still
	link api.Link
}

func (q *quiet) SetLink(_ context.Context, l api.Link) (api.NetworkApplied, error) {
	q.link = l
	return api.NetworkApplied{}, nil
}

func (q *quiet) DomainTaken(string) bool { return false }

// The probe decides about the system netstack, and the error recommends only a netstack that passed it.
func TestProbeDecidesTheNetstack(t *testing.T) {
	good := []api.Check{{What: "pod", Target: "10.244.0.2:80", OK: true, Seen: "connected in 1 ms"}}
	bad := []api.Check{{What: "clusterIP", Target: "10.96.0.1:443", Seen: "no answer"}}
	for _, tt := range []struct {
		name           string
		asked          string
		system, gvisor []api.Check
		netstack       string
		code           api.ExitCode
		message        string
		mtu            int
	}{
		{name: "system_well", asked: "auto", system: good, gvisor: bad, netstack: "system", mtu: 1450},
		{name: "auto_falls_back", asked: "auto", system: bad, gvisor: good, netstack: "gvisor", mtu: mtu},
		{name: "asked_for_system", asked: "system", system: bad, gvisor: good, code: 42, mtu: mtu,
			message: "the system netstack does not reach clusterIP 10.96.0.1:443: no answer (kube-proxy: iptables, by a test)"},
		{name: "not_the_netstack", asked: "system", system: bad, gvisor: bad, code: 40, mtu: mtu,
			message: "the tunnel is up but does not reach the cluster: clusterIP 10.96.0.1:443: no answer"},
		{name: "auto_not_the_netstack", asked: "auto", system: bad, gvisor: bad, code: 40, mtu: mtu,
			message: "the tunnel is up but does not reach the cluster: clusterIP 10.96.0.1:443: no answer"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newTestConnection(t)
			machine := &quiet{}
			s.cfg.Network, s.cfg.Request.Netstack = machine, tt.asked
			s.chooser.looked.Update(func(l **looked) { *l = &looked{proxy: iptablesProxy} })
			s.chooser.facts = facts{Asked: tt.asked, Proxy: iptablesProxy}
			s.handshake.learn(api.ManagerState{DNSDomain: "cluster.local", DNSServers: addrs("10.96.0.10"), Gateway: &api.Gateway{MTU: 1450, IPv4: true},
				ProbePod: netip.MustParseAddrPort("10.244.0.2:80")})
			s.status.change(func(r *report) { r.attached, r.greeted = true, true })
			s.chooser.adopt(choose(s.chooser.facts))
			if err := s.routes.apply(t.Context(), planned{Routes: prefixes("10.96.0.0/16 10.244.0.0/24")}); err != nil {
				t.Fatal(err)
			}
			s.checker.probe = func(_ context.Context, c probeTargets) []api.Check {
				if c.DNS.String() != "10.96.0.10:53" {
					t.Errorf("cluster DNS is tried at %v", c.DNS)
				}
				if s.Status().Netstack == api.NetstackSystem {
					return tt.system
				}
				return tt.gvisor
			}
			err := s.checker.check(t.Context())
			if e := api.AsError(err); (e == nil) != (tt.code == 0) || e != nil && (e.Code != tt.code || e.Message != tt.message) {
				t.Errorf("got %v, want code %d: %s", err, tt.code, tt.message)
			}
			st := s.Status()
			if err == nil && (st.Netstack != tt.netstack || !st.Checks[0].OK) {
				t.Errorf("got %s, %+v", st.Netstack, st.Checks)
			}
			if st.Status == api.StatusConnected {
				t.Error("it says connected")
			}
			if tt.code == api.ExitNetstack && st.Checks[0].OK {
				t.Error("the checks in the status are not those that failed")
			}
			if machine.link.MTU != tt.mtu {
				t.Errorf("MTU %d, want %d", machine.link.MTU, tt.mtu)
			}
		})
	}
}

func TestNewLeaseMovesAddressAndResolver(t *testing.T) {
	s := newTestConnection(t)
	machine := &quiet{}
	s.cfg.Network = machine
	var log []string
	s.routes.zone.serve = func(at netip.Addr) (func(), error) {
		log = append(log, "at "+at.String())
		return func() { log = append(log, "not at "+at.String()) }, nil
	}
	for _, lease := range []api.Lease{
		{Addrs: addrs("198.19.4.9"), Networks: prefixes("198.19.0.0/16"), Resolver: addrs("198.19.0.53")[0]},
		{Addrs: addrs("198.19.4.9"), Networks: prefixes("198.19.0.0/16"), Resolver: addrs("198.19.0.53")[0]},
		{Addrs: addrs("198.18.4.9"), Networks: prefixes("198.18.0.0/16"), Resolver: addrs("198.18.0.53")[0]},
	} {
		s.view.Update(func(v *view) { v.lease = lease })
		if err := s.routes.apply(t.Context(), planned{}); err != nil {
			t.Fatal(err)
		}
		if got := machine.link.Addrs; len(got) != 1 || got[0].Addr() != lease.Addrs[0] || machine.link.Resolver != lease.Resolver {
			t.Errorf("the link has %+v", machine.link)
		}
		hello, err := s.handshake.hello()
		if err != nil || len(hello.Lease) != 1 || hello.Lease[0] != lease.Addrs[0] {
			t.Errorf("the next hello asks for %v, %v", hello.Lease, err)
		}
	}
	if got, want := strings.Join(log, ", "), "at 198.19.0.53, at 198.18.0.53, not at 198.19.0.53"; got != want {
		t.Errorf("DNS: %s, want %s", got, want)
	}
}

func TestHelloNamesTheNetstack(t *testing.T) {
	for _, tt := range []struct{ asked, now, want string }{
		{"", "", "system"}, {"auto", "", "system"}, {"auto", "gvisor", "gvisor"}, {"auto", "system", "system"},
		{"gvisor", "", "gvisor"}, {"system", "", "system"},
	} {
		s := newTestConnection(t)
		s.cfg.Request.Netstack = tt.asked
		s.status.change(func(r *report) { r.shown.Netstack = tt.now })
		if hello, err := s.handshake.hello(); err != nil || hello.Netstack != tt.want || hello.MayUseGVisor != (tt.asked != "system") {
			t.Errorf("asked %q, now %q: says %+v, %v", tt.asked, tt.now, hello, err)
		}
	}
}

// A manager that limits what laptops reach dials cluster DNS, and perhaps nothing else that this laptop could guess.
func TestLimitedLaptopProbesClusterDNSAlone(t *testing.T) {
	for _, routed := range []bool{true, false} {
		s := newTestConnection(t)
		s.cfg.Network = &quiet{}
		s.handshake.learn(api.ManagerState{DNSDomain: "cluster.local", DNSServers: addrs("10.96.0.10"), Limited: true, Namespaces: []string{"shop"}})
		var want netip.AddrPort
		if routed {
			s.checker.routes.planned.Routes, want = prefixes("10.96.0.0/16"), netip.MustParseAddrPort("10.96.0.10:53")
		}
		if got := s.checker.targets(t.Context()); got.VIP != want || got.DNS != want || got.Pod.IsValid() {
			t.Errorf("routed %v: %+v", routed, got)
		}
	}
}

func TestCheckDNSRequiresAnAnswer(t *testing.T) {
	server, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	code := make(chan dnsmessage.RCode, 2)
	go func() {
		buf := make([]byte, 512)
		var answer dnsmessage.RCode
		for {
			n, from, err := server.ReadFrom(buf)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(buf[:n]) != nil || m.Questions[0].Name.String() != "kubernetes.default.svc.cluster.local." {
				continue
			}
			select {
			case answer = <-code:
			default:
			}
			m.Response, m.Authoritative, m.RCode, m.Additionals = true, true, answer, nil
			if answer == dnsmessage.RCodeSuccess && m.Questions[0].Type == dnsmessage.TypeA {
				m.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: m.Questions[0].Name, Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET, TTL: 5},
					Body:   &dnsmessage.AResource{A: [4]byte{10, 96, 0, 1}},
				}}
			}
			out, err := m.Pack()
			if err == nil {
				server.WriteTo(out, from)
			}
		}
	}()
	at := netip.MustParseAddrPort(server.LocalAddr().String())
	const name = "kubernetes.default.svc.cluster.local"
	p := prober{dial: new(net.Dialer).DialContext}
	for _, answer := range []dnsmessage.RCode{dnsmessage.RCodeSuccess, dnsmessage.RCodeNameError} {
		code <- answer
		if c := p.checkDNS(t.Context(), at, name); !c.OK || c.What != "dns" || c.Target != at.String() || !strings.HasPrefix(c.Seen, "answered over UDP in ") {
			t.Errorf("%v: %+v", answer, c)
		}
	}
	if c := p.checkDNS(t.Context(), netip.AddrPort{}, name); !c.OK || c.Target != "none" {
		t.Errorf("%+v", c)
	}
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if c := p.checkDNS(ctx, netip.MustParseAddrPort(silent.LocalAddr().String()), name); c.OK || c.Seen != "no answer" {
		t.Errorf("a server that is silent: %+v", c)
	}
}
