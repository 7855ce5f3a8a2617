package intercept

import (
	"net/netip"
	"slices"
	"sync"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
)

// cloneTarget holds the target of the requests: this laptop, or the current pods of a clone. It is safe for concurrent
// use.
type cloneTarget struct {
	mu      sync.Mutex
	pods    *api.ClonePods   // nil: the laptop; immutable, set replaces it
	changed wakeup.Broadcast // sent when set replaces pods
}

func newCloneTarget(clone bool) *cloneTarget {
	t := new(cloneTarget)
	if clone {
		t.pods = &api.ClonePods{Addresses: []netip.Addr{}}
	}
	return t
}

// current returns the clone's pods, or nil for the laptop, and a channel that closes when they change.
func (t *cloneTarget) current() (*api.ClonePods, <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.pods, t.changed.Next()
}

func (t *cloneTarget) set(pods []netip.Addr) {
	pods = slices.SortedFunc(slices.Values(pods), netip.Addr.Compare)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pods == nil || slices.Equal(t.pods.Addresses, pods) {
		return
	}
	t.pods = &api.ClonePods{Addresses: pods}
	t.changed.Send()
}

// SetClone sets the ready pods of the clone, which receive the requests if Config.Clone is set. While there are none,
// the application receives them.
func (i *Intercept) SetClone(pods []netip.Addr) { i.target.set(pods) }
