package watch

import (
	"reflect"
	"slices"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/balancer"
)

func TestDeltaContainsOnlyChanges(t *testing.T) {
	type names = map[string][]string
	db, web := balancer.Name{Namespace: "a", Name: "db"}, balancer.Name{Namespace: "b", Name: "web"}
	added, removed, changed := nameChange{db, nameAdded}, nameChange{db, nameRemoved}, nameChange{db, nameChanged}
	all := names{"a": {"db"}, "b": {"web"}}
	for name, tt := range map[string]struct {
		before, after names
		changes       []nameChange
		want          *api.NameDelta
	}{
		"both unknown":       {nil, nil, []nameChange{changed}, nil},
		"first":              {nil, all, []nameChange{added}, &api.NameDelta{Reset: true, Add: all}},
		"first and none":     {nil, names{}, nil, &api.NameDelta{Reset: true, Add: names{}}},
		"no longer known":    {all, nil, []nameChange{removed}, &api.NameDelta{Reset: true}},
		"none":               {all, all, nil, nil},
		"two":                {all, all, []nameChange{added, {web, nameRemoved}}, &api.NameDelta{Add: names{"a": {"db"}}, Remove: names{"b": {"web"}}}},
		"added and changed":  {all, all, []nameChange{added, changed}, &api.NameDelta{Add: names{"a": {"db"}}}},
		"changed twice":      {all, all, []nameChange{changed, changed}, &api.NameDelta{Changed: names{"a": {"db"}}}},
		"replaced":           {all, all, []nameChange{removed, added}, &api.NameDelta{Changed: names{"a": {"db"}}}},
		"changed, removed":   {all, all, []nameChange{changed, removed}, &api.NameDelta{Remove: names{"a": {"db"}}}},
		"for a moment":       {all, all, []nameChange{added, removed}, &api.NameDelta{}},
		"as many as fit":     {all, all, slices.Repeat([]nameChange{changed}, maxChanges), &api.NameDelta{Changed: names{"a": {"db"}}}},
		"more than are kept": {all, all, slices.Repeat([]nameChange{changed}, maxChanges+1), &api.NameDelta{Reset: true, Add: all}},
	} {
		t.Run(name, func(t *testing.T) {
			var log nameChanges
			for range 3 * maxChanges { // earlier ones
				log.add(web, nameChanged)
			}
			before := &Notice{names: tt.before, changes: log}
			for _, change := range tt.changes {
				log.add(change.Name, change.kind)
			}
			after := &Notice{names: tt.after, changes: log}
			log.add(web, nameRemoved) // a later one
			if got := delta(before, after); !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
}

func TestSlowReaderSkipsNotices(t *testing.T) {
	p := New(Config{})
	seen, newer := p.Notices.Get()
	for i := range 100 {
		p.publish(&Notice{State: api.ManagerState{Sessions: i + 1}})
	}
	<-newer
	now, newer := p.Notices.Get()
	if seen.State.Sessions != 0 || now.State.Sessions != 100 {
		t.Errorf("the reader got %d sessions, and then %d", seen.State.Sessions, now.State.Sessions)
	}
	p.publish(&Notice{State: api.ManagerState{Sessions: 100}})
	select {
	case <-newer:
		t.Error("publish replaced a notice by an equal one")
	default:
	}
}
