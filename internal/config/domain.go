package config

import (
	"fmt"
	"slices"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/osdns"
	"kubevpn/pkg/protocol/dns"
)

// domain parses a DNS domain.
func domain(s string) (string, error) {
	d := strings.ToLower(strings.Trim(s, "."))
	if d == "" {
		return "", fmt.Errorf("%q is not a domain; write it like corp.test", s)
	}
	// A public suffix is a domain too, and CheckDomain rejects it.
	if err := osdns.CheckDomain("x.x." + d); err != nil {
		return "", fmt.Errorf("%q is not a domain; write it like corp.test", s)
	}
	return d, nil
}

// extraDomain parses a domain whose names cluster DNS may answer.
func extraDomain(s string) (string, error) {
	d, err := domain(s)
	if err != nil {
		return "", err
	}
	if err := osdns.CheckDomain(d); err != nil {
		return "", fmt.Errorf("%w; name a domain below it", err)
	}
	switch d[strings.LastIndexByte(d, '.')+1:] {
	case "localhost", "onion", "invalid":
		return "", fmt.Errorf("nameservers do not answer names under %q", s)
	}
	if d == "local" || d == "svc" || d == "pod" {
		return "", fmt.Errorf("%q has names of this network or of every cluster; name a domain below it", s)
	}
	return d, nil
}

// excludedBy returns the excluded domain that contains all of d, or "".
func (c *Config) excludedBy(d string) string {
	i := slices.IndexFunc(c.ExcludeDomains, func(e string) bool { return dns.IsUnder(d, e) })
	if i < 0 {
		return ""
	}
	return c.ExcludeDomains[i]
}

// CheckDomains returns an *api.Error if an extra domain has no effect, because an excluded one contains it.
func (c *Config) CheckDomains() error {
	for _, d := range c.ExtraDomains {
		if e := c.excludedBy(d); e != "" {
			return api.Errorf(api.ExitUsage, "cluster DNS cannot answer names under %s: %s is excluded", d, e).
				WithHint("extraDomains is set by %s, and excludeDomains by %s: remove one of the two domains",
					c.Setting(KeyExtraDomains).Source, c.Setting(KeyExcludeDomains).Source)
		}
	}
	return nil
}

// yieldDomains removes domains of the client defaults that contradict the user's, or each other. An excluded domain
// takes precedence, unless the user set only the extra domain.
func (c *Config) yieldDomains() {
	of := func(key Key) api.Origin { return c.origins[key].layer }
	if of(KeyExcludeDomains) == api.OriginCluster && of(KeyExtraDomains) != api.OriginCluster {
		c.ExcludeDomains = slices.DeleteFunc(c.ExcludeDomains, func(e string) bool {
			return slices.ContainsFunc(c.ExtraDomains, func(d string) bool { return dns.IsUnder(d, e) })
		})
	}
	c.ExtraDomains = slices.DeleteFunc(c.ExtraDomains, func(d string) bool { return c.excludedBy(d) != "" })
}
