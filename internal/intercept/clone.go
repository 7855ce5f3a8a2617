package intercept

import (
	"net/netip"
	"slices"
	"sync"

	"kubevpn/internal/api"
)

// cloneTarget is who gets the requests: this laptop, or the pods of a clone, which come and go. A nil one is the laptop.
type cloneTarget struct {
	mu      sync.Mutex
	pods    *api.ClonePods // nil: the laptop; not changed, but replaced
	changed chan struct{}  // closed, and replaced, when pods is
}

func newCloneTarget(clone bool) *cloneTarget {
	t := &cloneTarget{changed: make(chan struct{})}
	if clone {
		t.pods = &api.ClonePods{Addresses: []netip.Addr{}}
	}
	return t
}

// now gives the clone's pods, and a channel that is closed when they are others.
func (t *cloneTarget) now() (*api.ClonePods, <-chan struct{}) {
	if t == nil {
		return nil, nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.pods, t.changed
}

func (t *cloneTarget) set(pods []netip.Addr) {
	pods = slices.SortedFunc(slices.Values(pods), netip.Addr.Compare)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pods == nil || slices.Equal(t.pods.Addresses, pods) {
		return
	}
	t.pods = &api.ClonePods{Addresses: pods}
	close(t.changed)
	t.changed = make(chan struct{})
}

// SetClone says which pods get the requests, if Config.Clone is set: those of a clone that are ready. As long as there is none, the
// application gets them.
func (i *Intercept) SetClone(pods []netip.Addr) { i.target.set(pods) }
