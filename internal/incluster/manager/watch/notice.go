package watch

import (
	"maps"
	"reflect"
	"slices"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/balancer"
)

// Notice is the state that the manager sends to laptops, at one moment. It is immutable.
type Notice struct {
	State api.ManagerState
	// names contains the Services by namespace, sorted. An unchanged namespace has the same slice as in the previous
	// notice. nil: the manager may not watch Services.
	names   map[string][]string
	records recordChanges
}

// recordChanges are the last Services that still exist and whose DNS records have changed. A copy does not change.
type recordChanges struct {
	count int // all of them, since the manager began
	last  []balancer.Name
}

// maxChanges is the number of changes between two notices after which a laptop is told that everything has changed.
const maxChanges = 64

func (c *recordChanges) add(name balancer.Name) {
	c.count++
	c.last = append(slices.Clone(c.last[max(0, len(c.last)+1-maxChanges):]), name)
}

// since returns the Services that have changed since before; ok is false if they are too many.
func (c *recordChanges) since(before recordChanges) (changed map[string][]string, ok bool) {
	n := c.count - before.count
	if n > len(c.last) {
		return nil, false
	}
	for _, name := range c.last[len(c.last)-n:] {
		if changed == nil {
			changed = make(map[string][]string)
		}
		if !slices.Contains(changed[name.Namespace], name.Name) {
			changed[name.Namespace] = append(changed[name.Namespace], name.Name)
		}
	}
	return changed, true
}

// equal reports whether laptops would receive nothing new.
func (n *Notice) equal(other *Notice) bool {
	return reflect.DeepEqual(n.State, other.State) && sameNames(n.names, other.names) &&
		n.records.count == other.records.count
}

func sameNames(a, b map[string][]string) bool {
	return (a == nil) == (b == nil) && maps.EqualFunc(a, b, sameSlice)
}

// sameSlice reports whether two lists of names are the same one, or equal.
func sameSlice(a, b []string) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0] || slices.Equal(a, b))
}

// Changes returns the messages that bring a laptop from one notice to the next.
func Changes(before, now *Notice) []api.ControlMessage {
	var messages []api.ControlMessage
	if !reflect.DeepEqual(before.State, now.State) {
		messages = append(messages, api.ControlMessage{State: &now.State})
	}
	if d := deltaOf(before, now); d != nil {
		messages = append(messages, api.ControlMessage{Names: d})
	}
	return messages
}

// deltaOf returns the changes of Services and their records from before to after, or nil if there are none.
func deltaOf(before, after *Notice) *api.NameDelta {
	d := delta(before.names, after.names)
	if after.names == nil || d != nil && d.Reset {
		return d
	}
	changed, ok := after.records.since(before.records)
	switch {
	case !ok:
		return delta(nil, after.names)
	case changed == nil:
		return d
	case d == nil:
		d = &api.NameDelta{}
	}
	d.Changed = changed
	return d
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
