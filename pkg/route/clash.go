package route

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// ClashKind says what of this machine a prefix would cut off.
type ClashKind string

const (
	ClashAddress   ClashKind = "address" // an address of this machine is inside the prefix
	ClashConnected ClashKind = "network" // a network that a link of this machine is attached to overlaps it
	ClashRoute     ClashKind = "route"   // another route is as specific, or more, and would win or lose by chance
	ClashGateway   ClashKind = "gateway" // a gateway that other routes need is inside the prefix
	ClashPolicy    ClashKind = "ip rule" // a table that is asked before the main one has a route that overlaps it
)

// Clash is one overlap of a prefix that is to be routed into the tunnel with a local network.
type Clash struct {
	Kind   ClashKind
	Prefix netip.Prefix // ours
	Other  netip.Prefix // theirs
	Link   string       // the interface that theirs belongs to; empty for a route without one (blackhole)
}

func (c Clash) String() string {
	link := c.Link
	if link == "" {
		link = "no interface"
	}
	return fmt.Sprintf("%s overlaps the %s %s of %s", c.Prefix, c.Kind, c.Other, link)
}

// local is what of the machine's network matters to clashes.
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
	early     bool       // in a table that is asked before the main one, so that it wins whatever its length
}

// clashes compares; it reads nothing.
//
// A route towards a gateway that is broader than ours is no clash: ours is more specific, takes its part and
// gives it back. The same holds for a broader route into another VPN's point-to-point link. A network whose
// hosts are neighbours is one in every case, since taking part of it would hide some of them.
func (l local) clashes(prefixes []netip.Prefix) []Clash {
	found := map[Clash]bool{}
	for _, ours := range prefixes {
		for _, a := range l.addrs {
			if ours.Contains(a.addr) {
				found[Clash{ClashAddress, ours, netip.PrefixFrom(a.addr, a.addr.BitLen()), a.link}] = true
			}
		}
		for _, r := range l.routes {
			if r.gateway.IsValid() && ours.Contains(r.gateway) {
				gw := netip.PrefixFrom(r.gateway, r.gateway.BitLen())
				found[Clash{ClashGateway, ours, gw, r.link}] = true
			}
			if r.dst.Bits() == 0 || !r.dst.Overlaps(ours) {
				continue // a default route is always broader
			}
			switch {
			case r.early:
				found[Clash{ClashPolicy, ours, r.dst, r.link}] = true
			case r.connected:
				found[Clash{ClashConnected, ours, r.dst, r.link}] = true
			case r.dst.Bits() >= ours.Bits():
				found[Clash{ClashRoute, ours, r.dst, r.link}] = true
			}
		}
	}
	out := make([]Clash, 0, len(found))
	for c := range found {
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b Clash) int {
		return cmp.Or(comparePrefix(a.Prefix, b.Prefix), comparePrefix(a.Other, b.Other),
			cmp.Compare(a.Link, b.Link), cmp.Compare(a.Kind, b.Kind))
	})
	return out
}

func comparePrefix(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}
