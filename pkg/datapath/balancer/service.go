package balancer

import (
	"cmp"
	"net/netip"
	"slices"
	"time"
)

// Protocol is an IP protocol number. Only TCP and UDP are balanced.
type Protocol uint8

// The protocols that are balanced. SCTP is not: kubevpn does not carry it.
const (
	TCP Protocol = 6
	UDP Protocol = 17
)

// Name is a Service's namespace and name.
type Name struct{ Namespace, Name string }

// Service is one Service with its endpoints. It must not change after Apply.
type Service struct {
	Name
	// ClusterIPs are the virtual IPs, of either family. Headless and ExternalName Services have none.
	ClusterIPs []netip.Addr
	// Affinity is the time for which a client keeps its endpoint after its last new flow. Zero disables affinity.
	Affinity time.Duration
	// LocalOnly reports internalTrafficPolicy Local.
	LocalOnly bool
	Ports     []Port
}

// Port is one port of a Service. Endpoints are the endpoints of all address families, each with its own target
// port. The caller resolves named target ports and merges slices.
type Port struct {
	Protocol  Protocol
	Port      uint16
	Endpoints []Endpoint
}

// Endpoint is one endpoint of an EndpointSlice.
type Endpoint struct {
	Addr        netip.AddrPort
	Node        string
	Ready       bool
	Serving     bool
	Terminating bool
	ZoneHints   []string
	NodeHints   []string
}

// locality is the node and zone of the balancer.
type locality struct{ node, zone string }

func (p locality) holds(e *Endpoint) bool { return p.node != "" && e.Node == p.node }

// usable returns the endpoints that a new flow to a virtual IP may use, and the verdict if there are none. It follows
// CategorizeEndpoints for internal traffic.
func usable(endpoints []Endpoint, localOnly bool, at locality) ([]Endpoint, Verdict) {
	ready := func(e *Endpoint) bool { return e.Ready }
	draining := func(e *Endpoint) bool { return e.Serving && e.Terminating }
	if !localOnly {
		chosen := filter(endpoints, ready)
		if len(chosen) == 0 {
			chosen = filter(endpoints, draining)
		} else if hinted := topology(chosen, at); hinted != nil {
			chosen = filter(chosen, hinted)
		}
		return chosen, Refused
	}
	local := filter(endpoints, at.holds)
	chosen := filter(local, ready)
	if len(chosen) == 0 {
		chosen = filter(local, draining)
	}
	elsewhere := slices.ContainsFunc(endpoints, func(e Endpoint) bool { return ready(&e) || draining(&e) })
	if elsewhere {
		return chosen, Dropped
	}
	return chosen, Refused
}

// topology returns a filter for the endpoints that the hints select, or nil if the hints do not apply. Node hints take
// precedence over zone hints (KEP-3015).
func topology(ready []Endpoint, at locality) func(*Endpoint) bool {
	forNode := func(e *Endpoint) bool { return slices.Contains(e.NodeHints, at.node) }
	forZone := func(e *Endpoint) bool { return slices.Contains(e.ZoneHints, at.zone) }
	allNode, someNode, allZone, someZone := true, false, true, false
	for i := range ready {
		e := &ready[i]
		allNode = allNode && len(e.NodeHints) > 0
		allZone = allZone && len(e.ZoneHints) > 0
		someNode = someNode || forNode(e)
		someZone = someZone || forZone(e)
	}
	switch {
	case allNode && someNode:
		return forNode
	case allZone && someZone:
		return forZone
	}
	return nil
}

func filter(endpoints []Endpoint, keep func(*Endpoint) bool) []Endpoint {
	var out []Endpoint
	for i := range endpoints {
		if keep(&endpoints[i]) {
			out = append(out, endpoints[i])
		}
	}
	return out
}

// family returns the endpoints of vip's family, sorted by address, each address once. Of duplicates the one on
// this node wins (as in kube-proxy's endpointSliceCache), then the ready one: while the controller moves an
// endpoint from one slice to another, both have it.
func family(endpoints []Endpoint, vip netip.Addr, at locality) []Endpoint {
	same := filter(endpoints, func(e *Endpoint) bool { return e.Addr.Addr().Is4() == vip.Is4() })
	rank := func(e *Endpoint) int {
		switch {
		case at.holds(e):
			return 0
		case e.Ready:
			return 1
		}
		return 2
	}
	slices.SortStableFunc(same, func(a, b Endpoint) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(rank(&a), rank(&b)))
	})
	return slices.CompactFunc(same, func(a, b Endpoint) bool { return a.Addr == b.Addr })
}
