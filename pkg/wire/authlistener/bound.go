package authlistener

import (
	"net"
	"net/netip"
	"slices"
	"sync"
)

// Bound limits the conns that are in a phase of their lives, such as those that have not authenticated yet. A new conn
// beyond a limit evicts the oldest of the address that has the most. So a client that only holds conns open does not
// keep others out. Its methods may be called concurrently.
type Bound struct {
	Max     int            // in total
	MaxFrom int            // from one address; 0: no limit of its own
	Evicted func(net.Conn) // called for each evicted conn, before it is closed; may be nil

	mu   sync.Mutex
	held []*Held // the oldest first
}

// Held is a conn that counts in a Bound.
type Held struct {
	bound   *Bound
	conn    net.Conn
	from    netip.Addr
	evicted bool          // closed for a newer conn; guarded by bound.mu
	left    chan struct{} // closed by Leave
}

// Enter counts conn until Leave. Beyond the limits it closes an older conn first, and waits for its Leave: the owner of
// a conn must call Leave soon after the conn is closed.
func (b *Bound) Enter(conn net.Conn) *Held {
	h := &Held{bound: b, conn: conn, from: remote(conn), left: make(chan struct{})}
	for {
		b.mu.Lock()
		old := b.victim(h.from)
		if old == nil {
			b.held = append(b.held, h)
			b.mu.Unlock()
			return h
		}
		first := !old.evicted
		old.evicted = true
		b.mu.Unlock()
		if first && b.Evicted != nil {
			b.Evicted(old.conn)
		}
		old.conn.Close()
		<-old.left
	}
}

// Leave ends the phase, and reports whether the conn was evicted and is closed. Later calls return the same.
func (h *Held) Leave() (evicted bool) {
	h.bound.mu.Lock()
	defer h.bound.mu.Unlock()
	if i := slices.Index(h.bound.held, h); i >= 0 {
		h.bound.held = slices.Delete(h.bound.held, i, i+1)
		close(h.left)
	}
	return h.evicted
}

// Len returns the number of conns that count.
func (b *Bound) Len() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.held)
}

// victim returns the conn to evict for a new one from an address, or nil if there is room: the oldest of that address,
// if the address has reached its limit, or else the oldest of the address with the most. Call with mu held.
func (b *Bound) victim(from netip.Addr) *Held {
	count := make(map[netip.Addr]int)
	most := from
	for _, h := range b.held {
		count[h.from]++
		if count[h.from] > count[most] {
			most = h.from
		}
	}
	switch {
	case b.MaxFrom > 0 && count[from] >= b.MaxFrom:
		most = from
	case len(b.held) < b.Max:
		return nil
	}
	return b.held[slices.IndexFunc(b.held, func(h *Held) bool { return h.from == most })]
}

// remote returns the address of conn's other end, or the zero Addr if it is no TCP address.
func remote(conn net.Conn) netip.Addr {
	if addr, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
		return addr.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}
