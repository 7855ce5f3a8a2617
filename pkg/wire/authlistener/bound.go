package authlistener

import (
	"cmp"
	"math"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// Bound limits the conns that are in a phase of their lives, such as those that have not authenticated yet, by their
// number or by what they cost. Beyond a limit it evicts the conn with the largest product of age and cost, so the
// oldest if all cost the same; with MaxFrom, one of the address that has the most. A client that only holds conns open
// therefore does not keep others out. Its methods may be called concurrently.
type Bound struct {
	Max     int // in total
	MaxFrom int // from one address; 0: addresses make no difference

	mu   sync.Mutex
	used int
	held []*Held // the oldest first
}

// Held is a conn that counts in a Bound.
type Held struct {
	bound   *Bound
	conn    net.Conn
	from    netip.Addr // zero without MaxFrom
	since   time.Time
	cost    int // 0: not in bound.held
	evicted bool
}

// Enter counts conn, at a cost of 1, until Leave. Beyond the limits it closes an older conn, whose owner should return
// soon.
func (b *Bound) Enter(conn net.Conn) *Held {
	h := &Held{bound: b, conn: conn}
	if b.MaxFrom > 0 {
		h.from = remote(conn)
	}
	h.SetCost(1)
	return h
}

// SetCost changes what the conn costs. It counts again after a Leave. Beyond the limits this conn or another is closed.
func (h *Held) SetCost(cost int) {
	b := h.bound
	b.mu.Lock()
	defer b.mu.Unlock()
	if h.evicted {
		return
	}
	if h.cost == 0 {
		h.since = time.Now()
		b.held = append(b.held, h)
	}
	b.used += cost - h.cost
	h.cost = cost
	for old := b.victim(h.from); old != nil; old = b.victim(h.from) {
		b.remove(old)
		old.evicted = true
		old.conn.Close()
	}
}

// Leave ends the phase, and reports whether the conn was evicted and is closed. Later calls return the same.
func (h *Held) Leave() (evicted bool) {
	h.bound.mu.Lock()
	defer h.bound.mu.Unlock()
	h.bound.remove(h)
	return h.evicted
}

// ConnState is for a http.Server. Its conns count until Admit, or until they are closed or hijacked.
func (b *Bound) ConnState(conn net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		b.Enter(conn)
	case http.StateClosed, http.StateHijacked:
		b.leave(func(h *Held) bool { return h.conn == conn })
	}
}

// Admit ends the phase of the conn of a request.
func (b *Bound) Admit(r *http.Request) {
	b.leave(func(h *Held) bool { return h.conn.RemoteAddr().String() == r.RemoteAddr })
}

func (b *Bound) leave(is func(*Held) bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if i := slices.IndexFunc(b.held, is); i >= 0 {
		b.remove(b.held[i])
	}
}

// Len returns the number of conns that count.
func (b *Bound) Len() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.held)
}

// remove and victim are called with mu held.
func (b *Bound) remove(h *Held) {
	if h.cost > 0 {
		b.held = slices.DeleteFunc(b.held, func(other *Held) bool { return other == h })
		b.used -= h.cost
		h.cost = 0
	}
}

// victim returns the conn to evict after one from an address has come or grown, or nil if there is room.
func (b *Bound) victim(from netip.Addr) *Held {
	if b.used <= b.Max && b.MaxFrom == 0 {
		return nil
	}
	cost := make(map[netip.Addr]int)
	for _, h := range b.held {
		cost[h.from] += h.cost
	}
	switch {
	case b.MaxFrom > 0 && cost[from] > b.MaxFrom:
		cost[from] = math.MaxInt
	case b.used <= b.Max:
		return nil
	}
	now := time.Now()
	score := func(h *Held) float64 { return now.Sub(h.since).Seconds() * float64(h.cost) }
	return slices.MaxFunc(b.held, func(x, y *Held) int {
		return cmp.Or(cmp.Compare(cost[x.from], cost[y.from]), cmp.Compare(score(x), score(y)))
	})
}

// remote returns the address of conn's other end, or the zero Addr if it is no TCP address.
func remote(conn net.Conn) netip.Addr {
	if addr, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
		return addr.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}
