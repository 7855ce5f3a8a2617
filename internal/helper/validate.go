package helper

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"

	"kubevpn/internal/api"
	"kubevpn/pkg/osdns"
)

// Limits of what a daemon may ask for. The daemon runs as the user; whatever runs as the same user can speak
// in its place, so the helper does for it what a VPN needs and no more.
const (
	maxLinks   = 16
	maxRoutes  = 4096
	maxDomains = 512 // match and search domains, per link
	minMTU     = 576
	maxMTU     = 65535
	minMTU6    = 1280 // RFC 8200: below it Linux takes IPv6 from a link
)

var linkName = regexp.MustCompile(`^kubevpn[0-9a-z]{0,8}$`)

// ownSpace is where addresses of our links may be: benchmarking (RFC 2544), carriers' own (RFC 6598) and unique local
// (RFC 4193), and the last of the traffic manager's pools.
var ownSpace = []netip.Prefix{
	netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("100.64.0.0/10"), netip.MustParsePrefix("10.219.0.0/16"),
	netip.MustParsePrefix("fd00::/8"),
}

// neverRouted are the special addresses that no route may cover (RFC 6890).
var neverRouted = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("224.0.0.0/3"), // multicast and reserved, broadcast too
	netip.MustParsePrefix("::/8"),        // unspecified, loopback, IPv4-mapped
	netip.MustParsePrefix("fe80::/9"),    // link-local and what was site-local
	netip.MustParsePrefix("ff00::/8"),
}

func refused(format string, args ...any) *api.Error {
	return api.Errorf(api.ExitNetwork, "the root helper refuses "+format, args...)
}

func checkTUN(name string, mtu int) error {
	if !linkName.MatchString(name) {
		return refused("the link name %q: it must be kubevpn and at most 8 letters or digits", name)
	}
	if mtu < minMTU || mtu > maxMTU {
		return refused("MTU %d of %s: it must be %d to %d", mtu, name, minMTU, maxMTU)
	}
	return nil
}

// check says why the helper does not apply a state.
func check(s api.NetworkState) error {
	if len(s.Links) > maxLinks {
		return refused("%d links: it takes %d", len(s.Links), maxLinks)
	}
	seen := map[string]bool{}
	routes := 0
	for _, l := range s.Links {
		if seen[l.Name] {
			return refused("two links called %s", l.Name)
		}
		seen[l.Name] = true
		if err := checkLink(l); err != nil {
			return err
		}
		routes += len(l.Routes)
	}
	if routes > maxRoutes {
		return refused("%d routes: it takes %d", routes, maxRoutes)
	}
	if s.Resolver == nil {
		return nil
	}
	if l := s.Resolver.Listen4; l.IsValid() && !(l.Addr().Is4() && l.Addr().IsLoopback() && l.Port() != 0) {
		return refused("the resolver %s: it must be a port on IPv4 loopback", l)
	}
	if l := s.Resolver.Listen6; l.IsValid() && !(l.Addr() == netip.IPv6Loopback() && l.Port() != 0) {
		return refused("the resolver %s: it must be a port on IPv6 loopback", l)
	}
	return nil
}

func checkLink(l api.Link) error {
	if err := checkTUN(l.Name, l.MTU); err != nil {
		return err
	}
	for _, p := range l.Addrs {
		if !p.IsValid() || !p.IsSingleIP() || !ours(p.Addr()) {
			return refused("the address %v of %s: it must be one address of %v", p, l.Name, ownSpace)
		}
		if p.Addr().Is6() && l.MTU < minMTU6 {
			return refused("MTU %d of %s: IPv6 needs %d", l.MTU, l.Name, minMTU6)
		}
	}
	for _, p := range l.Routes {
		if err := checkRoute(p); err != nil {
			return fmt.Errorf("%w (link %s)", err, l.Name)
		}
	}
	if r := l.Resolver; r.IsValid() {
		if !ours(r) && !covers(l.Routes, r) {
			return refused("the resolver %s of %s: it is neither ours nor routed into the link", r, l.Name)
		}
		if slices.ContainsFunc(l.Addrs, func(p netip.Prefix) bool { return p.Addr() == r }) {
			return refused("the resolver %s of %s: it is the link's own address, so queries would not reach the link", r, l.Name)
		}
		if err := checkRoute(netip.PrefixFrom(r, r.BitLen())); err != nil {
			return err
		}
	}
	if n := len(l.MatchDomains) + len(l.SearchDomains); n > maxDomains {
		return refused("%d domains of %s: it takes %d", n, l.Name, maxDomains)
	}
	for _, d := range slices.Concat(l.MatchDomains, l.SearchDomains) {
		if err := osdns.CheckDomain(d); err != nil {
			return refused("a domain of %s: %w", l.Name, err)
		}
	}
	return nil
}

func checkRoute(p netip.Prefix) error {
	if !p.IsValid() || p.Masked() != p || p.Addr().Is4In6() || p.Addr().Zone() != "" {
		return refused("the route %v: it is not a masked prefix", p)
	}
	shortest := 8
	if p.Addr().Is6() {
		shortest = 16
	}
	if p.Bits() < shortest {
		return refused("the route %s: it must be /%d or longer", p, shortest)
	}
	for _, n := range neverRouted {
		if n.Overlaps(p) {
			return refused("the route %s: %s is never routed into a tunnel", p, n)
		}
	}
	return nil
}

func ours(a netip.Addr) bool { return covers(ownSpace, a) }

func covers(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}
