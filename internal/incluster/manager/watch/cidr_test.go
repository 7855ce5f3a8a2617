package watch

import (
	"net/netip"
	"slices"
	"testing"

	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/pkg/datapath/routable"
)

func TestPrefixesContainStatedNetworksAndVerifiedBlocks(t *testing.T) {
	tests := []struct {
		name                   string
		podCIDRs, ranges       []string
		nodes, pods, vips      []string
		nodesUnknown           bool
		mayNotRead             bool
		unread                 []string // blocks of which no pod was read
		wantPods, wantServices []string
		wantIgnored            []string
	}{
		{name: "nothing"},
		{name: "stated", podCIDRs: []string{"10.244.0.0/24", "10.244.1.0/24", "fd00:244::/64"}, ranges: []string{"10.96.0.0/12", "fd00:96::/112"},
			nodes: []string{"192.168.0.1"}, pods: []string{"10.244.0.7", "fd00:244::7"}, vips: []string{"10.96.0.1"},
			wantPods: []string{"10.244.0.0/23", "fd00:244::/64"}, wantServices: []string{"10.96.0.0/12", "fd00:96::/112"}},
		{name: "plugin-with-its-own-pool", podCIDRs: []string{"10.244.0.0/24"}, nodes: []string{"192.168.0.1"},
			pods: []string{"10.42.5.3", "10.42.5.200", "fd00:42::5"}, wantPods: []string{"10.42.5.0/24", "10.244.0.0/24", "fd00:42::/64"}},
		{name: "a block of which no pod was read", podCIDRs: []string{"10.244.0.0/24"}, nodes: []string{"192.168.0.1"},
			pods: []string{"10.42.5.3", "10.42.6.3"}, unread: []string{"10.42.6.0/24"}, wantPods: []string{"10.42.5.0/24", "10.244.0.0/24"}},
		{name: "pods that may not be read", podCIDRs: []string{"10.244.0.0/24"}, nodes: []string{"192.168.0.1"}, mayNotRead: true,
			pods: []string{"10.42.5.3", "10.42.6.3"}, unread: []string{"10.42.6.0/24"}, wantPods: []string{"10.42.5.0/24", "10.42.6.3/32", "10.244.0.0/24"}},
		{name: "public and special endpoints", nodes: []string{"192.168.0.1"}, mayNotRead: true,
			pods:     []string{"10.244.0.3", "140.82.121.3", "8.8.8.8", "0.0.0.5", "127.0.0.1", "255.255.255.255", "2001:db8::1"},
			vips:     []string{"10.96.0.1", "8.8.4.4"},
			wantPods: []string{"10.244.0.0/24"}, wantServices: []string{"10.96.0.0/24"},
			wantIgnored: []string{"0.0.0.0/24", "8.8.8.0/24", "127.0.0.0/24", "140.82.121.0/24", "255.255.255.0/24", "2001:db8::/64"}},
		{name: "pods of GKE in class E", nodes: []string{"10.0.0.1"}, pods: []string{"240.1.2.3"}, vips: []string{"34.118.224.1"},
			wantPods: []string{"240.1.2.0/24"}, wantServices: []string{"34.118.224.0/24"}},
		{name: "pods-among-nodes", nodes: []string{"10.0.1.10"}, pods: []string{"10.0.1.10", "10.0.1.77", "10.0.2.4"},
			wantPods: []string{"10.0.1.77/32", "10.0.2.0/24"}},
		{name: "nodes-unknown", nodesUnknown: true, pods: []string{"10.0.1.77", "fd00::1"}, wantPods: []string{"10.0.1.77/32", "fd00::1/128"}},
		{name: "services-without-ranges", nodes: []string{"192.168.0.1"}, vips: []string{"10.96.0.1", "10.96.0.10", "10.97.3.4", "fd00:96::1234"},
			wantServices: []string{"10.96.0.0/24", "10.97.3.0/24", "fd00:96::1200/120"}},
		{name: "services-beside-a-range", ranges: []string{"10.96.0.0/16"}, vips: []string{"10.96.0.1", "10.200.0.1"},
			wantServices: []string{"10.96.0.0/16", "10.200.0.0/24"}},
		{name: "services-among-nodes-and-pods", nodes: []string{"10.0.1.10"}, podCIDRs: []string{"10.0.2.128/25"}, vips: []string{"10.0.1.20", "10.0.2.5"},
			wantPods: []string{"10.0.2.128/25"}, wantServices: []string{"10.0.1.20/32", "10.0.2.5/32"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := networks{podCIDRs: managertest.PrefixesOf(tt.podCIDRs...), ranges: managertest.PrefixesOf(tt.ranges...), nodesKnown: !tt.nodesUnknown,
				nodes: map[netip.Addr]struct{}{}, pods: blocks{}, clusterIPs: blocks{}, verified: map[netip.Prefix]struct{}{}, mayNotRead: tt.mayNotRead}
			for _, a := range tt.nodes {
				n.nodes[netip.MustParseAddr(a)] = struct{}{}
			}
			for _, a := range tt.pods {
				addr := netip.MustParseAddr(a)
				n.pods.add(routable.PodBlock(addr), addr, 1)
				if block := routable.PodBlock(addr); !slices.Contains(tt.unread, block.String()) {
					n.verified[block] = struct{}{}
				}
			}
			for _, a := range tt.vips {
				addr := netip.MustParseAddr(a)
				n.clusterIPs.add(routable.ServiceBlock(addr), addr, 1)
			}
			got := n.prefixes(true)
			if want := managertest.PrefixesOf(tt.wantPods...); !slices.Equal(got.pods, want) {
				t.Errorf("pods: got %v, want %v", got.pods, want)
			}
			if want := managertest.PrefixesOf(tt.wantServices...); !slices.Equal(got.services, want) {
				t.Errorf("services: got %v, want %v", got.services, want)
			}
			if want := managertest.PrefixesOf(tt.wantIgnored...); !slices.Equal(got.ignored, want) {
				t.Errorf("ignored: got %v, want %v", got.ignored, want)
			}
			got = n.prefixes(false)
			if len(tt.podCIDRs) == 0 && len(got.pods) > 0 || len(tt.ranges) == 0 && len(got.services) > 0 {
				t.Errorf("networks before the manager has synced contain guessed blocks: %v, %v", got.pods, got.services)
			}
		})
	}
}

func TestBlocksForgetAddressesThatNoObjectHas(t *testing.T) {
	b := blocks{}
	addr := netip.MustParseAddr("10.0.0.1")
	b.add(routable.PodBlock(addr), addr, 1)
	b.add(routable.PodBlock(addr), addr, 1) // behind two Services
	b.add(routable.PodBlock(addr), addr, -1)
	if len(b) != 1 {
		t.Error("the blocks forgot an address of one of two Services")
	}
	b.add(routable.PodBlock(addr), addr, -1)
	if len(b) != 0 {
		t.Errorf("blocks after the removal of all addresses: %v", b)
	}
}
