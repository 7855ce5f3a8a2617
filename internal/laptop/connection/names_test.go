package connection

import (
	"fmt"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/api"
)

// A query for a short name right after "Connected" must not go to the outside nameserver.
func TestShortNamesWaitForTheList(t *testing.T) {
	for _, tt := range []struct {
		name string
		tell func(*names)
		want time.Duration
	}{
		{"told", func(n *names) { n.apply(fromManager, api.NameDelta{Reset: true}) }, time.Second},
		{"nobody_may_tell", func(n *names) { n.tell() }, time.Second},
		{"not_told", func(*names) {}, namesTimeout},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newTestConnection(t)
				time.AfterFunc(time.Second, func() { tt.tell(s.names) })
				start := time.Now()
				if err := s.names.await(t.Context(), s.log); err != nil {
					t.Fatal(err)
				}
				if took := time.Since(start); took != tt.want {
					t.Errorf("waited %v, want %v", took, tt.want)
				}
			})
		})
	}
}

// No sequence of additions and removals lets a traffic manager fill the laptop's memory with names.
func TestNamesForgetAnswers(t *testing.T) {
	of := func(names ...string) map[string][]string { return map[string][]string{"shop": names} }
	for name, tt := range map[string]struct {
		from  nameOrigin
		delta api.NameDelta
		want  []map[string][]string
	}{
		"new":      {fromManager, api.NameDelta{Add: of("cart")}, []map[string][]string{of("cart")}},
		"gone":     {fromManager, api.NameDelta{Remove: of("cart")}, []map[string][]string{of("cart")}},
		"changed":  {fromManager, api.NameDelta{Changed: of("cart")}, []map[string][]string{of("cart")}},
		"all":      {fromManager, api.NameDelta{Reset: true, Add: of("cart")}, []map[string][]string{nil}},
		"not used": {fromUser, api.NameDelta{Add: of("cart")}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNames()
			n.apply(fromManager, api.NameDelta{Reset: true})
			var got []map[string][]string
			n.forget = func(changed map[string][]string) { got = append(got, changed) }
			n.apply(tt.from, tt.delta)
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("forgot %v, want %v", got, tt.want)
			}
		})
	}
}

func TestNamesAreBounded(t *testing.T) {
	many := func(prefix string, n int) []string {
		all := make([]string, n)
		for i := range all {
			all[i] = fmt.Sprintf("%s-%d", prefix, i)
		}
		return all
	}
	n := newNames()
	left := 0
	for i := range 30 {
		ns := fmt.Sprintf("ns-%d", i)
		left += n.apply(fromManager, api.NameDelta{Add: map[string][]string{ns: many(ns, 10_000)}})
		n.apply(fromManager, api.NameDelta{Remove: map[string][]string{ns: many("absent", 10_000)}})
	}
	for i := range 2 * maxNames {
		ns := fmt.Sprintf("twice-%d", i)
		left += n.apply(fromManager, api.NameDelta{Add: map[string][]string{ns: {"x", "x"}}})
		n.apply(fromManager, api.NameDelta{Remove: map[string][]string{ns: {"x"}}})
	}
	if held := n.index.Size(); held > maxNames || left == 0 {
		t.Errorf("%d names are held, %d were left out, want at most %d", held, left, maxNames)
	}
	if left := n.apply(fromManager, api.NameDelta{Reset: true, Add: map[string][]string{"shop": {"cart", "Not\x1b[2J", ""}, "../x": {"y"}}}); left != 3 {
		t.Errorf("%d names were left out, want 3, which are none", left)
	}
	if !n.index.Has("shop", "cart") || n.index.Size() != 2 {
		t.Errorf("after a reset the index has %d names and namespaces, want one of each", n.index.Size())
	}
}

func TestNamespaceIsMatchableWhileItHasServices(t *testing.T) {
	of := func(names ...string) map[string][]string { return map[string][]string{"billing": names} }
	for name, tt := range map[string]struct {
		deltas []api.NameDelta
		want   []string
	}{
		"a name that was added twice": {[]api.NameDelta{{Add: of("cart")}, {Add: of("cart")}, {Remove: of("cart")}}, nil},
		"names that were left out":    {[]api.NameDelta{{Add: of("cart")}, {Remove: of("not", "here")}}, []string{"billing"}},
		"invalid names only":          {[]api.NameDelta{{Add: of("Not a name")}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNames()
			for _, d := range tt.deltas {
				n.apply(fromManager, d)
			}
			if got := n.matchable(); !slices.Equal(got, tt.want) {
				t.Errorf("namespaces %q, want %q", got, tt.want)
			}
		})
	}
}
