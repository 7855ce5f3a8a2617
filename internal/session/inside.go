package session

import (
	"context"
	"net"
	"net/netip"

	"go4.org/netipx"

	"kubevpn/pkg/netstack"
	"kubevpn/pkg/route"
)

// A device that is not this machine's is in a network namespace, to which everything is sent:
//
//	         ┌─ in a network of the cluster ─▶ as ever: netstack or lane ══▶ manager
//	device ──┤
//	         └─ elsewhere ─▶ netstack ─▶ outside: a socket of this process
//
// This machine's own networks are nowhere in the way of that. They may have the same addresses as the cluster's, which are
// the cluster's in there.

// inside reports whether the device is in a namespace of its own.
func (s *Session) inside() bool { return s.cfg.Dial != nil }

// clashes are route.Clashes of a device of this machine.
func (s *Session) clashes(prefixes []netip.Prefix, links []string) ([]route.Clash, error) {
	if s.inside() {
		return nil, nil
	}
	return route.Clashes(prefixes, links)
}

// sendInside says which networks are the cluster's, where all others come to the device as well.
func (s *Session) sendInside(routes []netip.Prefix) error {
	if !s.inside() {
		return nil
	}
	var b netipx.IPSetBuilder
	for _, p := range routes {
		b.AddPrefix(p)
	}
	set, err := b.IPSet()
	if err != nil { // only invalid prefixes do that; plan has none
		return err
	}
	s.mu.Lock()
	s.routed = set
	s.mu.Unlock()
	s.resteer()
	return nil
}

// dialer gives the flows from the device their other ends.
func (s *Session) dialer() netstack.Dialer {
	d := dialer{s.current}
	if !s.inside() {
		return d
	}
	return split{cluster: d, elsewhere: outside{}, routed: func(dst netip.Addr) bool {
		to := s.lanes.steer.Load()
		return to.routed != nil && to.routed.Contains(dst)
	}}
}

// split dials by destination.
type split struct {
	cluster, elsewhere netstack.Dialer
	routed             func(dst netip.Addr) bool // into the cluster
}

var _ netstack.Dialer = split{}

func (d split) to(dst netip.Addr) netstack.Dialer {
	if d.routed(dst) {
		return d.cluster
	}
	return d.elsewhere
}

func (d split) DialTCP(ctx context.Context, src, dst netip.AddrPort) (netstack.Stream, error) {
	return d.to(dst.Addr()).DialTCP(ctx, src, dst)
}

func (d split) DialUDP(ctx context.Context, src, dst netip.AddrPort) (netstack.PacketStream, error) {
	return d.to(dst.Addr()).DialUDP(ctx, src, dst)
}

func (d split) DialEcho(ctx context.Context, src, dst netip.Addr) (netstack.PacketStream, error) {
	return d.to(dst).DialEcho(ctx, src, dst)
}

// resolver asks as programs that use the device do.
func (s *Session) resolver() *net.Resolver {
	r := &net.Resolver{PreferGo: true} // a fresh read of resolv.conf, no cache, no NSS plugin in between
	if s.inside() {
		r.Dial = func(ctx context.Context, network, _ string) (net.Conn, error) { // resolv.conf is this machine's
			return s.cfg.Dial(ctx, network, netip.AddrPortFrom(s.addressing().Resolver, 53).String())
		}
	}
	return r
}

// dialDevice connects as programs that use the device do.
func (s *Session) dialDevice(ctx context.Context, network, address string) (net.Conn, error) {
	if s.inside() {
		return s.cfg.Dial(ctx, network, address)
	}
	return new(net.Dialer).DialContext(ctx, network, address)
}
