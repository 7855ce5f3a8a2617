package connection

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/miekg/dns"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/netstack"
	"kubevpn/pkg/datapath/routable"
	"kubevpn/pkg/host/route"
)

// The device is in this machine's network namespace, or isolated in one of its own, or there is none: programs use a
// proxy of this process, whose dials go to the traffic manager. An isolated namespace sends everything to the device:
//
//	         ┌─ a network of the cluster ─▶ netstack or packet streams ══▶ manager
//	device ──┤
//	         └─ elsewhere ───────────────▶ netstack ─▶ outside: a socket of this process
//
// This machine's own networks do not matter there, nor to a proxy. An address that they share with a network of the
// cluster reaches the cluster.

// isolated reports whether the device is in a network namespace of its own.
func (c *Config) isolated() bool { return c.Dial != nil }

// proxied reports whether there is no device, because programs use a proxy of this process.
func (c *Config) proxied() bool { return c.Lookup != nil }

// leavesPod reports whether flows leave from a pod.
func (c *Config) leavesPod() bool { return c.Via != nil && c.Request.Egress != api.EgressNone }

// netstack returns the netstack of the request. A proxy needs none: the traffic manager dials, as with gvisor, or the
// agent of a Via, which takes no whole packets.
func (c *Config) netstack() string {
	if c.proxied() || c.leavesPod() {
		return api.NetstackGVisor
	}
	return cmp.Or(c.Request.Netstack, api.NetstackAuto)
}

// overlaps returns the local networks that overlap prefixes, except those of the connection's own device. All that
// another connection routes is one: it would lose what is more specific here.
func (s *shared) overlaps(prefixes []netip.Prefix) ([]route.Overlap, error) {
	if s.cfg.isolated() || s.cfg.proxied() {
		return nil, nil
	}
	others := s.cfg.Network.Others()
	found, err := route.Overlaps(prefixes, append(linkNames(others), s.packets.deviceName()))
	if err != nil {
		return nil, fmt.Errorf("reading this machine's routes: %w", err)
	}
	for _, link := range others {
		for _, r := range link.Routes {
			for _, p := range prefixes {
				if p.Overlaps(r) {
					found = append(found, route.Overlap{Kind: route.OverlapRoute, Prefix: p, Other: r, Link: link.Name})
				}
			}
		}
	}
	return found, nil
}

func linkNames(links []api.Link) []string {
	return api.Texts(links, func(l api.Link) string { return l.Name })
}

// dialMapped dials an address of the cluster as programs do.
func (s *shared) dialMapped(ctx context.Context, network, address string) (net.Conn, error) {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, err
	}
	at = netip.AddrPortFrom(s.mappings.now().ToLocal(at.Addr()), at.Port())
	return new(net.Dialer).DialContext(ctx, network, at.String())
}

// prober returns a prober that resolves and dials as programs do: through the device, or with dial if they use a proxy.
func (s *shared) prober(dial func(context.Context, string, netip.AddrPort) (net.Conn, error)) prober {
	p := prober{
		dial:     s.dialMapped,
		resolver: &net.Resolver{PreferGo: true, Dial: dialNameserver}, // no cache and no NSS plugin in between
	}
	if s.cfg.isolated() {
		p.dial = s.cfg.Dial
		// the resolv.conf of this machine does not name the resolver of the device's namespace
		p.resolver.Dial = func(ctx context.Context, network, _ string) (net.Conn, error) {
			server := s.view.Load().lease.Resolver
			if names := s.podNames(); names != nil && len(names.Servers) > 0 {
				server = names.Servers[0]
			}
			return s.cfg.Dial(ctx, network, netip.AddrPortFrom(server, 53).String())
		}
	}
	p.lookup = func(ctx context.Context, name string) ([]netip.Addr, error) {
		return p.resolver.LookupNetIP(ctx, "ip", name+".")
	}
	if s.cfg.proxied() {
		p.lookup = s.cfg.Lookup
		p.dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			to, err := netip.ParseAddrPort(address)
			if err != nil {
				return nil, err
			}
			return dial(ctx, network, to)
		}
	}
	return p
}

// dialNameserver dials a nameserver that resolv.conf names at this moment, as other programs do. Package net has read
// the file up to 5 seconds ago.
func dialNameserver(ctx context.Context, network, server string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(server)
	if err != nil {
		return nil, err
	}
	c, err := dns.ClientConfigFromFile("/etc/resolv.conf")
	if err == nil && len(c.Servers) > 0 && !slices.Contains(c.Servers, host) {
		server = net.JoinHostPort(c.Servers[0], c.Port)
	}
	return new(net.Dialer).DialContext(ctx, network, server)
}

// dialer returns the Dialer for the flows from the device.
func (s *shared) dialer() netstack.Dialer {
	d := dialer{s.current, s.via, s.flows, s.shortcuts}
	if !s.cfg.isolated() {
		return d
	}
	return split{cluster: d, elsewhere: outside{}, inside: s.Inside}
}

// Inside reports whether flows of a program with a network or a proxy of its own leave from the cluster: those to its
// networks, and from a pod also those that mean the pod's own surroundings (a metadata service, a node-local cache), or
// all.
func (s *shared) Inside(dst netip.Addr) bool {
	if s.cfg.Request.Egress == api.EgressAll {
		return true
	}
	if routes := s.hosts.routes.Load(); routes != nil && covers(*routes, dst) {
		return true
	}
	if s.via == nil {
		return false
	}
	names, _ := s.via.Names()
	return names != nil && slices.Contains(names.Servers, dst) ||
		routable.Refuse(netip.PrefixFrom(dst, dst.BitLen())) != ""
}

// podNames returns the name resolution of the pod from which flows leave, without nameservers on loopback, or nil if
// they leave from the traffic manager.
func (s *shared) podNames() *api.PodNames {
	if s.via == nil {
		return nil
	}
	names, _ := s.via.Names()
	if names == nil {
		return nil
	}
	usable := *names
	usable.Servers = slices.DeleteFunc(slices.Clone(names.Servers), netip.Addr.IsLoopback)
	return &usable
}

// split dials by destination.
type split struct {
	cluster, elsewhere netstack.Dialer
	inside             func(dst netip.Addr) bool
}

var _ netstack.Dialer = split{}

func (d split) to(dst netip.Addr) netstack.Dialer {
	if d.inside(dst) {
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
