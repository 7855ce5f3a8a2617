package daemon

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/project"
)

// newProjects returns projects whose entries are scripts in place of kubevpn.
func newProjects(t *testing.T) (*projects, project.Request) {
	if os.PathSeparator != '/' {
		t.Skip("kubevpn up needs a Unix")
	}
	leaks := goleak.IgnoreCurrent()
	dir := t.TempDir()
	script := "#!/bin/sh\nfor last; do :; done\ntrap 'exit 0' TERM\n[ $last = bad ] && exit 3\necho '{\"held\":true}' >&3\necho output of $last\nwhile :; do sleep 0.02; done\n"
	program := filepath.Join(dir, "kubevpn")
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	ps := &projects{program: program, logs: dir, changed: func() {}, all: map[string]*keptProject{}}
	t.Cleanup(func() {
		if err := ps.shutDown(); err != nil {
			t.Error(err)
		}
		if ps.inUse() {
			t.Error("a project is left")
		}
		goleak.VerifyNone(t, leaks)
	})
	return ps, project.Request{Project: project.Project{Name: "shop", File: filepath.Join(dir, "kubevpn.yaml"), Environ: os.Environ(),
		Entries: []project.Entry{{Kind: "proxy", Name: "web", Args: []string{"web"}, Directory: dir}}}}
}

func TestAProjectInTheBackgroundIsChangedAndEnded(t *testing.T) {
	ps, req := newProjects(t)
	nothing := func(api.Event) {}
	if err := ps.up(t.Context(), req, nothing); err != nil {
		t.Fatal(err)
	}
	var told []string
	tell := func(e api.Event) { told = append(told, e.Entry+": "+e.Detail) }
	dry := req
	dry.DryRun = true
	dry.Project.Entries = append(dry.Project.Entries, project.Entry{Kind: "dev", Name: "api", Args: []string{"api"}, Directory: ps.logs})
	if err := ps.up(t.Context(), dry, tell); err != nil || strings.Join(told, "\n") != "web: keep: kubevpn proxy web\napi: start: kubevpn dev api" {
		t.Errorf("%q %v", told, err)
	}
	if all := ps.status(); len(all) != 1 || len(all[0].Entries) != 1 || all[0].Entries[0].State != api.ProjectRunning {
		t.Errorf("%+v", all)
	}
	bad := req
	bad.Project.Entries = []project.Entry{{Kind: "proxy", Name: "bad", Args: []string{"bad"}, Directory: ps.logs}}
	if err := ps.up(t.Context(), bad, nothing); err == nil || err.Error() != "bad: exit status 3" {
		t.Error(err)
	}
	if err := ps.down(t.Context(), req.Project.File, nothing); err != nil || ps.inUse() {
		t.Error(err)
	}
	if err := ps.down(t.Context(), req.Project.File, nothing); api.AsError(err).Code != api.ExitNotConnected {
		t.Error(err)
	}
}

func TestAnAttachedProjectEndsWithItsRequest(t *testing.T) {
	for name, end := range map[string]func(*projects, string, context.CancelFunc) error{
		"client": func(_ *projects, _ string, cancel context.CancelFunc) error { cancel(); return nil },
		"down": func(ps *projects, file string, _ context.CancelFunc) error {
			return ps.down(context.Background(), file, func(api.Event) {})
		},
		"quit": func(ps *projects, _ string, _ context.CancelFunc) error { return ps.shutDown() },
	} {
		t.Run(name, func(t *testing.T) {
			ps, req := newProjects(t)
			req.Attached = true
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			held, done := make(chan struct{}), make(chan error, 1)
			go func() {
				done <- ps.up(ctx, req, func(e api.Event) {
					if e.Held {
						close(held)
					}
				})
			}()
			<-held
			if err := end(ps, req.Project.File, cancel); err != nil {
				t.Error(err)
			}
			if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			if ps.inUse() {
				t.Error("it is still up")
			}
		})
	}
}

func TestAProjectThatFailsAtTheStartIsEnded(t *testing.T) {
	ps, req := newProjects(t)
	req.Project.Entries = append(req.Project.Entries, project.Entry{Kind: "proxy", Name: "bad", Args: []string{"bad"}, Directory: ps.logs})
	if err := ps.up(t.Context(), req, func(api.Event) {}); err == nil || ps.inUse() {
		t.Error(err)
	}
}
