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
	tests := []struct {
		name          string
		before, after names
		want          *api.NameDelta
	}{
		{"both-unknown", nil, nil, nil},
		{"first", nil, names{"a": {"x"}}, &api.NameDelta{Reset: true, Add: names{"a": {"x"}}}},
		{"first-and-none", nil, names{}, &api.NameDelta{Reset: true, Add: names{}}},
		{"no-longer-known", names{"a": {"x"}}, nil, &api.NameDelta{Reset: true}},
		{"same", names{"a": {"x"}}, names{"a": {"x"}}, nil},
		{"added", names{"a": {"x"}}, names{"a": {"w", "x"}, "b": {"y"}}, &api.NameDelta{Add: names{"a": {"w"}, "b": {"y"}}}},
		{"removed", names{"a": {"w", "x"}, "b": {"y"}}, names{"a": {"x"}}, &api.NameDelta{Remove: names{"a": {"w"}, "b": {"y"}}}},
		{"replaced", names{"a": {"x"}}, names{"a": {"y"}}, &api.NameDelta{Add: names{"a": {"y"}}, Remove: names{"a": {"x"}}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := delta(tt.before, tt.after); !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
}

func TestDeltaContainsChangedRecords(t *testing.T) {
	type names = map[string][]string
	db := balancer.Name{Namespace: "a", Name: "db"}
	all := names{"a": {"db", "web"}}
	of := func(names map[string][]string, changed ...balancer.Name) *Notice {
		n := &Notice{names: names}
		for _, name := range changed {
			n.records.add(name)
		}
		return n
	}
	for name, tt := range map[string]struct {
		before, after *Notice
		want          *api.NameDelta
	}{
		"none":               {of(all, db), of(all, db), nil},
		"one, twice":         {of(all, db), of(all, db, db, db), &api.NameDelta{Changed: names{"a": {"db"}}}},
		"and a new Service":  {of(names{"a": {"db"}}), of(all, db), &api.NameDelta{Add: names{"a": {"web"}}, Changed: names{"a": {"db"}}}},
		"first":              {&Notice{}, of(all, db), &api.NameDelta{Reset: true, Add: all}},
		"no longer known":    {of(all), of(nil, db), &api.NameDelta{Reset: true}},
		"as many as fit":     {of(all), of(all, slices.Repeat([]balancer.Name{db}, maxChanges)...), &api.NameDelta{Changed: names{"a": {"db"}}}},
		"more than are kept": {of(all), of(all, slices.Repeat([]balancer.Name{db}, maxChanges+1)...), &api.NameDelta{Reset: true, Add: all}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := deltaOf(tt.before, tt.after); !reflect.DeepEqual(got, tt.want) {
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
