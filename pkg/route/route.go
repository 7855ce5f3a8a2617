// Package route puts addresses and routes on the links that kubevpn made, and takes them away again. It also
// finds the local networks that a set of routes would cut off, before anything is changed.
//
//	session ── Clashes ────▶ what may be routed       (unprivileged; reads only)
//	helper  ── Router.Set ─▶ link, addresses, routes  (root)
//
// Everything that Set makes hangs on the link: routes are in the main table and go through the device, so the
// kernel removes them, and the addresses, when the owner of a TUN dies, however it dies. There is no ip rule,
// no private table and no sysctl outside the link's own, because those would outlive it.
package route

import (
	"fmt"
	"net/netip"
)

// Config is all that a Router keeps up, whole. The zero value removes everything.
type Config struct {
	Links []Link
}

// Link is the wanted state of one link, which exists already.
type Link struct {
	Name   string
	MTU    int            // bytes
	Addrs  []netip.Prefix // the addresses of the link; not masked
	Routes []netip.Prefix // what is sent into the link; masked

	// TxQueueLen is the number of packets that the link queues towards its reader; 0 leaves it as it is.
	//
	// A TUN with offload queues super-packets of up to 64 KiB, so each 100 may be 6 MB, and delay a ping by that
	// much traffic. But the kernel drops, rather than waits, when the queue is full, and a dropped SYN costs a
	// second: the queue must hold what programs send in one go while the reader is not scheduled. Measured on
	// two busy cores, of bursts of 50, 100, 200 and 400 datagrams a queue of 32 lost 16, 40, 61 and 73 percent,
	// of 128 none, none, 20 and 48, of 500 none. Where the reader ends TCP itself (gVisor), its windows bound
	// what TCP queues, and a long queue does no harm; where it passes packets on, a short one keeps the delay
	// down.
	TxQueueLen int
}

// Applied is what Set has to say about a configuration that it applied.
type Applied struct {
	// Warnings are facts that a user should know: a family that the machine does not have, another program's
	// policy routing that is asked before our routes.
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

// set is the distinct prefixes of a list, in its order.
func set(list []netip.Prefix) []netip.Prefix {
	seen := make(map[netip.Prefix]bool, len(list))
	out := make([]netip.Prefix, 0, len(list))
	for _, p := range list {
		if !seen[p] {
			seen[p] = true
			out = append(out, p)
		}
	}
	return out
}

// without returns the prefixes of a that b has not, in a's order.
func without(a, b []netip.Prefix) []netip.Prefix {
	drop := make(map[netip.Prefix]bool, len(b))
	for _, p := range b {
		drop[p] = true
	}
	var out []netip.Prefix
	for _, p := range a {
		if !drop[p] {
			out = append(out, p)
		}
	}
	return out
}

// probeAddr is an address inside p that is neither the link's own nor loopback's, to ask the kernel where it would go.
func probeAddr(p netip.Prefix, own []netip.Prefix) (netip.Addr, bool) {
	mine := make(map[netip.Addr]bool, len(own))
	for _, o := range own {
		mine[o.Addr()] = true
	}
	a := p.Addr()
	if !p.IsSingleIP() {
		a = a.Next() // a network's first address is its own name, or IPv6's any-router address
	}
	for ; a.IsValid() && p.Contains(a); a = a.Next() {
		if !mine[a] && !a.IsLoopback() {
			return a, true
		}
	}
	return netip.Addr{}, false
}
