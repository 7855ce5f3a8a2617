package dns

import (
	"cmp"
	"slices"
	"strings"

	"github.com/miekg/dns"
)

// route is the destination of one query.
type route struct {
	// asks are the questions to the clusters, in order, until an answer is not NXDOMAIN. If empty, the query goes
	// upstream.
	asks []ask
	// short means that the query has a short name, which becomes an alias of the full name that exists.
	short bool
	// guess means that the query goes upstream when every answer to asks is NXDOMAIN.
	guess bool
	// late means that the query goes upstream first, and to the clusters only after NXDOMAIN.
	late bool
}

// isOutside reports whether the query goes upstream, at least at first.
func (rt route) isOutside() bool { return len(rt.asks) == 0 || rt.late }

// ask is one question to one cluster: for the query's name, without the alias of the zone at its end if cut is set,
// followed by suffix.
type ask struct {
	zone   *zone
	suffix string
	cut    bool
}

// zones is the ordered list of the connections' zones. It is immutable.
type zones []*zone

// programs returns the zones as the programs of one of them see them: no other zone has its domain, and no name gets a
// namespace.
func (zs zones) programs(of *zone) zones {
	out := make(zones, 0, len(zs))
	for _, z := range zs {
		without := *z
		without.namespace = ""
		if z != of && z.domain == of.domain {
			without.domains = nil // only its alias is left
		}
		out = append(out, &without)
	}
	return out
}

// route returns the route of a query. It depends only on its arguments and the zones' indexes.
func (zs zones) route(q question) route {
	zs = zs.claiming(q.key)
	if len(zs) == 0 || q.key == "" {
		return route{}
	}
	aliases := zs
	zs = slices.DeleteFunc(slices.Clone(zs), func(z *zone) bool { return z.domains == nil })
	// A name under a domain of a cluster stays inside for every class and type.
	if rt, ok := zs.full(q.key); ok {
		return rt
	}
	if q.qclass != dns.ClassINET {
		return route{}
	}
	if p, ok := reversePrefix(q.key); ok {
		for _, z := range zs {
			if z.contains(p) {
				return route{asks: []ask{{zone: z}}}
			}
		}
		return route{}
	}
	if rt := zs.shortName(q); len(rt.asks) > 0 && !rt.guess {
		return rt
	} else if aliased, ok := aliases.aliased(q.key); ok {
		return aliased
	} else {
		return rt
	}
}

// aliased routes a name under the alias of a zone. It needs no index.
func (zs zones) aliased(key string) (route, bool) {
	for _, z := range zs {
		relative, ok := strings.CutSuffix(key, "."+z.alias)
		if z.alias == "" || !ok || !isPlain(relative) {
			continue
		}
		var buf [maxLabels]string
		n, ok := splitKey(relative, &buf)
		if !ok {
			continue
		}
		suffixes := z.expand(buf[:n])
		if len(suffixes) == 0 {
			switch last := buf[n-1]; {
			case last == "svc" || last == "pod":
				suffixes = []string{z.under()}
			case n == 1:
				suffixes = []string{z.under(cmp.Or(z.namespace, "default"), "svc")}
			default:
				suffixes = []string{z.under("svc")}
			}
		}
		var rt route
		for _, suffix := range suffixes {
			rt.asks = append(rt.asks, ask{zone: z, suffix: suffix, cut: true})
		}
		return rt, true
	}
	return route{}, false
}

// claiming returns the zones that do not exclude the name.
func (zs zones) claiming(key string) zones {
	excludes := func(z *zone) bool { return IsUnderAny(key, z.exclude) }
	if !slices.ContainsFunc(zs, excludes) {
		return zs
	}
	return slices.DeleteFunc(slices.Clone(zs), excludes)
}

// full routes a name under a domain of a zone; the longest matching domain wins.
func (zs zones) full(key string) (route, bool) {
	domain := ""
	for _, z := range zs {
		if d := z.domainOf(key); len(d) > len(domain) {
			domain = d
		}
	}
	if domain == "" {
		return route{}, false
	}
	var (
		labels [maxLabels]string
		f      form
	)
	relative := strings.TrimSuffix(strings.TrimSuffix(key, domain), ".")
	if n, ok := splitKey(relative, &labels); ok {
		f, _ = formOf(labels[:n])
	}
	var rt route
	for _, z := range zs.pick(f, domain) {
		rt.asks = append(rt.asks, ask{zone: z})
	}
	return rt, true
}

// pick selects the zones to ask for a name of the given form, among those with the given domain, or all if it is
// empty. It returns the first zone that knows the name; else those without an index, which may have the Service;
// else the first.
func (zs zones) pick(f form, domain string) zones {
	var first, blind zones
	for _, z := range zs {
		if domain != "" && !slices.Contains(z.domains, domain) {
			continue
		}
		if (f.service != "" || f.pod.IsValid()) && z.knows(f) {
			return zones{z}
		}
		if first == nil {
			first = zones{z}
		}
		if f.service != "" && z.services == nil {
			blind = append(blind, z)
		}
	}
	if blind != nil {
		return blind
	}
	return first
}

// shortName routes a name outside every cluster domain.
func (zs zones) shortName(q question) route {
	var buf [maxLabels]string
	n, ok := splitKey(q.key, &buf)
	labels := buf[:n]
	if !ok || !isPlain(q.key) {
		labels = nil // cannot be a cluster name, except by its suffix
	}
	f, _ := formOf(labels)
	// No outside name ends in .svc, or consists of an address, a namespace and .pod.
	if f.pod.IsValid() || strings.HasSuffix(q.key, ".svc") {
		return zs.shortForm(f, labels)
	}
	if len(labels) == 0 || neverService(labels) {
		return route{}
	}
	last := labels[n-1]
	if n == 1 && isZoneType(q.qtype) && isPublicTLD(last) {
		return route{}
	}
	for _, z := range zs {
		if suffixes := z.expand(labels); len(suffixes) > 0 {
			if n > 1 && isPublicTLD(last) {
				return route{}
			}
			private := n > 1 && isPrivateTLD(last)
			rt := route{short: true, late: private, guess: private}
			rt.add(z, suffixes...)
			return rt
		}
	}
	if n > 1 || isZoneType(q.qtype) {
		return route{}
	}
	var rt route
	for _, z := range zs {
		if z.services == nil && z.namespace != "" {
			rt.short, rt.guess = true, true
			rt.add(z, z.under(z.namespace, "svc"))
		}
	}
	return rt
}

// shortForm routes a name that lacks only the cluster domain: web.billing.svc.
func (zs zones) shortForm(f form, labels []string) route {
	rt := route{short: true}
	for _, z := range zs.pick(f, "") {
		suffixes := z.expand(labels)
		if len(suffixes) == 0 || suffixes[len(suffixes)-1] != z.under() {
			suffixes = append(suffixes, z.under())
		}
		rt.add(z, suffixes...)
	}
	return rt
}

func (rt *route) add(z *zone, suffixes ...string) {
	for _, suffix := range suffixes {
		rt.asks = append(rt.asks, ask{zone: z, suffix: suffix})
	}
}
