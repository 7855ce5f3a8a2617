package route

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"
)

// dumpTries is how often dump repeats a listing that a change of the kernel's tables interrupted.
const dumpTries = 5

// links is the machine's links by index. It returns nil for a link that has gone meanwhile.
type links map[int]*netlink.LinkAttrs

func (l links) name(index int) string {
	if a := l[index]; a != nil {
		return a.Name
	}
	return ""
}

// readLocal reads the addresses and routes of all links but those named in ignoreLinks.
func readLocal(ignoreLinks []string) (local, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return local{}, fmt.Errorf("opening a netlink socket: %w", err)
	}
	defer h.Close()
	list, err := dump(h.LinkList)
	if err != nil {
		return local{}, fmt.Errorf("listing links: %w", err)
	}
	byIndex := make(links, len(list))
	for _, l := range list {
		byIndex[l.Attrs().Index] = l.Attrs()
	}
	var out local
	if out.addrs, err = byIndex.readAddrs(h, ignoreLinks); err != nil {
		return local{}, err
	}
	if out.routes, err = byIndex.readRoutes(h, ignoreLinks); err != nil {
		return local{}, err
	}
	return out, nil
}

func (l links) readAddrs(h *netlink.Handle, ignoreLinks []string) ([]localAddr, error) {
	addrs, err := dump(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("listing addresses: %w", err)
	}
	var out []localAddr
	for _, a := range addrs {
		name := l.name(a.LinkIndex)
		if ip, ok := netipx.FromStdIP(a.IP); ok && !slices.Contains(ignoreLinks, name) {
			out = append(out, localAddr{ip, name})
		}
	}
	return out, nil
}

// allRoutes returns the routes of all tables.
func allRoutes(h *netlink.Handle) ([]netlink.Route, error) {
	routes, err := dump(func() ([]netlink.Route, error) {
		return h.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC},
			netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("listing routes: %w", err)
	}
	return routes, nil
}

func (l links) readRoutes(h *netlink.Handle, ignoreLinks []string) ([]localRoute, error) {
	early, err := earlyTables(h)
	if err != nil {
		return nil, err
	}
	routes, err := allRoutes(h)
	if err != nil {
		return nil, err
	}
	var out []localRoute
	for _, r := range routes {
		if r.Table != unix.RT_TABLE_MAIN && !early[r.Table] {
			continue
		}
		for _, hop := range hops(r) {
			name := l.name(hop.LinkIndex)
			if slices.Contains(ignoreLinks, name) {
				continue
			}
			out = append(out, localRoute{
				dst:       destination(r),
				link:      name,
				gateway:   gateway(hop),
				connected: connected(r, hop, l[hop.LinkIndex]),
				early:     early[r.Table],
			})
		}
	}
	return out, nil
}

// earlyTables returns the tables that the kernel looks up for every packet before the main table, such as Tailscale's
// 52 and wg-quick's 51820. It leaves out rules that match only some packets (by source, interface, user or port),
// because it cannot know which packets this laptop's programs send. It includes rules that exclude a mark: VPNs mark
// their own packets to keep them out of their tunnel, so such a rule matches everything else.
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

// rulePriority returns the kernel's priority of a rule. The library says -1 for 0, which the kernel does not send.
func rulePriority(r netlink.Rule) int { return max(r.Priority, 0) }

func everyPacket(r netlink.Rule) bool {
	unmarked := r.Mark == 0 || r.Invert
	return unmarked && r.Src == nil && r.Dst == nil && r.IifName == "" && r.OifName == "" && r.UIDRange == nil &&
		r.Dport == nil && r.Sport == nil && r.IPProto == 0 && r.Tos == 0
}

// hops returns the next hops of a route.
func hops(r netlink.Route) []*netlink.NexthopInfo {
	if len(r.MultiPath) > 0 {
		return r.MultiPath
	}
	return []*netlink.NexthopInfo{{LinkIndex: r.LinkIndex, Gw: r.Gw, Via: r.Via}}
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

func gateway(h *netlink.NexthopInfo) netip.Addr {
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

// connected reports whether the hosts of a route are neighbours: either the kernel made the route from an address, or
// the route names a link without a gateway, and hosts on that link answer ARP or neighbour discovery. A route into
// another VPN's TUN or WireGuard link is not connected.
func connected(r netlink.Route, h *netlink.NexthopInfo, link *netlink.LinkAttrs) bool {
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
