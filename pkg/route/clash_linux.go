package route

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"
)

// dumpTries is how often a dump that the kernel changed under is read again.
const dumpTries = 5

// Clashes finds the local networks that overlap routes, except those of the links named in ignoreLinks. It
// needs no privilege and changes nothing. The result is sorted by our prefix, then theirs; empty means that
// routes can be taken into a tunnel and nothing that works now stops.
func Clashes(routes []netip.Prefix, ignoreLinks []string) ([]Clash, error) {
	l, err := readLocal(ignoreLinks)
	if err != nil {
		return nil, err
	}
	return l.clashes(routes), nil
}

func readLocal(ignoreLinks []string) (local, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return local{}, fmt.Errorf("opening a netlink socket: %w", err)
	}
	defer h.Close()

	links, err := dump(h.LinkList)
	if err != nil {
		return local{}, fmt.Errorf("listing links: %w", err)
	}
	byIndex := make(map[int]*netlink.LinkAttrs, len(links))
	for _, l := range links {
		byIndex[l.Attrs().Index] = l.Attrs()
	}
	ignored := func(index int) bool {
		a := byIndex[index]
		return a != nil && slices.Contains(ignoreLinks, a.Name)
	}
	name := func(index int) string {
		if a := byIndex[index]; a != nil {
			return a.Name
		}
		return ""
	}

	var out local
	addrs, err := dump(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return local{}, fmt.Errorf("listing addresses: %w", err)
	}
	for _, a := range addrs {
		if ip, ok := netipx.FromStdIP(a.IP); ok && !ignored(a.LinkIndex) {
			out.addrs = append(out.addrs, localAddr{ip, name(a.LinkIndex)})
		}
	}

	early, err := earlyTables(h)
	if err != nil {
		return local{}, err
	}
	routes, err := dump(func() ([]netlink.Route, error) {
		return h.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return local{}, fmt.Errorf("listing routes: %w", err)
	}
	for _, r := range routes {
		if r.Table != unix.RT_TABLE_MAIN && !early[r.Table] {
			continue
		}
		for _, hop := range hops(r) {
			if ignored(hop.LinkIndex) {
				continue
			}
			out.routes = append(out.routes, localRoute{
				dst:       destination(r),
				link:      name(hop.LinkIndex),
				gateway:   gateway(hop),
				connected: connected(r, hop, byIndex[hop.LinkIndex]),
				early:     early[r.Table],
			})
		}
	}
	return out, nil
}

// earlyTables are the tables that every packet is looked up in before the main one, as Tailscale's 52 and
// wg-quick's 51820 are. A rule that only some packets match (by source, interface, user or port) is left out:
// programs of this laptop may or may not be among them. A mark is no such limit, since VPNs mark their own
// packets to keep them out of the tunnel and so match everything else.
func earlyTables(h *netlink.Handle) (map[int]bool, error) {
	out := map[int]bool{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		rules, err := dump(func() ([]netlink.Rule, error) { return h.RuleList(family) })
		if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("listing routing rules: %w", err)
		}
		slices.SortStableFunc(rules, func(a, b netlink.Rule) int { return rulePriority(a) - rulePriority(b) })
		for _, r := range rules {
			if r.Table == unix.RT_TABLE_MAIN && r.SuppressPrefixlen <= 0 && everyPacket(r) {
				break
			}
			if r.Table > 0 && r.Table != unix.RT_TABLE_LOCAL && r.Table != unix.RT_TABLE_MAIN && everyPacket(r) {
				out[r.Table] = true
			}
		}
	}
	return out, nil
}

// rulePriority undoes the library's use of -1 for the kernel's 0, which it does not send.
func rulePriority(r netlink.Rule) int { return max(r.Priority, 0) }

func everyPacket(r netlink.Rule) bool {
	unmarked := r.Mark == 0 || r.Invert
	return unmarked && r.Src == nil && r.Dst == nil && r.IifName == "" && r.OifName == "" && r.UIDRange == nil &&
		r.Dport == nil && r.Sport == nil && r.IPProto == 0 && r.Tos == 0
}

// hop is one way that a route sends packets.
type hop struct {
	LinkIndex int
	Gw        net.IP
	Via       netlink.Destination
}

func hops(r netlink.Route) []hop {
	if len(r.MultiPath) == 0 {
		return []hop{{r.LinkIndex, r.Gw, r.Via}}
	}
	out := make([]hop, 0, len(r.MultiPath))
	for _, nh := range r.MultiPath {
		out = append(out, hop{nh.LinkIndex, nh.Gw, nh.Via})
	}
	return out
}

func destination(r netlink.Route) netip.Prefix {
	if r.Dst != nil {
		if p, ok := netipx.FromStdIPNet(r.Dst); ok {
			return p
		}
	}
	if r.Family == netlink.FAMILY_V6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

func gateway(h hop) netip.Addr {
	gw := h.Gw
	if via, ok := h.Via.(*netlink.Via); ok && gw == nil {
		gw = via.Addr
	}
	a, ok := netipx.FromStdIP(gw)
	if !ok || a.IsUnspecified() {
		return netip.Addr{}
	}
	return a
}

// connected reports that a route's hosts are neighbours: the kernel made it from an address, or it names a
// link, but no gateway, on which hosts are asked for by ARP or neighbour discovery. A route into another
// VPN's TUN or WireGuard link is not connected.
func connected(r netlink.Route, h hop, link *netlink.LinkAttrs) bool {
	if r.Type != unix.RTN_UNICAST || gateway(h).IsValid() {
		return false
	}
	if r.Protocol == unix.RTPROT_KERNEL {
		return true
	}
	return link != nil && link.RawFlags&(unix.IFF_POINTOPOINT|unix.IFF_NOARP) == 0
}

// dump repeats a netlink dump that was interrupted by a change.
func dump[T any](list func() ([]T, error)) ([]T, error) {
	var out []T
	var err error
	for range dumpTries {
		if out, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return out, err
		}
	}
	return out, err
}
