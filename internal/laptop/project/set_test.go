package project

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"kubevpn/internal/api"
)

// kubevpn is a program in place of kubevpn: it notes its life in a file, and fails if its last argument is "fail".
const kubevpn = `#!/bin/sh
for last; do :; done
echo "start $last" >> "$LOG"
[ "$last" = fail ] && { echo '{"error":{"code":62,"message":"no such workload"}}' >&3; exit 62; }
trap 'echo "end $last" >> "$LOG"; exit 0' TERM
echo '{"held":true}' >&3
[ "$last" = once ] && exit 0
echo "output of $last"
while :; do sleep 0.02; done
`

// stage is a Set with that program.
type stage struct {
	*Set
	t    *testing.T
	dir  string
	mu   sync.Mutex
	said string
}

func newStage(t *testing.T) *stage {
	if os.PathSeparator != '/' {
		t.Skip("kubevpn up needs a Unix")
	}
	leaks := goleak.IgnoreCurrent()
	dir := t.TempDir()
	program := filepath.Join(dir, "kubevpn")
	if err := os.WriteFile(program, []byte(kubevpn), 0o700); err != nil {
		t.Fatal(err)
	}
	s := &stage{t: t, dir: dir}
	s.Set = NewSet(program, func(name, text string) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.said += name + " | " + text + "\n"
	})
	t.Cleanup(func() {
		if err := s.Down(context.Background()); err != nil {
			t.Error(err)
		}
		goleak.VerifyNone(t, leaks)
	})
	return s
}

func (s *stage) project(entries ...Entry) Project {
	for i := range entries {
		entries[i].Directory = s.dir
		if entries[i].Args == nil {
			entries[i].Args = []string{entries[i].Name}
		}
		if entries[i].Kind == "" {
			entries[i].Kind = kindDev
		}
	}
	return Project{Name: "shop", File: filepath.Join(s.dir, DefaultFile), Environ: append(os.Environ(), "LOG="+s.log()), Entries: entries}
}

func (s *stage) log() string { return filepath.Join(s.dir, "log") }

// lines returns the notes of the programs since the last call.
func (s *stage) lines() []string {
	text, err := os.ReadFile(s.log())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		s.t.Fatal(err)
	}
	_ = os.Remove(s.log())
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

func (s *stage) apply(p Project) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 20*time.Second)
	defer cancel()
	if err := s.Apply(ctx, p); err != nil {
		s.t.Fatal(err)
	}
}

func (s *stage) want(lines ...string) {
	s.t.Helper()
	if d := cmp.Diff(lines, s.lines()); d != "" {
		s.t.Errorf("-want +got:\n%s", d)
	}
}

func TestSetStartsWhatIsNeededFirstAndEndsItLast(t *testing.T) {
	s := newStage(t)
	p := s.project(Entry{Kind: KindConnect, Name: "net"},
		Entry{Name: "web", Needs: map[string]Need{"db": Healthy}, Before: []string{"sh", "-c", "echo before web >> $LOG"}, After: []string{"sh", "-c", "echo after web >> $LOG"}},
		Entry{Name: "db", Health: &Healthcheck{Test: []string{"test", "-s", s.log()}, Interval: 10 * time.Millisecond, Timeout: time.Second, Retries: 1}})
	p.Before, p.After = []string{"sh", "-c", "echo first >> $LOG"}, []string{"sh", "-c", "echo last >> $LOG"}
	s.apply(p)
	s.want("first", "start net", "start db", "before web", "start web")
	if err := s.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.want("end web", "after web", "end db", "end net", "last")
	if !strings.Contains(s.said, "db | output of db\n") {
		t.Errorf("no output behind the name:\n%s", s.said)
	}
}

func TestApplyChangesOnlyWhatDiffers(t *testing.T) {
	s := newStage(t)
	s.apply(s.project(Entry{Name: "a"}, Entry{Name: "b"}, Entry{Name: "c"}))
	s.lines()
	s.apply(s.project(Entry{Name: "a"}, Entry{Name: "b"}, Entry{Name: "c"}))
	s.want("")
	another := s.project(Entry{Name: "a"}, Entry{Name: "b"}, Entry{Name: "c"})
	another.Environ = append(another.Environ, "SHLVL=7") // of another terminal
	s.apply(another)
	s.want("")
	s.apply(s.project(Entry{Name: "a"}, Entry{Name: "b", Args: []string{"--x", "b"}}, Entry{Name: "d"}))
	got := s.lines()
	for _, line := range []string{"end b", "end c", "start b", "start d"} {
		if !strings.Contains(strings.Join(got, "\n"), line) {
			t.Errorf("no %q: %q", line, got)
		}
	}
	if len(got) != 4 {
		t.Errorf("more has changed: %q", got)
	}
}

func TestApplyStartsAgainWhatHasEnded(t *testing.T) {
	s := newStage(t)
	p := s.project(Entry{Name: "once"}, Entry{Name: "after", Needs: map[string]Need{"once": Completed}})
	s.apply(p)
	s.want("start once", "start after")
	s.apply(p)
	s.want("start once")
}

func TestApplyReportsWhatFails(t *testing.T) {
	s := newStage(t)
	unhealthy := &Healthcheck{Test: []string{"sh", "-c", "echo no; exit 1"}, Interval: time.Millisecond, Timeout: time.Second, Retries: 2}
	for name, tt := range map[string]struct {
		entry Entry
		want  string
		code  api.ExitCode
	}{
		"an error":        {Entry{Name: "a", Args: []string{"fail"}}, "a: no such workload", 62},
		"a healthcheck":   {Entry{Name: "b", Health: unhealthy}, "b: the healthcheck fails: exit status 1: no", api.ExitWorkload},
		"the hook before": {Entry{Name: "c", Before: []string{"false"}}, "c: before: false: exit status 1", api.ExitWorkload},
		"a need":          {Entry{Name: "d", Needs: map[string]Need{"gone": Started}}, "gone: no such workload", 62},
	} {
		t.Run(name, func(t *testing.T) {
			entries := []Entry{tt.entry}
			if len(tt.entry.Needs) > 0 {
				entries = append(entries, Entry{Name: "gone", Args: []string{"fail"}})
			}
			err := s.Apply(t.Context(), s.project(entries...))
			if e := api.AsError(err); e == nil || !strings.Contains(e.Message, tt.want) || e.Code != tt.code {
				t.Errorf("got %+v, want %s", e, tt.want)
			}
		})
	}
}
