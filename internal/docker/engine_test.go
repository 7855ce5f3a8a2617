package docker

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kubevpn/internal/api"
)

// fakeDocker puts a docker command into PATH that is a script.
func fakeDocker(t *testing.T, script string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "docker"), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

func TestFind(t *testing.T) {
	const (
		local = `context) echo unix:///var/run/docker.sock;;`
		alive = `version) echo 20.10.24;;`
	)
	tests := []struct{ name, script, want string }{
		{"remote", `context) echo tcp://build:2376;;`, "on another machine (tcp://build:2376)"},
		{"ssh", `context) echo ssh://me@build;;`, "on another machine"},
		{"broken-context", `context) echo 'context "x": not found' >&2; exit 1;;`, "not found"},
		{"not-running", local + `version) echo "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?" >&2; exit 1;;`, "does not run"},
		{"not-allowed", local + `version) echo "Got permission denied while trying to connect to the Docker daemon socket" >&2; exit 1;;`, "you may not speak"},
		{"windows", local + alive + `info) echo '{"OSType":"windows"}';;`, "containers of windows"},
		{"desktop", local + alive + `info) echo '{"OSType":"linux","OperatingSystem":"Docker Desktop"}';;`, "virtual machine"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			fakeDocker(t, `case $1 in `+tt.script+` esac`)
			_, err := Find(t.Context())
			var e *api.Error
			if !errors.As(err, &e) || e.Code != api.ExitEngine || !strings.Contains(e.Message, tt.want) || !strings.Contains(e.Hint, "--isolate") {
				t.Errorf("%v, want an error with %q, and with what does without Docker", err, tt.want)
			}
		})
	}
	t.Run("found", func(t *testing.T) {
		fakeDocker(t, `case $1 in `+local+alive+` info) echo '{"OSType":"linux","SecurityOptions":["name=seccomp,profile=default","name=selinux"]}';; esac`)
		e, err := Find(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(e.security, []string{"seccomp", "selinux"}) {
			t.Errorf("security features %q", e.security)
		}
	})
	t.Run("none", func(t *testing.T) {
		t.Setenv("PATH", t.TempDir())
		_, err := Find(t.Context())
		var e *api.Error
		if !errors.As(err, &e) || e.Code != api.ExitEngine || !strings.Contains(e.Message, "none in PATH") {
			t.Error(err)
		}
	})
}

func TestImage(t *testing.T) {
	pulled := filepath.Join(t.TempDir(), "pulled")
	inspect := `image) [ -e ` + pulled + ` ] || { echo "Error: No such image: $5" >&2; exit 1; }; echo '{"Architecture":"amd64","Config":{"Entrypoint":["/app"],"Cmd":["-x"]}}';;`
	look := func(pull string) (image, string, error) {
		fakeDocker(t, `case $1 in `+inspect+` pull) `+pull+`;; esac`)
		e := &Engine{command: "docker"}
		var seen strings.Builder
		i, err := e.image(context.Background(), "registry.example/team/app:1", func() io.Writer { return &seen })
		return i, seen.String(), err
	}
	_, _, err := look(`echo "Error response from daemon: pull access denied, repository does not exist" >&2; exit 1`)
	var e *api.Error
	if !errors.As(err, &e) || e.Code != api.ExitEngine || !strings.Contains(e.Message, "pull access denied") || !strings.Contains(e.Hint, "`docker login registry.example`") {
		t.Errorf("a pull that fails: %v", err)
	}
	i, seen, err := look(`echo pulling $2; touch ` + pulled)
	if err != nil || seen != "pulling registry.example/team/app:1\n" || !slices.Equal(i.Config.Entrypoint, []string{"/app"}) || !slices.Equal(i.Config.Cmd, []string{"-x"}) {
		t.Errorf("%+v, seen %q: %v", i, seen, err)
	}
	if _, seen, err = look(`exit 1`); err != nil || seen != "" {
		t.Errorf("an image that is here: seen %q: %v", seen, err)
	}
}
