package manager

import (
	"net/netip"
	"slices"

	"go4.org/netipx"

	"kubevpn/pkg/datapath/routable"
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

	believed   map[netip.Prefix]struct{} // blocks of pods of which a pod was read
	mayNotRead bool                      // the manager may not read pods
}

// maxIgnored bounds the networks that laptops are told to be ignored.
const maxIgnored = 8

// found are the cluster's prefixes, each list masked, sorted and without overlap.
type found struct {
	pods, services             []netip.Prefix
	statedPods, statedServices []netip.Prefix // of these, what the API server states
	ignored                    []netip.Prefix // blocks of pods that may not be routed, some of them
}

// prefixes returns the networks of pods and of ClusterIPs.
//
// What the API server states is taken as it is: spec.podCIDRs of nodes, ServiceCIDRs. An address outside of
// that (a network plugin with pools of its own, a server without ServiceCIDRs) stands for the block around it,
// as its neighbours will be used next; but where the block holds a node's address, or a pod's where ClusterIPs
// are meant, it stands for itself alone. So it does when the nodes are not known: a block around the address of
// a pod on the host network would take the nodes' own network into the tunnel.
//
// A block of pods must be in private address space, and one of its pods must have been read (podReader). Where the
// manager may not read pods, each address stands for itself.
//
// Until all that may be watched is known whole (settled), only what is stated counts: a guess would be taken
// back a moment later.
func (n *networks) prefixes(settled bool) found {
	pods, services := stated(n.podCIDRs), stated(n.ranges)
	out := found{statedPods: pods.Prefixes(), statedServices: services.Prefixes()}
	out.pods, out.services = out.statedPods, out.statedServices
	if !settled {
		return out
	}
	var taken netipx.IPSetBuilder
	for addr := range n.nodes {
		taken.Add(addr)
	}
	out.pods, out.ignored = cover(pods, n.pods, routable.Set(&taken), n.believe)
	for _, p := range out.pods {
		taken.AddPrefix(p)
	}
	out.services, _ = cover(services, n.clusterIPs, routable.Set(&taken), func(netip.Prefix) (bool, bool) {
		return true, true
	})
	return out
}

// believe reports whether the addresses of a block are pods', and whether those around them are.
func (n *networks) believe(block netip.Prefix) (addrs, whole bool) {
	_, read := n.believed[block]
	return read || n.mayNotRead, read && n.nodesKnown
}

// cover returns the stated prefixes with those of the addresses outside of them. Addresses in taken are never
// added: they are of another kind. Blocks that may not be routed are ignored; some of these are returned.
func cover(known *netipx.IPSet, seen blocks, taken *netipx.IPSet,
	believe func(netip.Prefix) (addrs, whole bool)) (prefixes, ignored []netip.Prefix) {
	var all netipx.IPSetBuilder
	all.AddSet(known)
	space := routable.Space()
	for block, addrs := range seen {
		if known.ContainsPrefix(block) { // the usual case, and there may be a hundred thousand addresses
			continue
		}
		if !space.ContainsPrefix(block) {
			ignored = append(ignored, block)
			continue
		}
		some, whole := believe(block)
		whole = whole && !taken.OverlapsPrefix(block)
		for addr := range addrs {
			if !some || known.Contains(addr) || taken.Contains(addr) {
				continue
			}
			if whole {
				all.AddPrefix(block)
				break
			}
			all.Add(addr)
		}
	}
	slices.SortFunc(ignored, netip.Prefix.Compare)
	return routable.Set(&all).Prefixes(), ignored[:min(len(ignored), maxIgnored)]
}

// stated is the addresses of prefixes.
func stated(prefixes []netip.Prefix) *netipx.IPSet {
	var b netipx.IPSetBuilder
	for _, p := range prefixes {
		b.AddPrefix(p)
	}
	return routable.Set(&b)
}
