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
	// tcpBuffer is how much a connection may hold in each direction: of what the application sent and the stream has
	// not taken (half of it is the window), and of what the application has not acknowledged. It does not grow. More
	// than this waits in the device's queue, where other flows wait behind it, and brings nothing: with 8 MiB, a byte
	// took five times as long there and back beside an upload that was no faster. It is a limit, not a reservation.
	tcpBuffer        = 1 << 20
	udpReceiveBuffer = 1 << 20 // of local services

	// timeWait is how long a connection that the far end closed first is remembered. Its purpose is to
	// answer the application's FIN again if our ACK was lost, and between us and the application there is only a
	// device in memory. It is short, since gVisor answers no SYN of the same ports meanwhile.
	timeWait = time.Second
)

// start makes gVisor's stack, with its goroutines, unless that was done before.
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
		// IPv6 without neighbours: the zero options send no router solicitations, no duplicate address detection
		// and no multicast reports.
		NetworkProtocols: []stack.NetworkProtocolFactory{
			ipv4.NewProtocol,
			ipv6.NewProtocolWithOptions(ipv6.Options{}),
		},
		TransportProtocols: []stack.TransportProtocolFactory{
			tcp.NewProtocolCUBIC, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6,
		},
	})
}

func setUp(gv *stack.Stack, l *link) error {
	receive := tcpip.TCPReceiveBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: tcpBuffer, Max: tcpBuffer}
	send := tcpip.TCPSendBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: tcpBuffer, Max: tcpBuffer}
	wait := tcpip.TCPTimeWaitTimeoutOption(timeWait)
	sack, moderate := tcpip.TCPSACKEnabled(true), tcpip.TCPModerateReceiveBufferOption(false)
	// Without RACK: of 200 MB towards an application, it sent some 30 super-packets again that had not been lost, and
	// slowed down each time; without it, none. Losses do not occur on a device in memory, and SACK and timeouts
	// would see to them.
	recovery := tcpip.TCPRecovery(0)
	for _, option := range []tcpip.SettableTransportProtocolOption{&receive, &send, &wait, &sack, &moderate,
		&recovery} {
		if err := gv.SetTransportProtocolOption(tcp.ProtocolNumber, option); err != nil {
			return fmt.Errorf("setting TCP option %T: %s", option, err)
		}
	}
	udpReceive := tcpip.ReceiveBufferSizeOption{Min: tcp.MinBufferSize, Default: udpReceiveBuffer,
		Max: 4 * udpReceiveBuffer}
	if err := gv.SetOption(udpReceive); err != nil {
		return fmt.Errorf("setting the receive buffer of UDP: %s", err)
	}
	if err := gv.CreateNIC(nicID, l); err != nil {
		return fmt.Errorf("creating the interface of the netstack: %s", err)
	}
	// Packets for every address are for us, and ours come from every address.
	if err := gv.SetPromiscuousMode(nicID, true); err != nil {
		return fmt.Errorf("receiving for all addresses: %s", err)
	}
	if err := gv.SetSpoofing(nicID, true); err != nil {
		return fmt.Errorf("sending from all addresses: %s", err)
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

// acquireAddr makes addr an address of the stack's own.
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
			return fmt.Errorf("adding address %s to the netstack: %s", addr, err)
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
		// It fails when the stack has ended, and the address with it.
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

// ListenTCP makes a service inside the tunnel, which applications on the laptop reach at addr. While an address has a
// service, nothing else that is sent to it goes to the cluster: other ports are refused, and it answers pings. The end
// of Run closes the listener.
func (s *Stack) ListenTCP(addr netip.AddrPort) (net.Listener, error) {
	if err := s.acquireAddr(addr.Addr()); err != nil {
		return nil, err
	}
	l, err := gonet.ListenTCP(s.gv, fullAddress(addr), networkOf(addr.Addr()))
	if err != nil {
		s.releaseAddr(addr.Addr())
		return nil, fmt.Errorf("listening on %s inside the tunnel: %w", addr, err)
	}
	return &tcpListener{TCPListener: l, release: sync.OnceFunc(func() { s.releaseAddr(addr.Addr()) })}, nil
}

// ListenUDP makes a service inside the tunnel, as [Stack.ListenTCP] does. Its receive buffer holds 1 MiB; what does
// not fit is dropped.
func (s *Stack) ListenUDP(addr netip.AddrPort) (net.PacketConn, error) {
	if err := s.acquireAddr(addr.Addr()); err != nil {
		return nil, err
	}
	local := fullAddress(addr)
	c, err := gonet.DialUDP(s.gv, &local, nil, networkOf(addr.Addr()))
	if err != nil {
		s.releaseAddr(addr.Addr())
		return nil, fmt.Errorf("listening on %s inside the tunnel: %w", addr, err)
	}
	return &udpConn{UDPConn: c, release: sync.OnceFunc(func() { s.releaseAddr(addr.Addr()) })}, nil
}

// tcpListener gives its address back when it is closed, and returns net.ErrClosed then, as listeners of package net do.
type tcpListener struct {
	*gonet.TCPListener
	release func()
}

func (l *tcpListener) Accept() (net.Conn, error) {
	c, err := l.TCPListener.Accept()
	if err != nil {
		// A listener that waits for connections fails for no other reason than its end.
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

// udpConn is to gonet's UDPConn what tcpListener is to its listener.
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
