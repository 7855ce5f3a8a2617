// Package osdns puts a resolver of ours in the path of this machine's DNS queries, and takes it out again.
// It runs as root, in the helper; the resolver itself (pkg/dns) does not.
//
// On Linux the first of these that fits is used:
//
//	systemd-resolved  servers and routing domains of the tunnel's link, over D-Bus: only the cluster's names
//	                  come to us. They go with the link.
//	nftables          an "owner" table that redirects port 53 of resolv.conf's nameservers to us: every name
//	                  comes to us, and we ask those nameservers for what is not the cluster's, with packets
//	                  that carry a mark. The kernel removes the table when its owner's socket closes.
//	resolv.conf       an edit, with a journal that undoes it at Close or at the next start.
//
// plan decides from what was observed, and does nothing; Configurator observes and acts.
package osdns

import (
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/net/publicsuffix"
)

// Config is all that a Configurator keeps up, whole. The zero value means that name resolution is as it was
// before kubevpn.
type Config struct {
	// Listen4 and Listen6 are the loopback addresses at which the resolver answers for the whole machine, over
	// UDP and TCP. An invalid one means that it does not listen in that family.
	Listen4, Listen6 netip.AddrPort
	Links            []Link
}

// Link is a tunnel's link, which is up and has its addresses and routes.
type Link struct {
	Name string
	// Addrs are the link's own addresses. Packets for them from other links are dropped (CVE-2019-14899),
	// where nftables is to be had.
	Addrs []netip.Addr
	// Resolver is the address, routed into the link, at which the resolver answers on port 53. It is what
	// systemd-resolved, or resolv.conf, gets to know.
	Resolver      netip.Addr
	MatchDomains  []string // what Resolver is asked for; no dots at the ends
	SearchDomains []string // what single-label names are completed with
}

// Mode is the way in which queries reach the resolver.
type Mode string

const (
	ModeNone     Mode = ""
	ModeResolved Mode = "systemd-resolved"
	ModeNFTables Mode = "nftables"
	ModeFile     Mode = "resolv.conf"
	ModeDarwin   Mode = "/etc/resolver"
)

// Applied is what became of a Config.
type Applied struct {
	Mode Mode
	// Upstreams are the nameservers that answered before, in order. They are never an address of a Config.
	Upstreams []netip.AddrPort
	// Warnings are facts that a user should know.
	Warnings []string
}

func (c Config) zero() bool {
	return !c.Listen4.IsValid() && !c.Listen6.IsValid() && len(c.Links) == 0
}

func (c Config) validate() error {
	if a := c.Listen4; a.IsValid() && (!a.Addr().Is4() || !a.Addr().IsLoopback() || a.Port() == 0) {
		return fmt.Errorf("resolver address %s is not a port on IPv4 loopback", a)
	}
	if a := c.Listen6; a.IsValid() && (!a.Addr().Is6() || a.Addr().Is4In6() || !a.Addr().IsLoopback() || a.Port() == 0) {
		return fmt.Errorf("resolver address %s is not a port on IPv6 loopback", a)
	}
	for _, l := range c.Links {
		if l.Name == "" {
			return fmt.Errorf("a link has no name")
		}
		for _, d := range append(append([]string(nil), l.MatchDomains...), l.SearchDomains...) {
			if err := CheckDomain(d); err != nil {
				return fmt.Errorf("link %s: %w", l.Name, err)
			}
		}
	}
	return nil
}

// CheckDomain says why d may not be a match or search domain: it is not a DNS name in lower case without
// dots at its ends, or it is a name under which the public registers (com, dev, co.uk), whose owner we must
// not become because a namespace is called like it.
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
	if suffix, icann := publicsuffix.PublicSuffix(d); icann && suffix == d {
		return fmt.Errorf("domain %q is a public suffix: names below it belong to others", d)
	}
	return nil
}
