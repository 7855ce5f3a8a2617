package balancer

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// maxClients is the largest number of clients in an affinity: four times the sessions of a traffic manager.
const maxClients = 4096

// affinity stores the endpoint of each client of one port of a virtual IP, of the latest maxClients.
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
	s, known := a.clients[client]
	if known && now.Sub(s.used) < w.affinity {
		if i := slices.Index(w.usable, s.backend); i >= 0 {
			first = i
		}
	}
	if a.clients == nil {
		a.clients = make(map[string]sticky)
	}
	if !known {
		a.makeRoom(now, w.affinity)
	}
	a.clients[client] = sticky{w.usable[first], now}
	return first
}

// makeRoom removes the clients whose time is over, once there are twice as many as the last time, and that which was
// used least recently if there are too many. Call with mu held.
func (a *affinity) makeRoom(now time.Time, timeout time.Duration) {
	if len(a.clients) < max(a.sweepAt, 64) {
		return
	}
	oldest, used := "", now
	for client, s := range a.clients {
		switch {
		case now.Sub(s.used) >= timeout:
			delete(a.clients, client)
		case !s.used.After(used):
			oldest, used = client, s.used
		}
	}
	if len(a.clients) >= maxClients {
		delete(a.clients, oldest)
	}
	a.sweepAt = min(2*len(a.clients), maxClients)
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
