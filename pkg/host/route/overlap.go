package route

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
)

// OverlapKind says what a prefix overlaps on this machine.
type OverlapKind string

const (
	OverlapAddress OverlapKind = "address" // the prefix contains an address of this machine
	// the prefix overlaps a network to which a link of this machine is attached
	OverlapConnected OverlapKind = "network"
	OverlapRoute     OverlapKind = "route"   // another route is at least as specific as the prefix
	OverlapGateway   OverlapKind = "gateway" // the prefix contains the gateway of another route
	OverlapPolicy    OverlapKind = "ip rule" // a table that the kernel looks up before the main table has such a route
)

// Overlap is one overlap between a prefix for the tunnel and a local network.
type Overlap struct {
	Kind   OverlapKind
	Prefix netip.Prefix // the tunnel's
	Other  netip.Prefix // the local network's
	Link   string       // the interface of the local network; empty for a route without one (blackhole)
}

// String describes the overlap in one line.
func (o Overlap) String() string {
	link := o.Link
	if link == "" {
		link = "no interface"
	}
	return fmt.Sprintf("%s overlaps the %s %s of %s", o.Prefix, o.Kind, o.Other, link)
}

// Overlaps returns the local networks that overlap routes, except those of the links named in ignoreLinks. It needs no
// privilege and changes nothing. It sorts its result by the routes, then by the local networks. An empty result means
// that the routes can go into a tunnel without breaking anything that works now. Except on Linux and macOS it sees the
// machine's addresses and the networks that they are in, but no routes through gateways.
func Overlaps(routes []netip.Prefix, ignoreLinks []string) ([]Overlap, error) {
	l, err := readLocal(ignoreLinks)
	if err != nil {
		return nil, err
	}
	return l.overlaps(routes), nil
}

// local holds the addresses and routes of this machine that a prefix can overlap.
type local struct {
	addrs  []localAddr
	routes []localRoute
}

type localAddr struct {
	addr netip.Addr
	link string
}

type localRoute struct {
	dst       netip.Prefix
	link      string
	gateway   netip.Addr // invalid: none
	connected bool       // hosts of dst are neighbours on the link
	early     bool       // in a table that the kernel looks up before the main table: it wins whatever its length
}

// overlaps compares prefixes with the machine's network. It reads nothing.
//
// A route through a gateway does not overlap if it is broader than the prefix: the more specific prefix takes its
// part, and gives it back at the end. The same holds for a broader route into another VPN's point-to-point link. A
// network whose hosts are neighbours always overlaps, because a prefix inside it hides some of them.
func (l local) overlaps(prefixes []netip.Prefix) []Overlap {
	found := map[Overlap]bool{}
	for _, prefix := range prefixes {
		for _, a := range l.addrs {
			if prefix.Contains(a.addr) {
				found[Overlap{OverlapAddress, prefix, netip.PrefixFrom(a.addr, a.addr.BitLen()), a.link}] = true
			}
		}
		for _, r := range l.routes {
			if r.gateway.IsValid() && prefix.Contains(r.gateway) {
				gw := netip.PrefixFrom(r.gateway, r.gateway.BitLen())
				found[Overlap{OverlapGateway, prefix, gw, r.link}] = true
			}
			if r.dst.Bits() == 0 || !r.dst.Overlaps(prefix) {
				continue // a default route is always broader
			}
			switch {
			case r.early:
				found[Overlap{OverlapPolicy, prefix, r.dst, r.link}] = true
			case r.connected:
				found[Overlap{OverlapConnected, prefix, r.dst, r.link}] = true
			case r.dst.Bits() >= prefix.Bits():
				found[Overlap{OverlapRoute, prefix, r.dst, r.link}] = true
			}
		}
	}
	return slices.SortedFunc(maps.Keys(found), func(a, b Overlap) int {
		return cmp.Or(a.Prefix.Compare(b.Prefix), a.Other.Compare(b.Other), cmp.Compare(a.Link, b.Link),
			cmp.Compare(a.Kind, b.Kind))
	})
}
