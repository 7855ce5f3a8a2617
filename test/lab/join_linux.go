package lab

import (
	"fmt"
	"net/netip"
)

// Join connects two labs' routers, so that each lab's laptop reaches the nodes, the API server and the outside address
// of the other lab, but none of its pods and Services. A laptop can then use two clusters. The labs need different
// Config.Ranges. The connection ends when either lab ends. Joining labs that are already joined changes nothing.
func (l *Lab) Join(other *Lab) error {
	if l.config.Ranges == other.config.Ranges {
		return fmt.Errorf("labs %q and %q have the same address ranges: bring one of them up with --ranges 2",
			l.config.Name, other.config.Name)
	}
	here, err := l.open("router")
	if err != nil {
		return err
	}
	defer here.Close()
	there, err := other.open("router")
	if err != nil {
		return err
	}
	defer there.Close()
	// The link is named after the other end, as all links of the router are; at most 15 letters.
	hereLink, thereLink := "lab-"+fmt.Sprint(other.config.Ranges), "lab-"+fmt.Sprint(l.config.Ranges)
	if _, err := here.handle.LinkByName(hereLink); err == nil {
		return nil // joined before
	}
	if err := here.wire(hereLink, there, thereLink); err != nil {
		return err
	}
	ends := []netip.Prefix{netip.MustParsePrefix("192.0.2.1/30"), netip.MustParsePrefix("192.0.2.2/30")}
	ends6 := []netip.Prefix{netip.MustParsePrefix("2001:db8:ffff::1/64"), netip.MustParsePrefix("2001:db8:ffff::2/64")}
	for i := range min(len(l.config.Families()), len(other.config.Families())) {
		if i == 1 {
			ends = ends6
		}
		if err := here.address(hereLink, ends[0]); err != nil {
			return err
		}
		if err := there.address(thereLink, ends[1]); err != nil {
			return err
		}
		if err := here.routeTo(other.config.Families()[i], ends[1].Addr()); err != nil {
			return err
		}
		if err := there.routeTo(l.config.Families()[i], ends[0].Addr()); err != nil {
			return err
		}
	}
	return nil
}

// routeTo routes to another lab's nodes, laptop and outside address.
func (p *place) routeTo(f Family, via netip.Addr) error {
	for _, to := range []netip.Prefix{f.NodeNet, f.LaptopNet, netip.PrefixFrom(f.Outside, f.Outside.BitLen())} {
		if err := p.route(to, via); err != nil {
			return err
		}
	}
	return nil
}
