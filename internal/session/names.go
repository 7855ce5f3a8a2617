package session

import (
	"maps"
	"slices"
	"sync"

	"golang.org/x/net/publicsuffix"

	"kubevpn/internal/api"
	"kubevpn/pkg/dns"
)

// source is who tells the names of Services.
type source int

const (
	nobody      source = iota
	fromUser           // the user's own rights: one namespace
	fromManager        // the traffic manager: every namespace
)

// names is the index of the cluster's Services, and the namespaces in it. The manager's word replaces the user's.
type names struct {
	index *dns.Index
	told  chan struct{} // closed when somebody has spoken, or nobody will

	mu         sync.Mutex
	from       source
	namespaces map[string]int // Services in each
}

func newNames() *names {
	return &names{index: new(dns.Index), told: make(chan struct{}), namespaces: map[string]int{}}
}

// apply takes a delta. One from a lesser source than has spoken before is ignored.
func (n *names) apply(from source, d api.NameDelta) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if from < n.from {
		return
	}
	n.from = from
	if d.Reset {
		clear(n.namespaces)
	}
	for ns, services := range d.Add {
		n.namespaces[ns] += len(services)
	}
	for ns, services := range d.Remove {
		if n.namespaces[ns] -= len(services); n.namespaces[ns] <= 0 {
			delete(n.namespaces, ns)
		}
	}
	n.index.Apply(d.Reset, d.Add, d.Remove)
	n.tell()
}

// giveUp says that nobody will speak, for all that is known now.
func (n *names) giveUp() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.tell()
}

// tell closes told; n.mu is held.
func (n *names) tell() {
	select {
	case <-n.told:
	default:
		close(n.told)
	}
}

// known is who has spoken.
func (n *names) known() source {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.from
}

// matchable are the namespaces that a resolver with a server per link may route to us as if they were top-level
// domains (web.default). One that is called like a public suffix is not among them: it would take the suffix away.
func (n *names) matchable() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := slices.Sorted(maps.Keys(n.namespaces))
	return slices.DeleteFunc(all, func(ns string) bool {
		_, icann := publicsuffix.PublicSuffix("x." + ns)
		return icann
	})
}
