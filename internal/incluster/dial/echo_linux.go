package dial

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
)

const (
	echoRequest4, echoReply4 = 8, 0
	echoRequest6, echoReply6 = 128, 129
	echoHeader               = 8 // type, code, checksum, identifier, sequence number
)

// pingSocket is an unprivileged ICMP socket (SOCK_DGRAM, IPPROTO_ICMP). The sysctl net.ipv4.ping_group_range must
// include the pod's group; it is a safe sysctl, which a pod may set for itself. The kernel delivers only replies with
// the socket's own identifier, and computes the checksum.
type pingSocket struct {
	conn           *net.UDPConn // not really UDP, but net has no other type for datagrams
	dst            netip.Addr
	request, reply byte
}

// openPinger opens a socket for pings to dst. It returns EACCES if ICMP sockets are not permitted.
func openPinger(dst netip.Addr) (datagrams, error) {
	p := &pingSocket{dst: dst, request: echoRequest4, reply: echoReply4}
	family, protocol, level, option := unix.AF_INET, unix.IPPROTO_ICMP, unix.SOL_IP, unix.IP_RECVERR
	var to unix.Sockaddr = &unix.SockaddrInet4{Addr: as4(dst)}
	if dst.Is6() {
		p.request, p.reply = echoRequest6, echoReply6
		family, protocol, level, option = unix.AF_INET6, unix.IPPROTO_ICMPV6, unix.SOL_IPV6, unix.IPV6_RECVERR
		to = &unix.SockaddrInet6{Addr: dst.As16()}
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, fmt.Errorf("opening an ICMP socket: %w", err)
	}
	file := os.NewFile(uintptr(fd), "icmp")
	defer file.Close()
	// Without this option only "hard" errors (port unreachable) come back, and not that a host is unreachable.
	if err := unix.SetsockoptInt(fd, level, option, 1); err != nil {
		return nil, fmt.Errorf("asking for ICMP errors: %w", err)
	}
	if err := unix.Connect(fd, to); err != nil {
		return nil, fmt.Errorf("connecting an ICMP socket to %v: %w", dst, err)
	}
	conn, err := net.FileConn(file) // with a descriptor of its own
	if err != nil {
		return nil, fmt.Errorf("adopting an ICMP socket: %w", err)
	}
	udp, ok := conn.(*net.UDPConn)
	if !ok {
		conn.Close()
		return nil, fmt.Errorf("adopting an ICMP socket: it is a %T", conn)
	}
	p.conn = udp
	return p, nil
}

func as4(addr netip.Addr) [4]byte {
	if addr.Is4() {
		return addr.As4()
	}
	return [4]byte{}
}

// MayPing reports whether ICMP sockets are permitted.
func MayPing() bool {
	fd, err := datagramSocket(unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6)
	if err != nil {
		return false
	}
	unix.Close(fd)
	return true
}

// datagramSocket opens a socket of IPv4, or of IPv6 if the kernel has no IPv4.
func datagramSocket(protocol4, protocol6 int) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, protocol4)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, protocol6)
	}
	return fd, err
}

func (p *pingSocket) send(pings []byte, size int) error {
	for ping := range each(pings, size) {
		if err := p.sendOne(ping); err != nil && !isLoss(err) {
			return err
		}
	}
	return nil
}

func (p *pingSocket) sendOne(ping []byte) error {
	if len(ping) < sequence || len(ping) > maxEchoLen {
		return nil // not a ping
	}
	message := make([]byte, echoHeader-sequence+len(ping))
	message[0] = p.request
	copy(message[echoHeader-sequence:], ping)
	_, err := p.conn.Write(message)
	return err
}

func (p *pingSocket) receive(b *buffers, use func(p []byte, size int) error) error {
	var from unix.Sockaddr
	read := func(fd uintptr, b []byte) (n int, err error) {
		for {
			if n, from, err = unix.Recvfrom(int(fd), b, 0); !errors.Is(err, unix.EINTR) {
				return n, err
			}
		}
	}
	return readLoop(p.conn, b, read, func(message []byte, n int) error {
		// The kernel filters by identifier, not by who answers.
		if n < echoHeader || n == len(message) || message[0] != p.reply || message[1] != 0 || !isFrom(from, p.dst) {
			return nil
		}
		return use(message[echoHeader-sequence:n], n-echoHeader+sequence)
	})
}

func isFrom(from unix.Sockaddr, addr netip.Addr) bool {
	switch from := from.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrFrom4(from.Addr) == addr
	case *unix.SockaddrInet6:
		return netip.AddrFrom16(from.Addr) == addr
	}
	return false
}

func (p *pingSocket) close() { p.conn.Close() }

// nextHopTimeout limits endsAtNextHop where the node sends no ICMP errors. A busy node needs a part of it.
const nextHopTimeout = 2 * time.Second

// endsAtNextHop reports whether addr is an address of the next hop, which is the node. It sends a ping that lives for
// one hop: a node that would have to forward it reports that it has expired. Its own address answers, or with
// kube-proxy's IPVS mode rejects it (KUBE-IPVS-FILTER).
func endsAtNextHop(addr netip.Addr) bool {
	d, err := openPinger(addr)
	if err != nil {
		return false
	}
	defer d.close()
	p, ok := d.(*pingSocket)
	if !ok || p.conn.SetReadDeadline(time.Now().Add(nextHopTimeout)) != nil {
		return false
	}
	if addr.Is6() {
		err = ipv6.NewConn(p.conn).SetHopLimit(1)
	} else {
		err = ipv4.NewConn(p.conn).SetTTL(1)
	}
	if err = errors.Join(err, p.sendOne(make([]byte, sequence))); err != nil {
		return false
	}
	answered := errors.New("the next hop has answered")
	err = p.receive(new(buffers), func([]byte, int) error { return answered })
	return errors.Is(err, answered) || errors.Is(err, unix.ECONNREFUSED)
}
