package dial

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/wire/nonblock"
)

// udpSocket is a connected UDP socket that sends and receives several datagrams in one system call (UDP_SEGMENT,
// UDP_GRO). They then cross the kernel of this node as one packet.
type udpSocket struct {
	*net.UDPConn
	raw     syscall.RawConn
	fastest int  // datagrams of a millisecond that fill half of the receive buffer
	plain   bool // the path does not take several datagrams at once; used by send alone

	// The send in progress, and the function that RawConn calls, which is allocated once.
	message nonblock.Message
	p       []byte
	size    int
	err     error
	try     func(fd uintptr) bool
}

// canJoin reports whether the kernel has UDP_SEGMENT and UDP_GRO (Linux 5.0). It asks for the option's value because
// gVisor accepts options that it does not have.
var canJoin = sync.OnceValue(func() bool {
	fd, err := datagramSocket(0, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	if unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_GRO, 1) != nil {
		return false
	}
	on, err := unix.GetsockoptInt(fd, unix.SOL_UDP, unix.UDP_GRO)
	return err == nil && on == 1
})

// newUDPSocket returns a udpSocket that owns c.
func newUDPSocket(c *net.UDPConn) (*udpSocket, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("using a UDP socket: %w", err)
	}
	s := &udpSocket{UDPConn: c, raw: raw, plain: !canJoin()}
	s.try = func(fd uintptr) bool {
		s.err = s.message.Send(fd, s.p, s.size)
		return s.err != unix.EAGAIN
	}
	err = raw.Control(func(fd uintptr) {
		// The kernel grants as much as it permits (net.core.rmem_max). A smaller buffer works as well.
		_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, socketBuffer)
		if granted, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF); err == nil {
			s.fastest = granted / datagramMemory / 2
		}
		if !s.plain {
			_ = unix.SetsockoptInt(int(fd), unix.SOL_UDP, unix.UDP_GRO, 1)
		}
	})
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("using a UDP socket: %w", err)
	}
	return s, nil
}

// send sends the datagrams in p, each of which has size bytes, except that the last may be shorter.
func (s *udpSocket) send(p []byte, size int) error {
	if size < len(p) && !s.plain {
		err := s.sendOnce(p, size)
		if !isUnjoinable(err) {
			return err
		}
		s.plain = true // they are longer than the MTU, or the interface does not compute checksums
	}
	for one := range each(p, size) {
		if err := s.sendOnce(one, len(one)); err != nil && !isLoss(err) {
			return err
		}
	}
	return nil
}

func isUnjoinable(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EIO) || errors.Is(err, unix.EMSGSIZE) ||
		errors.Is(err, unix.EOPNOTSUPP)
}

// sendOnce sends all of p in one system call. It waits while the socket is full.
func (s *udpSocket) sendOnce(p []byte, size int) error {
	s.p, s.size = p, size
	err := s.raw.Write(s.try)
	s.p = nil
	if err != nil {
		return err
	}
	return s.err
}

// receive calls use with the datagrams of each read, in the form of send, until an error.
func (s *udpSocket) receive(b *buffers, use func(p []byte, size int) error) error {
	var message nonblock.Message
	g := gatherer{most: s.fastest}
	size := 0
	read := func(fd uintptr, p []byte) (n int, err error) {
		n, size, err = message.Receive(fd, p)
		switch {
		case err == unix.EMSGSIZE: // a datagram that is longer than p is lost
			return lost, nil
		case err == unix.EAGAIN && g.pause() > 0:
			return empty, nil
		}
		return n, err
	}
	return readLoop(s, b, read, func(data []byte, n int) error {
		switch n {
		case lost:
			return nil
		case empty:
			time.Sleep(g.pause())
			return nil
		}
		g.count()
		return use(data[:n], size)
	})
}

// Results of a read that returns no datagram.
const (
	lost  = -1
	empty = -2
)

const (
	gatherTime = time.Millisecond
	gatherFrom = 8
	// datagramMemory is about what the kernel counts for a datagram of 1200 bytes in a socket's buffer.
	datagramMemory = 2304
)

// gatherer makes the reader of a fast flow wake up once a millisecond instead of for each datagram. A flow is fast from
// the eighth read of a millisecond on. The datagrams that arrive meanwhile go to the laptop in one write. The write
// crosses the API server and perhaps the kubelet and the container runtime, and costs them as much for one datagram as
// for fifty.
type gatherer struct {
	most  int // reads of a millisecond beyond which the socket's buffer might overflow
	began time.Time
	reads int // since began
}

// count notes a read.
func (g *gatherer) count() {
	if now := time.Now(); now.Sub(g.began) >= gatherTime {
		g.began, g.reads = now, 0
	}
	g.reads++
}

// pause returns how long the reader may leave the socket alone.
func (g *gatherer) pause() time.Duration {
	if g.reads < gatherFrom || g.reads > g.most {
		return 0
	}
	return gatherTime - time.Since(g.began)
}
