package connection

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"

	"go4.org/netipx"

	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/routable"
	"kubevpn/pkg/host/route"
)

// maxMapped limits the parts of networks that are mapped: each packet is compared with them.
const maxMapped = 32

// mappedTo returns the networks in which mapped networks get a place, in this order: benchmarking (RFC 2544), shared
// (RFC 6598), private (RFC 1918) and unique local (RFC 4193) addresses.
func mappedTo() []netip.Prefix {
	var out []netip.Prefix
	for _, p := range []string{"198.18.0.0/15", "100.64.0.0/10", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16",
		"fd6b:7670::/32"} {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

// appliedMappings holds the mappings that are in use.
type appliedMappings struct {
	applied atomic.Pointer[packet.Mappings] // nil: none
}

func (m *appliedMappings) now() packet.Mappings {
	if p := m.applied.Load(); p != nil {
		return *p
	}
	return nil
}

// isForeign reports whether a link is of a kubevpn other than the one that has the own links. macOS names links itself:
// none is.
func isForeign(link string, own []string) bool {
	return strings.HasPrefix(link, "kubevpn") && !slices.Contains(own, link)
}

// maps reports whether networks that overlap local ones are mapped. In a pod of the cluster, both are the same.
func (p *planner) maps() bool { return !p.NoMap && !p.InPod }

// mapOverlaps maps what overlaps local networks, and what the user maps. Mappings in use stay: programs know their
// addresses. What finds no place stays in out.Overlaps.
//
//	cluster 10.0.0.0/8, office 10.0.3.0/24 ─▶ 10.0.3.0/24 ⇄ 198.18.0.0/24; the rest of 10.0.0.0/8 as it is
func (p *planner) mapOverlaps() error {
	if !p.maps() {
		return nil
	}
	routes := routable.Of(p.out.Routes)
	var done netipx.IPSetBuilder
	for _, m := range slices.Concat(p.Mapped, p.Map) {
		if routable.Set(&done).OverlapsPrefix(m.Cluster) || !routes.OverlapsPrefix(m.Cluster) {
			continue
		}
		done.AddPrefix(m.Cluster)
		p.out.Mappings = append(p.out.Mappings, m)
	}
	parts := p.overlapping(routable.Set(&done))
	if len(parts) > 0 {
		free, err := p.free()
		if err != nil {
			return err
		}
		for _, part := range parts {
			if m, left, ok := place(part, free); ok && len(p.out.Mappings) < maxMapped {
				free = left
				p.out.Mappings = append(p.out.Mappings, m)
				done.AddPrefix(part)
			}
		}
	}
	mapped := routable.Set(&done)
	p.out.Overlaps = slices.DeleteFunc(p.out.Overlaps, func(o route.Overlap) bool {
		if mapped.ContainsPrefix(narrower(o.Prefix, o.Other)) {
			return true
		}
		_, isHost := p.out.Hosts[o.Prefix.Addr()]
		if isHost = isHost && o.Prefix.IsSingleIP(); isHost {
			p.out.Hosts[o.Prefix.Addr()], p.out.Withheld[o.Prefix.Addr()] = o.String(), true
			p.out.Routes = slices.DeleteFunc(p.out.Routes, func(r netip.Prefix) bool { return r == o.Prefix })
		}
		return isHost
	})
	var locals []netip.Prefix
	for _, m := range p.out.Mappings {
		locals = append(locals, m.Local)
	}
	found, err := p.overlaps(locals) // of --map, or of a network that came later
	p.out.Overlaps = append(p.out.Overlaps, found...)
	return err
}

// overlapping returns what of the routes overlaps local networks and is not mapped yet, the widest first.
func (p *planner) overlapping(done *netipx.IPSet) []netip.Prefix {
	parts := func(of func(route.Overlap) netip.Prefix) []netip.Prefix {
		var b netipx.IPSetBuilder
		for _, o := range p.out.Overlaps {
			if p.Foreign == nil || !p.Foreign(o.Link) {
				b.AddPrefix(of(o))
			}
		}
		b.RemoveSet(done)
		return routable.Set(&b).Prefixes()
	}
	out := parts(func(o route.Overlap) netip.Prefix { return narrower(o.Prefix, o.Other) })
	// A part in the middle of a network leaves up to 128 routes beside it.
	if len(out) > maxMapped-len(p.out.Mappings) || len(p.out.Routes)+128*len(out) > routable.MaxRoutes {
		out = parts(func(o route.Overlap) netip.Prefix { return o.Prefix })
	}
	slices.SortStableFunc(out, func(a, b netip.Prefix) int { return a.Bits() - b.Bits() })
	return out
}

// free returns the addresses of mappedTo that nothing else uses, one set for each network.
func (p *planner) free() ([]*netipx.IPSet, error) {
	found, err := p.overlaps(mappedTo())
	if err != nil {
		return nil, err
	}
	var out []*netipx.IPSet
	for _, network := range mappedTo() {
		var b netipx.IPSetBuilder
		b.AddPrefix(network)
		for _, o := range found {
			b.RemovePrefix(o.Other)
		}
		for _, used := range slices.Concat(p.out.Routes, p.out.Cluster, p.Inner, p.Exclude, p.Taken) {
			b.RemovePrefix(used.Masked())
		}
		for _, m := range p.out.Mappings {
			b.RemovePrefix(m.Local)
		}
		for _, a := range slices.Concat(p.Path, p.Own, p.Hosts) {
			b.Remove(a.Unmap().WithZone(""))
		}
		out = append(out, routable.Set(&b))
	}
	return out, nil
}

// place finds a place for a network in the first set that has one, and returns the sets without it.
func place(network netip.Prefix, free []*netipx.IPSet) (m packet.Mapping, left []*netipx.IPSet, ok bool) {
	left = slices.Clone(free)
	for i, set := range free {
		if first := set.Ranges(); len(first) == 0 || first[0].From().Is4() != network.Addr().Is4() {
			continue
		}
		if local, rest, ok := set.RemoveFreePrefix(uint8(network.Bits())); ok {
			left[i] = rest
			return packet.Mapping{Cluster: network, Local: local}, left, true
		}
	}
	return packet.Mapping{}, free, false
}

// local returns prefixes of the cluster as programs of this machine know them.
func (p *planned) local(prefixes []netip.Prefix) []netip.Prefix {
	if len(p.Mappings) == 0 {
		return prefixes
	}
	var b netipx.IPSetBuilder
	for _, r := range prefixes {
		b.AddPrefix(r)
	}
	all := routable.Set(&b)
	for _, m := range p.Mappings {
		b.RemovePrefix(m.Cluster)
		if all.OverlapsPrefix(m.Cluster) {
			b.AddPrefix(m.Local)
		}
	}
	return routable.Set(&b).Prefixes()
}

// mappedTexts describes mappings that were not there before, for people.
func (p *planned) mappedTexts(before packet.Mappings) (out []string) {
	for _, m := range p.Mappings {
		if !slices.Contains(before, m) {
			out = append(out, fmt.Sprintf("programs on this machine reach %v of the cluster at %v: something else "+
				"here has those addresses; names resolve to the mapped ones", m.Cluster, m.Local))
		}
	}
	return out
}
