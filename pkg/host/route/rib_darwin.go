package route

import (
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/net/route"
)

// readRoutes returns the routes of this machine that packets of programs follow, except those of the links that ignore
// selects.
func readRoutes(ignore func(link string) bool) (out []localRoute, err error) {
	// The package can panic on messages of new versions of macOS (golang/go#70528, #71578).
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("reading the routing table: %v", p)
		}
	}()
	raw, err := route.FetchRIB(0, route.RIBTypeRoute, 0)
	var messages []route.Message
	if err == nil {
		messages, err = route.ParseRIB(route.RIBTypeRoute, raw)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the routing table: %w", err)
	}
	links, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("listing links: %w", err)
	}
	byIndex := map[int]net.Interface{}
	for _, l := range links {
		byIndex[l.Index] = l
	}
	for _, m := range messages {
		if m, ok := m.(*route.RouteMessage); ok {
			link := byIndex[m.Index]
			if r, ok := entryOf(m, link).localRoute(); ok && !ignore(link.Name) {
				out = append(out, r)
			}
		}
	}
	return out, nil
}

// entryOf returns the entry of a message about a link.
func entryOf(m *route.RouteMessage, link net.Interface) ribEntry {
	const dst, gateway, mask = 0, 1, 2 // RTAX_DST, RTAX_GATEWAY, RTAX_NETMASK
	e := ribEntry{flags: m.Flags, link: link.Name, pointToPoint: link.Flags&net.FlagPointToPoint != 0}
	for i, a := range m.Addrs {
		var addr netip.Addr
		var raw []byte
		switch a := a.(type) {
		case *route.Inet4Addr:
			addr, raw = netip.AddrFrom4(a.IP), a.IP[:]
		case *route.Inet6Addr:
			addr, raw = netip.AddrFrom16(a.IP), a.IP[:]
		default:
			continue
		}
		switch i {
		case dst:
			e.dst = addr
		case gateway:
			e.gateway = addr
		case mask:
			e.mask = raw
		}
	}
	return e
}

// readLink returns the state of a link.
func readLink(name string) (linkState, error) {
	link, err := net.InterfaceByName(name)
	if err != nil {
		return linkState{}, fmt.Errorf("reading the link %s: %w", name, err)
	}
	s := linkState{mtu: link.MTU, up: link.Flags&net.FlagUp != 0}
	addrs, err := link.Addrs()
	if err != nil {
		return linkState{}, fmt.Errorf("reading the addresses of %s: %w", name, err)
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			s.addrs = append(s.addrs, p.Addr())
		}
	}
	routes, err := readRoutes(func(link string) bool { return link != name })
	for _, r := range routes {
		s.routes = append(s.routes, r.dst)
	}
	return s, err
}
