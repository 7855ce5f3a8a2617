// Package route sets addresses and routes on the links that kubevpn created, and removes them again. Before anything
// changes, it also finds the local networks that overlap a set of routes.
//
//	connection ── Overlaps ───▶ local networks that overlap  (unprivileged; reads only)
//	helper, gateway ── Router.Set ─▶ link, addresses, routes  (root)
//	                    └─────▶ guard: the kernel forwards no neighbour's packets into the link  (root)
//
// Everything that Set creates belongs to the link: its routes are in the main table and lead into the device. So the
// kernel removes the routes and the addresses when the owner of the TUN device ends, in whatever way. Set creates no
// ip rule, no routing table and no sysctl outside of the link's own, because those would outlive the owner. The guard
// is an nftables table that the kernel removes with its owner.
package route

import (
	"fmt"
	"net/netip"
	"slices"
)

// Config is the complete wanted state of a Router. The zero value removes everything.
type Config struct {
	Links []Link
	// Forwards means that this machine is to forward packets into the links: there is no guard.
	Forwards bool
}

// Link is the wanted state of one link. The link must exist.
type Link struct {
	Name   string
	MTU    int            // bytes
	Addrs  []netip.Prefix // the addresses of the link; not masked
	Routes []netip.Prefix // routed into the link; masked

	// TxQueueLen is the number of packets that the link queues towards its reader; 0 leaves it as it is.
	//
	// A TUN device with offload queues super-packets of up to 64 KiB. 100 of them can be 6 MB, and delay a ping by
	// that much traffic. But the kernel drops packets when the queue is full, and a dropped SYN costs a second: the
	// queue must hold a burst that programs send while the reader is not scheduled. Measured on two busy cores with
	// bursts of 50, 100, 200 and 400 datagrams, a queue of 32 lost 16, 40, 61 and 73 percent, one of 128 lost none,
	// none, 20 and 48, and one of 500 lost none. If the reader terminates TCP (gVisor), its windows limit what TCP
	// queues, so a long queue is harmless. If the reader forwards packets, a short queue keeps the delay low.
	TxQueueLen int
}

// Applied is the result of Set.
type Applied struct {
	// Warnings are facts that a user should know: an address family that the machine lacks, or another program's
	// policy routing that precedes these routes.
	Warnings []string
}

func (c Config) validate() error {
	seen := make(map[string]bool, len(c.Links))
	for _, l := range c.Links {
		if l.Name == "" {
			return fmt.Errorf("a link has no name")
		}
		if seen[l.Name] {
			return fmt.Errorf("link %s is named twice", l.Name)
		}
		seen[l.Name] = true
		if l.MTU <= 0 {
			return fmt.Errorf("link %s: MTU %d", l.Name, l.MTU)
		}
		for _, p := range l.Addrs {
			if !p.IsValid() || p.Addr().Is4In6() {
				return fmt.Errorf("link %s: address %v", l.Name, p)
			}
		}
		for _, p := range l.Routes {
			if !p.IsValid() || p.Addr().Is4In6() || p.Masked() != p {
				return fmt.Errorf("link %s: route %v is not a masked prefix", l.Name, p)
			}
		}
	}
	return nil
}

// distinct returns the distinct prefixes of a list, in their order.
func distinct(list []netip.Prefix) []netip.Prefix {
	seen := make(map[netip.Prefix]bool, len(list))
	return slices.DeleteFunc(slices.Clone(list), func(p netip.Prefix) bool {
		again := seen[p]
		seen[p] = true
		return again
	})
}

// without returns the prefixes of a that are not in b, in their order.
func without(a, b []netip.Prefix) []netip.Prefix {
	drop := make(map[netip.Prefix]bool, len(b))
	for _, p := range b {
		drop[p] = true
	}
	return slices.DeleteFunc(slices.Clone(a), func(p netip.Prefix) bool { return drop[p] })
}

// lacking names the addresses and routes of l that are not among those that exist.
func lacking(l Link, addrs, routes []netip.Prefix) (out []string) {
	for _, p := range without(l.Addrs, addrs) {
		out = append(out, "address "+p.String())
	}
	for _, p := range without(l.Routes, routes) {
		out = append(out, "route "+p.String())
	}
	return out
}

// probeAddr returns an address inside p that is neither the link's own nor a loopback address. The Router asks the
// kernel where packets to it go.
func probeAddr(p netip.Prefix, own []netip.Prefix) (netip.Addr, bool) {
	a := p.Addr()
	if !p.IsSingleIP() {
		a = a.Next() // a network's first address names the network, or is IPv6's any-router address
	}
	for ; a.IsValid() && p.Contains(a); a = a.Next() {
		if !a.IsLoopback() && !slices.ContainsFunc(own, func(o netip.Prefix) bool { return o.Addr() == a }) {
			return a, true
		}
	}
	return netip.Addr{}, false
}
