package helper

import (
	"net/netip"
	"regexp"
	"runtime"
	"slices"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/routable"
	"kubevpn/pkg/host/osdns"
)

// Limits of the requests of a daemon. The daemon runs as the user, and any program of that user can replace it, so the
// helper allows only changes that a VPN needs.
const (
	maxLinks   = 16
	maxDomains = 512 // match and search domains, per link
	minMTU     = 576
	maxMTU     = 65535
	minMTU6    = 1280 // RFC 8200: below it Linux disables IPv6 on a link
)

// linkName and linkRule say which names links may have on this system.
var linkName, linkRule = linkNames(runtime.GOOS)

// linkNames returns the names of links on a system, and the same in words. macOS names TUN devices itself.
func linkNames(goos string) (*regexp.Regexp, string) {
	if goos == "darwin" {
		return regexp.MustCompile(`^utun[0-9]{0,5}$`), "utun and at most 5 digits"
	}
	return regexp.MustCompile(`^kubevpn[0-9a-z]{0,8}$`), "kubevpn and at most 8 letters or digits"
}

func refused(format string, args ...any) *api.Error {
	return api.Errorf(api.ExitNetwork, "the root helper refuses "+format, args...)
}

func checkTUN(name string, mtu int) error {
	if !linkName.MatchString(name) {
		return refused("the link name %q: it must be %s", name, linkRule)
	}
	if mtu < minMTU || mtu > maxMTU {
		return refused("MTU %d of %s: it must be %d to %d", mtu, name, minMTU, maxMTU)
	}
	return nil
}

// check returns an error if the helper must not apply a state. A nil policy allows what the user allowed.
func check(s api.NetworkState, policy *Policy) error {
	if len(s.Links) > maxLinks {
		return refused("%d links: the limit is %d", len(s.Links), maxLinks)
	}
	seen := map[string]bool{}
	for _, l := range s.Links {
		if seen[l.Name] {
			return refused("two links with the name %s", l.Name)
		}
		seen[l.Name] = true
		if err := checkLink(l); err != nil {
			return err
		}
		if policy != nil {
			if err := policy.check(l); err != nil {
				return err
			}
		}
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
		if !p.IsValid() || !p.IsSingleIP() || !isInner(p.Addr()) {
			return refused("the address %v of %s: it must be one address of %v", p, l.Name, routable.Inner())
		}
		if p.Addr().Is6() && l.MTU < minMTU6 {
			return refused("MTU %d of %s: IPv6 requires %d", l.MTU, l.Name, minMTU6)
		}
	}
	if err := routable.Check(l.Routes, l.Named); err != nil {
		return refused("%w (link %s)", err, l.Name)
	}
	if r := l.Resolver; r.IsValid() {
		if !isInner(r) && !covers(l.Routes, r) {
			return refused("the resolver %s of %s: it must be in %v or routed into the link", r, l.Name,
				routable.Inner())
		}
		if slices.ContainsFunc(l.Addrs, func(p netip.Prefix) bool { return p.Addr() == r }) {
			return refused("the resolver %s of %s: it is the link's own address, so queries would not reach the link",
				r, l.Name)
		}
	}
	if n := len(l.MatchDomains) + len(l.SearchDomains); n > maxDomains {
		return refused("%d domains of %s: the limit is %d", n, l.Name, maxDomains)
	}
	for _, d := range slices.Concat(l.MatchDomains, l.SearchDomains) {
		if err := osdns.CheckDomain(d); err != nil {
			return refused("a domain of %s: %w", l.Name, err)
		}
	}
	return nil
}

func isInner(a netip.Addr) bool { return covers(routable.Inner(), a) }

func covers(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}
