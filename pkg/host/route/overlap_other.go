//go:build !linux

package route

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"go4.org/netipx"
)

// readLocal reads the addresses and routes of all links but those named in ignoreLinks.
func readLocal(ignoreLinks []string) (l local, err error) {
	links, err := net.Interfaces()
	if err != nil {
		return local{}, fmt.Errorf("listing links: %w", err)
	}
	if l.routes, err = readRoutes(func(link string) bool { return slices.Contains(ignoreLinks, link) }); err != nil {
		return local{}, err
	}
	for _, link := range links {
		if slices.Contains(ignoreLinks, link.Name) {
			continue
		}
		addrs, err := link.Addrs()
		if err != nil {
			return local{}, fmt.Errorf("listing the addresses of %s: %w", link.Name, err)
		}
		for _, a := range addrs {
			n, ok := a.(*net.IPNet)
			if !ok {
				continue
			}
			ip, ok := netipx.FromStdIP(n.IP)
			if !ok {
				continue
			}
			ones, _ := n.Mask.Size()
			l.addrs = append(l.addrs, localAddr{ip, link.Name})
			l.routes = append(l.routes, localRoute{
				dst: netip.PrefixFrom(ip, ones).Masked(), link: link.Name, connected: ones < ip.BitLen(),
			})
		}
	}
	return l, nil
}
