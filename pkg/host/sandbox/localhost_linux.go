package sandbox

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/netfilter"
	"kubevpn/pkg/host/unixsocket"
)

// localhost gives connections to loopback ports on which nobody listens in the sandbox to a listener for the client.
//
//	program ─▶ 127.0.0.1:5432 ─▶ lo ─▶ prerouting ─┬─ a socket here listens, or is connected ─▶ that socket
//	                                               └─ tproxy ─▶ listener; its conns have the address that was dialed
//
// See Documentation/networking/tproxy.rst of Linux.
type localhost struct {
	table    *netfilter.Table
	sets     map[bool]*nftables.Set // of ports; by whether they are of IPv4
	listener *net.TCPListener
}

// newLocalhost creates the listener and the rules, for no port.
func newLocalhost() (l *localhost, err error) {
	l = new(localhost)
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	any, err := lc.Listen(context.Background(), "tcp", ":0") // of both families, if the kernel has both
	if err != nil {
		return nil, err
	}
	l.listener = any.(*net.TCPListener)
	if err = unixsocket.Control(l.listener, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1)
	}); err != nil {
		return nil, errors.Join(err, l.listener.Close())
	}
	if l.table, err = netfilter.OpenTable("kubevpn-localhost"); err != nil {
		return nil, errors.Join(err, l.listener.Close())
	}
	if err = l.addRules(l.listener.Addr().(*net.TCPAddr).AddrPort().Port()); err != nil {
		return nil, errors.Join(err, l.close())
	}
	return l, nil
}

func (l *localhost) addRules(to uint16) error {
	chain := l.table.Chain("localhost", nftables.ChainTypeFilter, nftables.ChainHookPrerouting,
		*nftables.ChainPriorityMangle)
	l.sets = make(map[bool]*nftables.Set)
	for _, at := range []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()} {
		set := &nftables.Set{Table: l.table.Table(), Name: "ports4", KeyType: nftables.TypeInetService}
		family := byte(unix.NFPROTO_IPV4)
		if at.Is6() {
			set.Name, family = "ports6", unix.NFPROTO_IPV6
		}
		if err := l.table.AddSet(set, nil); err != nil {
			return err
		}
		l.sets[at.Is4()] = set
		matches := netfilter.MetaIs(expr.MetaKeyIIFNAME, netfilter.InterfaceName("lo"))
		matches = append(matches, netfilter.DestinationIs(at)...)
		matches = append(matches, netfilter.MetaIs(expr.MetaKeyL4PROTO, []byte{unix.IPPROTO_TCP})...)
		matches = append(matches,
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}, // the port
			&expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID})
		// The expression ends its rule unless there is a socket.
		l.table.Rule(chain, matches, []expr.Any{&expr.Socket{Key: expr.SocketKeyTransparent, Register: 1}},
			netfilter.Verdict(expr.VerdictAccept))
		l.table.Rule(chain, matches, []expr.Any{
			&expr.Immediate{Register: 1, Data: binary.BigEndian.AppendUint16(nil, to)},
			&expr.TProxy{Family: family, TableFamily: unix.NFPROTO_INET, RegPort: 1},
		})
	}
	return l.table.Flush()
}

// set replaces the ports. The addresses of ports are 127.0.0.1 and ::1.
func (l *localhost) set(ports []netip.AddrPort) error {
	for is4, set := range l.sets {
		l.table.FlushSet(set)
		var elements []nftables.SetElement
		for _, p := range ports {
			if p.Addr().Is4() == is4 {
				elements = append(elements, nftables.SetElement{Key: binary.BigEndian.AppendUint16(nil, p.Port())})
			}
		}
		if len(elements) == 0 {
			continue
		}
		if err := l.table.SetAddElements(set, elements); err != nil {
			return err
		}
	}
	return l.table.Flush()
}

func (l *localhost) close() error { return errors.Join(l.table.Close(), l.listener.Close()) }

// setLocalhost answers an order for [Place.Localhost] with the listener.
func (s *server) setLocalhost(ports []netip.AddrPort) (syscall.Conn, error) {
	if s.localhost == nil {
		l, err := newLocalhost()
		if err != nil {
			return nil, err
		}
		s.localhost = l
	}
	if err := s.localhost.set(ports); err != nil {
		return nil, fmt.Errorf("setting the ports: %w", err)
	}
	return s.localhost.listener, nil
}

// Localhost implements [Place].
func (r *Remote) Localhost(ctx context.Context, ports []netip.AddrPort) (net.Listener, error) {
	socket, err := r.askSocket(ctx, order{Localhost: &ports})
	var l net.Listener
	if err == nil {
		defer socket.Close()
		l, err = net.FileListener(socket)
	}
	if err != nil {
		return nil, fmt.Errorf("receiving connections to loopback of the sandbox: %w", err)
	}
	return l, nil
}

// Localhost implements [Place].
func (p *Process) Localhost(ctx context.Context, ports []netip.AddrPort) (net.Listener, error) {
	return p.remote.Localhost(ctx, ports)
}
