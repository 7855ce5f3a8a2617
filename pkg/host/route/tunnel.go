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
	has := func(prefix string) bool { return slices.Contains(t.Routes, netip.MustParsePrefix(prefix)) }
	return has("0.0.0.0/0") || has("::/0") || has("0.0.0.0/1") && has("128.0.0.0/1") || has("::/1") && has("8000::/1")
}
