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

// loopback has the resolver's sockets on this machine. They exist before the helper redirects queries to them, and are
// served once the upstreams are known. Until then, queries wait in the kernel.
type loopback struct {
	addrs     api.Resolver
	packets   []net.PacketConn
	listeners []net.Listener
	cancel    context.CancelFunc // nil: not served yet
	done      chan struct{}
}

// listenLoopback opens sockets in each address family of this machine.
func (h *hostNetwork) listenLoopback() (*loopback, error) {
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
		return nil, api.Errorf(api.ExitNetwork, "the resolver cannot listen on a loopback address: %w",
			errors.Join(errs...)).
			WithHint("check that the loopback device is up: `ip link show lo`")
	}
	for _, err := range errs {
		h.logger.Info("resolver listens in one family only", "err", err)
	}
	return b, nil
}

// serveLoopbackLocked starts the resolver on the loopback sockets, if there are any, unless it runs.
func (h *hostNetwork) serveLoopbackLocked() {
	b := h.loopback
	if b == nil || b.cancel != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	b.cancel = cancel
	go func() {
		err := h.resolver.Serve(ctx, b.packets, b.listeners)
		close(b.done)
		if err != nil {
			h.resolverEnded(b, err)
		}
	}()
}

// listenBoth opens a UDP and a TCP socket on the same port of ip.
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

// closeLoopbackLocked reverses listenLoopback and serveLoopbackLocked.
func (h *hostNetwork) closeLoopbackLocked() {
	b := h.loopback
	if b == nil {
		return
	}
	h.loopback = nil
	if b.cancel != nil {
		b.cancel()
		<-b.done
	} else {
		for i := range b.packets {
			b.packets[i].Close()
			b.listeners[i].Close()
		}
	}
	h.resolver.SetUpstreams(nil) // closes idle sockets
}

// resolverEnded removes the resolver from the path after a loopback socket failed: the machine then resolves no cluster
// names, but all others. The next SetLink starts the resolver again.
func (h *hostNetwork) resolverEnded(b *loopback, cause error) {
	h.logger.Error("resolver ended: cluster names are not resolved", "err", cause)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.loopback != b || h.closed {
		return
	}
	h.loopback = nil
	ctx, cancel := context.WithTimeout(context.Background(), removeTimeout)
	defer cancel()
	if _, err := h.applyLocked(ctx); err != nil {
		h.logger.Error("cannot remove the resolver", "err", err)
	}
}

// dialUpstream connects to a nameserver outside of the cluster. If the firewall redirects queries to this resolver, the
// socket needs a mark that only the helper can set.
func (h *hostNetwork) dialUpstream(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error) {
	if !h.marked.Load() {
		var d net.Dialer
		return d.DialContext(ctx, network, addr.String())
	}
	family := "6"
	if addr.Addr().Unmap().Is4() {
		family = "4"
	}
	f, err := h.helper.MarkedSocket(ctx, strings.TrimRight(network, "46")+family)
	if err != nil {
		return nil, fmt.Errorf("cannot get a socket from the root helper: %w", err)
	}
	defer f.Close()
	conn, err := connect(ctx, f, netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port()))
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Addr: net.UDPAddrFromAddrPort(addr), Err: err}
	}
	return conn, nil
}
