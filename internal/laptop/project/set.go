package project

import (
	"cmp"
	"context"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
)

// Set keeps the entries of a project running. Its methods may be called concurrently.
type Set struct {
	executable string
	out        func(name, text string)                   // gets the output, line by line
	state      wakeup.Value[map[string]api.ProjectEntry] // by name; replaced, never changed

	project wakeup.Value[Project] // as applied; written by Apply and Down

	changing sync.Mutex // held by Apply and Down
	units    map[string]*unit
	begun    bool // the command before has run
}

// NewSet returns a Set without entries, whose processes are of the program executable. out gets each line of their
// output with the name of the entry; it may be called concurrently. NewSet starts nothing.
func NewSet(executable string, out func(name, text string)) *Set {
	return &Set{executable: executable, out: out, units: map[string]*unit{}}
}

// Request asks the daemon for a project.
type Request struct {
	Project  Project `json:"project"`
	Attached bool    `json:"attached,omitempty"` // ends with the request, if the request has started it
	DryRun   bool    `json:"dryRun,omitempty"`   // only tell the differences
}

// Difference is what Apply would do with an entry.
type Difference struct {
	Change string // start, restart, stop, keep
	Entry
}

// Changes reports whether it changes anything.
func (d Difference) Changes() bool { return d.Change != keep }

const (
	start, restart, stop, keep = "start", "restart", "stop", "keep"
)

// String describes it in one line.
func (d Difference) String() string {
	return d.Change + ": kubevpn " + strings.Join(api.Texts(d.Command(), api.ShellQuote), " ")
}

// Differences returns what Apply would do.
func (s *Set) Differences(to *Project) (all []Difference) {
	from, ended := s.project.Load(), s.ended()
	for _, e := range from.Entries {
		if !slices.ContainsFunc(to.Entries, func(o Entry) bool { return o.Name == e.Name }) {
			all = append(all, Difference{stop, e})
		}
	}
	same := slices.Equal(from.Variables, to.Variables) // the environment differs from terminal to terminal
	for _, e := range to.Entries {
		was := api.Find(from.Entries, func(o Entry) bool { return o.Name == e.Name })
		switch {
		case was == nil:
			all = append(all, Difference{start, e})
		case reflect.DeepEqual(*was, e) && (same || e.Kind != kindDev) && !slices.Contains(ended, e.Name):
			all = append(all, Difference{keep, e})
		default:
			all = append(all, Difference{restart, e})
		}
	}
	return all
}

// ended returns the names of the entries that do not run.
func (s *Set) ended() (names []string) {
	for name, e := range s.state.Load() {
		if e.State == api.ProjectFailed || e.State == api.ProjectCompleted {
			names = append(names, name)
		}
	}
	return names
}

// Apply makes the Set keep what p lists: it ends and starts only what differs. It returns when all entries are ready,
// or with the errors of those that are not.
func (s *Set) Apply(ctx context.Context, p Project) error {
	s.changing.Lock()
	defer s.changing.Unlock()
	differences := s.Differences(&p)
	s.end(func(e Entry) bool {
		return slices.ContainsFunc(differences, func(d Difference) bool {
			return d.Name == e.Name && d.Change != keep
		})
	})
	if !s.begun && len(p.Before) > 0 {
		if err := s.hook(ctx, p, "before", p.Before); err != nil {
			return err
		}
	}
	s.begun = true
	s.project.Update(func(now *Project) { *now = p })
	for _, e := range p.Entries {
		if s.units[e.Name] == nil {
			s.begin(p, e)
		}
	}
	return s.ready(ctx, p)
}

// begin starts the unit of an entry.
func (s *Set) begin(p Project, e Entry) {
	u := &unit{set: s, entry: e, environ: p.Environ, ended: make(chan struct{})}
	for _, other := range p.Entries {
		if other.Kind == KindConnect && e.Kind != KindConnect {
			u.after = append(u.after, other.Name)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	u.cancel = cancel
	s.units[e.Name] = u
	s.set(e, api.ProjectWaiting, "")
	go u.run(ctx)
}

// set changes the state of an entry.
func (s *Set) set(e Entry, state api.ProjectState, detail string) {
	s.change(api.ProjectEntry{Kind: e.Kind, Name: e.Name, State: state, Detail: detail})
}

func (s *Set) change(e api.ProjectEntry) {
	e.Since = time.Now()
	s.state.Update(func(m *map[string]api.ProjectEntry) {
		next := maps.Clone(*m)
		if next == nil {
			next = map[string]api.ProjectEntry{}
		}
		next[e.Name] = e
		*m = next
	})
}

// ready waits until every entry is ready, or one of them has failed.
func (s *Set) ready(ctx context.Context, p Project) error {
	healthy := map[string]bool{}
	for _, e := range p.Entries {
		healthy[e.Name] = e.Health != nil
	}
	var failed []api.ProjectEntry
	_, err := s.state.Await(ctx, func(m map[string]api.ProjectEntry) bool {
		failed = nil
		waiting := false
		for name, e := range m {
			switch e.State {
			case api.ProjectFailed, api.ProjectUnhealthy:
				failed = append(failed, e)
			case api.ProjectRunning:
				waiting = waiting || healthy[name]
			case api.ProjectWaiting, api.ProjectStarting:
				waiting = true
			}
		}
		return !waiting || len(failed) > 0
	})
	return cmp.Or(err, failure(failed))
}

// end ends the units whose entries are chosen, each after those that need it.
func (s *Set) end(chosen func(Entry) bool) {
	var ending []*unit
	for name, u := range s.units {
		if chosen(u.entry) {
			ending = append(ending, u)
			delete(s.units, name)
			s.set(u.entry, api.ProjectStopping, "")
		}
	}
	var all sync.WaitGroup
	for _, u := range ending {
		all.Go(func() {
			for _, other := range ending {
				if other.follows(u) {
					<-other.ended
				}
			}
			u.cancel()
			<-u.ended
		})
	}
	all.Wait()
	s.state.Update(func(m *map[string]api.ProjectEntry) {
		*m = maps.Clone(*m)
		for _, u := range ending {
			delete(*m, u.entry.Name)
		}
	})
}

// Down ends all entries, and runs the command after.
func (s *Set) Down(ctx context.Context) error {
	s.changing.Lock()
	defer s.changing.Unlock()
	s.end(func(Entry) bool { return true })
	p := s.project.Load()
	s.project.Update(func(now *Project) { *now = Project{Name: p.Name, File: p.File} })
	if !s.begun || len(p.After) == 0 {
		return nil
	}
	s.begun = false
	return s.hook(ctx, p, "after", p.After)
}

// hook runs a command of the project itself.
func (s *Set) hook(ctx context.Context, p Project, name string, args []string) error {
	u := &unit{set: s, entry: Entry{Name: name, Directory: filepath.Dir(p.File)}, environ: p.Environ}
	return u.command(ctx, name, args)
}

// Ended waits until all programs and intercepts have ended, or ctx does. It returns an error if one has failed.
func (s *Set) Ended(ctx context.Context) error {
	var failed []api.ProjectEntry
	_, err := s.state.Await(ctx, func(m map[string]api.ProjectEntry) bool {
		failed = nil
		others := 0
		for _, e := range m {
			switch {
			case e.State == api.ProjectFailed:
				failed = append(failed, e)
			case e.Kind != KindConnect && e.State != api.ProjectCompleted:
				return false
			}
			if e.Kind != KindConnect {
				others++
			}
		}
		return others > 0 || len(failed) > 0
	})
	if err != nil {
		return nil // ctx has ended
	}
	return failure(failed)
}

// failure returns an error that lists what has failed, or nil. It has their exit code, if that is one.
func failure(failed []api.ProjectEntry) error {
	if len(failed) == 0 {
		return nil
	}
	var codes []api.ExitCode
	for _, e := range failed {
		if e.Code > api.ExitUnexpected { // else it is of a program, or follows from another
			codes = append(codes, e.Code)
		}
	}
	code := api.ExitWorkload
	if slices.Sort(codes); len(slices.Compact(codes)) == 1 {
		code = codes[0]
	}
	lines := api.Texts(failed, func(e api.ProjectEntry) string { return e.Name + ": " + e.Detail })
	slices.Sort(lines)
	return api.Errorf(code, "%s", strings.Join(lines, "\n"))
}

// Status returns the project with the states of its entries.
func (s *Set) Status() api.Project {
	p, states := s.project.Load(), s.state.Load()
	all := api.Project{Name: p.Name, File: p.File, Entries: []api.ProjectEntry{}}
	for _, e := range p.Entries {
		if state, there := states[e.Name]; there {
			all.Entries = append(all.Entries, state)
		}
	}
	return all
}
