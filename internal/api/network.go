package api

import "net/netip"

// NetworkState is the complete network configuration of kubevpn on this machine. The helper applies the difference to
// the previous state. The zero value removes everything.
type NetworkState struct {
	Links    []Link    `json:"links,omitempty"`
	Resolver *Resolver `json:"resolver,omitempty"` // nil: name resolution is as before kubevpn
}

// Link is one TUN device with its addresses and the routes through it, which are in the main table. The kernel removes
// addresses and routes with the device.
type Link struct {
	Name   string         `json:"name"` // begins with "kubevpn"; at most 15 bytes
	MTU    int            `json:"mtu"`
	Addrs  []netip.Prefix `json:"addrs,omitempty"`  // host prefixes (/32, /128)
	Routes []netip.Prefix `json:"routes,omitempty"` // masked
	// Named are the networks outside of private address space that the user allowed, with --extra-cidr or by consent.
	// The helper accepts only routes into these and into private address space.
	Named []netip.Prefix `json:"named,omitempty"`
	// Resolver is the address inside the tunnel at which the daemon answers DNS for this link. It is only
	// used with resolvers that take a server per link (systemd-resolved).
	Resolver netip.Addr `json:"resolver,omitzero"`
	// MatchDomains are the DNS suffixes that this link's resolver answers, without dots at their ends.
	MatchDomains []string `json:"matchDomains,omitempty"`
	// SearchDomains are the suffixes by which a resolver with a server per link expands single-label names.
	SearchDomains []string `json:"searchDomains,omitempty"`
	// Names, unless nil, replace Resolver and SearchDomains for a program with a network of its own.
	Names *PodNames `json:"names,omitempty"`
}

// Resolver contains the loopback addresses at which the daemon answers the DNS queries of this machine, over UDP and
// TCP. An invalid AddrPort means that the daemon does not listen in that family.
type Resolver struct {
	Listen4 netip.AddrPort `json:"listen4,omitzero"`
	Listen6 netip.AddrPort `json:"listen6,omitzero"`
}

// ResolverMode is the method that directs the DNS queries of this machine to the resolver.
type ResolverMode string

const (
	ResolverNone     ResolverMode = ""
	ResolverResolved ResolverMode = "systemd-resolved" // per-link servers over D-Bus; they go with the link
	ResolverNFTables ResolverMode = "nftables"         // an owner table redirects port 53 of resolv.conf's nameservers
	ResolverFile     ResolverMode = "resolv.conf"      // a journaled edit
	ResolverProxy    ResolverMode = "the proxy"        // of a connection that serves a proxy only
)

// NetworkApplied is the result of applying a NetworkState.
type NetworkApplied struct {
	ResolverMode ResolverMode `json:"resolverMode,omitempty"`
	// Upstreams are the nameservers of the machine without kubevpn, in order. They resolve all other names.
	Upstreams []netip.AddrPort `json:"upstreams,omitempty"`
	// Warnings are facts that the user should know: "nf_tables is missing: editing /etc/resolv.conf".
	Warnings []string `json:"warnings,omitempty"`
}
