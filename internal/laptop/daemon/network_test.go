//go:build linux

package daemon

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	mdns "github.com/miekg/dns"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/protocol/dns"
)

func link(name string, routes ...string) api.Link {
	l := api.Link{Name: name, MTU: 1500}
	for _, r := range routes {
		l.Routes = append(l.Routes, netip.MustParsePrefix(r))
	}
	return l
}

// shares returns a hostNetwork and the scopedNetworks of n connections.
func shares(t *testing.T, h *fakeHelper, n int) (*hostNetwork, []*scopedNetwork) {
	t.Helper()
	m := newHostNetwork(h, dns.Config{}, discard())
	m.present = func(string) bool { return true }
	watched := make(chan struct{})
	go func() {
		m.watch()
		close(watched)
	}()
	t.Cleanup(func() {
		if err := m.close(); err != nil {
			t.Error(err)
		}
		<-watched
	})
	var out []*scopedNetwork
	for range n {
		out = append(out, &scopedNetwork{host: m})
	}
	return m, out
}

func names(s api.NetworkState) string {
	var out []string
	for _, l := range s.Links {
		out = append(out, l.Name)
	}
	return strings.Join(out, " ")
}

func TestConnectionsShareOneNetworkState(t *testing.T) {
	h := newFakeHelper()
	h.applied = api.NetworkApplied{ResolverMode: api.ResolverResolved, Warnings: []string{"w"}}
	_, s := shares(t, h, 2)
	ctx := t.Context()
	must := func(applied api.NetworkApplied, err error) {
		t.Helper()
		if err != nil || applied.ResolverMode != api.ResolverResolved || len(applied.Warnings) != 1 {
			t.Errorf("SetLink = %+v, %v", applied, err)
		}
	}
	must(s[0].SetLink(ctx, link("kubevpn0", "10.1.0.0/16")))
	first := h.last()
	if first.Resolver == nil || !first.Resolver.Listen4.Addr().IsLoopback() || first.Resolver.Listen4.Port() == 0 {
		t.Fatalf("resolver = %+v, want one on loopback", first.Resolver)
	}
	must(s[1].SetLink(ctx, link("kubevpn1", "10.2.0.0/16")))
	must(s[0].SetLink(ctx, link("kubevpn0", "10.1.0.0/16", "10.9.0.0/16"))) // replaced where it stands
	want := api.NetworkState{
		Links:    []api.Link{link("kubevpn0", "10.1.0.0/16", "10.9.0.0/16"), link("kubevpn1", "10.2.0.0/16")},
		Resolver: first.Resolver,
	}
	if diff := cmp.Diff(want, h.last(), cmpopts.EquateComparable(netip.Prefix{}, netip.AddrPort{}, netip.Addr{})); diff != "" {
		t.Errorf("state (-want +got):\n%s", diff)
	}

	if err := s[0].close(); err != nil {
		t.Error(err)
	}
	if got := h.last(); names(got) != "kubevpn1" || got.Resolver == nil {
		t.Errorf("after one share is closed: %+v, want the other's link", got)
	}
	n := len(h.states)
	if err := s[0].RemoveLink(ctx); err != nil || len(h.states) != n {
		t.Errorf("removing what it no longer has: %v, and %d changes; want none", err, len(h.states)-n)
	}
	if err := s[1].RemoveLink(ctx); err != nil {
		t.Error(err)
	}
	if got := h.last(); len(got.Links) != 0 || got.Resolver != nil {
		t.Errorf("at the end: %+v, want the zero value", got)
	}
	if c, err := net.Dial("tcp", first.Resolver.Listen4.String()); err == nil {
		c.Close()
		t.Error("the resolver still listens")
	}
}

func TestOverlappingRoutesAreRejected(t *testing.T) {
	h := newFakeHelper()
	_, s := shares(t, h, 2)
	if _, err := s[0].SetLink(t.Context(), link("kubevpn0", "10.1.0.0/16", "fd00::/64")); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		link api.Link
		want string
	}{
		{"same-name", link("kubevpn0"), "another connection has a device named kubevpn0"},
		{"inside", link("kubevpn1", "10.1.2.0/24"), "10.1.2.0/24 overlaps 10.1.0.0/16 of another connected cluster"},
		{"around", link("kubevpn1", "192.0.2.0/24", "fd00::/16"), "fd00::/16 overlaps fd00::/64 of another connected cluster"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := s[1].SetLink(t.Context(), tt.link)
			var e *api.Error
			if !errors.As(err, &e) || e.Code != api.ExitOverlap || e.Message != tt.want {
				t.Errorf("SetLink = %v, want %q", err, tt.want)
			}
			if len(h.states) != 1 {
				t.Errorf("the helper was asked %d times, want only before", len(h.states))
			}
		})
	}
}

// Two managers may lease addresses of the same inner network to two connections at the same time.
func TestReserveRejectsNetworksOfOtherConnections(t *testing.T) {
	_, s := shares(t, newFakeHelper(), 3)
	nets := func(list ...string) (out []netip.Prefix) {
		for _, p := range list {
			out = append(out, netip.MustParsePrefix(p))
		}
		return out
	}
	for _, tt := range []struct {
		by       int
		networks []netip.Prefix
		want     []netip.Prefix
	}{
		{0, nets("198.19.0.0/16", "fd4e::/48"), nil},
		{1, nets("198.19.0.0/16"), nets("198.19.0.0/16", "fd4e::/48")},
		{1, nets("198.18.0.0/16"), nil},
		{2, nets("100.96.0.0/16", "fd4e::/48"), nets("198.18.0.0/16", "198.19.0.0/16", "fd4e::/48")},
		{0, nets("198.19.0.0/16"), nil}, // its own, without the other one from here on
		{2, nets("100.96.0.0/16", "fd4e::/48"), nil},
	} {
		if got := s[tt.by].Reserve(tt.networks); !slices.Equal(got, tt.want) {
			t.Errorf("share %d reserves %v: got %v, want %v", tt.by, tt.networks, got, tt.want)
		}
	}
	if err := s[0].close(); err != nil {
		t.Fatal(err)
	}
	if got := s[1].Reserve(nets("198.19.0.0/16")); got != nil {
		t.Errorf("what a connection that is gone had is still reserved: %v", got)
	}
}

func TestFailedApplyIsUndone(t *testing.T) {
	h := newFakeHelper()
	m, s := shares(t, h, 2)
	h.err = errors.New("no such device")
	if _, err := s[0].SetLink(t.Context(), link("kubevpn0")); err == nil || err.Error() != "no such device" {
		t.Errorf("SetLink = %v", err)
	}
	if got := h.last(); len(h.states) != 2 || len(got.Links) != 0 || got.Resolver != nil {
		t.Errorf("states = %+v, want the refused one, then nothing", h.states)
	}
	if m.loopback != nil {
		t.Error("the resolver listens without links")
	}
	if _, err := s[0].SetLink(t.Context(), link("kubevpn0")); err != nil {
		t.Fatal(err)
	}
	h.err = errors.New("no such device")
	if _, err := s[1].SetLink(t.Context(), link("kubevpn1")); err == nil {
		t.Error("SetLink = nil")
	}
	if got := h.last(); names(got) != "kubevpn0" || got.Resolver == nil {
		t.Errorf("state = %+v, want the first link as it was", got)
	}
}

func TestClosedNetworkRejectsLinks(t *testing.T) {
	h := newFakeHelper()
	m, s := shares(t, h, 1)
	if err := m.close(); err != nil {
		t.Fatal(err)
	}
	if _, err := s[0].SetLink(t.Context(), link("kubevpn0")); err == nil || err.Error() != "the root helper has been closed" {
		t.Errorf("SetLink = %v", err)
	}
}

func TestLinkWithoutDeviceIsDropped(t *testing.T) {
	h := newFakeHelper()
	m, s := shares(t, h, 2)
	if _, err := s[0].SetLink(t.Context(), link("kubevpn0", "10.1.0.0/16")); err != nil {
		t.Fatal(err)
	}
	m.present = func(device string) bool { return device != "kubevpn0" } // its connection is ending
	if _, err := s[1].SetLink(t.Context(), link("kubevpn1", "10.1.0.0/16")); err != nil {
		t.Fatal(err)
	}
	if got := h.last(); names(got) != "kubevpn1" {
		t.Errorf("links = %s, want only the one that is there", names(got))
	}
}

func TestResolverFollowsTheUpstreams(t *testing.T) {
	h := newFakeHelper()
	h.applied = api.NetworkApplied{ResolverMode: api.ResolverFile}
	_, s := shares(t, h, 1)
	if _, err := s[0].SetLink(t.Context(), link("kubevpn0")); err != nil {
		t.Fatal(err)
	}
	at := h.last().Resolver.Listen4.String()
	if got := lookup(t, at, "www.example.com."); got != "SERVFAIL" {
		t.Errorf("without a nameserver = %q", got)
	}
	changed := api.NetworkApplied{ResolverMode: api.ResolverFile, Upstreams: []netip.AddrPort{nameserver(t)}}
	h.changes <- changed
	h.changes <- changed // the first one has been taken in
	if got := lookup(t, at, "www.example.com."); got != "192.0.2.53" {
		t.Errorf("with the new one = %q", got)
	}
}

// nameserver answers every query with the address 192.0.2.53. Over UDP it truncates the answer for names in "long.".
func nameserver(t *testing.T) netip.AddrPort {
	t.Helper()
	udp, tcp, err := listenBoth(netip.MustParseAddr("127.0.0.1"))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []*mdns.Server{{PacketConn: udp}, {Listener: tcp}} {
		s.Handler = mdns.HandlerFunc(func(w mdns.ResponseWriter, q *mdns.Msg) {
			reply := new(mdns.Msg).SetReply(q)
			if w.RemoteAddr().Network() == "udp" && strings.HasPrefix(q.Question[0].Name, "long.") {
				reply.Truncated = true
			} else {
				rr, err := mdns.NewRR(q.Question[0].Name + " 5 IN A 192.0.2.53")
				if err != nil {
					t.Error(err)
				}
				reply.Answer = append(reply.Answer, rr)
			}
			if err := w.WriteMsg(reply); err != nil {
				t.Error(err)
			}
		})
		ready := make(chan struct{})
		s.NotifyStartedFunc = func() { close(ready) }
		done := make(chan error, 1)
		go func() { done <- s.ActivateAndServe() }()
		wait(t, ready, "the nameserver")
		t.Cleanup(func() {
			if err := errors.Join(s.Shutdown(), <-done); err != nil {
				t.Error(err)
			}
		})
	}
	return udp.LocalAddr().(*net.UDPAddr).AddrPort()
}

func TestResolverServesClusterAndOtherNames(t *testing.T) {
	tests := []struct {
		name   string
		mode   api.ResolverMode
		marked string // the sockets that the helper is asked for, in order
	}{
		{"redirected", api.ResolverNFTables, "udp4 tcp4"},
		{"edited", api.ResolverFile, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := newFakeHelper()
			h.applied = api.NetworkApplied{ResolverMode: tt.mode, Upstreams: []netip.AddrPort{nameserver(t)}}
			_, s := shares(t, h, 1)
			if _, err := s[0].SetLink(t.Context(), link("kubevpn0")); err != nil {
				t.Fatal(err)
			}
			zone := &dns.Zone{Domain: "cluster.local", Cluster: clusterDNS{}}
			if err := s[0].SetZone(zone); err != nil {
				t.Fatal(err)
			}
			at := h.last().Resolver.Listen4.String()
			if got := lookup(t, at, "www.example.com."); got != "192.0.2.53" {
				t.Errorf("an outside name = %q", got)
			}
			if got := lookup(t, at, "long.example.com."); got != "truncated" {
				t.Errorf("a truncated answer = %q, want it passed on", got)
			}
			if got := lookupTCP(t, at, "long.example.com."); got != "192.0.2.53" {
				t.Errorf("over TCP = %q", got)
			}
			if got := lookup(t, at, "web.default.svc.cluster.local."); got != "10.96.0.80" {
				t.Errorf("a cluster name = %q", got)
			}
			if err := s[0].SetZone(nil); err != nil {
				t.Fatal(err)
			}
			if got := lookup(t, at, "web.default.svc.cluster.local."); got != "192.0.2.53" {
				t.Errorf("a cluster name without its zone = %q, want it asked upstream", got)
			}
			h.mu.Lock()
			defer h.mu.Unlock()
			if got := strings.Join(h.marked, " "); !strings.HasPrefix(got, tt.marked) || (tt.marked == "") != (got == "") {
				t.Errorf("marked sockets = %q, want %q", got, tt.marked)
			}
		})
	}
}

func TestDomainBelongsToTheFirstConnection(t *testing.T) {
	_, s := shares(t, newFakeHelper(), 3)
	taken := func(want ...bool) {
		t.Helper()
		for i, w := range want {
			if got := s[i].DomainTaken("cluster.local"); got != w {
				t.Errorf("share %d: DomainTaken = %v, want %v", i, got, w)
			}
		}
	}
	set := func(i int, zone *dns.Zone) {
		t.Helper()
		if err := s[i].SetZone(zone); err != nil {
			t.Fatal(err)
		}
	}
	taken(false, false, false)
	set(0, &dns.Zone{Domain: "other.local", Cluster: clusterDNS{}})
	taken(false, false, false)
	set(1, &dns.Zone{Domain: "Cluster.Local", Cluster: clusterDNS{}})
	taken(false, false, true) // the first has its place already
	set(2, &dns.Zone{Domain: "cluster.local", Cluster: clusterDNS{}})
	taken(false, false, true)
	set(1, nil)
	taken(false, true, false)
	set(0, &dns.Zone{Domain: "other.local", Extra: []string{"cluster.local"}, Cluster: clusterDNS{}})
	taken(false, true, true)
}

// clusterDNS answers every name with the address 10.96.0.80.
type clusterDNS struct{}

func (clusterDNS) ServeDNS(_ context.Context, q *mdns.Msg) (*mdns.Msg, error) {
	reply := new(mdns.Msg).SetReply(q)
	rr, err := mdns.NewRR(q.Question[0].Name + " 5 IN A 10.96.0.80")
	reply.Answer = append(reply.Answer, rr)
	return reply, err
}

func lookup(t *testing.T, server, name string) string    { return ask(t, "udp", server, name) }
func lookupTCP(t *testing.T, server, name string) string { return ask(t, "tcp", server, name) }

func ask(t *testing.T, network, server, name string) string {
	t.Helper()
	c := mdns.Client{Net: network, Timeout: 5 * time.Second}
	reply, _, err := c.Exchange(new(mdns.Msg).SetQuestion(name, mdns.TypeA), server)
	switch {
	case err != nil:
		return err.Error()
	case reply.Truncated:
		return "truncated"
	case len(reply.Answer) == 0:
		return mdns.RcodeToString[reply.Rcode]
	}
	return reply.Answer[0].(*mdns.A).A.String()
}

func TestServeDNSAnswersInsideTheTunnel(t *testing.T) {
	h := newFakeHelper()
	_, s := shares(t, h, 1)
	if err := s[0].SetZone(&dns.Zone{Domain: "cluster.local", Cluster: clusterDNS{}}); err != nil {
		t.Fatal(err)
	}
	p, l, err := listenBoth(netip.MustParseAddr("127.0.0.1"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s[0].ServeDNS(ctx, "", []net.PacketConn{p}, []net.Listener{l}) }()
	if got := lookup(t, p.LocalAddr().String(), "web.default.svc.cluster.local."); got != "10.96.0.80" {
		t.Errorf("answer = %q", got)
	}
	cancel()
	if err := wait(t, done, "ServeDNS"); err != nil {
		t.Error(err)
	}
}

func TestConnectReportsRefusal(t *testing.T) {
	f, err := newFakeHelper().MarkedSocket(t.Context(), "tcp4")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if c, err := connect(t.Context(), f, testenv.ClosedPort(t, "tcp")); err == nil || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("connect = %v, %v; want that it is refused", c, err)
	}
}
