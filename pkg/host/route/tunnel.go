package route

import (
	"net/netip"
	"slices"
)

// Tunnel is a link into another network, as VPNs make them, with the prefixes that are routed into it.
type Tunnel struct {
	Link   string
	Kind   string // "wireguard", "tun", "ppp"
	Routes []netip.Prefix
}

// Everything reports whether the tunnel takes all traffic of IPv4 or IPv6: by a default route, or by its two halves.
func (t Tunnel) Everything() bool {
	for _, all := range []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0),
		netip.PrefixFrom(netip.IPv6Unspecified(), 0)} {
		upper := netip.MustParsePrefix("128.0.0.0/1")
		if all.Addr().Is6() {
			upper = netip.MustParsePrefix("8000::/1")
		}
		lower := netip.PrefixFrom(all.Addr(), 1)
		if slices.Contains(t.Routes, all) || slices.Contains(t.Routes, lower) && slices.Contains(t.Routes, upper) {
			return true
		}
	}
	return false
}
