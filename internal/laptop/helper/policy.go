package helper

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/routable"
	"kubevpn/pkg/host/osdns"
)

// Policy is what the helper of the service allows, in place of the user's consent: nobody typed a password for it, so
// any program of the user could send a consent. The zero value allows private networks and domains outside of the
// Internet. The same functions decide when the user must consent.
type Policy struct {
	// Networks are public networks that may be routed.
	Networks []netip.Prefix `json:"networks,omitempty"`
	// Domains are domains of the Internet that may be resolved by a cluster, with the names below them.
	Domains []string `json:"domains,omitempty"`
	// AllQueries allows the resolver of the user to answer all DNS queries of the machine, as a machine without
	// systemd-resolved needs.
	AllQueries bool `json:"allQueries,omitempty"`

	file  string
	lines map[string]int // of the keys in the file; the first line is 1
}

// The keys of a policy.
const (
	keyNetworks   = "networks"
	keyDomains    = "domains"
	keyAllQueries = "allQueries"
)

// parsePolicy reads the content of a policy file. Its errors name the file.
func parsePolicy(file string, content []byte) (*Policy, error) {
	p := &Policy{file: file, lines: map[string]int{}}
	err := yaml.UnmarshalStrict(content, p)
	if err == nil {
		err = p.validate()
	}
	if err != nil {
		return nil, api.Errorf(api.ExitPrivilege, "cannot use the policy %s: %w", file, err).
			WithHint("an administrator must correct the file; without it the defaults apply")
	}
	for i, line := range slices.Collect(bytes.Lines(content)) {
		if key, _, ok := strings.Cut(string(line), ":"); ok {
			p.lines[key] = i + 1
		}
	}
	return p, nil
}

func (p *Policy) validate() (err error) {
	for _, n := range p.Networks {
		why := routable.Refuse(n)
		if why == "" && n.Masked() != n {
			why = "it is not a masked prefix"
		}
		if why != "" {
			err = errors.Join(err, fmt.Errorf("%s: %v: %s", keyNetworks, n, why))
		}
	}
	for _, d := range p.Domains {
		if e := osdns.CheckDomain(d); e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", keyDomains, e))
		}
	}
	return err
}

// check returns an error if the policy does not allow a link.
func (p *Policy) check(l api.Link) error {
	space := routable.Space(p.Networks...)
	for _, r := range l.Routes {
		if !space.ContainsPrefix(r) {
			return refused("the route %v: it is not in private address space, and not in a network that %s allows "+
				"(link %s)", r, p.file, l.Name).WithHint("%s", hint(p, keyNetworks, list(p.Networks, r)))
		}
	}
	for _, d := range slices.Concat(l.MatchDomains, l.SearchDomains) {
		if osdns.PublicDomain(d) && !isReverse(d) && !p.covers(d) {
			return refused("the domain %q: it can contain names of the Internet, and %s does not allow it (link %s)",
				d, p.file, l.Name).WithHint("%s", hint(p, keyDomains, list(p.Domains, d)))
		}
	}
	return nil
}

// isReverse reports whether a domain contains only names of addresses. These names send no traffic anywhere.
func isReverse(domain string) bool {
	return strings.HasSuffix("."+domain, ".in-addr.arpa") || strings.HasSuffix("."+domain, ".ip6.arpa")
}

// covers reports whether the policy allows a domain of the Internet.
func (p *Policy) covers(domain string) bool {
	return slices.ContainsFunc(p.Domains, func(d string) bool { return strings.HasSuffix("."+domain, "."+d) })
}

// list is the value of a key that allows one more.
func list[T any](allowed []T, more T) string {
	return "[" + api.Join(append(slices.Clone(allowed), more)) + "]"
}

// hint names the line of the policy that has this value of a key.
func hint(p *Policy, key, value string) string {
	line := key + ": " + value
	if n := p.lines[key]; n > 0 {
		return fmt.Sprintf("only an administrator can allow it. Change line %d of %s to\n  %s", n, p.file, line)
	}
	return fmt.Sprintf("only an administrator can allow it. Add this line to %s:\n  %s", p.file, line)
}
