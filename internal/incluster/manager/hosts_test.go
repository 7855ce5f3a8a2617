package manager

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/pkg/wire/transport"
)

// The guard covers streams, pings and packets. The manager dials an endpoint of a Service at any address.
func TestNoProtocolReachesNodes(t *testing.T) {
	server := managertest.TCPPod(t, func(c *net.TCPConn) { c.Write([]byte("served")) })
	at := netip.MustParseAddrPort(server)
	extra := func(t *testing.T, cidrs ...netip.Prefix) *running {
		r := start(t, Config{Kube: managertest.NewFakeAPI(nil, managertest.NodeAt("a", "127.0.0.1"),
			managertest.SliceOf("default", "kubernetes", 6443, "127.0.0.1"))})
		<-r.watch.Ready
		if c := managertest.Hello(t, r.laptop, api.ClientHello{Protocol: api.Protocol, Client: "laptop", ExtraCIDRs: cidrs}); c.Next().Hello == nil {
			t.Fatal("no Hello")
		}
		return r
	}
	r := extra(t)
	if _, err := r.open(t, server); !errors.Is(err, syscall.EACCES) {
		t.Errorf("TCP: got %v", err)
	}
	if _, err := managertest.Ask(t, managertest.OpenPackets(t, r.laptop, transport.ProtoUDP, server), "  x"); !errors.Is(err, syscall.EACCES) {
		t.Errorf("UDP: got %v", err)
	}
	if _, err := managertest.Ask(t, managertest.OpenPackets(t, r.laptop, transport.ProtoEcho, netip.AddrPortFrom(at.Addr(), 0).String()), "  x"); !errors.Is(err, syscall.EACCES) {
		t.Errorf("ping: got %v", err)
	}
	r.vip(server)
	st, err := r.open(t, "10.96.0.1:80")
	if err != nil {
		t.Fatalf("the ClusterIP of a Service on the node: %v", err)
	}
	if got := managertest.ReadAll(t, st); got != "served" {
		t.Errorf("the Service says %q", got)
	}
	if _, err := extra(t, netip.MustParsePrefix("127.0.0.1/32")).open(t, server); err != nil {
		t.Errorf("with --extra-cidr: %v", err)
	}
}

// No laptop lifts the networks of the admin, and no EndpointSlice: check is for each address that the manager dials.
func TestAdminsNetworksApplyAboveTheLaptops(t *testing.T) {
	networks := func(texts ...string) (all []netip.Prefix) {
		for _, text := range texts {
			all = append(all, netip.MustParsePrefix(text))
		}
		return all
	}
	node := networks("192.168.0.0/16")
	for _, tt := range []struct {
		about       string
		allow, deny []netip.Prefix
		dst         string
		extra       []netip.Prefix
		want        bool
	}{
		{"a node with --extra-cidr", nil, nil, "192.168.0.1:10250", node, true},
		{"a denied node with --extra-cidr", nil, node, "192.168.0.1:10250", node, false},
		{"a denied node, in disguise", nil, node, "[::ffff:192.168.0.1]:10250", node, false},
		{"a denied node by NAT64", nil, node, "[64:ff9b::c0a8:1]:10250", networks("64:ff9b::/96"), false},
		{"its pings", nil, node, "192.168.0.1:0", node, false},
		{"a pod", nil, node, "10.244.0.7:80", nil, true},
		{"an allowed pod", networks("10.244.0.0/16"), nil, "10.244.0.7:80", nil, true},
		{"what is not allowed", networks("10.244.0.0/16"), nil, "10.0.0.1:80", nil, false},
		{"what is not allowed, with --extra-cidr", networks("10.244.0.0/16"), nil, "10.0.0.1:80", networks("10.0.0.0/8"), false},
		{"what is allowed and denied", networks("10.0.0.0/8"), networks("10.1.0.0/16"), "10.1.0.1:80", nil, false},
		{"the cluster's DNS", networks("10.244.0.0/16"), networks("10.96.0.0/16"), "10.96.0.10:53", nil, true},
		{"another port of it", networks("10.244.0.0/16"), nil, "10.96.0.10:80", nil, false},
		{"metadata, although allowed", networks("169.254.0.0/16"), nil, "169.254.169.254:80", networks("169.254.0.0/16"), false},
	} {
		t.Run(tt.about, func(t *testing.T) {
			kube := managertest.NewFakeAPI(nil, managertest.NodeAt("a", "192.168.0.1"),
				managertest.SliceOf("default", "web", 8080, "10.244.0.7"))
			m := start(t, Config{Kube: kube, AllowCIDRs: tt.allow, DenyCIDRs: tt.deny}, func(m *Manager) {
				m.filter.DNS = []netip.Addr{netip.MustParseAddr("10.96.0.10")}
				m.dialer.Check = m.filter.Check
			})
			<-m.watch.Ready
			dst := netip.MustParseAddrPort(tt.dst)
			if got := m.filter.AllowsDirect(dst, tt.extra); got != tt.want {
				t.Errorf("a packet: %v, want %v", got, tt.want)
			}
			if err := errors.Join(m.dialer.Check(dst), m.dialer.CheckHost(dst, tt.extra)); (err == nil) != tt.want || err != nil && !errors.Is(err, syscall.EACCES) {
				t.Errorf("a flow: %v, want it to be allowed: %v", err, tt.want)
			}
		})
	}
}
