package balancer

import (
	"net/netip"
	"sync"
	"sync/atomic"
)

// Verdict is what becomes of a flow to some address.
type Verdict uint8

const (
	// NotService: the address is no ClusterIP that we know; it is to be dialled as it is.
	NotService Verdict = iota
	// Chosen: there is a Pick.
	Chosen
	// Refused: kube-proxy would reject the flow (RST, ICMP port unreachable).
	Refused
	// Dropped: kube-proxy would drop the flow's packets: silence.
	Dropped
)

var verdictNames = [...]string{NotService: "not a service", Chosen: "chosen", Refused: "refused", Dropped: "dropped"}

func (v Verdict) String() string { return verdictNames[v] }

// Balancer holds the Services. Its methods may be called from any goroutine.
type Balancer struct {
	index atomic.Pointer[index]

	mu       sync.Mutex // one writer at a time
	at       place
	services map[Name]*Service
}

// New returns a Balancer without Services that runs on the node of that name. With an empty name no endpoint
// is local.
func New(node string) *Balancer {
	b := &Balancer{at: place{node: node}, services: make(map[Name]*Service)}
	b.index.Store(&index{v4: map[uint64]*vip{}, v6: map[key6]*vip{}, addrs: map[netip.Addr]Name{}})
	return b
}

// SetZone says in which zone (topology.kubernetes.io/zone) the node is. Until it is called, and with "", zone
// hints are not followed.
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
			if v := x.find(k.key); v != nil && v.owner == name {
				v.update(s, k.port, k.addr.Addr(), b.at)
			}
		}
	}
}

// Apply removes and then sets Services. When it returns, no new Pick sees what was before. Services that are
// not named stay as they are. The balancer keeps what is in set: it must not change afterwards.
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

// Pick chooses an endpoint for a new flow of client to dst. With verdict Chosen the caller owns the Pick and
// must Release it when the flow has ended; with any other the Pick is empty.
func (b *Balancer) Pick(protocol Protocol, dst netip.AddrPort, client string, s Scheduler) (Pick, Verdict) {
	x := b.index.Load()
	v := x.find(key{dst, protocol})
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
		start = v.affinity.claim(client, w, start)
	}
	p := Pick{vip: v, view: w, seen: w, client: client, start: start, current: w.usable[start]}
	p.current.active.Add(1)
	return p, Chosen
}

// Service returns whose ClusterIP addr is.
func (b *Balancer) Service(addr netip.Addr) (Name, bool) {
	name, ok := b.index.Load().addrs[addr]
	return name, ok
}

// edit is an index on its way from one state to the next.
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

// replace takes the ports of old out and puts those of s in. Either may be nil. A ClusterIP that was freed and
// given to another Service at once may be seen with the new owner first: an entry is the last one's who set it,
// and only its owner removes it.
func (e *edit) replace(old, s *Service, at place) {
	kept := make(map[key]bool)
	if s != nil {
		for _, addr := range s.ClusterIPs {
			if e.index.addrs[addr] != s.Name {
				e.own().addrs[addr] = s.Name
			}
		}
		for _, k := range keys(s) {
			kept[k.key] = true
			v := e.index.find(k.key)
			if v == nil {
				v = &vip{backends: make(map[netip.AddrPort]*backend)}
				e.own().put(k.key, v)
			}
			v.owner = s.Name
			v.update(s, k.port, k.addr.Addr(), at)
		}
	}
	if old == nil {
		return
	}
	for _, k := range keys(old) {
		if v := e.index.find(k.key); v != nil && v.owner == old.Name && !kept[k.key] {
			e.own().delete(k.key)
			e.gone = append(e.gone, v)
		}
	}
	for _, addr := range old.ClusterIPs {
		if e.index.addrs[addr] == old.Name && (s == nil || !contains(s.ClusterIPs, addr)) {
			delete(e.own().addrs, addr)
		}
	}
}

func contains(addrs []netip.Addr, addr netip.Addr) bool {
	for _, a := range addrs {
		if a == addr {
			return true
		}
	}
	return false
}

type portKey struct {
	key
	port *Port
}

// keys returns where s is in the index: one entry per ClusterIP and port that is TCP or UDP.
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
