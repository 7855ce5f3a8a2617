package connection

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/netstack"
	"kubevpn/pkg/host/route"
)

// The device is in this machine's network namespace, or isolated in one of its own. An isolated namespace sends
// everything to the device:
//
//	         ┌─ a network of the cluster ─▶ netstack or packet streams ══▶ manager
//	device ──┤
//	         └─ elsewhere ───────────────▶ netstack ─▶ outside: a socket of this process
//
// This machine's own networks do not matter there. They may have the same addresses as the cluster's; inside, these are
// the cluster's.

// isolated reports whether the device is in a network namespace of its own.
func (c *Config) isolated() bool { return c.Dial != nil }

// netstack returns the netstack of the request.
func (c *Config) netstack() string { return cmp.Or(c.Request.Netstack, api.NetstackAuto) }

// overlaps returns the local networks that overlap prefixes, except those of the connection's own device.
func (c *Config) overlaps(prefixes []netip.Prefix, device string) ([]route.Overlap, error) {
	if c.isolated() {
		return nil, nil
	}
	found, err := route.Overlaps(prefixes, []string{device})
	if err != nil {
		return nil, fmt.Errorf("reading this machine's routes: %w", err)
	}
	return found, nil
}

// prober returns a prober that resolves and dials as programs that use the device do.
func (s *shared) prober() prober {
	p := prober{
		dial:     new(net.Dialer).DialContext,
		resolver: &net.Resolver{PreferGo: true}, // reads resolv.conf anew: no cache and no NSS plugin in between
	}
	if s.cfg.isolated() {
		p.dial = s.cfg.Dial
		// resolv.conf is this machine's
		p.resolver.Dial = func(ctx context.Context, network, _ string) (net.Conn, error) {
			return s.cfg.Dial(ctx, network, netip.AddrPortFrom(s.view.Load().lease.Resolver, 53).String())
		}
	}
	return p
}

// dialer returns what dials for the flows from the device.
func (s *shared) dialer() netstack.Dialer {
	d := dialer{s.current}
	if !s.cfg.isolated() {
		return d
	}
	return split{cluster: d, elsewhere: outside{}, routed: func(dst netip.Addr) bool {
		routed := s.packets.steering.Load().routed
		return routed != nil && routed.Contains(dst)
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
