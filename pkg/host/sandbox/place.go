package sandbox

import (
	"context"
	"net"
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
}
