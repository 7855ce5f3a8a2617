package balancer

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// affinity stores the endpoint of each client of one port of a virtual IP.
type affinity struct {
	mu      sync.Mutex
	clients map[string]sticky
	sweepAt int // number of clients that triggers the next removal of expired ones
}

type sticky struct {
	backend *backend
	used    time.Time
}

// endpointOf returns the index in w.usable of client's endpoint, and refreshes its time. It assigns first to a client
// without an endpoint, or with an expired or unusable one.
func (a *affinity) endpointOf(client string, w *view, first int) int {
	now := time.Now()
	a.mu.Lock()
	defer a.mu.Unlock()
	if s, ok := a.clients[client]; ok && now.Sub(s.used) < w.affinity {
		if i := slices.Index(w.usable, s.backend); i >= 0 {
			first = i
		}
	}
	if a.clients == nil {
		a.clients = make(map[string]sticky)
	}
	a.clients[client] = sticky{w.usable[first], now}
	if len(a.clients) >= max(a.sweepAt, 64) {
		maps.DeleteFunc(a.clients, func(_ string, s sticky) bool { return now.Sub(s.used) >= w.affinity })
		a.sweepAt = 2 * len(a.clients)
	}
	return first
}

// move replaces client's endpoint from by to, so that the client's next flow does not use a candidate that refused.
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

// retain removes the clients whose endpoints are not usable in w, and all clients if w has no affinity.
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
	maps.DeleteFunc(a.clients, func(_ string, s sticky) bool {
		_, ok := usable[s.backend]
		return !ok || w.affinity == 0
	})
}
