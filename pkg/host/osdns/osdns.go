// Package osdns puts kubevpn's resolver into the path of this machine's DNS queries, and removes it again. It runs as
// root, in the helper; the resolver itself (pkg/protocol/dns) does not.
//
// On Linux it uses the first of these methods that fits:
//
//	systemd-resolved  servers and routing domains of the tunnel's link, set over D-Bus: the resolver gets only the
//	                  cluster's names. They end with the link.
//	nftables          an "owner" table that redirects port 53 of resolv.conf's nameservers: the resolver gets every
//	                  name, and asks those nameservers for what is not the cluster's. Its own queries carry a mark.
//	                  The kernel removes the table when its owner's socket closes.
//	resolv.conf       an edit, with a journal that undoes it at Close or at the next start.
//
// On macOS a running scutil(8) holds keys in the system's dynamic store: resolvers for the cluster's names. They end
// with the scutil, and that with this process.
//
// On Linux plan decides and changes nothing; Configurator observes the machine and carries out the decision.
package osdns

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/net/publicsuffix"
)

// Config is the complete wanted state of a Configurator. With the zero value, names resolve as they did before kubevpn.
type Config struct {
	// Listen4 and Listen6 are the loopback addresses at which the resolver answers for the whole machine, over
	// UDP and TCP. An invalid address means that it does not listen in that family.
	Listen4, Listen6 netip.AddrPort
	Links            []Link
	// DomainsOnly rejects every method by which the resolver would get queries for names outside of the links' domains.
	// Set then fails with ErrAllQueries, also if links are missing or systemd-resolved ends later.
	DomainsOnly bool
}

// ErrAllQueries means that the only methods left would send all DNS queries of this machine to the resolver.
var ErrAllQueries = errors.New("all DNS queries of this machine would go to the resolver")

// Link is a tunnel's link. It must be up, with its addresses and routes.
type Link struct {
	Name string
	// Addrs are the link's own addresses. If the kernel has nftables, it drops packets to them from other links
	// (CVE-2019-14899).
	Addrs []netip.Addr
	// Resolver is the address, routed into the link, at which the resolver answers on port 53. systemd-resolved and
	// resolv.conf name this address.
	Resolver      netip.Addr
	MatchDomains  []string // domains for which programs ask Resolver; no dots at the ends
	SearchDomains []string // suffixes for single-label names
}

// Mode is the method by which queries reach the resolver.
type Mode string

const (
	ModeNone     Mode = ""
	ModeResolved Mode = "systemd-resolved"
	ModeNFTables Mode = "nftables"
	ModeFile     Mode = "resolv.conf"
	ModeDarwin   Mode = "scutil"
)

// Applied is the result of Set.
type Applied struct {
	Mode Mode
	// Upstreams are the nameservers that answered before, in order. No address of a Config is among them.
	Upstreams []netip.AddrPort
	// Warnings are for the user.
	Warnings []string
}

func (c Config) zero() bool {
	return !c.Listen4.IsValid() && !c.Listen6.IsValid() && len(c.Links) == 0
}

func (c Config) validate() error {
	if a := c.Listen4; a.IsValid() && (!a.Addr().Is4() || !a.Addr().IsLoopback() || a.Port() == 0) {
		return fmt.Errorf("resolver address %s is not a port on IPv4 loopback", a)
	}
	if a := c.Listen6; a.IsValid() &&
		(!a.Addr().Is6() || a.Addr().Is4In6() || !a.Addr().IsLoopback() || a.Port() == 0) {
		return fmt.Errorf("resolver address %s is not a port on IPv6 loopback", a)
	}
	for _, l := range c.Links {
		if l.Name == "" {
			return fmt.Errorf("a link has no name")
		}
		for _, d := range slices.Concat(l.MatchDomains, l.SearchDomains) {
			if err := CheckDomain(d); err != nil {
				return fmt.Errorf("link %s: %w", l.Name, err)
			}
		}
	}
	return nil
}

// CheckDomain returns an error if d must not be a match or search domain: if it is not a DNS name in lower case without
// dots at its ends, or if it is a public suffix (com, dev, co.uk) or contains only public suffixes (kawasaki.jp). A
// namespace may have the name of a public suffix, and must not capture the names below it.
func CheckDomain(d string) error {
	if d == "" || len(d) > 253 {
		return fmt.Errorf("domain %q has %d bytes, not 1 to 253", d, len(d))
	}
	for label := range strings.SplitSeq(d, ".") {
		if label == "" || len(label) > 63 {
			return fmt.Errorf("domain %q has a label of %d bytes, not 1 to 63", d, len(label))
		}
		for i, c := range []byte(label) {
			inner := i > 0 && i < len(label)-1
			if !('a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '_' || c == '-' && inner) {
				return fmt.Errorf("domain %q has %q in the wrong place", d, c)
			}
		}
	}
	for _, name := range []string{d, "x." + d} { // some suffixes only have a rule for everything below them
		if suffix, icann := publicsuffix.PublicSuffix(name); icann && suffix == name {
			return fmt.Errorf("domain %q is a public suffix: names below it belong to others", d)
		}
	}
	return nil
}

// PublicDomain reports whether names below domain may be the Internet's. The domain is in lower case, without dots at
// its ends.
func PublicDomain(domain string) bool {
	top := domain[strings.LastIndexByte(domain, '.')+1:]
	// Some top-level domains only have a rule for everything below them.
	return slices.ContainsFunc([]string{domain, top, "x." + top}, func(d string) bool {
		_, icann := publicsuffix.PublicSuffix(d)
		return icann
	})
}
