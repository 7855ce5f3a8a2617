package connection

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"kubevpn/pkg/datapath/netstack"
	"kubevpn/pkg/datapath/routable"
)

// outside dials addresses outside of the cluster, as any program of this machine does.
type outside struct{}

var _ netstack.Dialer = outside{}

// nat64 returns the addresses by which a network with IPv6 only reaches the IPv4 address in the last 4 bytes (RFC
// 6052).
func nat64() netip.Prefix { return netip.MustParsePrefix("64:ff9b::/96") }

// refuseOutside returns why an address is not outside of this machine, or "": it is special, such as a loopback or
// link-local one, where clouds have the credentials of a machine, or it belongs to an interface.
func refuseOutside(to netip.AddrPort) string {
	a := to.Addr().Unmap()
	if a.Zone() != "" {
		return "it has a zone"
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		return "this machine's addresses are unknown: " + err.Error()
	}
	within := routable.Embedded(a)
	if nat64().Contains(a) {
		a = within[0]
	}
	for _, a := range []netip.Addr{a, within[0], within[1]} {
		if !a.IsValid() {
			continue
		}
		if why := routable.Refuse(netip.PrefixFrom(a, a.BitLen())); why != "" {
			return why
		}
		is := func(o net.Addr) bool {
			p, err := netip.ParsePrefix(o.String())
			return err == nil && p.Addr().Unmap() == a
		}
		if slices.ContainsFunc(own, is) {
			return "it is this machine's own"
		}
	}
	return ""
}

// DialOutside connects to an address outside of the cluster, for a program that reaches the cluster through a proxy. It
// rejects addresses of the host itself, as a device does: the program means its namespace, not this machine.
func DialOutside(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
	if refuseOutside(to) != "" {
		return nil, &net.OpError{Op: "dial", Net: network, Addr: net.TCPAddrFromAddrPort(to),
			Err: syscall.EHOSTUNREACH}
	}
	return new(net.Dialer).DialContext(ctx, network, to.String())
}

func (outside) DialTCP(ctx context.Context, _, dst netip.AddrPort) (netstack.Stream, error) {
	conn, err := DialOutside(ctx, "tcp", dst)
	if err != nil {
		return nil, err
	}
	return tcpStream{conn.(*net.TCPConn)}, nil
}

type tcpStream struct{ *net.TCPConn }

func (s tcpStream) Reset() error { return errors.Join(s.SetLinger(0), s.Close()) }

func (outside) DialUDP(ctx context.Context, _, dst netip.AddrPort) (netstack.PacketStream, error) {
	conn, err := DialOutside(ctx, "udp", dst)
	if err != nil {
		return nil, err
	}
	return udpPackets{conn}, nil
}

type udpPackets struct{ net.Conn }

func (p udpPackets) ReadPacket(b []byte) (int, error) { return p.Read(b) }

func (p udpPackets) WritePacket(b []byte) error {
	_, err := p.Write(b)
	if errors.Is(err, syscall.EMSGSIZE) || errors.Is(err, syscall.ENOBUFS) {
		return nil // this datagram is lost; the flow continues
	}
	return err
}

// DialEcho pings with a socket that needs no privilege. If this user may not open one, pings get no answer.
func (outside) DialEcho(_ context.Context, _, dst netip.Addr) (netstack.PacketStream, error) {
	e := &echo{dst: dst, protocol: 1, request: ipv4.ICMPTypeEcho, reply: ipv4.ICMPTypeEchoReply}
	network, any := "udp4", "0.0.0.0"
	if dst.Is6() {
		network, any = "udp6", "::"
		e.protocol, e.request, e.reply = 58, ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply
	}
	conn, err := icmp.ListenPacket(network, any)
	if err != nil {
		return nil, fmt.Errorf("pinging %v: %w", dst, err)
	}
	e.conn = conn
	return e, nil
}

// echo carries the pings of one program. The kernel assigns an identifier to its socket, and delivers the replies with
// that identifier.
type echo struct {
	conn           *icmp.PacketConn
	dst            netip.Addr
	protocol       int
	request, reply icmp.Type
	buf            []byte
}

func (e *echo) WritePacket(b []byte) error {
	if len(b) < 2 {
		return fmt.Errorf("a ping of %d bytes has no sequence number", len(b))
	}
	m := icmp.Message{Type: e.request, Body: &icmp.Echo{Seq: int(binary.BigEndian.Uint16(b)), Data: b[2:]}}
	packet, err := m.Marshal(nil) // the kernel computes the checksum of IPv6
	if err != nil {
		return err
	}
	_, err = e.conn.WriteTo(packet, net.UDPAddrFromAddrPort(netip.AddrPortFrom(e.dst, 0)))
	return err
}

func (e *echo) ReadPacket(b []byte) (int, error) {
	if e.buf == nil {
		e.buf = make([]byte, 1<<16)
	}
	for {
		n, from, err := e.conn.ReadFrom(e.buf)
		if err != nil {
			return 0, err
		}
		if a, ok := from.(*net.UDPAddr); !ok || a.AddrPort().Addr().Unmap() != e.dst {
			continue
		}
		m, err := icmp.ParseMessage(e.protocol, e.buf[:n])
		if err != nil || m.Type != e.reply {
			continue
		}
		if reply, ok := m.Body.(*icmp.Echo); ok && len(b) >= 2+len(reply.Data) {
			binary.BigEndian.PutUint16(b, uint16(reply.Seq))
			return 2 + copy(b[2:], reply.Data), nil
		}
	}
}

func (e *echo) Close() error { return e.conn.Close() }
