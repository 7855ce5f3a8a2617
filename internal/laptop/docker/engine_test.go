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
	"time"

	"github.com/google/go-cmp/cmp"

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

func TestFindExplainsWhyAnEngineDoesNotFit(t *testing.T) {
	const (
		local = `context) echo unix:///var/run/docker.sock;;`
		alive = `version) echo 20.10.24;;`
	)
	tests := []struct{ name, script, want string }{
		{"remote", `context) echo tcp://build:2376;;`, "on another machine (tcp://build:2376)"},
		{"ssh", `context) echo ssh://me@build;;`, "on another machine"},
		{"broken-context", `context) echo 'context "x": not found' >&2; exit 1;;`, "not found"},
		{"not-running", local + `version) echo "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?" >&2; exit 1;;`, "does not run"},
		{"not-allowed", local + `version) echo "Got permission denied while trying to connect to the Docker daemon socket" >&2; exit 1;;`, "you have no permission"},
		{"windows", local + alive + `info) echo '{"OSType":"windows"}';;`, "windows containers"},
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
	t.Run("a fitting engine", func(t *testing.T) {
		fakeDocker(t, `case $1 in `+local+alive+` info) echo '{"OSType":"linux","SecurityOptions":["name=seccomp,profile=default","name=selinux"]}';; esac`)
		e, err := Find(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(e.security, []string{"seccomp", "selinux"}) {
			t.Errorf("security features %q", e.security)
		}
	})
	t.Run("no docker command", func(t *testing.T) {
		t.Setenv("PATH", t.TempDir())
		_, err := Find(t.Context())
		var e *api.Error
		if !errors.As(err, &e) || e.Code != api.ExitEngine || !strings.Contains(e.Message, "not in PATH") {
			t.Error(err)
		}
	})
}

// The pod names its image, and docker would read such a name as a flag.
func TestImageIsNoFlag(t *testing.T) {
	e := &Engine{command: "/nonexistent"} // nothing is started
	_, err := e.image(t.Context(), "--privileged", false, nil, nil)
	if err == nil || !strings.Contains(err.Error(), `"--privileged" is not the name of an image`) {
		t.Error(err)
	}
}

func TestImagePullsOnlyWhenNeeded(t *testing.T) {
	pulled := filepath.Join(t.TempDir(), "pulled")
	inspect := `image) [ -e ` + pulled + ` ] || { echo "Error: No such image: $5" >&2; exit 1; }; echo '{"Architecture":"amd64","Config":{"User":"app","Env":["A=1"],"Entrypoint":["/app"],"Cmd":["'$(cat ` + pulled + `)'"]}}';;`
	look := func(now bool, pull string) (i image, seen string, warned []string, err error) {
		fakeDocker(t, `case $1 in `+inspect+` pull) `+pull+`;; esac`)
		e := &Engine{command: "docker"}
		var progress strings.Builder
		i, err = e.image(context.Background(), "registry.example/team/app:1", now, func() io.Writer { return &progress }, func(s string) { warned = append(warned, s) })
		return i, progress.String(), warned, err
	}
	const denied = `echo "Error response from daemon: pull access denied, repository does not exist" >&2; exit 1`
	for _, now := range []bool{false, true} {
		_, _, _, err := look(now, denied)
		var e *api.Error
		if !errors.As(err, &e) || e.Code != api.ExitEngine || !strings.Contains(e.Message, "pull access denied") || !strings.Contains(e.Hint, "`docker login registry.example`") {
			t.Errorf("a pull that fails: %v", err)
		}
	}
	check := func(what, cmd, progress, warning string) func(image, string, []string, error) {
		return func(i image, seen string, warned []string, err error) {
			t.Helper()
			want := image{Architecture: "amd64"}
			want.Config.User, want.Config.Env, want.Config.Entrypoint, want.Config.Cmd = "app", []string{"A=1"}, []string{"/app"}, []string{cmd}
			if diff := cmp.Diff(want, i); diff != "" || err != nil || seen != progress || !strings.Contains(strings.Join(warned, "\n"), warning) || (warning == "") != (warned == nil) {
				t.Errorf("%s: seen %q, warned %q, %v\n%s", what, seen, warned, err, diff)
			}
		}
	}
	pull := func(version string) string { return `echo pulling $2; echo ` + version + ` >` + pulled }
	check("a missing image", "one", "pulling registry.example/team/app:1\n", "")(look(false, pull("one")))
	check("a local image", "one", "", "")(look(false, pull("two")))
	check("a local image that is pulled again", "two", "pulling registry.example/team/app:1\n", "")(look(true, pull("two")))
	check("a registry that denies the pull", "two", "", "pull access denied")(look(true, denied))
}

// remove also waits for a container that the engine is already removing.
func TestRemoveWaitsUntilTheContainerIsGone(t *testing.T) {
	asked := filepath.Join(t.TempDir(), "asked")
	fakeDocker(t, `[ -e `+asked+` ] && echo "Error: No such container: $4" >&2 || echo "removal of container is already in progress" >&2; touch `+asked+`; exit 1`)
	e := &Engine{command: "docker"}
	if err := e.remove(t.Context(), "kubevpn-1-web"); err != nil {
		t.Error(err)
	}
	fakeDocker(t, `echo "it cannot be killed" >&2; exit 1`)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := e.remove(ctx, "kubevpn-1-web"); err == nil || !strings.Contains(err.Error(), "it cannot be killed") {
		t.Error(err)
	}
}
