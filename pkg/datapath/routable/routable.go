// Package routable decides which addresses of this machine may be routed to a cluster.
//
//	private  10.0.0.0/8, 100.64.0.0/10, fd00::/8 ...   routed without asking
//	public   203.0.113.0/24, 2001:db8::/32 ...         routed only if the user named it
//	special  127.0.0.0/8, 169.254.0.0/16, ff00::/8 ... never routed
package routable

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"go4.org/netipx"
)

// MaxRoutes limits the routes of one device, and the networks that a user may allow for it.
const MaxRoutes = 4096

// private returns the networks that are routed without asking.
func private() []netip.Prefix {
	return prefixes(
		"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", // RFC 1918
		"100.64.0.0/10",   // RFC 6598, shared address space
		"198.18.0.0/15",   // RFC 2544, benchmarking
		"240.0.0.0/4",     // RFC 1112, reserved: GKE has pods there
		"34.118.224.0/20", // GKE's default for Services, which Google keeps free
		"fc00::/7",        // RFC 4193, unique local
	)
}

// special returns the networks of RFC 6890 that are never routed.
func special() []netip.Prefix {
	return prefixes(
		"0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "255.255.255.255/32",
		"224.0.0.0/4", // multicast
		"::/8",        // unspecified, loopback, IPv4-mapped
		"fe80::/9",    // link-local and the former site-local
		"ff00::/8",
	)
}

// prefixes parses valid prefixes.
func prefixes(texts ...string) []netip.Prefix {
	all := make([]netip.Prefix, len(texts))
	for i, text := range texts {
		all[i] = netip.MustParsePrefix(text)
	}
	return all
}

// Space returns the addresses that may be routed: private networks and the networks that the user named. It ignores
// a named network that Refuse rejects. The result never contains special addresses.
func Space(named ...netip.Prefix) *netipx.IPSet {
	var b netipx.IPSetBuilder
	b.AddSet(Of(private()))
	for _, p := range named {
		if Refuse(p) == "" {
			b.AddPrefix(p.Masked())
		}
	}
	for _, p := range special() {
		b.RemovePrefix(p)
	}
	return Set(&b)
}

// Set returns the addresses of b. It panics if one is invalid.
func Set(b *netipx.IPSetBuilder) *netipx.IPSet {
	set, err := b.IPSet()
	if err != nil { // only an invalid address or prefix is an error
		panic("building an IP set: " + err.Error())
	}
	return set
}

// Of returns the addresses of valid prefixes.
func Of(prefixes []netip.Prefix) *netipx.IPSet {
	var b netipx.IPSetBuilder
	for _, p := range prefixes {
		b.AddPrefix(p)
	}
	return Set(&b)
}

// PodBlock returns the network of pods that is assumed around the address of one, if no API object states its network:
// a network plugin usually gives a node a /26 to /24 at least, or a /64 of IPv6.
func PodBlock(pod netip.Addr) netip.Prefix { return block(pod, 24, 64) }

// ServiceBlock returns the network of Services that is assumed around a ClusterIP, if no API object states its network.
// It has 256 addresses in both families: it must stay inside the Service range, usually a /20 or wider, or a /112 to
// /108 of IPv6, and nothing verifies the neighbors.
func ServiceBlock(clusterIP netip.Addr) netip.Prefix { return block(clusterIP, 24, 120) }

func block(addr netip.Addr, bits4, bits6 int) netip.Prefix {
	bits := bits6
	if addr = addr.Unmap(); addr.Is4() {
		bits = bits4
	}
	return netip.PrefixFrom(addr, bits).Masked()
}

// Inner returns the networks for inner addresses: benchmarking (RFC 2544), shared (RFC 6598) and unique local (RFC
// 4193) addresses, and a part of a private network (RFC 1918) as the last resort.
func Inner() []netip.Prefix {
	return prefixes("198.18.0.0/15", "100.64.0.0/10", "10.219.0.0/16", "fd00::/8")
}

// Refuse returns the reason why p can never be routed, not even if the user names it, or "". It accepts a p that
// contains special addresses among others; Space omits those.
func Refuse(p netip.Prefix) string {
	a := p.Addr()
	switch {
	case !p.IsValid() || a.Is4In6():
		return "it is not a prefix"
	case p.Bits() == 0:
		return "it is a default route"
	case a.Is4() && p.Bits() < 8, a.Is6() && p.Bits() < 16:
		return "it is too wide"
	case a.IsLoopback():
		return "it is loopback"
	case a.IsLinkLocalUnicast():
		return "it is link-local"
	case a.IsMulticast():
		return "it is multicast"
	}
	for _, s := range special() {
		if s.Bits() <= p.Bits() && s.Contains(a) {
			return "it is in " + s.String() + ", a special-purpose network"
		}
	}
	return ""
}

// Check returns an error if a device must not have the routes, given the networks that the user named. The root helper
// checks its requests with it.
func Check(routes, named []netip.Prefix) error {
	if n := len(routes); n > MaxRoutes {
		return fmt.Errorf("%d routes: at most %d", n, MaxRoutes)
	}
	if n := len(named); n > MaxRoutes {
		return fmt.Errorf("%d networks that the user allowed: at most %d", n, MaxRoutes)
	}
	for _, p := range named {
		if why := Refuse(p); why != "" {
			return fmt.Errorf("the network %v that the user allowed: %s", p, why)
		}
	}
	space := Space(named...)
	for _, p := range routes {
		why := Refuse(p)
		switch {
		case !p.IsValid() || p.Masked() != p || p.Addr().Is4In6():
			why = "it is not a masked prefix"
		case space.ContainsPrefix(p):
			continue // also if it is wider than a network that can be named
		case why == "":
			why = "it is not in private address space, and not in a network that the user allowed"
		}
		return fmt.Errorf("the route %v: %s", p, why)
	}
	return nil
}

// Embedded returns the IPv4 addresses that a translator or a tunnel on the way may make of an IPv6 address; the others
// are invalid. It does not allocate.
//
//	64:ff9b::a.b.c.d         NAT64 (RFC 6052), the last 32 bits
//	64:ff9b:1:AABB:00CC:DD.. NAT64 of the local site (RFC 8215): bits 48-63 and 72-87, or, in a /96 of it, the last 32
//	2002:AABB:CCDD::         6to4 (RFC 3056), bits 16-47
//	::a.b.c.d                IPv4-compatible (RFC 4291), the last 32 bits
//	::ffff:0:a.b.c.d         SIIT (RFC 2765), the last 32 bits
func Embedded(addr netip.Addr) (all [2]netip.Addr) {
	if !addr.Is6() {
		return all
	}
	b := addr.As16()
	last := netip.AddrFrom4([4]byte(b[12:]))
	switch head := binary.BigEndian.Uint64(b[:]); {
	case head == 0x64ff9b<<32, head == 0: // also ::ffff:0:0/96 and ::ffff:0:0:0/96
		all[0] = last
	case head>>16 == 0x64ff9b0001:
		all[0], all[1] = netip.AddrFrom4([4]byte{b[6], b[7], b[9], b[10]}), last
	case head>>48 == 0x2002:
		all[0] = netip.AddrFrom4([4]byte(b[2:6]))
	}
	return all
}
