package balancer

import (
	"sync"
	"time"
)

// affinity remembers which endpoint each client of one virtual IP's port was given.
type affinity struct {
	mu      sync.Mutex
	clients map[string]sticky
	sweepAt int // number of clients at which expired ones are looked for next
}

type sticky struct {
	backend *backend
	used    time.Time
}

// claim returns the index in w.usable of client's endpoint, and refreshes its time. A client without one, or
// whose one is void, gets first.
func (a *affinity) claim(client string, w *view, first int) int {
	now := time.Now()
	a.mu.Lock()
	defer a.mu.Unlock()
	if s, ok := a.clients[client]; ok && now.Sub(s.used) < w.affinity {
		if i := w.indexOf(s.backend); i >= 0 {
			first = i
		}
	}
	if a.clients == nil {
		a.clients = make(map[string]sticky)
	}
	a.clients[client] = sticky{w.usable[first], now}
	if len(a.clients) >= max(a.sweepAt, 64) {
		a.sweep(func(s sticky) bool { return now.Sub(s.used) < w.affinity })
		a.sweepAt = 2 * len(a.clients)
	}
	return first
}

// move gives client another endpoint, if it still has from: a candidate that refused must not attract the
// client's next flow.
func (a *affinity) move(client string, from, to *backend) {
	a.mu.Lock()
	defer a.mu.Unlock()
	s, ok := a.clients[client]
	if !ok || s.backend != from {
		return
	}
	if to == nil {
		delete(a.clients, client)
		return
	}
	a.clients[client] = sticky{to, s.used}
}

// retain forgets the clients of endpoints that are not usable in w, and everybody if w has no affinity.
func (a *affinity) retain(w *view) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.clients) == 0 {
		return
	}
	usable := make(map[*backend]struct{}, len(w.usable))
	for _, b := range w.usable {
		usable[b] = struct{}{}
	}
	a.sweep(func(s sticky) bool {
		_, ok := usable[s.backend]
		return ok && w.affinity > 0
	})
}

func (a *affinity) sweep(keep func(sticky) bool) {
	for client, s := range a.clients {
		if !keep(s) {
			delete(a.clients, client)
		}
	}
}
