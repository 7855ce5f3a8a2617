package connection

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/pkg/datapath/routable"
	"kubevpn/pkg/host/osdns"
	"kubevpn/pkg/protocol/dns"
)

// This file checks what the traffic manager says, because it decides where this machine's packets and names go.

// accept returns state without the parts that the connection does not use. A public domain needs the user's consent:
// without it a first hello fails, and later the connection keeps its domain.
func (h *handshake) accept(state api.ManagerState) (api.ManagerState, error) {
	v := h.view.Load()
	before, running := v.state.DNSDomain, v.hello != nil
	domain := strings.ToLower(strings.Trim(state.DNSDomain, "."))
	switch {
	case domain == "":
	// CheckDomain rejects public suffixes, hence the labels: PublicDomain finds those
	case osdns.CheckDomain("x.x."+domain) != nil:
		h.status.warn(fmt.Sprintf("the traffic manager's cluster domain %.80q is not a domain name", state.DNSDomain))
		domain = before
	case osdns.PublicDomain(domain) && domain != h.cfg.Request.Consent.Domain:
		if !running {
			err := api.Errorf(api.ExitConsent,
				"the cluster's domain is %s, so that names of the Internet below it would be resolved by the cluster",
				domain).
				WithHint("A cluster's domain is usually its own: cluster.local.")
			err.Needs = &api.Consent{Domain: domain}
			return api.ManagerState{}, err
		}
		h.status.warn(fmt.Sprintf("the traffic manager now says that the cluster's domain is %s: it stays %q; "+
			"connect again to be asked", domain, before))
		domain = before
	}
	state.DNSDomain = domain
	state.InnerNetworks = slices.DeleteFunc(slices.Clone(state.InnerNetworks), func(p netip.Prefix) bool {
		if !innerNetwork(p) {
			h.status.warn(fmt.Sprintf("laptops with an address in %v are not reached: it is not a network for laptops",
				p))
			return true
		}
		return false
	})
	return state, nil
}

// checkDefaults returns an error if the client defaults of the cluster add networks or domains that the user has not
// allowed.
func checkDefaults(r *api.ConnectRequest) error {
	if setting := r.Setting(string(config.KeyExtraCIDRs)); setting.Origin == api.OriginCluster {
		invalid := func(p netip.Prefix) bool { return !p.IsValid() }
		allowed := slices.DeleteFunc(slices.Clone(r.Consent.Networks), invalid)
		ask := slices.DeleteFunc(slices.Clone(r.ExtraCIDRs), routable.Of(allowed).ContainsPrefix)
		if len(ask) > 0 {
			return defaultsError("networks, which are routed", api.Some(ask, 1), setting, &api.Consent{Networks: ask})
		}
	}
	if setting := r.Setting(string(config.KeyExtraDomains)); setting.Origin == api.OriginCluster {
		ask := slices.DeleteFunc(slices.Clone(r.ExtraDomains), func(d string) bool {
			return slices.Contains(r.Consent.ExtraDomains, d)
		})
		if len(ask) > 0 {
			return defaultsError("domains, whose names cluster DNS answers and whose addresses are routed",
				api.Some(ask, 1), setting, &api.Consent{ExtraDomains: ask})
		}
	}
	return nil
}

// defaultsError asks for consent to what a setting of the client defaults adds.
func defaultsError(what, text string, setting api.Setting, needs *api.Consent) *api.Error {
	err := api.Errorf(api.ExitConsent, "the client defaults of the cluster add %s only if you allow it: %s (%s)", what,
		text, setting.Source)
	err.Needs = needs
	return err.WithHint("Nothing was changed on this machine. To allow them once:\n  kubevpn connect --yes\n"+
		"To go on without them:\n  kubevpn connect --%s ''", config.Key(setting.Key).FlagName())
}

// checkDomains returns an error if the extra or excluded domains contradict the cluster's domain, or if an earlier
// connection has one of them.
func (s *shared) checkDomains() error {
	r, domain := &s.cfg.Request, s.view.Load().state.DNSDomain
	reject := func(key config.Key, code api.ExitCode, format string, args ...any) error {
		by := r.Setting(string(key)).Source
		return api.Errorf(code, format, args...).
			WithHint("%s is set by %s. To go on without:\n  kubevpn connect --%s ''", key, by, key.FlagName())
	}
	for _, d := range r.ExcludeDomains {
		if domain != "" && (dns.IsUnder(domain, d) || dns.IsUnder(d, domain)) {
			return reject(config.KeyExcludeDomains, api.ExitUsage,
				"%s cannot be excluded: the cluster's own domain is %s", d, domain)
		}
	}
	for _, d := range r.ExtraDomains {
		switch {
		case domain != "" && dns.IsUnder(d, domain):
			return reject(config.KeyExtraDomains, api.ExitUsage,
				"%s is no extra domain: cluster DNS answers all names under %s anyway", d, domain)
		case s.cfg.Network.DomainTaken(d):
			return reject(config.KeyExtraDomains, api.ExitOverlap,
				"another connected cluster answers names under %s: disconnect it first", d)
		}
	}
	return nil
}

// The widest networks that a manager's laptops share, in bits.
const (
	inner4 = 16
	inner6 = 48
)

// innerNetwork reports whether a manager may give laptops addresses of p.
func innerNetwork(p netip.Prefix) bool {
	bits := inner4
	if p.Addr().Is6() {
		bits = inner6
	}
	return p.IsValid() && p.Masked() == p && p.Bits() >= bits &&
		slices.ContainsFunc(routable.Inner(), func(s netip.Prefix) bool {
			return s.Contains(p.Addr()) && s.Bits() <= p.Bits()
		})
}

// checkLease returns an error if this laptop must not use the addresses of a lease.
func checkLease(l api.Lease) error {
	reject := func(format string, args ...any) error {
		return api.Errorf(api.ExitIncompatible, "the traffic manager leases this laptop "+format, args...).
			WithHint("Nothing of it is used. `kubevpn connect --upgrade` replaces a traffic manager that is broken; " +
				"ask an admin who installed this one.")
	}
	for _, p := range l.Networks {
		if !innerNetwork(p) {
			return reject("the network %v, which is not one for laptops (at most a /%d or /%d of %v)", p, inner4,
				inner6, routable.Inner())
		}
	}
	family := map[bool]bool{}
	for _, a := range l.Addrs {
		if family[a.Is4()] {
			return reject("%v: two addresses of one family", l.Addrs)
		}
		family[a.Is4()] = true
		if !covers(l.Networks, a) {
			return reject("the address %v, which is not in the networks %v of the lease", a, l.Networks)
		}
	}
	r := l.Resolver
	if r.IsValid() && (!r.Is4() || slices.Contains(l.Addrs, r) ||
		!slices.ContainsFunc(l.Networks, func(p netip.Prefix) bool {
			return p.Contains(r) && slices.ContainsFunc(l.Addrs, p.Contains)
		})) {
		return reject("the resolver %v, which is not another address of its network (%v)", r, l.Networks)
	}
	return nil
}
