package dial

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/unixsocket"
)

// ports chooses the source ports of the manager's connections to pods, in turn. The kernel would choose at random and
// skip ports whose last connection to the same pod is in TIME_WAIT. These are all ports of the last minute if the
// laptop's program closes its connections first, because then the manager closes first, too. So the ports to a busy pod
// would run out after 28 000 connections, and the search for a free one becomes slow before that: after 14 000
// connections, connect(2) alone took four times as long as everything else together.
//
// The kernel reuses a port that the caller names at once if both ends use timestamps (RFC 6191), because the pod can
// distinguish the new connection from the old one.
type ports struct {
	next        atomic.Uint32
	first, last uint16 // of the range; 0: the kernel chooses
}

// portTries is how many ports connect tries before it lets the kernel choose.
const portTries = 16

// newPorts reads the range of this pod.
func newPorts() *ports {
	p := new(ports)
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return p
	}
	if n, err := fmt.Sscan(strings.TrimSpace(string(text)), &p.first, &p.last); n != 2 || err != nil ||
		p.first > p.last {
		p.first, p.last = 0, 0
	}
	p.next.Store(rand.Uint32()) // an earlier process of this pod began elsewhere
	return p
}

// connect is d.DialContext to dst, from the next port that is free for it.
func (p *ports) connect(ctx context.Context, d net.Dialer, dst netip.AddrPort) (net.Conn, error) {
	d.Control = unixsocket.DialControl(reuseAddress)
	if p.first != 0 {
		size := uint32(p.last-p.first) + 1
		for range portTries {
			d.LocalAddr = &net.TCPAddr{Port: int(p.first) + int(p.next.Add(1)%size)}
			conn, err := d.DialContext(ctx, "tcp", dst.String())
			// A listener uses the port, or a connection to the same address, or one without reuseAddress.
			if !errors.Is(err, unix.EADDRINUSE) && !errors.Is(err, unix.EADDRNOTAVAIL) {
				return conn, err
			}
		}
	}
	d.LocalAddr = nil
	return d.DialContext(ctx, "tcp", dst.String())
}

// reuseAddress allows binding a port that has connections to other addresses.
func reuseAddress(fd int) error {
	return os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
}
