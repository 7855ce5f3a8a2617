package manager

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
	"syscall"

	"golang.org/x/sys/unix"
)

// ports chooses the source ports of the manager's connections to pods, in turn. The kernel would choose at random, and
// passes over those whose last connection to the same pod is in TIME_WAIT. That is every port that was used within the
// last minute, as it is the manager who closes first when the application has; so the ports to a busy pod would run
// out after 28 000 connections, and looking for a free one takes the kernel longer and longer before that: measured
// here, after 14 000 connections connect(2) alone took four times as long as all else together.
//
// A port that the caller names is taken again at once when both ends use timestamps, as RFC 6191 allows: the pod can
// tell the new connection from the old one.
type ports struct {
	next        atomic.Uint32
	first, last uint16 // of the range; 0: the kernel chooses
}

// portTries is how many ports are tried before the kernel is asked.
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
	p.next.Store(rand.Uint32()) // not where an earlier process of this pod began
	return p
}

// connect is d.DialContext to dst, from the next port that is free for it.
func (p *ports) connect(ctx context.Context, d net.Dialer, dst netip.AddrPort) (net.Conn, error) {
	d.Control = reuseAddress
	if p.first != 0 {
		size := uint32(p.last-p.first) + 1
		for range portTries {
			d.LocalAddr = &net.TCPAddr{Port: int(p.first) + int(p.next.Add(1)%size)}
			conn, err := d.DialContext(ctx, "tcp", dst.String())
			// In use by a listener, by a connection to the same address, or by one that did not say reuseAddress.
			if !errors.Is(err, unix.EADDRINUSE) && !errors.Is(err, unix.EADDRNOTAVAIL) {
				return conn, err
			}
		}
	}
	d.LocalAddr = nil
	return d.DialContext(ctx, "tcp", dst.String())
}

// reuseAddress lets a port be bound that has connections to other addresses.
func reuseAddress(_, _ string, c syscall.RawConn) error {
	var err error
	if e := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}); e != nil {
		return e
	}
	return os.NewSyscallError("setsockopt", err)
}
