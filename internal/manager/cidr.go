package manager

import (
	"net/netip"

	"go4.org/netipx"
)

// blocks counts addresses by the block they are in: what is seen of a network whose prefix nobody tells.
type blocks map[netip.Prefix]map[netip.Addr]int

// The sizes of blocks. Pods: the smallest that network plugins give to a node is usually a /26 to /24, and a
// /64 of IPv6. ClusterIPs: 256 addresses, as a Service range of IPv6 is a /112 to /108.
func podBlock(addr netip.Addr) netip.Prefix       { return mask(addr, 24, 64) }
func clusterIPBlock(addr netip.Addr) netip.Prefix { return mask(addr, 24, 120) }

func mask(addr netip.Addr, bits4, bits6 int) netip.Prefix {
	bits := bits6
	if addr.Is4() {
		bits = bits4
	}
	return netip.PrefixFrom(addr, bits).Masked()
}

// add changes how often addr was seen in block.
func (b blocks) add(block netip.Prefix, addr netip.Addr, n int) {
	in := b[block]
	if in == nil {
		in = make(map[netip.Addr]int)
		b[block] = in
	}
	if in[addr] += n; in[addr] > 0 {
		return
	}
	if delete(in, addr); len(in) == 0 {
		delete(b, block)
	}
}

// networks is what the cluster's prefixes are computed from.
type networks struct {
	podCIDRs   []netip.Prefix // of all nodes
	ranges     []netip.Prefix // of ServiceCIDR objects
	nodes      map[netip.Addr]struct{}
	nodesKnown bool
	pods       blocks // pod addresses that EndpointSlices show
	clusterIPs blocks
}

// prefixes returns the networks of pods and of ClusterIPs, each masked, sorted and without overlap.
//
// What the API server states is taken as it is: spec.podCIDRs of nodes, ServiceCIDRs. An address outside of
// that (a network plugin with pools of its own, a server without ServiceCIDRs) stands for the block around it,
// as its neighbours will be used next; but where the block holds a node's address, or a pod's where ClusterIPs
// are meant, it stands for itself alone. So it does when the nodes are not known: a block around the address of
// a pod on the host network would take the nodes' own network into the tunnel.
//
// Until all that may be watched is known whole (settled), only what is stated counts: a guess would be taken
// back a moment later.
func (n *networks) prefixes(settled bool) (pods, services []netip.Prefix) {
	seenPods, seenVIPs := n.pods, n.clusterIPs
	if !settled {
		seenPods, seenVIPs = nil, nil
	}
	var nodes netipx.IPSetBuilder
	for addr := range n.nodes {
		nodes.Add(addr)
	}
	taken := set(&nodes)
	pods = cover(n.podCIDRs, seenPods, taken, !n.nodesKnown)
	var podAddrs netipx.IPSetBuilder
	podAddrs.AddSet(taken)
	for _, p := range pods {
		podAddrs.AddPrefix(p)
	}
	services = cover(n.ranges, seenVIPs, set(&podAddrs), false)
	return pods, services
}

// cover returns the stated prefixes with those of the addresses outside of them. Addresses in taken are never
// added: they are of another kind.
func cover(stated []netip.Prefix, seen blocks, taken *netipx.IPSet, exact bool) []netip.Prefix {
	var all netipx.IPSetBuilder
	for _, p := range stated {
		all.AddPrefix(p)
	}
	known := set(&all)
	for block, addrs := range seen {
		if known.ContainsPrefix(block) { // the usual case, and there may be a hundred thousand addresses
			continue
		}
		alone := exact || taken.OverlapsPrefix(block)
		for addr := range addrs {
			if known.Contains(addr) || taken.Contains(addr) {
				continue
			}
			if !alone {
				all.AddPrefix(block)
				break
			}
			all.Add(addr)
		}
	}
	return set(&all).Prefixes()
}

// set returns b's addresses. Its only error is an invalid prefix or address, and those were not added.
func set(b *netipx.IPSetBuilder) *netipx.IPSet {
	s, err := b.IPSet()
	if err != nil {
		panic("building an IP set: " + err.Error())
	}
	return s
}
