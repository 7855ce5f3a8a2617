package router

import (
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"math"
	"net/netip"
	"slices"
	"time"

	"kubevpn/internal/api"
)

// quarantine is how long the manager keeps an address for its last client, because others may still send to it.
const quarantine = 10 * time.Minute

// innerPools returns the networks for inner addresses, by family, the preferred ones first. For IPv4 these are the
// benchmark networks, which nothing routes, then parts of the shared address space, and of a private network; for IPv6
// unique local networks with random global identifiers.
func innerPools() [2][]netip.Prefix {
	return [2][]netip.Prefix{
		{
			netip.MustParsePrefix("198.19.0.0/16"), netip.MustParsePrefix("198.18.0.0/16"),
			netip.MustParsePrefix("100.96.0.0/16"), netip.MustParsePrefix("100.119.0.0/16"),
			netip.MustParsePrefix("10.219.0.0/16"),
		},
		{netip.MustParsePrefix("fd4e:19c6:8b7a::/48"), netip.MustParsePrefix("fd93:a5d0:2e61::/48")},
	}
}

// The first /24 of an IPv4 pool and the first /112 of an IPv6 pool are never leased. They contain the gateway's
// address, which is also the source of the manager's ICMP errors, and the address of each laptop's resolver.
const (
	reserved4, reserved6 = 1 << 8, 1 << 16
	gatewayHost          = 1
	resolverHost         = 53
)

// leases records which session holds which inner address. The router's mutex guards it.
//
//	free ──▶ held by a session, its transport's grace included ──▶ kept for the same client ──▶ free
//	                ▲        │                                           │
//	                │        └── the same client's newer session takes it, when the older one is cut off
//	                └────────────────────────────────────────────────────┘
//
// An address never has two holders: a session that takes it over replaces its holder.
type leases struct {
	now   func() time.Time
	pools [2][]netip.Prefix
	taken map[netip.Addr]holding
}

type holding struct {
	pool   netip.Prefix
	client string
	holder *Peer     // nil: the address is kept for client
	until  time.Time // without a holder: the end of the quarantine
}

// leaseRequest describes the lease that a session asks for.
type leaseRequest struct {
	client string
	keep   []netip.Addr   // of its previous lease
	avoid  []netip.Prefix // networks of the laptop and of the cluster
}

func newLeases() *leases {
	return &leases{now: time.Now, pools: innerPools(), taken: make(map[netip.Addr]holding)}
}

// take leases p an address of each family, if one is available, and ends the sessions from which it takes an address
// over.
func (l *leases) take(p *Peer, w leaseRequest) api.Lease {
	now := l.now()
	maps.DeleteFunc(l.taken, func(_ netip.Addr, h holding) bool { return h.holder == nil && !now.Before(h.until) })
	l.endAvoided(p, w, now)
	var lease api.Lease
	for _, pools := range l.pools {
		pools = slices.DeleteFunc(slices.Clone(pools), func(pool netip.Prefix) bool { return overlaps(pool, w.avoid) })
		addr, pool, ok := l.choose(pools, p, w)
		if !ok {
			continue
		}
		if before := l.taken[addr].holder; before != nil && before != p {
			before.removeAddress(addr)
			before.end() // if its laptop comes back, it opens a new session and gets another address
		}
		l.taken[addr] = holding{pool: pool, client: w.client, holder: p}
		lease.Addrs = append(lease.Addrs, addr)
		lease.Networks = append(lease.Networks, pool)
		if addr.Is4() {
			lease.Resolver = host(pool, resolverHost)
		}
	}
	p.setAddresses(lease.Addrs)
	return lease
}

// endAvoided ends those sessions of p's client that are cut off and have an address in a network that the client avoids
// now: it does not come back to them, and other laptops need no route to them.
func (l *leases) endAvoided(p *Peer, w leaseRequest, now time.Time) {
	for addr, h := range l.taken {
		if h.client != w.client || h.holder == nil || h.holder == p || h.holder.connected() ||
			!overlaps(h.pool, w.avoid) {
			continue
		}
		h.holder.removeAddress(addr)
		h.holder.end()
		h.holder, h.until = nil, now.Add(quarantine)
		l.taken[addr] = h
	}
}

// choose returns an address. It prefers one that the client had. Otherwise it starts at a hash of the client's identity
// and takes the first free address, so a client usually gets the same one. The identity is secret and cannot be
// computed from the address, which others see.
func (l *leases) choose(pools []netip.Prefix, p *Peer, w leaseRequest) (netip.Addr, netip.Prefix, bool) {
	for _, addr := range w.keep {
		for _, pool := range pools {
			if leasable(pool, addr) && l.available(addr, p, w.client) {
				return addr, pool, true
			}
		}
	}
	for _, pool := range pools {
		first, last := hosts(pool)
		sum := sha256.Sum256([]byte(w.client))
		n := first + binary.BigEndian.Uint64(sum[:])%(last-first+1)
		// Of len(taken)+1 addresses at least one is free, unless the pool is smaller.
		for range min(uint64(len(l.taken)), last-first) + 1 {
			if addr := host(pool, n); l.available(addr, p, w.client) {
				return addr, pool, true
			}
			if n++; n > last || n < first {
				n = first
			}
		}
	}
	return netip.Addr{}, netip.Prefix{}, false
}

// available reports whether p, a session of client, may lease addr.
func (l *leases) available(addr netip.Addr, p *Peer, client string) bool {
	h, taken := l.taken[addr]
	switch {
	case !taken || h.holder == p:
		return true
	case h.client != client:
		return false
	}
	return h.holder == nil || !h.holder.connected()
}

// release starts the quarantine of p's addresses.
func (l *leases) release(p *Peer) {
	for _, addr := range p.addresses() {
		h := l.taken[addr]
		h.holder, h.until = nil, l.now().Add(quarantine)
		l.taken[addr] = h
	}
	p.setAddresses(nil)
}

// networks returns the pools in which a session holds an address, sorted.
func (l *leases) networks() []netip.Prefix {
	var all []netip.Prefix
	for _, h := range l.taken {
		if h.holder != nil && !slices.Contains(all, h.pool) {
			all = append(all, h.pool)
		}
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	return all
}

// usedBeside reports whether a session of another client holds an address in a pool.
func (l *leases) usedBeside(client string, pool netip.Prefix) bool {
	for _, h := range l.taken {
		if h.holder != nil && h.pool == pool && h.client != client {
			return true
		}
	}
	return false
}

// overlaps reports whether one of others overlaps pool. It ignores networks that are larger than any real one, such as
// 0.0.0.0/1: they stand for a default route, and the pool's route is more specific.
func overlaps(pool netip.Prefix, others []netip.Prefix) bool {
	return slices.ContainsFunc(others, func(o netip.Prefix) bool {
		if o.Addr().Is4() && o.Bits() < 8 || o.Addr().Is6() && o.Bits() < 7 {
			return false
		}
		return o.Overlaps(pool)
	})
}

// hosts returns the numbers of the first and the last address in pool that may be leased.
func hosts(pool netip.Prefix) (first, last uint64) {
	if pool.Addr().Is4() {
		return reserved4, 1<<(32-pool.Bits()) - 2 // the last is the broadcast address
	}
	return reserved6, math.MaxUint64
}

// host returns the address in pool with the number n.
func host(pool netip.Prefix, n uint64) netip.Addr {
	if base := pool.Addr(); base.Is4() {
		b := base.As4()
		binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+uint32(n))
		return netip.AddrFrom4(b)
	}
	b := pool.Addr().As16()
	binary.BigEndian.PutUint64(b[8:], n)
	return netip.AddrFrom16(b)
}

// leasable reports whether addr is in pool and within the numbers of hosts.
func leasable(pool netip.Prefix, addr netip.Addr) bool {
	first, last := hosts(pool)
	return pool.Contains(addr) && !addr.Less(host(pool, first)) && !host(pool, last).Less(addr)
}
