package api

import "net/netip"

// NetworkState is everything that kubevpn wants of this machine's network, whole: the helper applies the
// difference to what it applied before. The zero value removes everything.
type NetworkState struct {
	Links    []Link    `json:"links,omitempty"`
	Resolver *Resolver `json:"resolver,omitempty"` // nil: name resolution is as before kubevpn
}

// Link is one TUN device with its addresses and the routes through it. Routes are in the main table: they,
// and the addresses, go with the device.
type Link struct {
	Name   string         `json:"name"` // begins with "kubevpn"; at most 15 bytes
	MTU    int            `json:"mtu"`
	Addrs  []netip.Prefix `json:"addrs,omitempty"`  // host prefixes (/32, /128)
	Routes []netip.Prefix `json:"routes,omitempty"` // masked
	// Resolver is the address inside the tunnel at which the daemon answers DNS for this link. It is only
	// used with resolvers that take a server per link (systemd-resolved).
	Resolver netip.Addr `json:"resolver,omitzero"`
	// MatchDomains are the DNS suffixes that this link's resolver answers, without dots at their ends.
	MatchDomains []string `json:"matchDomains,omitempty"`
	// SearchDomains are the suffixes by which a resolver with a server per link expands single-label names.
	SearchDomains []string `json:"searchDomains,omitempty"`
}

// Resolver says where the daemon answers DNS for the whole machine, on loopback. Each address is served over
// UDP and TCP. An invalid AddrPort means that the daemon does not listen in that family.
type Resolver struct {
	Listen4 netip.AddrPort `json:"listen4,omitzero"`
	Listen6 netip.AddrPort `json:"listen6,omitzero"`
}

// ResolverMode is the way in which the resolver was put in the path of the machine's DNS queries.
type ResolverMode string

const (
	ResolverNone     ResolverMode = ""
	ResolverResolved ResolverMode = "systemd-resolved" // per-link servers over D-Bus; they go with the link
	ResolverNFTables ResolverMode = "nftables"         // an owner table redirects port 53 of resolv.conf's nameservers
	ResolverFile     ResolverMode = "resolv.conf"      // a journaled edit
)

// NetworkApplied is what the helper did with a NetworkState.
type NetworkApplied struct {
	ResolverMode ResolverMode `json:"resolverMode,omitempty"`
	// Upstreams are the nameservers that answered before kubevpn, in order: where other names go on going.
	Upstreams []netip.AddrPort `json:"upstreams,omitempty"`
	// Warnings are facts that the user should know: "nf_tables is missing: editing /etc/resolv.conf".
	Warnings []string `json:"warnings,omitempty"`
}
