package route

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"
)

// awaitIPv6 waits until the kernel accepts packets for the link's IPv6 addresses. The kernel completes an address that
// was added while the link was down asynchronously.
func awaitIPv6(h *netlink.Handle, addrs []netip.Prefix) error {
	deadline := time.Now().Add(ipv6Timeout)
	for _, p := range addrs {
		if !p.Addr().Is6() {
			continue
		}
		for {
			late := time.Now().After(deadline) // before it looks, in case this process did not run for a while
			got, err := h.RouteGet(p.Addr().AsSlice())
			if err == nil && len(got) > 0 && got[0].Type == unix.RTN_LOCAL {
				break
			}
			if late {
				return fmt.Errorf("address %s was set and is not in use after %s (%v, %v)", p, ipv6Timeout, got, err)
			}
			time.Sleep(time.Millisecond)
		}
	}
	return nil
}

// verify reads the link back and returns an error that names what is missing.
func verify(h *netlink.Handle, l Link) error {
	link, err := h.LinkByName(l.Name)
	if err != nil {
		return fmt.Errorf("reading it back: %w", err)
	}
	addrs, err := linkAddrs(h, link)
	if err != nil {
		return err
	}
	routes, err := linkRoutes(h, link)
	if err != nil {
		return err
	}
	var missing []string
	if a := link.Attrs(); a.MTU != l.MTU || a.RawFlags&unix.IFF_UP == 0 {
		missing = append(missing, fmt.Sprintf("up with MTU %d (it is %s, MTU %d)", l.MTU, a.Flags, a.MTU))
	}
	missing = append(missing, lacking(l, addrs, routes)...)
	if len(missing) > 0 {
		return fmt.Errorf("was set and read back without %s", strings.Join(missing, ", "))
	}
	return nil
}

// warnings asks the kernel for the route to an address of each prefix. It returns a warning for each prefix whose
// packets do not go into one of the Router's links: another program's ip rule precedes the main table.
func (r *Router) warnings(h *netlink.Handle, cfg Config) []string {
	ours := map[int]bool{}
	for _, m := range r.links {
		ours[m.index] = true
	}
	var warnings []string
	left := probes
	for _, l := range cfg.Links {
		for _, p := range r.links[l.Name].routes {
			addr, ok := probeAddr(p, l.Addrs)
			if !ok {
				continue
			}
			if left--; left < 0 {
				break
			}
			got, err := h.RouteGet(addr.AsSlice())
			if err == nil && len(got) > 0 && ours[got[0].LinkIndex] {
				continue
			}
			where := "nowhere"
			if err != nil {
				where = err.Error()
			} else if len(got) > 0 {
				if link, err := h.LinkByIndex(got[0].LinkIndex); err == nil {
					where = link.Attrs().Name
				}
			}
			warnings = append(warnings,
				fmt.Sprintf("%s is routed into %s, but packets for %s go to %s: another program's ip rule or route "+
					"comes first", p, l.Name, addr, where))
		}
	}
	return warnings
}

// conflictingRoute describes the route that kept the kernel from adding p.
func conflictingRoute(h *netlink.Handle, p netip.Prefix) string {
	routes, err := h.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Dst: netipx.PrefixIPNet(p)},
		netlink.RT_FILTER_DST)
	if err == nil {
		for _, r := range routes {
			if link, err := h.LinkByIndex(r.LinkIndex); err == nil {
				return link.Attrs().Name + " already has this route"
			}
		}
	}
	return "another route for it exists"
}

func linkAddrs(h *netlink.Handle, link netlink.Link) ([]netip.Prefix, error) {
	list, err := dump(func() ([]netlink.Addr, error) { return h.AddrList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("listing its addresses: %w", err)
	}
	out := make([]netip.Prefix, 0, len(list))
	for _, a := range list {
		if ip, ok := netipx.FromStdIP(a.IP); ok {
			ones, _ := a.Mask.Size()
			out = append(out, netip.PrefixFrom(ip, ones))
		}
	}
	return out, nil
}

func linkRoutes(h *netlink.Handle, link netlink.Link) ([]netip.Prefix, error) {
	list, err := dump(func() ([]netlink.Route, error) { return h.RouteList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("listing its routes: %w", err)
	}
	out := make([]netip.Prefix, 0, len(list))
	for _, r := range list {
		if r.Protocol == unix.RTPROT_STATIC {
			out = append(out, destination(r))
		}
	}
	return out, nil
}
