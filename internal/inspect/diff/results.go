package diff

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"

	"kubevpn/internal/api"
)

// The bounds of what Results keeps. What exceeds them is counted together.
const (
	maxGroups     = 1000
	maxKinds      = 10_000 // of requests, by the groups to which they belong
	maxExamples   = 3      // of a group
	maxIgnored    = 1000
	maxPathShown  = 300
	maxRouteShown = 200
)

// groupKey identifies a group: a place in the answers to a route.
type groupKey struct{ route, where string }

// elsewhere counts the differences in routes and places beyond maxGroups.
var elsewhere = groupKey{"other routes", "other differences"}

// Results collects the differences of many requests. Its methods are safe for concurrent use.
type Results struct {
	secrets api.Secrets
	first   func(api.DiffGroup)

	mu         sync.Mutex
	requests   int
	incomplete int
	groups     map[groupKey]*api.DiffGroup
	kinds      map[string]*kind
	varying    map[groupKey]*api.DiffIgnored
	routes     map[string][]string // the places of varying, by route
	skipped    map[string]int
}

// kind counts requests that differ in the same places. The places that vary may be known only later.
type kind struct {
	places []groupKey
	n      int
}

// NewResults returns empty Results. It hides secrets: see api.Secrets. It calls first with each new group,
// unless the group's place is known to vary.
func NewResults(redact []string, first func(api.DiffGroup)) *Results {
	return &Results{secrets: redact, first: first,
		groups: make(map[groupKey]*api.DiffGroup), kinds: make(map[string]*kind),
		varying: make(map[groupKey]*api.DiffIgnored), routes: make(map[string][]string), skipped: make(map[string]int)}
}

// Route returns the method and the path of a request, with {id} in place of the parts that look like IDs.
func Route(e *api.Exchange) string {
	path, _, _ := strings.Cut(e.Request.Path, "?")
	parts := strings.Split(path, "/")
	for n, part := range parts {
		if isID.MatchString(part) || isHex.MatchString(part) && strings.ContainsAny(part, "0123456789") {
			parts[n] = "{id}"
		}
	}
	return cut(api.CleanLine(e.Request.Method+" "+strings.Join(parts, "/")), maxRouteShown)
}

var (
	isID  = regexp.MustCompile(`^([0-9]+|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})$`)
	isHex = regexp.MustCompile(`^[0-9a-fA-F]{8,}$`)
)

// cut returns at most limit bytes of a text, and a mark if that is not all.
func cut(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return string(api.WholeRunes([]byte(s[:limit]))) + "…"
}

// skip counts a request that is not compared.
func (r *Results) skip(reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.skipped[reason]++
}

// Add counts a request with the differences of its answers. It returns those that are not known to vary.
func (r *Results) Add(e *api.Exchange, all []Difference, incomplete bool) []Difference {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests++
	if incomplete {
		r.incomplete++
	}
	route := r.secrets.Hide("", Route(e))
	var places []groupKey
	var left []Difference
	for _, d := range all {
		d = r.hide(d)
		if !r.varies(route, d.Where) {
			left = append(left, d)
		}
		if p := r.group(e, groupKey{route, d.Where}, d); !slices.Contains(places, p) {
			places = append(places, p)
			r.groups[p].Requests++
		}
	}
	if len(places) > 0 {
		r.count(places)
	}
	return left
}

// hide replaces the secrets of a header, a field or a line.
func (r *Results) hide(d Difference) Difference {
	_, name, _ := strings.Cut(d.Where, " ")
	for _, text := range []*string{&d.From, &d.To} {
		if *text != absent {
			*text = r.secrets.Hide(name, *text)
		}
	}
	return d
}

// group adds an example of a difference to its group, and returns the place of that.
func (r *Results) group(e *api.Exchange, p groupKey, d Difference) groupKey {
	if r.groups[p] == nil && len(r.groups) >= maxGroups {
		p = elsewhere
	}
	g := r.groups[p]
	if g == nil {
		g = &api.DiffGroup{Route: p.route, Where: p.where, Examples: []api.DiffExample{}}
		r.groups[p] = g
	}
	if len(g.Examples) < maxExamples {
		path := cut(api.CleanLine(r.secrets.Hide("", e.Request.Path)), maxPathShown)
		g.Examples = append(g.Examples, api.DiffExample{Path: path, From: d.From, To: d.To})
		if len(g.Examples) == 1 && r.first != nil && !r.varies(p.route, p.where) {
			r.first(*g)
		}
	}
	return p
}

// count counts a request that differs in these places.
func (r *Results) count(places []groupKey) {
	name := fmt.Sprintf("%q", places)
	if r.kinds[name] == nil && len(r.kinds) >= maxKinds {
		places = places[:1]
		name = fmt.Sprintf("%q", places)
	}
	if r.kinds[name] == nil {
		r.kinds[name] = &kind{places: places}
	}
	r.kinds[name].n++
}

// vary ignores the places in which two answers of the same version to a request differ.
func (r *Results) vary(e *api.Exchange, all []Difference, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	route := r.secrets.Hide("", Route(e))
	for _, d := range all {
		if d.Where == "status" || d.Where == "answer" { // a fault, not a value that varies
			continue
		}
		p := groupKey{route, d.Where}
		v := r.varying[p]
		if v == nil {
			if len(r.varying) >= maxIgnored {
				return
			}
			v = &api.DiffIgnored{Route: route, Where: d.Where, Reason: reason}
			r.varying[p] = v
			r.routes[route] = append(r.routes[route], d.Where)
		}
		v.Times++
	}
}

// varies reports whether a place is ignored. Call with mu held.
func (r *Results) varies(route, where string) bool {
	return slices.ContainsFunc(r.routes[route], func(known string) bool {
		below, found := strings.CutPrefix(where, known)
		return found && (below == "" || strings.HasPrefix(known, "body $") && strings.ContainsAny(below[:1], ".[")) ||
			known == "body lines" && strings.HasPrefix(where, "body line")
	})
}

// Counts returns how many requests were compared, and how many of them differ.
func (r *Results) Counts() (requests, differ int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, k := range r.kinds {
		if slices.ContainsFunc(k.places, func(p groupKey) bool { return !r.varies(p.route, p.where) }) {
			differ += k.n
		}
	}
	return r.requests, differ
}

// Summary returns the result so far. The caller adds the namespace, the workload and what was dropped.
func (r *Results) Summary() api.Diff {
	requests, differ := r.Counts()
	r.mu.Lock()
	defer r.mu.Unlock()
	d := api.Diff{Requests: requests, Differ: differ, Differences: []api.DiffGroup{}, Incomplete: r.incomplete}
	for _, g := range r.groups {
		if !r.varies(g.Route, g.Where) {
			shown := *g
			shown.Examples = slices.Clone(g.Examples)
			d.Differences = append(d.Differences, shown)
		}
	}
	slices.SortFunc(d.Differences, func(a, b api.DiffGroup) int {
		return cmp.Or(cmp.Compare(b.Requests, a.Requests), cmp.Compare(a.Route, b.Route), cmp.Compare(a.Where, b.Where))
	})
	for _, v := range r.varying {
		d.Ignored = append(d.Ignored, *v)
	}
	slices.SortFunc(d.Ignored, func(a, b api.DiffIgnored) int {
		return cmp.Or(cmp.Compare(a.Route, b.Route), cmp.Compare(a.Where, b.Where))
	})
	for _, reason := range slices.Sorted(maps.Keys(r.skipped)) {
		d.NotCompared = append(d.NotCompared, api.DiffSkipped{Reason: reason, Requests: r.skipped[reason]})
	}
	return d
}
