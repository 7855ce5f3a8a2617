package route

import (
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
)

// Flags of macOS' routes, from <net/route.h>.
const (
	ribGateway = 0x2
	ribHost    = 0x4
	ribCloned  = 0x20000   // RTF_WASCLONED: the entry of one neighbour
	ribScoped  = 0x1000000 // RTF_IFSCOPE: only for sockets that are bound to the link
)

// ribEntry is an entry of macOS' routing table.
type ribEntry struct {
	flags        int
	dst, gateway netip.Addr // gateway is invalid for an entry into a link
	mask         []byte     // nil: none
	link         string
	pointToPoint bool
}

// localRoute returns the route of an entry. ok is false if packets of programs do not follow it.
func (e ribEntry) localRoute() (r localRoute, ok bool) {
	if e.flags&(ribCloned|ribScoped) != 0 || !e.dst.IsValid() {
		return localRoute{}, false
	}
	length := 0
	switch {
	case e.flags&ribHost != 0:
		length = e.dst.BitLen()
	case e.mask == nil:
		if !e.dst.IsUnspecified() {
			return localRoute{}, false
		}
	default:
		for _, b := range e.mask {
			length += bits.OnesCount8(b)
		}
	}
	dst, err := e.dst.WithZone("").Prefix(length)
	if err != nil {
		return localRoute{}, false
	}
	r = localRoute{dst: dst, link: e.link}
	if e.flags&ribGateway != 0 {
		r.gateway = e.gateway
	}
	r.connected = !r.gateway.IsValid() && !dst.IsSingleIP() && !e.pointToPoint
	return r, true
}

// linkState is the state of a link, as the kernel has it.
type linkState struct {
	mtu    int
	up     bool
	addrs  []netip.Addr
	routes []netip.Prefix
}

// present returns the part of l that the kernel has.
func (s linkState) present(l Link) Link {
	l.Addrs = slices.DeleteFunc(slices.Clone(l.Addrs), func(p netip.Prefix) bool {
		return !slices.Contains(s.addrs, p.Addr())
	})
	l.Routes = slices.DeleteFunc(slices.Clone(l.Routes), func(p netip.Prefix) bool {
		return !slices.Contains(s.routes, p)
	})
	if s.mtu != l.MTU {
		l.MTU = 0
	}
	if !s.up {
		l.Name = "" // as for a new link
	}
	return l
}

// missing names the parts of l that the kernel lacks.
func (s linkState) missing(l Link) (out []string) {
	if s.mtu != l.MTU || !s.up {
		out = append(out, fmt.Sprintf("up with MTU %d (it has %d, up: %t)", l.MTU, s.mtu, s.up))
	}
	return append(out, lacking(l, s.present(l).Addrs, s.routes)...)
}
