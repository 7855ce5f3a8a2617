// Package redirect brings connections that are for an application to another port of the same network namespace, and lets
// whoever serves that port go on to the application with the client's address.
//
// What it asks of the kernel is in a table that ends with the process (kubevpn/pkg/ownertable): however the process dies, the
// application has its ports back at once. Kernels before Linux 5.12 have no such table; there it is rules of iptables, which
// end by the clock unless they are renewed, and earlier if somebody else calls Remove.
//
//	client ── eth0 ─┬─ new, for a port of the map ──▶ local port: who redirects ──┐ from the client's address (DialFrom)
//	                └─ everything else ─────────────▶ application ◀──────── lo ◀──┘
//
// Redirected are new TCP connections and UDP flows to any address of the namespace, which keep that address; not those that
// begin within it, over loopback. It is Linux only.
package redirect

import (
	"fmt"
	"log/slog"
	"slices"
)

// The protocols of a Port.
const (
	TCP = "tcp"
	UDP = "udp"
)

// Port is where an application listens.
type Port struct {
	Protocol string // TCP or UDP
	Port     uint16
}

// String is "tcp/80".
func (p Port) String() string { return fmt.Sprintf("%s/%d", p.Protocol, p.Port) }

// Backend is how redirects are made.
type Backend string

// The backends. The zero Backend is NFTables, or where the kernel cannot, IPTables.
const (
	NFTables Backend = "nftables"
	IPTables Backend = "iptables"
)

// Config is what New needs.
type Config struct {
	// Name is the nftables table's, by which a person finds it. Nobody else in the network namespace may have it. With IPTables
	// it is in the name of a chain.
	Name string
	// Backend is how redirects are made.
	Backend Backend
	// Programs is the directory of iptables' programs, xtables-nft-multi and xtables-legacy-multi. Empty: there are none.
	Programs string
	// Mark is on the sockets that DialFrom opens (SO_MARK), and as conntrack's mark on UDP flows that are redirected. Mark+1 is
	// for the connections that keep the client's address: on their sockets and packets, as conntrack's mark, and as the number
	// of a routing table. Neither may have another meaning in the network namespace.
	Mark uint32
	// Logger is told what is done. nil: nobody is.
	Logger *slog.Logger
}

// validate checks what Set is given. Who answers a datagram has no other way than the port to know where it was for.
func validate(ports map[Port]uint16) error {
	var locals []uint16
	for p, local := range ports {
		switch {
		case p.Protocol != TCP && p.Protocol != UDP:
			return fmt.Errorf("redirecting %s: only tcp and udp can be", p)
		case p.Port == 0 || local == 0:
			return fmt.Errorf("redirecting %s to port %d: a port is zero", p, local)
		case p.Port == local:
			return fmt.Errorf("redirecting %s to itself", p)
		case p.Protocol == UDP && slices.Contains(locals, local):
			return fmt.Errorf("redirecting %s to port %d: so is another port", p, local)
		case p.Protocol == UDP:
			locals = append(locals, local)
		}
	}
	return nil
}
