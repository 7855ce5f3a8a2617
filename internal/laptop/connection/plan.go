package connection

import (
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go4.org/netipx"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/routable"
	"kubevpn/pkg/host/route"
)

// networks is everything that plan depends on.
type networks struct {
	Cluster []client.CIDR  // pods and Services
	DNS     []netip.Addr   // cluster DNS servers; routed also if no known network contains them
	VIPs    []netip.Addr   // ClusterIPs that the manager names; likewise, because the known network may be a guess
	Extra   []netip.Prefix // --extra-cidr
	Exclude []netip.Prefix // --exclude-cidr
	Consent []netip.Prefix // public networks of the cluster that the user allowed
	// Path are the addresses that the connection needs outside of the tunnel: the API server, a proxy, name servers,
	// and the traffic manager where the transport direct reaches it.
	Path  []netip.Addr
	Inner []netip.Prefix   // inner networks; those of IPv6 are routed if the cluster has IPv6
	Own   []netip.Addr     // addresses inside the tunnel at which the laptop's resolver answers
	Hosts []netip.Addr     // of names under the extra domains
	NoMap bool             // --no-map: what overlaps a local network is an error
	Map   []packet.Mapping // --map
	// Foreign reports whether a link is of another user's kubevpn. What overlaps that is not mapped: of two
	// connections to one cluster, only one would answer its names on this machine. Nil: none is.
	Foreign func(link string) bool
	// Mapped are the mappings in use, and Taken further networks in which no new one may have a place.
	Mapped packet.Mappings
	Taken  []netip.Prefix
	// InPod says that this machine is a pod of the cluster: local networks that overlap the cluster's are part of them.
	InPod bool
	// Overlaps finds the local networks that prefixes would hide. Nil: there are none.
	Overlaps func(prefixes []netip.Prefix) ([]route.Overlap, error)
}

// planned is the result of plan.
type planned struct {
	// Routes, Cluster and Hosts have addresses as the cluster knows them. Programs of this machine know those of
	// Mappings by others.
	Routes   []netip.Prefix        // masked, sorted, without overlap, at most routable.MaxRoutes
	Named    []netip.Prefix        // the public networks in which routes may be, because the user allowed them
	Cluster  []netip.Prefix        // pods, Services and DNS servers, whether or not the user excludes them
	Found    bool                  // Routes has more than the tunnel's own networks
	Ask      []client.CIDR         // public networks that the cluster states and the user has not allowed
	Mappings packet.Mappings       // of parts of Routes
	Overlaps []route.Overlap       // of Routes with local networks, if they are not mapped
	Hosts    map[netip.Addr]string // why a host is not routed; empty: it is
	Withheld map[netip.Addr]bool   // the hosts of those that a name of the cluster must not lead to either
	Warnings []string
}

// hasIPv6 reports whether the cluster has something in IPv6 to route.
func (n networks) hasIPv6() bool {
	return slices.ContainsFunc(n.Cluster, func(c client.CIDR) bool { return c.Prefix.Addr().Is6() }) ||
		slices.ContainsFunc(n.Extra, func(p netip.Prefix) bool { return p.Addr().Is6() && routable.Refuse(p) == "" }) ||
		slices.ContainsFunc(n.DNS, netip.Addr.Is6)
}

// plan decides which prefixes are routed into the tunnel: pods, Services, cluster DNS, inner networks and the extra
// ones, without the excluded ones. It also excludes single addresses that the connection needs outside of the tunnel.
//
//	stated by the cluster  private or allowed ─▶ routed     public ─▶ Ask        meets a local network ─▶ Mappings
//	guessed                private or allowed ─▶ routed     public ─▶ a warning  meets a local network ─▶ Mappings
//
// Without mapping, a stated network that meets a local one is in Overlaps, and a guessed one shrinks and warns. In a
// pod of the cluster, both shrink and warn: the pod is in them.
//
// Nothing that the cluster says makes plan fail: an error comes from the function Overlaps.
func plan(n networks) (planned, error) {
	p := newPlanner(n)
	for _, c := range n.Cluster {
		p.addCluster(c)
	}
	p.addAddrs("cluster DNS", n.DNS)
	p.addAddrs("ClusterIP", n.VIPs)
	p.addExtra()
	if err := p.shrink(); err != nil {
		return planned{}, err
	}
	if len(p.out.Routes) > routable.MaxRoutes {
		if err := p.bound(); err != nil {
			return planned{}, err
		}
	}
	if err := p.addHosts(); err != nil {
		return planned{}, err
	}
	if err := p.mapOverlaps(); err != nil {
		return planned{}, err
	}
	return p.out, nil
}

// planner is the state of plan.
type planner struct {
	networks
	space   *netipx.IPSet // what may be routed
	may     *netipx.IPSet // the same without Exclude and Path
	stated  netipx.IPSetBuilder
	guessed netipx.IPSetBuilder
	extra   netipx.IPSetBuilder
	out     planned
}

func newPlanner(n networks) *planner {
	p := &planner{networks: n}
	for _, named := range slices.Concat(n.Extra, n.Consent) {
		if routable.Refuse(named) == "" {
			p.out.Named = append(p.out.Named, named.Masked())
		}
	}
	slices.SortFunc(p.out.Named, netip.Prefix.Compare)
	p.out.Named = slices.Compact(p.out.Named)
	if left := len(p.out.Named) - routable.MaxRoutes; left > 0 {
		p.out.Named = p.out.Named[:routable.MaxRoutes]
		p.warn("%d networks of --extra-cidr and of those that you allowed are not used: too many", left)
	}
	p.space = routable.Space(p.out.Named...)
	var may netipx.IPSetBuilder
	may.AddSet(p.space)
	for _, e := range n.Exclude {
		may.RemovePrefix(e.Masked())
	}
	for _, a := range n.Path {
		may.Remove(a.Unmap().WithZone(""))
	}
	p.may = routable.Set(&may)
	return p
}

func (p *planner) warn(format string, args ...any) {
	p.out.Warnings = append(p.out.Warnings, fmt.Sprintf(format, args...))
}

const public = "it is outside of private address space"

func (p *planner) addCluster(c client.CIDR) {
	switch why := routable.Refuse(c.Prefix); {
	case why != "":
		p.warn("%v (%s) is not routed: %s", c.Prefix, c.Source, why)
	case !p.allows(c.Prefix) && c.Source.Guessed():
		p.warn("%v (%s) is not routed: %s; --extra-cidr %v routes it", c.Prefix, c.Source, public, c.Prefix)
	case !p.allows(c.Prefix):
		p.out.Ask = append(p.out.Ask, c)
	default:
		p.set(c.Source.Guessed()).AddPrefix(c.Prefix)
	}
}

// set returns the set of what the cluster states, or of what is guessed and may shrink, as everything may in a pod.
func (p *planner) set(guessed bool) *netipx.IPSetBuilder {
	if guessed || p.InPod {
		return &p.guessed
	}
	return &p.stated
}

// allows reports whether all of a prefix may be routed, apart from special addresses and what the user excludes.
func (p *planner) allows(prefix netip.Prefix) bool {
	if p.space.ContainsPrefix(prefix) {
		return true
	}
	var rest netipx.IPSetBuilder
	rest.AddPrefix(prefix)
	rest.Intersect(routable.Space(prefix))
	rest.RemoveSet(p.space)
	for _, e := range p.Exclude {
		rest.RemovePrefix(e.Masked())
	}
	return len(routable.Set(&rest).Ranges()) == 0
}

func (p *planner) addAddrs(what string, addrs []netip.Addr) {
	for _, a := range addrs {
		a = a.Unmap()
		if why := p.refuse(a); why != "" {
			p.warn("%v (%s) is not routed: %s", a, what, why)
			continue
		}
		p.set(false).Add(a)
	}
}

// refuse returns why one address may not be routed, apart from what the user excludes, or "".
func (p *planner) refuse(a netip.Addr) string {
	why := routable.Refuse(netip.PrefixFrom(a, a.BitLen()))
	if why == "" && !p.space.Contains(a) {
		why = public + "; --extra-cidr " + a.String() + " routes it"
	}
	return why
}

// addHosts adds a route for each host that no other route contains and that may have one. It changes no other route.
func (p *planner) addHosts() error {
	if len(p.networks.Hosts) == 0 {
		return nil
	}
	p.out.Hosts, p.out.Withheld = map[netip.Addr]string{}, map[netip.Addr]bool{}
	// A pod reaches without the tunnel what the cluster's names lead to.
	withhold := func(a netip.Addr, why string) { p.out.Hosts[a], p.out.Withheld[a] = why, !p.InPod }
	var add []netip.Prefix
	for _, a := range p.networks.Hosts {
		at := netip.PrefixFrom(a, a.BitLen())
		switch why := p.refuse(a); {
		case slices.ContainsFunc(p.Exclude, func(e netip.Prefix) bool { return e.Contains(a) }):
			p.out.Hosts[a] = "it is excluded"
		case routable.Refuse(at) != "":
			withhold(a, why)
		case why != "": // public: without the tunnel, this machine reaches the same host
			p.out.Hosts[a] = why
		case !p.may.Contains(a):
			withhold(a, "the connection itself needs it outside of the tunnel")
		default:
			p.out.Hosts[a] = ""
			add = append(add, at)
		}
	}
	found, err := p.overlaps(add)
	if err != nil {
		return err
	}
	for _, o := range found {
		if p.maps() && !covers(p.out.Routes, o.Prefix.Addr()) {
			p.out.Overlaps = append(p.out.Overlaps, o)
		} else if !p.maps() {
			withhold(o.Prefix.Addr(), o.String())
		}
	}
	for _, h := range add {
		switch {
		case p.out.Hosts[h.Addr()] != "":
		case covers(p.out.Routes, h.Addr()):
		case len(p.out.Routes) >= routable.MaxRoutes:
			withhold(h.Addr(), "this connection has too many routes")
		default:
			p.out.Routes = append(p.out.Routes, h)
		}
	}
	slices.SortFunc(p.out.Routes, netip.Prefix.Compare)
	return nil
}

func (p *planner) addExtra() {
	for _, e := range p.Extra {
		if why := routable.Refuse(e); why != "" {
			p.warn("%v (--extra-cidr) is not routed: %s", e, why)
			continue
		}
		p.extra.AddPrefix(e.Masked())
	}
}

// build computes the routes.
func (p *planner) build() {
	var b netipx.IPSetBuilder
	b.AddSet(routable.Set(&p.stated))
	b.AddSet(routable.Set(&p.guessed))
	b.Intersect(p.space)
	p.out.Cluster = routable.Set(&b).Prefixes()
	b.AddSet(routable.Set(&p.extra))
	b.Intersect(p.may)
	found := routable.Set(&b).Prefixes()
	p.out.Found = len(found) > 0
	six := slices.ContainsFunc(found, func(f netip.Prefix) bool { return f.Addr().Is6() })
	for _, inner := range p.Inner {
		if routable.Refuse(inner) == "" && (inner.Addr().Is4() || six) {
			b.AddPrefix(inner.Masked())
		}
	}
	for _, a := range p.Own {
		if p.may.Contains(a) {
			b.Add(a)
		}
	}
	b.Intersect(p.may)
	p.out.Routes = routable.Set(&b).Prefixes()
}

// shrink removes local networks from the guessed ones, and records the other overlaps.
func (p *planner) shrink() error {
	p.build()
	found, err := p.overlaps(p.out.Routes)
	if err != nil {
		return err
	}
	if p.maps() {
		p.out.Overlaps = found
		return nil
	}
	wanted, guessed := p.wanted(), routable.Set(&p.guessed)
	shrunk := false
	for _, c := range found {
		at := narrower(c.Prefix, c.Other)
		if !guessed.OverlapsPrefix(at) || wanted.OverlapsPrefix(at) {
			continue
		}
		p.guessed.RemovePrefix(at)
		if p.InPod {
			guessed = routable.Set(&p.guessed) // the pod's own addresses are in the network that is named
			p.warn("%v is reached without the tunnel: this machine is a pod in that network", at)
		} else {
			p.warn("%v is not routed: it is guessed from addresses seen in the cluster, and %v", at, c)
		}
		shrunk = true
	}
	if !shrunk {
		p.out.Overlaps = found
		return nil
	}
	p.build()
	p.out.Overlaps, err = p.overlaps(p.out.Routes)
	return err
}

// wanted returns what the cluster states and what the user asks for.
func (p *planner) wanted() *netipx.IPSet {
	var b netipx.IPSetBuilder
	b.AddSet(routable.Set(&p.stated))
	b.AddSet(routable.Set(&p.extra))
	return routable.Set(&b)
}

func (p *planner) overlaps(prefixes []netip.Prefix) ([]route.Overlap, error) {
	if p.Overlaps == nil {
		return nil, nil
	}
	return p.Overlaps(prefixes)
}

// The widest prefixes into which bound joins routes, in bits: addresses of pods in one network of a cloud.
const widest4, widest6 = 16, 48

// bound reduces the number of routes. It joins neighbours to the prefix around them, the longest first, if that
// contains no address that must not be routed. If that is not enough, it drops guessed routes before stated ones.
func (p *planner) bound() error {
	for host := 1; host <= 128-widest6 && len(p.out.Routes) > routable.MaxRoutes; host++ {
		inside := map[netip.Prefix]int{}
		for _, r := range p.out.Routes {
			if around, ok := widen(r, host); ok {
				inside[around]++
			}
		}
		var joined []netip.Prefix
		for around, n := range inside {
			if n > 1 && p.may.ContainsPrefix(around) {
				joined = append(joined, around)
			}
		}
		if len(joined) == 0 {
			continue
		}
		found, err := p.overlaps(joined)
		if err != nil {
			return err
		}
		hides := map[netip.Prefix]bool{}
		for _, c := range found {
			hides[c.Prefix] = true
		}
		var b netipx.IPSetBuilder
		for _, r := range p.out.Routes {
			b.AddPrefix(r)
		}
		for _, around := range joined {
			if !hides[around] {
				b.AddPrefix(around)
			}
		}
		p.out.Routes = routable.Set(&b).Prefixes()
	}
	left := len(p.out.Routes) - routable.MaxRoutes
	if left <= 0 {
		return nil
	}
	wanted := p.wanted()
	rank := func(r netip.Prefix) int {
		if wanted.OverlapsPrefix(r) {
			return 0
		}
		return r.Bits()
	}
	slices.SortStableFunc(p.out.Routes, func(a, b netip.Prefix) int { return rank(a) - rank(b) })
	p.warn("%d networks of the cluster are not routed: they are too many, and cannot be joined", left)
	p.out.Routes = p.out.Routes[:routable.MaxRoutes]
	slices.SortFunc(p.out.Routes, netip.Prefix.Compare)
	return nil
}

// widen returns the prefix around r that leaves host bits, unless that is r itself or too wide.
func widen(r netip.Prefix, host int) (netip.Prefix, bool) {
	bits, widest := 128-host, widest6
	if r.Addr().Is4() {
		bits, widest = 32-host, widest4
	}
	if bits < widest || bits >= r.Bits() {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(r.Addr(), bits).Masked(), true
}

// reverseDomains returns the zones under in-addr.arpa and ip6.arpa that cover the prefixes, without a trailing dot.
// Zones end at labels (RFC 1035 section 3.5, RFC 3596 section 2.5), so a prefix inside of a label becomes several
// zones.
func reverseDomains(prefixes []netip.Prefix) []string {
	var out []string
	for _, p := range prefixes {
		step := 8
		if p.Addr().Is6() {
			step = 4
		}
		bits := (p.Bits() + step - 1) / step * step
		for a := p.Masked().Addr(); p.Contains(a); a = netipx.PrefixLastIP(netip.PrefixFrom(a, bits)).Next() {
			out = append(out, reverseDomain(a, bits))
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// maxMatch limits the match domains of a link, and maxReverse the reverse zones among them. systemd-resolved before
// version 246 takes 256 domains per link, search domains among them.
const (
	maxMatch   = 250
	maxReverse = 100
)

// matchDomains returns the domains for which a resolver with a server per link asks kubevpn's: the cluster's; svc and
// pod, which are no public top-level domains; the reverse zones; and namespaces, for NAME.NAMESPACE. kubevpn's resolver
// forwards what is not the cluster's, so a domain that is too wide costs a hop and no name. If there are too many
// domains, matchDomains widens reverse zones and leaves out namespaces; left is their number.
func matchDomains(domains, reverse, namespaces []string) (match []string, left int) {
	for len(reverse) > maxReverse {
		reverse = widened(reverse)
	}
	match = slices.Concat(domains, []string{"svc", "pod"}, reverse)
	match = match[:min(len(match), maxMatch)]
	n := min(len(namespaces), maxMatch-len(match))
	return append(match, namespaces[:n]...), len(namespaces) - n
}

// widened returns the zones, with the longest ones of the family that has more zones cut by one label. It cuts none
// shorter than in-addr.arpa and ip6.arpa.
func widened(zones []string) []string {
	depth := map[bool][]int{} // by whether the family is IPv6
	is6 := func(z string) bool { return strings.HasSuffix(z, "ip6.arpa") }
	for _, z := range zones {
		depth[is6(z)] = append(depth[is6(z)], strings.Count(z, "."))
	}
	wide := len(depth[true]) > len(depth[false])
	longest := slices.Max(depth[wide])
	var out []string
	for _, z := range zones {
		if is6(z) == wide && strings.Count(z, ".") == longest && longest > 1 {
			_, z, _ = strings.Cut(z, ".")
		}
		out = append(out, z)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// reverseDomain returns the zone of the addresses that share the first bits of a. dns.ReverseAddr of miekg/dns is no
// replacement: it writes an IPv4-mapped address as IPv4.
func reverseDomain(a netip.Addr, bits int) string {
	labels, root := strings.Split(hex.EncodeToString(a.AsSlice())[:bits/4], ""), "ip6.arpa"
	if a.Is4() {
		labels, root = strings.Split(a.String(), ".")[:bits/8], "in-addr.arpa"
	}
	slices.Reverse(labels)
	return strings.Join(append(labels, root), ".")
}

// sharedInner reports whether p may be routed to reach other laptops. The last of the inner networks may not: it is
// part of a private network (RFC 1918), in which this machine may reach other hosts.
func sharedInner(p netip.Prefix) bool {
	return slices.ContainsFunc(routable.Inner(), func(s netip.Prefix) bool {
		return (s.Addr().Is6() || !s.Addr().IsPrivate()) && s.Bits() <= p.Bits() && s.Contains(p.Addr())
	})
}

// leased checks a lease, and returns it with the IPv4 address first.
func leased(l api.Lease) (api.Lease, error) {
	if err := checkLease(l); err != nil {
		return api.Lease{}, err
	}
	l.Addrs = slices.SortedFunc(slices.Values(l.Addrs), netip.Addr.Compare)
	if len(l.Addrs) == 0 || !l.Addrs[0].Is4() || !l.Resolver.IsValid() {
		return api.Lease{}, api.Errorf(api.ExitOverlap, "the traffic manager has no address for this laptop: "+
			"every inner network that it knows overlaps one of the cluster or of this machine").
			WithHint("`ip route` shows what uses 198.18.0.0/15 and 100.64.0.0/10 here.")
	}
	return l, nil
}

// linkAddrs returns the addresses of a lease for a link with these routes: the IPv6 address only if a route is IPv6.
func linkAddrs(l api.Lease, routes []netip.Prefix) []netip.Prefix {
	all := hostPrefixes(l.Addrs)
	if slices.ContainsFunc(routes, func(p netip.Prefix) bool { return p.Addr().Is6() }) {
		return all
	}
	return slices.DeleteFunc(all, func(p netip.Prefix) bool { return p.Addr().Is6() })
}

// covers reports whether one of the prefixes contains the address.
func covers(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

// hostPrefixes returns each address as a prefix of that address alone.
func hostPrefixes(addrs []netip.Addr) (out []netip.Prefix) {
	for _, a := range addrs {
		out = append(out, netip.PrefixFrom(a, a.BitLen()))
	}
	return out
}
