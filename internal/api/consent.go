package api

import (
	"net/netip"
	"slices"
)

// Consent lists the managers, networks and domains that kubevpn uses in one cluster because the user allowed them. The
// CLI stores one Consent for each cluster (`kubevpn trust list`) and sends it with each request; the daemon stores
// nothing. A request that needs more fails with ExitConsent, and Error.Needs contains the rest. The zero value allows
// nothing.
//
//	CLI ── ConnectRequest with Consent ──▶ daemon
//	CLI ◀── Error{ExitConsent, Needs} ──── daemon
//	CLI asks the user, stores the answer, and sends the request again
type Consent struct {
	// Managers are the traffic managers that the user trusts, at most one for each namespace. Error.Needs contains the
	// one in question.
	Managers []TrustedManager `json:"managers,omitempty"`
	// Networks outside private address space that the cluster states as its own (podCIDRs of Nodes, ServiceCIDRs).
	Networks []netip.Prefix `json:"networks,omitempty"`
	// Domain is the cluster's domain, if it is empty ("."), or lies under a public suffix ("example.com").
	Domain string `json:"domain,omitempty"`
	// ExtraDomains of the cluster's client defaults.
	ExtraDomains []string `json:"extraDomains,omitempty"`
}

// TrustedManager identifies a traffic manager. If NamespaceUID, Repository or ServiceAccount changes, it is a different
// manager, and the CLI asks the user again.
type TrustedManager struct {
	Namespace string `json:"namespace"`
	// NamespaceUID is the UID of the namespace. If the user may not get the namespace, it is "deployment:" and the UID
	// of the manager's Deployment.
	NamespaceUID   string `json:"namespaceUID"`
	Repository     string `json:"repository"` // of its image, without tag and digest
	ServiceAccount string `json:"serviceAccount"`
	// Image and Age are for people; Same ignores them. Age is the age of the Deployment or, without one, of the
	// namespace.
	Image string `json:"image,omitempty"`
	Age   string `json:"age,omitempty"`
}

// Same reports whether m and o are the same manager. The tags and digests of their images may differ.
func (m TrustedManager) Same(o TrustedManager) bool {
	m.Image, m.Age, o.Image, o.Age = "", "", "", ""
	return m == o
}

// Trusts returns nil if the user trusts m, else the error that asks for it.
func (c *Consent) Trusts(m TrustedManager) *Error {
	if slices.ContainsFunc(c.Managers, m.Same) {
		return nil
	}
	return NeedsManager(m, "the traffic manager in the namespace %s was not installed by you", m.Namespace)
}

// NeedsManager returns an error with ExitConsent that asks whether the user trusts m.
func NeedsManager(m TrustedManager, format string, args ...any) *Error {
	e := Errorf(ExitConsent, format, args...).
		WithHint("Its image is %s and its ServiceAccount is %s. All your traffic to the cluster would go through it.",
			m.Image, m.ServiceAccount)
	e.Needs = &Consent{Managers: []TrustedManager{m}}
	return e
}

// With returns the union of c and needs. A manager in needs replaces the one of the same namespace.
func (c Consent) With(needs Consent) Consent {
	for _, m := range needs.Managers {
		c.Managers = append(slices.DeleteFunc(slices.Clone(c.Managers), func(o TrustedManager) bool {
			return o.Namespace == m.Namespace
		}), m)
	}
	c.Networks, c.ExtraDomains = union(c.Networks, needs.Networks), union(c.ExtraDomains, needs.ExtraDomains)
	if needs.Domain != "" {
		c.Domain = needs.Domain
	}
	return c
}

// union returns a and those of b that it lacks, and changes neither.
func union[T comparable](a, b []T) []T {
	added := slices.DeleteFunc(slices.Clone(b), func(v T) bool { return slices.Contains(a, v) })
	return append(slices.Clip(a), added...)
}
