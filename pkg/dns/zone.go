package dns

import (
	"fmt"
	"net/netip"
	"strings"
)

// Zone is the names of one connected cluster. It is a value: to change one (another namespace, other CIDRs) give
// [Resolver.SetZones] the whole new list.
type Zone struct {
	// Domain is the cluster domain: "cluster.local".
	Domain string
	// Namespace is where names without a namespace are looked for; empty means "default".
	Namespace string
	// Services says which short names are this cluster's. Nil where that cannot be known; the package's
	// documentation tells what follows from it.
	Services Services
	// Reverse holds the prefixes of pods and Services, whose reverse names are this cluster's.
	Reverse []netip.Prefix
	// Cluster asks the cluster's DNS through the tunnel; usually a [Nameservers]. It is asked full names only.
	// It should answer within the time that clients wait, or fail.
	Cluster Handler
}

// zone is a Zone made ready for lookups. It does not change.
type zone struct {
	domain    string // as in a key: lower case, no dots at its ends
	namespace string
	services  Services
	reverse   []netip.Prefix
	cluster   Handler
}

func newZone(z Zone) (*zone, error) {
	if z.Cluster == nil {
		return nil, fmt.Errorf("zone %q has no way to its cluster's DNS", z.Domain)
	}
	domain, err := keyOf(strings.Trim(z.Domain, "."))
	if err != nil || domain == "" || !isPlain(domain) {
		return nil, fmt.Errorf("%q is not a cluster domain", z.Domain)
	}
	namespace := strings.ToLower(z.Namespace)
	if namespace == "" {
		namespace = "default"
	}
	c := &zone{domain: domain, namespace: namespace, services: z.Services, cluster: z.Cluster}
	for _, p := range z.Reverse {
		if !p.IsValid() {
			return nil, fmt.Errorf("zone %q has an invalid reverse prefix", z.Domain)
		}
		c.reverse = append(c.reverse, p.Masked())
	}
	return c, nil
}

// has says whether the zone's index knows the Service.
func (z *zone) has(namespace, service string) bool {
	return z.services != nil && z.services.Has(namespace, service)
}

// owns says whether the name is the cluster domain or below it.
func (z *zone) owns(key string) bool {
	rest, ok := strings.CutSuffix(key, z.domain)
	return ok && (rest == "" || rest[len(rest)-1] == '.')
}

// contains says whether all addresses of p are inside one of the zone's prefixes.
func (z *zone) contains(p netip.Prefix) bool {
	for _, r := range z.reverse {
		if r.Bits() <= p.Bits() && r.Contains(p.Addr()) {
			return true
		}
	}
	return false
}

// knows says whether the zone's index or prefixes tell that what f stands for is in this cluster.
func (z *zone) knows(f form) bool {
	if f.pod.IsValid() {
		return z.contains(netip.PrefixFrom(f.pod, f.pod.BitLen()))
	}
	return z.has(f.namespace, f.service)
}

// under is what to put behind a short name, whose end is a dot, to make it a full one: the given labels and the
// cluster domain.
func (z *zone) under(labels ...string) string {
	return strings.Join(append(labels, z.domain), ".") + "."
}

// expand says what to put behind a short name to get the full names that it may stand for in this cluster, in the
// order in which a pod's search list tries them, as far as the index knows their Services.
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
