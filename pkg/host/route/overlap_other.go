//go:build !linux

package route

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
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
			p, err := netip.ParsePrefix(a.String())
			if err != nil {
				continue
			}
			l.addrs = append(l.addrs, localAddr{p.Addr(), link.Name})
			l.routes = append(l.routes, localRoute{dst: p.Masked(), link: link.Name, connected: !p.IsSingleIP()})
		}
	}
	return l, nil
}
