package watch

import (
	"log/slog"
	"net/netip"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/access"
	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/pkg/datapath/balancer"
)

// fill passes objects to the manager, as its watches would.
func fill(t *testing.T, m *Publisher, nodeList, sliceList []any) {
	t.Helper()
	c := m.cluster
	for r, objects := range map[resource][]any{nodes: nodeList, endpointSlices: sliceList, services: nil} {
		if err := c.store(scope{resource: r}).Replace(objects, ""); err != nil {
			t.Fatal(err)
		}
	}
	m.names, m.sorted = map[string]map[string]uint64{}, map[string][]string{}
	m.apply()
	m.post()
}

func TestNodesAndTheAPIServerAreNotDialed(t *testing.T) {
	m := New(Config{Filter: new(access.Filter), Balancer: balancer.New(""), Describe: func(*api.ManagerState) {}, Laptops: func() int { return 0 }, Logger: slog.New(slog.DiscardHandler)})
	may := func(dst string, extra ...netip.Prefix) bool {
		return m.cfg.Filter.AllowsDirect(netip.MustParseAddrPort(dst), extra)
	}
	if !may("192.168.0.1:22") {
		t.Error("the filter refuses an address before the first sync")
	}
	fill(t, m,
		[]any{managertest.NodeAt("a", "192.168.0.1", "fd00:192::1"), managertest.NodeAt("b", "192.168.0.2")},
		[]any{
			managertest.SliceOf("default", "kubernetes", 6443, "192.168.0.100", "192.168.0.1"),
			managertest.SliceOf("monitoring", "exporter", 9100, "192.168.0.1", "192.168.0.2"),
			managertest.SliceOf("default", "web", 8080, "10.244.0.7"),
		})
	node := netip.MustParsePrefix("192.168.0.1/32")
	for _, tt := range []struct {
		about, dst string
		extra      []netip.Prefix
		want       bool
	}{
		{"a node's sshd", "192.168.0.1:22", nil, false},
		{"a node's kubelet", "192.168.0.2:10250", nil, false},
		{"a node's IPv6 address", "[fd00:192::1]:22", nil, false},
		{"a node in disguise", "[::ffff:192.168.0.1]:22", nil, false},
		{"a node by NAT64", "[64:ff9b::c0a8:1]:22", nil, false},
		{"a node by 6to4", "[2002:c0a8:1::]:22", nil, false},
		{"an endpoint on the host network by NAT64", "[64:ff9b::c0a8:1]:9100", nil, true},
		{"the API server", "192.168.0.100:6443", nil, false},
		{"the API server on a node", "192.168.0.1:6443", nil, false},
		{"an endpoint on the host network", "192.168.0.1:9100", nil, true},
		{"its fragments, and pings", "192.168.0.1:0", nil, true},
		{"the API server has no other endpoint", "192.168.0.100:0", nil, false},
		{"a node with --extra-cidr", "192.168.0.1:22", []netip.Prefix{node}, true},
		{"another node than --extra-cidr has", "192.168.0.2:22", []netip.Prefix{node}, false},
		{"a node's sshd, in disguise, with --extra-cidr", "[::ffff:192.168.0.1]:22", []netip.Prefix{node}, true},
		{"a pod", "10.244.0.7:22", nil, true},
		{"an address of neither", "192.168.0.3:22", nil, true},
		{"loopback with --extra-cidr", "127.0.0.1:10800", []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, false},
	} {
		if got := may(tt.dst, tt.extra...); got != tt.want {
			t.Errorf("%s: %s: %v, want %v", tt.about, tt.dst, got, tt.want)
		}
	}

	t.Run("changes of the cluster change the filter", func(t *testing.T) {
		c := m.cluster
		if err := c.store(scope{resource: endpointSlices}).Delete(managertest.SliceOf("monitoring", "exporter", 9100)); err != nil {
			t.Fatal(err)
		}
		m.post()
		if may("192.168.0.1:9100") {
			t.Error("the filter allows a removed endpoint")
		}
		if err := c.store(scope{resource: nodes}).Delete(managertest.NodeAt("b")); err != nil {
			t.Fatal(err)
		}
		m.post()
		if !may("192.168.0.2:22") {
			t.Error("the filter refuses the address of a removed node")
		}
		c.store(scope{resource: endpointSlices}).reset(false)
		m.post()
		if may("192.168.0.1:22") {
			t.Error("without the right to read endpoints any more, the filter forgets the nodes")
		}
		c.store(scope{resource: nodes}).reset(false)
		fill := c.store(scope{resource: endpointSlices})
		if err := fill.Replace(nil, ""); err != nil {
			t.Fatal(err)
		}
		m.post()
		if may("192.168.0.1:22") {
			t.Error("without the right to read nodes any more, the filter forgets them")
		}
	})
}

// The manager guards nodes also if it watches some namespaces. Endpoints of others on the host network count as nodes.
func TestNodesAreNotDialedIfSomeNamespacesAreWatched(t *testing.T) {
	c := newCluster("", "shop", "tools")
	replace := func(s scope, objects ...any) {
		t.Helper()
		if err := c.store(s).Replace(objects, ""); err != nil {
			t.Fatal(err)
		}
	}
	replace(scope{resource: nodes}, managertest.NodeAt("a", "192.168.0.1"))
	c.recount()
	if c.hostAddrs() != nil {
		t.Error("the filter refuses nodes, although no endpoint is known")
	}
	replace(scope{endpointSlices, "shop"}, managertest.SliceOf("shop", "exporter", 9100, "192.168.0.1"))
	f := access.Filter{}
	f.Hosts.Store(c.hostAddrs())
	for dst, want := range map[string]bool{"192.168.0.1:9100": true, "192.168.0.1:22": false} {
		if got := f.AllowsDirect(netip.MustParseAddrPort(dst), nil); got != want {
			t.Errorf("%s: %v, want %v", dst, got, want)
		}
	}
	// A list of one namespace leaves the objects of the others.
	replace(scope{endpointSlices, "tools"})
	if _, ok := c.hostAddrs().Endpoints[netip.MustParseAddrPort("192.168.0.1:9100")]; !ok {
		t.Error("the list of namespace tools removed an endpoint in shop")
	}
	c.store(scope{endpointSlices, "shop"}).reset(false)
	if n := len(c.hostAddrs().Endpoints); n != 0 {
		t.Errorf("%d endpoints remain of a namespace that the manager may no longer watch", n)
	}
}
