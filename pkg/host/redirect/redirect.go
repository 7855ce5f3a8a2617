//go:build linux

// Package redirect brings connections for an application to another port of the same network namespace, and lets the
// program that serves that port connect to the application from the client's address.
//
//	client ─── eth0 ─┬─ new, for a port of the map ──▶ local port: the redirector ──┐ from the client's address (Dial)
//	neighbor ─── lo ─┴─ everything else ─────────────▶ application ◀───────── lo ◀──┘
//
// It redirects new TCP connections and UDP flows to any address of the namespace, and they keep that address: those
// from outside and, with Config.Within, those that begin within the namespace, but for Dial's. It is Linux only.
//
// The rules are in a netfilter.Table, which the kernel removes with the process: however the process dies, the
// application has its ports back at once. It needs Linux 5.12 and CAP_NET_ADMIN.
package redirect

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
)

// The protocols of a Port.
const (
	TCP = "tcp"
	UDP = "udp"
)

// Port is a port on which an application listens.
type Port struct {
	Protocol string // TCP or UDP
	Port     uint16
}

// String is "tcp/80".
func (p Port) String() string { return fmt.Sprintf("%s/%d", p.Protocol, p.Port) }

// Config configures Redirects.
type Config struct {
	// Name is the name of the nftables table. It must be unique in the network namespace.
	Name string
	// Mark marks the sockets that Dial opens (SO_MARK) and, in conntrack, redirected UDP flows. Mark+1 marks the
	// sockets, packets and conntrack entries of connections that keep the client's address, and is the number of a
	// routing table. Neither may have another meaning in the network namespace.
	Mark   uint32
	Checks Checks
	// Within also redirects what begins within the namespace, over loopback, unless the process has one of these users.
	Within bool
	Exempt []uint32
	Logger *slog.Logger // nil: logs nothing
}

// Checks are connections that ask only whether the application listens, and close without a byte. Those that could be
// such, from these networks to these TCP ports, are redirected only while a socket listens where they go.
type Checks struct {
	From  []netip.Prefix
	Ports []uint16
}

// validate checks the argument of Set. Only the local port of a datagram tells which port it was for.
func validate(ports map[Port]uint16) error {
	var locals []uint16
	for p, local := range ports {
		switch {
		case p.Protocol != TCP && p.Protocol != UDP:
			return fmt.Errorf("cannot redirect %s: only tcp and udp are possible", p)
		case p.Port == 0 || local == 0:
			return fmt.Errorf("cannot redirect %s to port %d: a port is zero", p, local)
		case p.Port == local:
			return fmt.Errorf("cannot redirect %s to itself", p)
		case p.Protocol == UDP && slices.Contains(locals, local):
			return fmt.Errorf("cannot redirect %s to port %d: another port is redirected to it", p, local)
		case p.Protocol == UDP:
			locals = append(locals, local)
		}
	}
	return nil
}
