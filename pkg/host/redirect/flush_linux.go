package redirect

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"kubevpn/pkg/host/netfilter"

	"github.com/mdlayher/netlink"
	nl "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Flush ends the applications' open connections on these ports, so that their clients connect again. It resets both
// ends of a TCP connection; the next datagram of a UDP flow counts as its first. It returns the number of connections
// and flows. It leaves alone the connections of Dial, by Config.Mark, and flows within the network namespace.
func Flush(ports []Port, mark uint32) (n int, err error) {
	has := make(map[string]bool)
	for _, p := range ports {
		if p.Protocol != TCP && p.Protocol != UDP {
			return 0, fmt.Errorf("cannot end connections of %s: only tcp and udp are possible", p)
		}
		has[p.Protocol] = true
	}
	if has[TCP] {
		if n, err = flushTCP(ports, mark); err != nil {
			err = fmt.Errorf("ending TCP connections (sock_diag): %w", err)
		}
	}
	if has[UDP] {
		flows, udpErr := forgetFlows(ports)
		n += flows
		if udpErr != nil {
			err = errors.Join(err, fmt.Errorf("forgetting UDP flows (conntrack): %w", udpErr))
		}
	}
	return n, err
}

// Open returns the clients of the TCP connections that Flush would end.
func Open(ports []Port, mark uint32) (clients []netip.AddrPort, err error) {
	conn, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, nil)
	if err != nil {
		return nil, fmt.Errorf("listing TCP connections (sock_diag): %w", err)
	}
	defer conn.Close()
	open, err := clientsOf(conn, ports, mark)
	for _, s := range open {
		clients = append(clients, s.remote)
	}
	return clients, err
}

// flushTCP ends the applications' open TCP connections on these ports.
func flushTCP(ports []Port, mark uint32) (n int, err error) {
	conn, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, nil)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	open, err := clientsOf(conn, ports, mark)
	if err != nil {
		return 0, err
	}
	var errs []error
	for _, s := range open {
		switch err := destroy(conn, s); {
		case errors.Is(err, os.ErrNotExist): // it ended meanwhile
		case err != nil:
			errs = append(errs, fmt.Errorf("the connection from %v: %w", s.remote, err))
		default:
			n++
		}
	}
	return n, errors.Join(errs...)
}

// clientsOf returns the connections to these ports but those of Dial.
func clientsOf(conn *netlink.Conn, ports []Port, mark uint32) (clients []socket, err error) {
	open, err := tcpSockets(conn)
	if err != nil {
		return nil, err
	}
	// The other end's socket exists before this one: if it is in this namespace, a second list has it.
	all, err := tcpSockets(conn)
	if err != nil {
		return nil, err
	}
	type ends struct{ local, remote netip.AddrPort }
	dialed := make(map[ends]bool)
	for _, s := range all {
		dialed[ends{s.local, s.remote}] = s.mark == mark || s.mark == mark+1
	}
	for _, s := range open {
		if slices.Contains(ports, Port{TCP, s.local.Port()}) && !dialed[ends{s.remote, s.local}] {
			clients = append(clients, s)
		}
	}
	return clients, nil
}

// socket is a TCP socket that has a peer. An IPv4 connection of a socket for both families is IPv4 here.
type socket struct {
	local, remote netip.AddrPort
	family        byte
	id            [48]byte // inet_diag_sockid
	mark          uint32   // 0: the kernel does not tell, as without CAP_NET_ADMIN
}

// TCP's states, net/tcp_states.h.
const (
	tcpTimeWait = 6
	tcpClose    = 7
	tcpListen   = 10
	tcpStates   = 13 // more than the kernel defines
)

// diagRequest is inet_diag_req_v2.
func diagRequest(family byte, states uint32, id [48]byte) []byte {
	b := []byte{family, unix.IPPROTO_TCP, 0, 0}
	b = binary.NativeEndian.AppendUint32(b, states)
	return append(b, id[:]...)
}

// parseSocket reads inet_diag_msg: family, state, timer, retransmissions, an inet_diag_sockid of ports, addresses,
// interface and cookie, counters, and attributes.
func parseSocket(b []byte) (s socket, err error) {
	const header, inetDiagMark = 72, 15
	if len(b) < header {
		return socket{}, fmt.Errorf("the description of a socket has only %d bytes", len(b))
	}
	s.family, s.id = b[0], [48]byte(b[4:])
	length := 16
	if s.family == unix.AF_INET {
		length = 4
	}
	end := func(port, addr int) netip.AddrPort {
		a, _ := netip.AddrFromSlice(s.id[addr : addr+length]) // 4 or 16 bytes are always an address
		return netip.AddrPortFrom(a.Unmap(), binary.BigEndian.Uint16(s.id[port:]))
	}
	s.local, s.remote = end(0, 4), end(2, 20)
	attributes, err := netlink.UnmarshalAttributes(b[header:])
	for _, a := range attributes {
		if a.Type == inetDiagMark && len(a.Data) == 4 {
			s.mark = binary.NativeEndian.Uint32(a.Data)
		}
	}
	return s, err
}

// tcpSockets lists sockets with a peer, including those of unfinished handshakes.
func tcpSockets(conn *netlink.Conn) (out []socket, err error) {
	states := uint32(1<<tcpStates-1) &^ (1<<tcpTimeWait | 1<<tcpClose | 1<<tcpListen)
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		messages, err := conn.Execute(netlink.Message{
			Header: netlink.Header{Type: unix.SOCK_DIAG_BY_FAMILY, Flags: netlink.Request | netlink.Dump},
			Data:   diagRequest(family, states, [48]byte{}),
		})
		if err != nil {
			return nil, err
		}
		for _, m := range messages {
			s, err := parseSocket(m.Data)
			if err != nil {
				return nil, err
			}
			out = append(out, s)
		}
	}
	return out, nil
}

// destroy resets a connection, like `ss -K`.
func destroy(conn *netlink.Conn, s socket) error {
	_, err := conn.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.SOCK_DESTROY, Flags: netlink.Request | netlink.Acknowledge},
		Data:   diagRequest(s.family, 1<<tcpStates-1, s.id),
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("the kernel lacks CONFIG_INET_DIAG_DESTROY: %w", err)
	}
	return err
}

// forgetFlows has conntrack forget UDP flows from outside to these ports of this network namespace. It leaves alone
// flows with a mark, redirected ones and those of Dial, and those that another program redirected.
func forgetFlows(ports []Port) (n int, err error) {
	addrs, err := localAddrs()
	if err != nil {
		return 0, err
	}
	return netfilter.DeleteFlows(flowsTo{addrs, ports})
}

// flowsTo selects the flows that forgetFlows deletes.
type flowsTo struct {
	addrs []netip.Addr // of this network namespace
	ports []Port
}

// MatchConntrackFlow implements netlink.CustomConntrackFilter.
func (t flowsTo) MatchConntrackFlow(f *nl.ConntrackFlow) bool {
	src, _ := netip.AddrFromSlice(f.Forward.SrcIP)
	dst, _ := netip.AddrFromSlice(f.Forward.DstIP)
	return f.Forward.Protocol == unix.IPPROTO_UDP && f.Mark == 0 && f.Forward.DstPort == f.Reverse.SrcPort &&
		slices.Contains(t.addrs, dst.Unmap()) && !slices.Contains(t.addrs, src.Unmap()) &&
		slices.Contains(t.ports, Port{UDP, f.Forward.DstPort})
}
