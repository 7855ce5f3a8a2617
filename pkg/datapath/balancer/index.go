package balancer

import (
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"
)

// index maps addresses to virtual IPs. It is immutable once published.
type index struct {
	ports map[key]*vip
	addrs map[netip.Addr]Name // the Service of each ClusterIP, to distinguish unknown ports from unknown addresses
}

// key identifies a port of a virtual IP in the index.
type key struct {
	addr     netip.AddrPort
	protocol Protocol
}

func (x *index) clone() *index { return &index{ports: maps.Clone(x.ports), addrs: maps.Clone(x.addrs)} }

// vip is one port of one virtual IP. It exists as long as the port, so that turn, affinity and counts survive
// changes of the endpoints.
type vip struct {
	view     atomic.Pointer[view]
	turn     atomic.Uint64
	affinity affinity

	// Guarded by Balancer.mu:
	owner    Name
	backends map[netip.AddrPort]*backend
}

// view is an immutable snapshot of a vip's endpoints.
type view struct {
	usable   []*backend            // sorted by address
	serving  map[*backend]struct{} // endpoints that existing flows may keep; nil if equal to usable
	empty    Verdict               // the verdict if usable is empty
	affinity time.Duration
	gone     bool // the Service, or this port of it, was deleted
}

func (w *view) isServing(b *backend) bool {
	if w.serving != nil {
		_, ok := w.serving[b]
		return ok
	}
	return slices.Contains(w.usable, b)
}

// backend is one endpoint of one vip. It keeps its identity as long as the endpoint exists or has flows.
type backend struct {
	addr   netip.AddrPort
	hash   uint64
	active atomic.Int64 // flows, including those that are being dialed
}

// update computes v's view of a Service's port.
func (v *vip) update(s *Service, p *Port, addr netip.Addr, at locality) {
	all := family(p.Endpoints, addr, at)
	chosen, empty := usable(all, s.LocalOnly, at)
	known := make(map[netip.AddrPort]*backend, len(all))
	backendOf := func(e *Endpoint) *backend {
		b := v.backends[e.Addr]
		if b == nil {
			b = &backend{addr: e.Addr, hash: hashString(e.Addr.String())}
			v.backends[e.Addr] = b
		}
		known[e.Addr] = b
		return b
	}
	w := &view{empty: empty, affinity: s.Affinity, usable: make([]*backend, 0, len(chosen))}
	for i := range chosen {
		w.usable = append(w.usable, backendOf(&chosen[i]))
	}
	serving := filter(all, func(e *Endpoint) bool { return e.Serving })
	if len(serving) != len(chosen) || slices.ContainsFunc(chosen, func(e Endpoint) bool { return !e.Serving }) {
		w.serving = make(map[*backend]struct{}, len(serving))
		for i := range serving {
			w.serving[backendOf(&serving[i])] = struct{}{}
		}
	}
	for addr, b := range v.backends {
		if known[addr] == nil && b.active.Load() == 0 {
			delete(v.backends, addr)
		}
	}
	v.view.Store(w)
	v.affinity.retain(w)
}
