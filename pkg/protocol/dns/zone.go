package dns

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Zone describes the names of one connected cluster. To change a zone, pass the complete new list to
// [Resolver.SetZones].
type Zone struct {
	// Name identifies the zone for an Observer.
	Name string
	// Domain is the cluster domain: "cluster.local".
	Domain string
	// Extra are further domains that Cluster answers.
	Extra []string
	// Alias is a label under which all names are this cluster's, whatever other clusters have: web.billing.ALIAS.
	// Empty: none.
	Alias string
	// Exclude are domains whose names are not this cluster's, although Extra or a short name would make them so.
	Exclude []string
	// Namespace is the namespace of names without one; empty means "default".
	Namespace string
	// Services contains the Services of this cluster, which have short names. It is nil if they are not known; see
	// the package documentation for the consequences.
	Services *Index
	// Reverse holds the prefixes of pods and Services. Their reverse names belong to this cluster.
	Reverse []netip.Prefix
	// Cluster asks the cluster's DNS through the tunnel; usually a [Nameservers]. It receives full names only. It
	// should answer or fail before clients time out.
	Cluster Handler
}

// zone is a Zone prepared for lookups. It is immutable.
type zone struct {
	name      string
	domain    string   // as in a key: lower case, no dots at its ends
	domains   []string // domain and the extra ones
	alias     string   // "": none
	exclude   []string
	namespace string
	services  *Index // nil: not known
	reverse   []netip.Prefix
	cluster   Handler
}

func newZone(z Zone) (*zone, error) {
	if z.Cluster == nil {
		return nil, fmt.Errorf("zone %q has no handler for its cluster's DNS", z.Domain)
	}
	c := &zone{name: z.Name, namespace: cmp.Or(strings.ToLower(z.Namespace), "default"), services: z.Services,
		cluster: z.Cluster, alias: strings.ToLower(z.Alias)}
	for _, d := range slices.Concat([]string{z.Domain}, z.Extra, z.Exclude) {
		domain, err := keyOf(strings.Trim(d, "."))
		if err != nil || domain == "" || !isPlain(domain) {
			return nil, fmt.Errorf("%q is not a domain", d)
		}
		c.domains = append(c.domains, domain)
	}
	c.domain, c.exclude = c.domains[0], c.domains[1+len(z.Extra):]
	c.domains = c.domains[:1+len(z.Extra)]
	for _, p := range z.Reverse {
		if !p.IsValid() {
			return nil, fmt.Errorf("zone %q has an invalid reverse prefix", z.Domain)
		}
		c.reverse = append(c.reverse, p.Masked())
	}
	return c, nil
}

// has reports whether the zone's index contains the Service.
func (z *zone) has(namespace, service string) bool {
	return z.services != nil && z.services.Has(namespace, service)
}

// domainOf returns the longest of the zone's domains that contains the name, or "".
func (z *zone) domainOf(key string) (longest string) {
	for _, d := range z.domains {
		if len(d) > len(longest) && IsUnder(key, d) {
			longest = d
		}
	}
	return longest
}

// IsUnder reports whether the name is the domain or below it. Both are in lower case and without dots at their ends.
func IsUnder(name, domain string) bool {
	rest, ok := strings.CutSuffix(name, domain)
	return ok && (rest == "" || rest[len(rest)-1] == '.')
}

// IsUnderAny reports whether the name is under one of the domains.
func IsUnderAny(name string, domains []string) bool {
	return slices.ContainsFunc(domains, func(d string) bool { return IsUnder(name, d) })
}

// contains reports whether one of the zone's prefixes contains p.
func (z *zone) contains(p netip.Prefix) bool {
	return slices.ContainsFunc(z.reverse, func(r netip.Prefix) bool {
		return r.Bits() <= p.Bits() && r.Contains(p.Addr())
	})
}

// knows reports whether the zone's index or prefixes contain the Service or pod of f.
func (z *zone) knows(f form) bool {
	if f.pod.IsValid() {
		return z.contains(netip.PrefixFrom(f.pod, f.pod.BitLen()))
	}
	return z.has(f.namespace, f.service)
}

// under returns the suffix that makes a short name a full one: the given labels and the cluster domain. The short
// name must end in a dot.
func (z *zone) under(labels ...string) string {
	return strings.Join(append(labels, z.domain), ".") + "."
}

// expand returns the suffixes that make a short name one of the full names in this cluster, in the order of a pod's
// search list. It omits names whose Services are not in the index.
func (z *zone) expand(labels []string) (suffixes []string) {
	n := len(labels)
	if z.services == nil || n == 0 {
		return nil
	}
	last := labels[n-1]
	// NAME.NAMESPACE.svc.DOMAIN
	if n == 1 || n == 2 && !isPrivateTLD(last) || n == 3 && isPort(labels) {
		if z.has(z.namespace, last) {
			suffixes = append(suffixes, z.under(z.namespace, "svc"))
		}
	}
	// NAME.svc.DOMAIN
	if n == 2 || n == 3 || n == 4 && isPort(labels) {
		if z.has(last, labels[n-2]) {
			suffixes = append(suffixes, z.under("svc"))
		}
	}
	// NAME.DOMAIN
	if f, ok := formOf(labels); ok && f.service != "" && z.knows(f) {
		suffixes = append(suffixes, z.under())
	}
	return suffixes
}
