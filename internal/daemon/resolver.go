package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"kubevpn/internal/api"
)

// loopback is the resolver's sockets on this machine. They exist before the helper sends queries to them, and
// are served once the upstreams are known: what comes in between waits in the kernel.
type loopback struct {
	addrs     api.Resolver
	packets   []net.PacketConn
	listeners []net.Listener
	cancel    context.CancelFunc // nil: not served yet
	done      chan struct{}
}

// listenLoopback makes sockets in each family that this machine has.
func (m *machine) listenLoopback() (*loopback, error) {
	b := &loopback{done: make(chan struct{})}
	var errs []error
	for ip, addr := range map[netip.Addr]*netip.AddrPort{
		netip.AddrFrom4([4]byte{127, 0, 0, 1}): &b.addrs.Listen4,
		netip.IPv6Loopback():                   &b.addrs.Listen6,
	} {
		p, l, err := listenBoth(ip)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		b.packets, b.listeners = append(b.packets, p), append(b.listeners, l)
		*addr = p.LocalAddr().(*net.UDPAddr).AddrPort()
	}
	if len(b.packets) == 0 {
		return nil, api.Errorf(api.ExitNetwork, "the resolver cannot listen on loopback: %w", errors.Join(errs...)).
			WithHint("is the loopback device up?")
	}
	for _, err := range errs {
		m.logger.Info("resolver listens in one family only", "err", err)
	}
	return b, nil
}

// serveLoopback begins to answer, if that has not begun; m.mu is held.
func (m *machine) serveLoopback() {
	b := m.loopback
	if b.cancel != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	b.cancel = cancel
	go func() {
		err := m.resolver.Serve(ctx, b.packets, b.listeners)
		close(b.done)
		if err != nil {
			m.resolverEnded(b, err)
		}
	}()
}

// listenBoth makes a UDP and a TCP socket on the same port of ip.
func listenBoth(ip netip.Addr) (net.PacketConn, net.Listener, error) {
	const tries = 16 // the kernel picks the UDP port; the TCP port of that number may be taken
	var err error
	for range tries {
		var p *net.UDPConn
		p, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(ip, 0)))
		if err != nil {
			return nil, nil, err
		}
		var l *net.TCPListener
		l, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(p.LocalAddr().(*net.UDPAddr).AddrPort()))
		if err == nil {
			return p, l, nil
		}
		p.Close()
	}
	return nil, nil, fmt.Errorf("no port of %s is free for UDP and TCP: %w", ip, err)
}

// closeLoopback ends what listenLoopback and serveLoopback began; m.mu is held.
func (m *machine) closeLoopback() {
	b := m.loopback
	if b == nil {
		return
	}
	m.loopback = nil
	if b.cancel != nil {
		b.cancel()
		<-b.done
	} else {
		for i := range b.packets {
			b.packets[i].Close()
			b.listeners[i].Close()
		}
	}
	m.resolver.SetUpstreams(nil) // closes idle sockets
}

// resolverEnded is called when a loopback socket broke. A machine that sends its queries nowhere is worse off
// than one without cluster names, so the resolver leaves the path; the next SetLink starts it again.
func (m *machine) resolverEnded(b *loopback, cause error) {
	m.logger.Error("resolver ended: names of the cluster are not resolved", "err", cause)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.loopback != b || m.closed {
		return
	}
	m.loopback = nil
	ctx, cancel := context.WithTimeout(context.Background(), removeTimeout)
	defer cancel()
	if _, err := m.apply(ctx, m.links); err != nil {
		m.logger.Error("taking the resolver out of the path", "err", err)
	}
}

// dialUpstream connects to a nameserver that is not the cluster's. Where the firewall redirects queries to our
// resolver, the socket must carry the mark that lets it pass, which only the helper can set.
func (m *machine) dialUpstream(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error) {
	if !m.marked.Load() {
		var d net.Dialer
		return d.DialContext(ctx, network, addr.String())
	}
	family := "6"
	if addr.Addr().Unmap().Is4() {
		family = "4"
	}
	f, err := m.helper.MarkedSocket(ctx, strings.TrimRight(network, "46")+family)
	if err != nil {
		return nil, fmt.Errorf("asking the root helper for a socket: %w", err)
	}
	defer f.Close()
	conn, err := connect(ctx, f, netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port()))
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Addr: net.UDPAddrFromAddrPort(addr), Err: err}
	}
	return conn, nil
}
