package watch

import (
	"reflect"
	"slices"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/balancer"
)

// Notice is the state that the manager sends to laptops, at one moment. It is immutable.
type Notice struct {
	State api.ManagerState
	// names contains the Services by namespace, sorted. nil: the manager may not watch Services.
	names   map[string][]string
	changes nameChanges // of names, and of DNS records
}

// nameChanges are the last changes of Services and of their DNS records. A copy does not change.
type nameChanges struct {
	count int // all of them, since the manager began
	last  []nameChange
}

type nameChange struct {
	balancer.Name
	kind changeKind
}

type changeKind int

const (
	nameChanged changeKind = iota // the DNS records
	nameAdded
	nameRemoved
)

// maxChanges is the number of changes between two notices after which a laptop receives all names again.
const maxChanges = 1 << 10

func (c *nameChanges) add(name balancer.Name, kind changeKind) {
	c.count++
	if len(c.last) >= 2*maxChanges {
		c.last = slices.Clone(c.last[maxChanges:])
	}
	c.last = append(c.last, nameChange{name, kind}) // copies see only the elements before
}

// since returns what has changed since before, or nil; ok is false if the changes are too many.
func (c *nameChanges) since(before nameChanges) (d *api.NameDelta, ok bool) {
	n := c.count - before.count
	switch {
	case n > min(len(c.last), maxChanges):
		return nil, false
	case n == 0:
		return nil, true
	}
	recent := c.last[len(c.last)-n:]
	first, last := map[balancer.Name]changeKind{}, map[balancer.Name]changeKind{}
	for _, change := range recent {
		if _, known := first[change.Name]; !known {
			first[change.Name] = change.kind
		}
		last[change.Name] = change.kind
	}
	d = &api.NameDelta{}
	for _, change := range recent {
		kind, left := last[change.Name]
		delete(last, change.Name)
		isNew := first[change.Name] == nameAdded
		switch {
		case !left, kind == nameRemoved && isNew:
		case kind == nameRemoved:
			put(&d.Remove, change.Name)
		case isNew:
			put(&d.Add, change.Name)
		default:
			put(&d.Changed, change.Name)
		}
	}
	return d, true
}

func put(m *map[string][]string, name balancer.Name) {
	if *m == nil {
		*m = make(map[string][]string)
	}
	(*m)[name.Namespace] = append((*m)[name.Namespace], name.Name)
}

// equal reports whether laptops would receive nothing new.
func (n *Notice) equal(other *Notice) bool {
	return reflect.DeepEqual(n.State, other.State) && (n.names == nil) == (other.names == nil) &&
		n.changes.count == other.changes.count
}

// Changes returns the messages that bring a laptop from one notice to the next.
func Changes(before, now *Notice) []api.ControlMessage {
	var messages []api.ControlMessage
	if !reflect.DeepEqual(before.State, now.State) {
		messages = append(messages, api.ControlMessage{State: &now.State})
	}
	if d := delta(before, now); d != nil {
		messages = append(messages, api.ControlMessage{Names: d})
	}
	return messages
}

// delta returns the changes of Services and their records from before to after, or nil if there are none. If before has
// no Services, the delta has Reset set, so the first delta always has.
func delta(before, after *Notice) *api.NameDelta {
	if after.names == nil {
		if before.names == nil {
			return nil
		}
		return &api.NameDelta{Reset: true}
	}
	if before.names != nil {
		if d, ok := after.changes.since(before.changes); ok {
			return d
		}
	}
	return &api.NameDelta{Reset: true, Add: after.names}
}
