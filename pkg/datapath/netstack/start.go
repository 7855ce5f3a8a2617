package netstack

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

const nicID tcpip.NICID = 1

const (
	// tcpBuffer bounds the bytes of a connection in each direction: bytes from the application that the stream has not
	// taken (half of it is the window), and bytes that the application has not acknowledged. It is a limit, not a
	// reservation, and does not grow. A larger buffer fills the device's queue, where other flows wait: with 8 MiB, a
	// round trip of one byte took five times as long beside an upload that was no faster.
	tcpBuffer        = 1 << 20
	udpReceiveBuffer = 1 << 20 // for each local service

	// timeWait is the TIME-WAIT period of a connection that the far end closed first. TIME-WAIT answers a repeated FIN
	// if the ACK was lost, and only a device in memory lies between the stack and the application. The period is short
	// because gVisor does not answer a SYN from the same ports meanwhile.
	timeWait = time.Second
)

// start creates gVisor's stack and its goroutines, unless an earlier call did.
func (s *Stack) start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return errEnded
	}
	if s.gv != nil {
		return nil
	}
	gv := newGVisor()
	if err := setUp(gv, s.link); err != nil {
		gv.Close()
		gv.Wait()
		return err
	}
	s.tcp = newTCPForwarder(s, gv)
	gv.SetTransportProtocolHandler(tcp.ProtocolNumber, s.tcp.handle)
	gv.SetTransportProtocolHandler(udp.ProtocolNumber, s.handleUDP)
	gv.SetTransportProtocolHandler(icmp.ProtocolNumber4, s.handleEcho)
	gv.SetTransportProtocolHandler(icmp.ProtocolNumber6, s.handleEcho)
	s.gv = gv
	return nil
}

var errEnded = errors.New("the netstack has ended")

func newGVisor() *stack.Stack {
	return stack.New(stack.Options{
		// IPv6 without neighbors: with zero options gVisor sends no router solicitations, no multicast reports and
		// no probes for duplicate addresses.
		NetworkProtocols: []stack.NetworkProtocolFactory{
			ipv4.NewProtocol,
			ipv6.NewProtocolWithOptions(ipv6.Options{}),
		},
		TransportProtocols: []stack.TransportProtocolFactory{
			tcp.NewProtocolCUBIC, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6,
		},
	})
}

// setUp sets gv's options and makes l its only interface.
func setUp(gv *stack.Stack, l *linkEndpoint) error {
	receive := tcpip.TCPReceiveBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: tcpBuffer, Max: tcpBuffer}
	send := tcpip.TCPSendBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: tcpBuffer, Max: tcpBuffer}
	wait := tcpip.TCPTimeWaitTimeoutOption(timeWait)
	sack, moderate := tcpip.TCPSACKEnabled(true), tcpip.TCPModerateReceiveBufferOption(false)
	// Without RACK: it retransmitted some 30 super-packets of a 200 MB download that were not lost, and slowed down
	// each time; without it gVisor retransmitted none. A device in memory loses nothing, and SACK and timeouts would
	// repair a loss.
	recovery := tcpip.TCPRecovery(0)
	for _, option := range []tcpip.SettableTransportProtocolOption{&receive, &send, &wait, &sack, &moderate,
		&recovery} {
		if err := gv.SetTransportProtocolOption(tcp.ProtocolNumber, option); err != nil {
			return fmt.Errorf("cannot set TCP option %T of the netstack: %s", option, err)
		}
	}
	udpReceive := tcpip.ReceiveBufferSizeOption{Min: tcp.MinBufferSize, Default: udpReceiveBuffer,
		Max: 4 * udpReceiveBuffer}
	if err := gv.SetOption(udpReceive); err != nil {
		return fmt.Errorf("cannot set the UDP receive buffer of the netstack: %s", err)
	}
	if err := gv.CreateNIC(nicID, l); err != nil {
		return fmt.Errorf("cannot create the interface of the netstack: %s", err)
	}
	// The stack receives packets to every address, and sends packets from every address.
	if err := gv.SetPromiscuousMode(nicID, true); err != nil {
		return fmt.Errorf("cannot make the netstack receive for all addresses: %s", err)
	}
	if err := gv.SetSpoofing(nicID, true); err != nil {
		return fmt.Errorf("cannot make the netstack send from all addresses: %s", err)
	}
	gv.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, NIC: nicID},
		{Destination: header.IPv6EmptySubnet, NIC: nicID},
	})
	return nil
}

// localAddrs counts the local services at each address.
type localAddrs map[netip.Addr]int

func (s *Stack) isLocal(a tcpip.Address) bool {
	locals := *s.locals.Load()
	return len(locals) > 0 && locals[addrOf(a)] > 0
}

// acquireAddr counts a local service at addr, and adds addr to the stack for the first one.
func (s *Stack) acquireAddr(addr netip.Addr) error {
	if err := s.start(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	locals := maps.Clone(*s.locals.Load())
	if locals[addr] == 0 {
		err := s.gv.AddProtocolAddress(nicID, tcpip.ProtocolAddress{
			Protocol:          networkOf(addr),
			AddressWithPrefix: tcpipAddr(addr).WithPrefix(),
		}, stack.AddressProperties{})
		if err != nil {
			return fmt.Errorf("cannot add address %s to the netstack: %s", addr, err)
		}
	}
	locals[addr]++
	s.locals.Store(&locals)
	return nil
}

func (s *Stack) releaseAddr(addr netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	locals := maps.Clone(*s.locals.Load())
	if locals[addr]--; locals[addr] == 0 {
		delete(locals, addr)
		// It fails only if the stack has ended, and the address with it.
		_ = s.gv.RemoveAddress(nicID, tcpipAddr(addr))
	}
	s.locals.Store(&locals)
}

func networkOf(addr netip.Addr) tcpip.NetworkProtocolNumber {
	if addr.Is4() {
		return ipv4.ProtocolNumber
	}
	return ipv6.ProtocolNumber
}

func fullAddress(addr netip.AddrPort) tcpip.FullAddress {
	return tcpip.FullAddress{NIC: nicID, Addr: tcpipAddr(addr.Addr()), Port: addr.Port()}
}

// ListenTCP listens inside the tunnel: applications on the laptop reach the service at addr. While an address has a
// service, the stack sends none of its packets to the cluster: it refuses other ports and answers pings. The end of Run
// closes the listener.
func (s *Stack) ListenTCP(addr netip.AddrPort) (net.Listener, error) {
	if err := s.acquireAddr(addr.Addr()); err != nil {
		return nil, err
	}
	l, err := gonet.ListenTCP(s.gv, fullAddress(addr), networkOf(addr.Addr()))
	if err != nil {
		s.releaseAddr(addr.Addr())
		return nil, fmt.Errorf("cannot listen on TCP %s inside the tunnel: %w", addr, err)
	}
	return &tcpListener{TCPListener: l, release: sync.OnceFunc(func() { s.releaseAddr(addr.Addr()) })}, nil
}

// ListenUDP listens inside the tunnel, as [Stack.ListenTCP] does. The receive buffer holds 1 MiB; datagrams beyond it
// are dropped.
func (s *Stack) ListenUDP(addr netip.AddrPort) (net.PacketConn, error) {
	if err := s.acquireAddr(addr.Addr()); err != nil {
		return nil, err
	}
	local := fullAddress(addr)
	c, err := gonet.DialUDP(s.gv, &local, nil, networkOf(addr.Addr()))
	if err != nil {
		s.releaseAddr(addr.Addr())
		return nil, fmt.Errorf("cannot listen on UDP %s inside the tunnel: %w", addr, err)
	}
	return &udpConn{UDPConn: c, release: sync.OnceFunc(func() { s.releaseAddr(addr.Addr()) })}, nil
}

// tcpListener releases its address when it is closed. Accept then returns net.ErrClosed, as listeners of package net
// do.
type tcpListener struct {
	*gonet.TCPListener
	release func()
}

func (l *tcpListener) Accept() (net.Conn, error) {
	c, err := l.TCPListener.Accept()
	if err != nil {
		// Accept of gonet fails only after the end of the listener.
		return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: l.Addr(), Err: net.ErrClosed}
	}
	return c, nil
}

func (l *tcpListener) Close() error {
	l.TCPListener.Shutdown()
	err := l.TCPListener.Close()
	l.release()
	return err
}

// udpConn releases its address when it is closed. ReadFrom then returns net.ErrClosed.
type udpConn struct {
	*gonet.UDPConn
	release func()
}

func (c *udpConn) ReadFrom(p []byte) (int, net.Addr, error) {
	n, from, err := c.UDPConn.ReadFrom(p)
	if errors.Is(err, io.EOF) {
		err = &net.OpError{Op: "read", Net: "udp", Addr: c.LocalAddr(), Err: net.ErrClosed}
	}
	return n, from, err
}

func (c *udpConn) Close() error {
	err := c.UDPConn.Close()
	c.release()
	return err
}
