package dns

import (
	"strings"

	"github.com/miekg/dns"
)

// route is where one query goes.
type route struct {
	// asks are the questions to put to clusters, in order, until one gives something else than NXDOMAIN.
	// Empty: the query goes upstream.
	asks []ask
	// short says that the asked names are not the query's, which becomes an alias of the one that answers.
	short bool
	// guess says that the query goes upstream when all asks give NXDOMAIN.
	guess bool
}

// ask is one question to one cluster: for the query's name with the suffix behind it.
type ask struct {
	zone   *zone
	suffix string
}

// zones is the list of connections' zones, in order. It does not change.
type zones []*zone

// route decides where a query goes. It is a function of its arguments and the zones' indexes only.
func (zs zones) route(q question) route {
	if len(zs) == 0 || q.key == "" {
		return route{}
	}
	// Whatever its class and type, a name under a cluster domain stays inside.
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
	return zs.shortName(q)
}

// full routes a name under the cluster domain of a zone; the longest such domain counts.
func (zs zones) full(key string) (route, bool) {
	domain := ""
	for _, z := range zs {
		if len(z.domain) > len(domain) && z.owns(key) {
			domain = z.domain
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

// pick chooses the zone to ask for a name of the given form, among those with the given domain (any, if it is
// empty): the first that knows it; else, as they may know a Service, those without an index; else the first.
func (zs zones) pick(f form, domain string) zones {
	var first, blind zones
	for _, z := range zs {
		if domain != "" && z.domain != domain {
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

// shortName routes a name that is under no cluster domain.
func (zs zones) shortName(q question) route {
	var buf [maxLabels]string
	n, ok := splitKey(q.key, &buf)
	labels := buf[:n]
	if !ok || !isPlain(q.key) {
		labels = nil // not one of ours, but for its end
	}
	f, _ := formOf(labels)
	// The form says it all: no outside name ends in .svc, or in .pod behind an address.
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
			rt := route{short: true}
			rt.add(z, suffixes...)
			return rt
		}
	}
	if n > 1 || isZoneType(q.qtype) {
		return route{}
	}
	var rt route
	for _, z := range zs {
		if z.services == nil {
			rt.short, rt.guess = true, true
			rt.add(z, z.under(z.namespace, "svc"))
		}
	}
	return rt
}

// shortForm routes a name that misses the cluster domain only: web.billing.svc.
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
