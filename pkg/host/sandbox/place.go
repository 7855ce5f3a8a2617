package sandbox

import (
	"context"
	"net"
	"net/netip"
	"os"
)

// Place is a network namespace of another process with a TUN device: a *Process, or the *Remote of a container. Its
// methods are safe for concurrent use.
type Place interface {
	// TUN returns the device, which the Place owns. Its Name is that of the interface.
	TUN() *os.File
	// SetNetwork sets the device's addresses, routes everything to it, and sets the nameservers. It may be called
	// again.
	SetNetwork(ctx context.Context, n Network) error
	// Dial connects from inside. Its conns are sockets.
	Dial(ctx context.Context, network, address string) (net.Conn, error)
	// Localhost makes TCP connections from inside to these ports of 127.0.0.1 and ::1 arrive at the listener that it
	// returns, unless a program inside listens on the port. The local address of such a conn is what the program
	// dialed. Each call replaces the ports, and returns another listener of the same socket.
	Localhost(ctx context.Context, ports []netip.AddrPort) (net.Listener, error)
}
