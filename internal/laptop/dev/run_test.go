package dev

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/sandbox"
)

func TestExitExplainsAMissingProgram(t *testing.T) {
	gone := &os.PathError{Op: "opening", Path: "x", Err: os.ErrNotExist}
	for _, tt := range []struct {
		name, program string
		status        sandbox.ExitStatus
		err           error
		want          api.ExitCode
	}{
		{name: "the program succeeds", program: "go"},
		{name: "the program fails", program: "go", status: sandbox.ExitStatus{Code: 7}, want: 7},
		{name: "no such program", program: "kubevpn-no-such-program", err: gone, want: api.ExitUsage},
		{name: "something else is missing", program: "go", err: gone, want: api.ExitUnexpected},
		{name: "the machine rejects the attempt", err: fmt.Errorf("%w: seccomp", sandbox.ErrNotAllowed), want: api.ExitPrivilege},
		{name: "something else", err: errors.New("else"), want: api.ExitUnexpected},
	} {
		t.Run(tt.name, func(t *testing.T) {
			code, err := (&Runner{Options: Options{Args: []string{tt.program}}}).exit(tt.status, tt.err)
			got := api.ExitCode(code)
			if err != nil {
				got = api.AsError(err).Code
			}
			if got != tt.want {
				t.Errorf("%v: exit code %d, want %d", err, got, tt.want)
			}
		})
	}
}

// If this machine allows no sandbox, the hint names another mode.
func TestNotAllowedNamesAnotherMode(t *testing.T) {
	for _, tt := range []struct {
		err  error
		mode Mode
		code api.ExitCode
		hint string
	}{
		{fmt.Errorf("%w: AppArmor", sandbox.ErrNotAllowed), OnMachine, api.ExitPrivilege, "`kubevpn dev --docker` runs the workload's containers instead"},
		{fmt.Errorf("%w: AppArmor", sandbox.ErrNotAllowed), Isolated, api.ExitPrivilege, "`kubevpn dev --docker` runs the workload's containers instead"},
		{fmt.Errorf("%w: no device", sandbox.ErrNoTUN), Isolated, api.ExitNoTUN, "without --isolate the program has this machine's network, which `kubevpn dev` connects with sudo"},
		{fmt.Errorf("namespaces: %w on plan9", errors.ErrUnsupported), Isolated, api.ExitPrivilege, "`kubevpn dev` needs a Linux machine"},
	} {
		e := api.AsError(notAllowed(tt.err, tt.mode))
		if e.Code != tt.code || e.Hint != tt.hint || !errors.Is(e, tt.err) {
			t.Errorf("%v: %d %q, %v", tt.err, e.Code, e.Hint, e)
		}
	}
}

func TestWarnerShowsWarningsWithAttributes(t *testing.T) {
	var said []string
	log := slog.New(warner{warn: func(s string) { said = append(said, s) }})
	log.Info("started", "pid", 7)
	log.Warn("new files stay inside", "dir", "/srv")
	log.With("run", "a").WithGroup("pod").Error("lost", "name", "web", "err", errors.New("gone"))
	log.Warn("bare")
	if diff := cmp.Diff([]string{"new files stay inside (dir: /srv)", "lost (run: a, pod.name: web, pod.err: gone)", "bare"}, said); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}
