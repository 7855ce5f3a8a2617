package route

import (
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// tunnelKinds are the kinds of links that VPNs make. The library says tuntap for what ip(8) calls tun.
var tunnelKinds = []string{"tuntap", "wireguard", "ppp", "ipip", "gre", "vti", "xfrm", "sit", "ip6tnl"}

// Tunnels returns the tunnels of this machine that are up and have routes, in any table. It needs no privilege.
func Tunnels() ([]Tunnel, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("opening a netlink socket: %w", err)
	}
	defer h.Close()
	list, err := dump(h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("listing links: %w", err)
	}
	routes, err := allRoutes(h)
	if err != nil {
		return nil, err
	}
	var out []Tunnel
	for _, l := range list {
		a := l.Attrs()
		tap, is := l.(*netlink.Tuntap)
		switch {
		case !slices.Contains(tunnelKinds, l.Type()), a.RawFlags&unix.IFF_UP == 0,
			is && tap.Mode == netlink.TUNTAP_MODE_TAP: // a virtual machine's
			continue
		}
		t := Tunnel{Link: a.Name, Kind: l.Type()}
		if is {
			t.Kind = "tun"
		}
		for _, r := range routes {
			multicast := r.Dst != nil && (r.Dst.IP.IsMulticast() || r.Dst.IP.IsLinkLocalUnicast())
			if r.Table != unix.RT_TABLE_LOCAL && r.Type == unix.RTN_UNICAST && !multicast &&
				slices.ContainsFunc(hops(r), func(h *netlink.NexthopInfo) bool { return h.LinkIndex == a.Index }) {
				t.Routes = append(t.Routes, destination(r))
			}
		}
		if len(t.Routes) > 0 {
			out = append(out, t)
		}
	}
	return out, nil
}
