//go:build e2e && linux

package e2e

import (
	"strings"
	"syscall"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/test/lab"
)

// foregroundSuite checks that, as root, one process does everything, and that its end restores the laptop.
func foregroundSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	before := l.snapshot(t)

	for _, end := range []struct {
		name   string
		signal syscall.Signal
		code   int
	}{
		{"ctrl_c", syscall.SIGINT, int(api.ExitOK)}, // a requested end is a success
		{"sigterm", syscall.SIGTERM, int(api.ExitOK)},
		{"kill_9", syscall.SIGKILL, -1},
	} {
		t.Run(end.name, func(t *testing.T) {
			a := l.begin(t, "--foreground")
			a.connected(t)
			l.reaches(t)
			for _, role := range []string{theDaemon, theHelper} {
				if found := l.processes(t, role); len(found) > 0 {
					t.Errorf("a %s runs: %+v", role, found)
				}
			}
			if err := a.cmd.Process.Signal(end.signal); err != nil {
				t.Fatal(err)
			}
			if code, last := a.end(t); code != end.code {
				t.Errorf("exit %d, want %d; last event %+v\n%s", code, end.code, last, &a.stderr)
			}
			if end.signal == syscall.SIGKILL {
				l.soonAs(t, before)
			} else {
				l.sameAs(t, before)
			}
		})
	}
	for _, step := range steps {
		t.Run("ctrl_c_at_"+strings.ReplaceAll(step, " ", "_"), func(t *testing.T) {
			before := l.stall(t)
			a := l.begin(t, "--foreground")
			a.reach(t, step)
			if err := a.cmd.Process.Signal(syscall.SIGINT); err != nil {
				t.Fatal(err)
			}
			if code, last := a.end(t); code != int(api.ExitInterrupted) {
				t.Errorf("exit %d; last event %+v\n%s", code, last, &a.stderr)
			}
			l.sameAs(t, before)
		})
	}
}

// connected reads events until the connection exists.
func (a *attempt) connected(t *testing.T) {
	t.Helper()
	for {
		var e api.Event
		if err := a.events.Decode(&e); err != nil {
			t.Fatalf("waiting for the connection: %v\n%s", err, &a.stderr)
		}
		if e.Error != nil {
			t.Fatal(e.Error)
		}
		if c := e.Connection; c != nil && c.Status == api.StatusConnected {
			return
		}
	}
}
