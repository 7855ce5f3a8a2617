package manager

import (
	"maps"
	"reflect"
	"slices"
	"sync"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
)

// notice is the state that the manager sends to laptops, at one moment. It is immutable.
type notice struct {
	state api.ManagerState
	// names contains the Services by namespace, sorted. An unchanged namespace has the same slice as in the previous
	// notice. nil: the manager may not watch Services.
	names map[string][]string
}

// notices publishes the latest notice to all control streams. A slow reader skips notices and blocks nobody.
// It is safe for concurrent use.
type notices struct {
	mu      sync.Mutex
	current *notice
	changed wakeup.Broadcast // sent when current is replaced
}

func newNotices() *notices { return &notices{current: &notice{}} }

// read returns the latest notice, and a channel that post closes when there is a newer one.
func (b *notices) read() (*notice, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.current, b.changed.Next()
}

// post replaces the notice, unless the new one is equal.
func (b *notices) post(n *notice) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if reflect.DeepEqual(b.current.state, n.state) && sameNames(b.current.names, n.names) {
		return
	}
	b.current = n
	b.changed.Send()
}

func sameNames(a, b map[string][]string) bool {
	return (a == nil) == (b == nil) && maps.EqualFunc(a, b, sameSlice)
}

// sameSlice reports whether two lists of names are the same one, or equal.
func sameSlice(a, b []string) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0] || slices.Equal(a, b))
}

// delta returns the changes from before to after, or nil if there are none. If before has no Services, the delta has
// Reset set, so the first delta always has.
func delta(before, after map[string][]string) *api.NameDelta {
	switch {
	case after == nil && before == nil:
		return nil
	case after == nil:
		return &api.NameDelta{Reset: true}
	case before == nil:
		return &api.NameDelta{Reset: true, Add: after}
	}
	d := &api.NameDelta{}
	for namespace, names := range after {
		if old := before[namespace]; !sameSlice(old, names) {
			put(&d.Add, namespace, missingFrom(old, names))
			put(&d.Remove, namespace, missingFrom(names, old))
		}
	}
	for namespace, names := range before {
		if _, ok := after[namespace]; !ok {
			put(&d.Remove, namespace, names)
		}
	}
	if d.Add == nil && d.Remove == nil {
		return nil
	}
	return d
}

func put(m *map[string][]string, namespace string, names []string) {
	if len(names) == 0 {
		return
	}
	if *m == nil {
		*m = make(map[string][]string)
	}
	(*m)[namespace] = names
}

// missingFrom returns the elements of names that have does not contain. Both are sorted.
func missingFrom(have, names []string) []string {
	var missing []string
	for _, name := range names {
		if _, ok := slices.BinarySearch(have, name); !ok {
			missing = append(missing, name)
		}
	}
	return missing
}
