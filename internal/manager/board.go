package manager

import (
	"maps"
	"reflect"
	"slices"
	"sync"

	"kubevpn/internal/api"
)

// notice is what laptops are told, at one moment. It never changes.
type notice struct {
	state api.ManagerState
	// names are the Services by namespace, sorted. A namespace that did not change has the same slice as in the
	// notice before. nil: the manager may not watch Services.
	names map[string][]string
}

// board shows the latest notice to everyone. Readers that are slow miss those between, and nobody waits for
// them.
type board struct {
	mu      sync.Mutex
	current *notice
	next    chan struct{} // closed when current is replaced
}

func newBoard() *board { return &board{current: &notice{}, next: make(chan struct{})} }

// read returns the latest notice, and a channel that is closed when there is a newer one.
func (b *board) read() (*notice, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.current, b.next
}

// post replaces the notice, unless it says the same.
func (b *board) post(n *notice) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if reflect.DeepEqual(b.current.state, n.state) && sameNames(b.current.names, n.names) {
		return
	}
	b.current = n
	close(b.next)
	b.next = make(chan struct{})
}

func sameNames(a, b map[string][]string) bool {
	return (a == nil) == (b == nil) && maps.EqualFunc(a, b, sameSlice)
}

// sameSlice reports whether two lists of names are the same one, or equal.
func sameSlice(a, b []string) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0] || slices.Equal(a, b))
}

// delta returns what changes before into after, or nil if nothing does. A before that knew no Services is
// reset, so that the first delta always is one.
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

// missingFrom returns the elements of names that have does not have. Both are sorted.
func missingFrom(have, names []string) []string {
	var missing []string
	for _, name := range names {
		if _, ok := slices.BinarySearch(have, name); !ok {
			missing = append(missing, name)
		}
	}
	return missing
}
