package watch

import (
	"net/netip"
	"slices"

	"go4.org/netipx"

	"kubevpn/pkg/datapath/routable"
)

// blocks counts addresses by block: the known addresses of networks whose prefix no API object states.
type blocks map[netip.Prefix]map[netip.Addr]int

// add adds n to the number of objects with addr, which is in block.
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

// networks contains the data from which prefixes computes the cluster's networks.
type networks struct {
	podCIDRs   []netip.Prefix // of all nodes
	ranges     []netip.Prefix // of ServiceCIDR objects
	nodes      map[netip.Addr]struct{}
	nodesKnown bool
	pods       blocks // pod addresses that EndpointSlices show
	clusterIPs blocks

	verified   map[netip.Prefix]struct{} // blocks of pods of which the podReader has verified a pod
	mayNotRead bool                      // the manager may not read pods
}

// maxIgnored bounds the ignored networks that laptops receive.
const maxIgnored = 8

// found contains the cluster's prefixes, each list masked, sorted and without overlap.
type found struct {
	pods, services             []netip.Prefix
	statedPods, statedServices []netip.Prefix // those of them that API objects state
	ignored                    []netip.Prefix // some of the blocks of pods that may not be routed
}

// prefixes returns the networks of pods and of ClusterIPs.
//
// It includes the networks that API objects state: spec.podCIDRs of Nodes, and ServiceCIDRs. For an address outside of
// them (a network plugin with pools of its own, a server without ServiceCIDRs) it includes the block around it, because
// the neighbors will be used next. It includes only the address itself if the block contains a node's address or, for
// ClusterIPs, a pod's. It does the same if the nodes are unknown, because the block around the address of a pod on the
// host network would take the nodes' own network into the tunnel.
//
// A block of pods must be in private address space, and the podReader must have verified one of its pods. If the
// manager may not read pods, each address is included by itself.
//
// Until the manager knows all that it may watch (settled), only the stated networks count, because a guess could change
// a moment later.
func (n *networks) prefixes(settled bool) found {
	pods, services := routable.Of(n.podCIDRs), routable.Of(n.ranges)
	out := found{statedPods: pods.Prefixes(), statedServices: services.Prefixes()}
	out.pods, out.services = out.statedPods, out.statedServices
	if !settled {
		return out
	}
	var taken netipx.IPSetBuilder
	for addr := range n.nodes {
		taken.Add(addr)
	}
	out.pods, out.ignored = cover(pods, n.pods, routable.Set(&taken), n.belongToPods)
	for _, p := range out.pods {
		taken.AddPrefix(p)
	}
	out.services, _ = cover(services, n.clusterIPs, routable.Set(&taken), func(netip.Prefix) (bool, bool) {
		return true, true
	})
	return out
}

// belongToPods reports whether the addresses of a block belong to pods, and whether the whole block does.
func (n *networks) belongToPods(block netip.Prefix) (addrs, whole bool) {
	_, read := n.verified[block]
	return read || n.mayNotRead, read && n.nodesKnown
}

// cover returns the stated prefixes and those of the addresses outside of them. It never adds addresses in taken, which
// are of another kind. It ignores blocks that may not be routed, and returns some of them.
func cover(known *netipx.IPSet, seen blocks, taken *netipx.IPSet,
	belong func(netip.Prefix) (addrs, whole bool)) (prefixes, ignored []netip.Prefix) {
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
		some, whole := belong(block)
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
