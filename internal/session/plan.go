package session

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go4.org/netipx"

	"kubevpn/internal/api"
)

// networks is everything that decides what is routed into the tunnel.
type networks struct {
	Pods     []netip.Prefix // from the traffic manager and the user's own rights
	Services []netip.Prefix
	DNS      []netip.Addr   // cluster DNS servers; always routed
	VIPs     []netip.Addr   // ClusterIPs that the manager names; always routed, as the network that is known may be a guess
	Extra    []netip.Prefix // --extra-cidr
	Exclude  []netip.Prefix // --exclude-cidr
	Carrier  []netip.Addr   // what the session itself runs over: the API server, a proxy
	Inner    []netip.Prefix // inner networks; those of IPv6 are routed where the cluster has IPv6
	Own      []netip.Addr   // addresses inside the tunnel that the laptop's resolver answers on
}

// alone is n without what is not the cluster's.
func (n networks) alone() networks {
	n.Inner, n.Own = nil, nil
	return n
}

// hasIPv6 reports whether there is something of the cluster's to be routed in IPv6.
func (n networks) hasIPv6() bool {
	six := func(p netip.Prefix) bool { return p.Addr().Is6() && unroutable(p) == "" }
	return slices.ContainsFunc(n.Pods, six) || slices.ContainsFunc(n.Services, six) || slices.ContainsFunc(n.Extra, six) ||
		slices.ContainsFunc(n.DNS, netip.Addr.Is6)
}

// plan decides which prefixes are routed into the tunnel: pods, Services, cluster DNS, inner networks and the extra
// ones, without the excluded ones and without any address that the session runs over, which is carved out rather
// than dropping the prefix that holds it. The result is masked, sorted and minimal. Prefixes that would
// take over the machine (default routes, loopback, link-local, multicast) are left out, each with a warning.
func plan(n networks) (routes []netip.Prefix, warnings []string) {
	var b netipx.IPSetBuilder
	add := func(what string, prefixes []netip.Prefix) {
		for _, p := range prefixes {
			if why := unroutable(p); why != "" {
				warnings = append(warnings, fmt.Sprintf("%s %s is not routed: %s", what, p, why))
				continue
			}
			b.AddPrefix(p.Masked())
		}
	}
	add("pod network", n.Pods)
	add("Service network", n.Services)
	add("--extra-cidr", n.Extra)
	addEach := func(what string, addrs []netip.Addr) {
		for _, a := range addrs {
			add(what, []netip.Prefix{netip.PrefixFrom(a, a.BitLen())})
		}
	}
	addEach("cluster DNS", n.DNS)
	addEach("ClusterIP", n.VIPs)
	for _, p := range n.Inner {
		if p.Addr().Is4() || n.hasIPv6() {
			add("inner network", []netip.Prefix{p})
		}
	}
	for _, p := range n.Exclude {
		b.RemovePrefix(p.Masked())
	}
	for _, a := range n.Carrier {
		b.Remove(a.Unmap())
	}
	for _, a := range n.Own {
		b.Add(a)
	}
	set, err := b.IPSet()
	if err != nil { // only invalid prefixes do that; unroutable has filtered them
		return nil, append(warnings, err.Error())
	}
	return set.Prefixes(), warnings
}

// unroutable says why a prefix must never be routed into the tunnel, or "".
func unroutable(p netip.Prefix) string {
	switch a := p.Addr(); {
	case !p.IsValid():
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
	return ""
}

// reverseDomains are the zones under in-addr.arpa and ip6.arpa that cover the prefixes, cut at label
// borders (RFC 1035 section 3.5, RFC 3596 section 2.5), without a trailing dot. A prefix that does not end
// at a border gives the enclosing zone's children.
func reverseDomains(prefixes []netip.Prefix) []string {
	var out []string
	for _, p := range prefixes {
		step := 8
		if p.Addr().Is6() {
			step = 4
		}
		bits := (p.Bits() + step - 1) / step * step
		for a := p.Masked(); a.Addr().IsValid() && p.Contains(a.Addr()); {
			out = append(out, reverseDomain(a.Addr(), bits))
			next := netipx.PrefixLastIP(netip.PrefixFrom(a.Addr(), bits)).Next()
			if !next.IsValid() {
				break
			}
			a = netip.PrefixFrom(next, bits)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// maxMatch bounds the match domains of a link, and maxReverse the reverse zones among them. systemd-resolved before
// version 246 takes 256 domains per link, search domains among them.
const (
	maxMatch   = 250
	maxReverse = 100
)

// matchDomains are the domains that a resolver with a server per link shall ask ours about: the cluster's; svc and
// pod, in which no outside name ends; the reverse zones; and namespaces, for NAME.NAMESPACE. Our resolver passes on
// what is not the cluster's, so that a domain too wide costs a hop and not a name. Where there are too many, reverse
// zones are widened, and namespaces are left out: how many, is left.
func matchDomains(domain string, reverse, namespaces []string) (match []string, left int) {
	for len(reverse) > maxReverse {
		reverse = widened(reverse)
	}
	match = slices.Concat([]string{domain, "svc", "pod"}, reverse)
	n := min(len(namespaces), maxMatch-len(match))
	return append(match, namespaces[:n]...), len(namespaces) - n
}

// widened are reverse zones with the longest of the family that has more of them cut by a label, in-addr.arpa and
// ip6.arpa at the shortest.
func widened(zones []string) []string {
	depth := map[string][]int{} // by family
	family := func(z string) string {
		if strings.HasSuffix(z, "ip6.arpa") {
			return "ip6.arpa"
		}
		return "in-addr.arpa"
	}
	for _, z := range zones {
		depth[family(z)] = append(depth[family(z)], strings.Count(z, "."))
	}
	wide := "in-addr.arpa"
	if len(depth["ip6.arpa"]) > len(depth[wide]) {
		wide = "ip6.arpa"
	}
	longest := slices.Max(depth[wide])
	var out []string
	for _, z := range zones {
		if family(z) == wide && strings.Count(z, ".") == longest && longest > 1 {
			_, z, _ = strings.Cut(z, ".")
		}
		out = append(out, z)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func reverseDomain(a netip.Addr, bits int) string {
	name := ""
	if a.Is4() {
		b := a.As4()
		for _, octet := range b[:bits/8] {
			name = fmt.Sprintf("%d.%s", octet, name)
		}
		return name + "in-addr.arpa"
	}
	b := a.As16()
	for i := range bits / 4 {
		nibble := b[i/2] >> 4
		if i%2 == 1 {
			nibble = b[i/2] & 15
		}
		name = fmt.Sprintf("%x.%s", nibble, name)
	}
	return name + "ip6.arpa"
}

// innerSpace is where inner networks may be: benchmarking (RFC 2544), carriers' own (RFC 6598) and unique local
// (RFC 4193) addresses, and a part of a private network (RFC 1918) as the last resort.
var innerSpace = []netip.Prefix{
	netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("100.64.0.0/10"), netip.MustParsePrefix("10.219.0.0/16"),
	netip.MustParsePrefix("fd00::/8"),
}

// addressing is the tunnel's device, whose name is this machine's affair, and the session's inner addresses, which the
// traffic manager has leased it.
type addressing struct {
	Device   string
	Laptop4  netip.Addr
	Laptop6  netip.Addr // invalid: none
	Resolver netip.Addr // where names are answered inside the tunnel
	Networks []netip.Prefix
}

// deviceName is the name of the machine's tunnel with that number. Tunnels are numbered, whoever owns them.
func deviceName(n int) string { return fmt.Sprintf("kubevpn%d", n) }

// leased is a with the addresses of a lease.
func (a addressing) leased(l api.Lease) (addressing, error) {
	out := addressing{Device: a.Device, Resolver: l.Resolver, Networks: l.Networks}
	for _, addr := range l.Addrs {
		if addr.Is4() {
			out.Laptop4 = addr
		} else {
			out.Laptop6 = addr
		}
	}
	if !out.Laptop4.IsValid() || !out.Resolver.IsValid() {
		return a, api.Errorf(api.ExitClash, "the traffic manager has no address for this laptop: every inner network that it knows overlaps one of the cluster or of this machine").
			WithHint("`ip route` shows what uses 198.18.0.0/15 and 100.64.0.0/10 here.")
	}
	return out, nil
}

// addrs are the inner addresses, IPv4 first.
func (a addressing) addrs() (out []netip.Addr) {
	for _, addr := range []netip.Addr{a.Laptop4, a.Laptop6} {
		if addr.IsValid() {
			out = append(out, addr)
		}
	}
	return out
}

// link is the helper's view of the tunnel. The IPv6 address is there only if something IPv6 is routed.
func (a addressing) link(mtu int, routes []netip.Prefix, match, search []string) api.Link {
	l := api.Link{
		Name:          a.Device,
		MTU:           mtu,
		Routes:        routes,
		Resolver:      a.Resolver,
		MatchDomains:  match,
		SearchDomains: search,
	}
	six := slices.ContainsFunc(routes, func(p netip.Prefix) bool { return p.Addr().Is6() })
	for _, p := range a.prefixes() {
		if p.Addr().Is4() || six {
			l.Addrs = append(l.Addrs, p)
		}
	}
	return l
}

// prefixes are the inner addresses as a device has them.
func (a addressing) prefixes() (out []netip.Prefix) {
	for _, addr := range a.addrs() {
		out = append(out, netip.PrefixFrom(addr, addr.BitLen()))
	}
	return out
}
