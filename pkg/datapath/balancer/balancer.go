package balancer

import (
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
)

// Verdict is the decision for a flow to an address.
type Verdict uint8

const (
	// NotService means that the address is not a known ClusterIP. The caller dials it directly.
	NotService Verdict = iota
	// Chosen means that the Pick has an endpoint.
	Chosen
	// Refused means that kube-proxy would reject the flow (RST, ICMP port unreachable).
	Refused
	// Dropped means that kube-proxy would drop the packets without a reply.
	Dropped
)

var verdictNames = [...]string{NotService: "not a service", Chosen: "chosen", Refused: "refused", Dropped: "dropped"}

func (v Verdict) String() string { return verdictNames[v] }

// Balancer holds the Services. Its methods are safe for concurrent use.
type Balancer struct {
	index atomic.Pointer[index]

	mu       sync.Mutex // one writer at a time
	at       locality
	services map[Name]*Service
}

// New returns a Balancer without Services for the node of that name. If the name is empty, no endpoint is local.
func New(node string) *Balancer {
	b := &Balancer{at: locality{node: node}, services: make(map[Name]*Service)}
	b.index.Store(&index{ports: map[key]*vip{}, addrs: map[netip.Addr]Name{}})
	return b
}

// SetZone sets the zone of the node (topology.kubernetes.io/zone). Without a zone the Balancer ignores zone hints.
func (b *Balancer) SetZone(zone string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.at.zone == zone {
		return
	}
	b.at.zone = zone
	x := b.index.Load()
	for name, s := range b.services {
		for _, k := range keys(s) {
			if v := x.ports[k.key]; v != nil && v.owner == name {
				v.update(s, k.port, k.addr.Addr(), b.at)
			}
		}
	}
}

// Apply removes and then sets Services. Other Services do not change. After it returns, every new Pick uses the new
// state. The Balancer retains set; the caller must not change it.
func (b *Balancer) Apply(set []Service, remove []Name) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := edit{index: b.index.Load()}
	for _, name := range remove {
		e.replace(b.services[name], nil, b.at)
		delete(b.services, name)
	}
	for i := range set {
		s := &set[i]
		e.replace(b.services[s.Name], s, b.at)
		b.services[s.Name] = s
	}
	if e.copied {
		b.index.Store(e.index)
	}
	for _, v := range e.gone {
		v.view.Store(&view{empty: Refused, gone: true})
	}
}

// Pick selects an endpoint for a new flow of client to dst. With the verdict Chosen the caller must Release the
// Pick when the flow has ended. With any other verdict the Pick is empty.
func (b *Balancer) Pick(protocol Protocol, dst netip.AddrPort, client string, s Scheduler) (Pick, Verdict) {
	x := b.index.Load()
	v := x.ports[key{dst, protocol}]
	if v == nil {
		if _, ok := x.addrs[dst.Addr()]; ok {
			return Pick{}, Refused
		}
		return Pick{}, NotService
	}
	w := v.view.Load()
	if len(w.usable) == 0 {
		return Pick{}, w.empty
	}
	start := s.first(v, w.usable, client)
	if w.affinity > 0 {
		start = v.affinity.endpointOf(client, w, start)
	}
	p := Pick{vip: v, view: w, seen: w, client: client, start: start, current: w.usable[start]}
	p.current.active.Add(1)
	return p, Chosen
}

// Service returns the name of the Service with the ClusterIP addr.
func (b *Balancer) Service(addr netip.Addr) (Name, bool) {
	name, ok := b.index.Load().addrs[addr]
	return name, ok
}

// Len returns the number of Services.
func (b *Balancer) Len() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.services)
}

// edit changes an index. It copies the index before the first change.
type edit struct {
	index  *index
	copied bool
	gone   []*vip
}

func (e *edit) own() *index {
	if !e.copied {
		e.index, e.copied = e.index.clone(), true
	}
	return e.index
}

// replace removes the ports of old and adds those of s. Either may be nil. When a ClusterIP moves from one Service
// to another, the update of the new owner may arrive first. So the last Service that sets an entry owns it, and
// only the owner removes it.
func (e *edit) replace(old, s *Service, at locality) {
	kept := make(map[key]bool)
	if s != nil {
		for _, addr := range s.ClusterIPs {
			if e.index.addrs[addr] != s.Name {
				e.own().addrs[addr] = s.Name
			}
		}
		for _, k := range keys(s) {
			kept[k.key] = true
			v := e.index.ports[k.key]
			if v == nil {
				v = &vip{backends: make(map[netip.AddrPort]*backend)}
				e.own().ports[k.key] = v
			}
			v.owner = s.Name
			v.update(s, k.port, k.addr.Addr(), at)
		}
	}
	if old == nil {
		return
	}
	for _, k := range keys(old) {
		if v := e.index.ports[k.key]; v != nil && v.owner == old.Name && !kept[k.key] {
			delete(e.own().ports, k.key)
			e.gone = append(e.gone, v)
		}
	}
	for _, addr := range old.ClusterIPs {
		if e.index.addrs[addr] == old.Name && (s == nil || !slices.Contains(s.ClusterIPs, addr)) {
			delete(e.own().addrs, addr)
		}
	}
}

type portKey struct {
	key
	port *Port
}

// keys returns the keys of s in the index: one per ClusterIP and port that is TCP or UDP.
func keys(s *Service) []portKey {
	ks := make([]portKey, 0, len(s.ClusterIPs)*len(s.Ports))
	for _, addr := range s.ClusterIPs {
		for i := range s.Ports {
			p := &s.Ports[i]
			if p.Protocol == TCP || p.Protocol == UDP {
				ks = append(ks, portKey{key{netip.AddrPortFrom(addr, p.Port), p.Protocol}, p})
			}
		}
	}
	return ks
}
