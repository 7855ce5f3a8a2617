//go:build e2e && linux

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// The product's processes, by their distinguishing first argument.
const (
	theDaemon = "daemon"
	theHelper = "helper"
)

// deaths lists the ways in which the product's processes end unexpectedly.
var deaths = []struct {
	name   string
	signal syscall.Signal
	of     []string // in this order, without a pause
}{
	{"kill_9_of_the_daemon", syscall.SIGKILL, []string{theDaemon}},
	{"kill_9_of_the_helper", syscall.SIGKILL, []string{theHelper}},
	{"kill_9_of_the_daemon_and_the_helper", syscall.SIGKILL, []string{theDaemon, theHelper}},
	{"kill_9_of_the_helper_and_the_daemon", syscall.SIGKILL, []string{theHelper, theDaemon}},
	{"sigterm_of_the_daemon", syscall.SIGTERM, []string{theDaemon}},
	{"sigterm_of_the_helper", syscall.SIGTERM, []string{theHelper}},
	{"sigterm_of_the_daemon_and_the_helper", syscall.SIGTERM, []string{theDaemon, theHelper}},
	{"sigint_of_the_daemon", syscall.SIGINT, []string{theDaemon}},
}

// steps lists the steps of connect in order.
var steps = []string{
	"Reaching the API server", "Finding the traffic manager", "Opening the tunnel", "Choosing the netstack", "Configuring the network",
	"Checking a name, a pod, a ClusterIP and cluster DNS",
}

// tracesSuite ends each process at each step, and checks that the laptop is restored and that the next connect works.
func tracesSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	before := l.snapshot(t)

	for _, d := range deaths {
		t.Run(d.name, func(t *testing.T) {
			l.usable(t)
			l.dies(t, d.signal, d.of)
			l.soonAs(t, before)
			l.gone(t, theHelper)
			if slices.Contains(d.of, theDaemon) {
				l.gone(t, theDaemon)
				if s := l.status(t); len(s.Connections) != 0 {
					t.Errorf("status without a daemon: %+v", s)
				}
				return
			}
			testenv.Eventually(t, time.Minute, func() error {
				c := l.connection(t)
				if c.Status != api.StatusFailed || c.Error == nil || c.Error.Code != api.ExitLost || c.Error.Hint == "" {
					return fmt.Errorf("status %s, error %+v", c.Status, c.Error)
				}
				return nil
			})
			if out := l.must(t, "kubevpn", "status"); !strings.Contains(out, "the root helper ended") {
				t.Errorf("status has no reason:\n%s", out)
			}
		})
	}
	t.Run("helper_ignores_sigint", func(t *testing.T) {
		l.usable(t)
		helper := l.process(t, theHelper)
		if err := syscall.Kill(helper.pid, syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		l.reaches(t)
		if now := l.process(t, theHelper); now.pid != helper.pid {
			t.Errorf("the helper was process %d and is %d", helper.pid, now.pid)
		}
		l.must(t, "kubevpn", "disconnect", "--all")
		l.sameAs(t, before)
	})
	for _, role := range []string{theDaemon, theHelper} {
		for _, step := range steps[1:] { // only the command takes part in the first
			t.Run("kill_9_of_the_"+role+"_at_"+strings.ReplaceAll(step, " ", "_"), func(t *testing.T) {
				before := l.stall(t)
				a := l.begin(t)
				a.reach(t, step)
				kill(t, l.process(t, role).pid)
				code, last := a.end(t)
				want := api.ExitDaemon
				if role == theHelper {
					want = api.ExitLost
				}
				if code != int(want) || last.Error == nil || last.Error.Code != want || last.Error.Hint == "" {
					t.Errorf("exit %d, want %d; last event %+v, error %+v", code, want, last, last.Error)
				}
				l.soonAs(t, before)
				l.gone(t, theHelper)
			})
		}
	}
	for _, step := range steps {
		t.Run("ctrl_c_at_"+strings.ReplaceAll(step, " ", "_"), func(t *testing.T) {
			before := l.stall(t)
			a := l.begin(t)
			a.reach(t, step)
			if err := a.cmd.Process.Signal(syscall.SIGINT); err != nil {
				t.Fatal(err)
			}
			code, last := a.end(t)
			if code != int(api.ExitInterrupted) {
				t.Errorf("exit %d; last event %+v", code, last)
			}
			l.sameAs(t, before) // at once, because the command waits for the cleanup
			if s := l.status(t); len(s.Connections) != 0 {
				t.Errorf("%+v", s)
			}
			l.gone(t, theHelper)
		})
	}
	t.Run("kill_9_at_any_moment", func(t *testing.T) {
		took := l.usable(t).took // the kills are spread over this duration
		l.must(t, "kubevpn", "disconnect", "--all")
		for n := range moments {
			role := []string{theDaemon, theHelper}[n%2]
			after := took * time.Duration(n) / moments
			a := l.begin(t)
			time.Sleep(after) // the test varies this moment
			for _, p := range l.processes(t, role) {
				if err := syscall.Kill(p.pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
					t.Fatal(err) // the helper of the attempt before may have ended at this moment
				}
			}
			code, last := a.end(t)
			// The kill may hit a helper that is still starting.
			if !slices.Contains([]api.ExitCode{api.ExitOK, api.ExitLost, api.ExitDaemon, api.ExitPrivilege}, api.ExitCode(code)) {
				t.Errorf("the %s was killed %v after connect began: exit %d, %+v\n%s", role, after, code, last.Error, &a.stderr)
			}
			testenv.Eventually(t, time.Minute, func() error {
				// A connection that existed is now failed, or the daemon has ended with it. Otherwise the kill missed
				// it, and it is ended here.
				for _, c := range l.status(t).Connections {
					if c.Status != api.StatusFailed && len(l.processes(t, theHelper)) > 0 {
						l.must(t, "kubevpn", "disconnect", "--all")
					}
				}
				if d := cmp.Diff(before, l.snapshot(t)); d != "" {
					return fmt.Errorf("the %s was killed %v after connect began; the laptop is not as before (-before +after):\n%s", role, after, d)
				}
				return nil
			})
		}
		l.gone(t, theHelper)
	})
	t.Run("connect_works_afterwards", func(t *testing.T) {
		l.usable(t)
		l.must(t, "kubevpn", "disconnect", "--all")
		l.sameAs(t, before)
	})
}

// moments is the number of moments of a connect at which a process is killed.
const moments = 24

// usable connects and checks that the connection carries traffic.
func (l *laptop) usable(t *testing.T) result {
	t.Helper()
	r := l.run(t, "kubevpn", "connect")
	if r.code != 0 {
		t.Fatal(r)
	}
	l.reaches(t)
	return r
}

// stall blocks all tunnels until the test ends, so that no connect gets past its last step before it gives up, which
// takes seconds. It returns a snapshot of the laptop in that state.
func (l *laptop) stall(t *testing.T) string {
	t.Helper()
	r := l.sh(t, `
		nft add table inet stall && nft add chain inet stall out '{ type filter hook output priority 0; }' &&
		nft add rule inet stall out oifname '"kubevpn*"' drop`)
	if r.code != 0 {
		t.Fatal(r)
	}
	l.finally(t, "nft", "delete", "table", "inet", "stall")
	return l.snapshot(t)
}

// reaches fetches a page by the name of the Service.
func (l *laptop) reaches(t *testing.T) {
	t.Helper()
	if _, err := l.get(t, "http://web.default/"); err != nil {
		t.Fatal(err)
	}
}

// dies sends a signal to the processes with these roles, in order and without a pause.
func (l *laptop) dies(t *testing.T, signal syscall.Signal, roles []string) {
	t.Helper()
	var pids []int
	for _, role := range roles {
		pids = append(pids, l.process(t, role).pid)
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err) // a process that has already ended is fine
		}
	}
}

// soonAs waits until the laptop's network is as before. The kernel removes the resources of a dead process later, and
// a helper that has lost its daemon needs a moment.
func (l *laptop) soonAs(t *testing.T, before string) {
	t.Helper()
	testenv.Eventually(t, time.Minute, func() error {
		if d := cmp.Diff(before, l.snapshot(t)); d != "" {
			return fmt.Errorf("the laptop is not as before (-before +after):\n%s", d)
		}
		return nil
	})
}

// process is a process of the binary under test, which only this run uses.
type process struct {
	pid    int
	uid    uint32
	caller string // the user who called sudo, for a helper that sudo started
}

// processes returns the binary's live processes of this laptop's user whose first argument is role.
func (l *laptop) processes(t *testing.T, role string) []process {
	t.Helper()
	binary, err := os.Stat(filepath.Join(bin, "kubevpn"))
	if err != nil {
		t.Fatal(err)
	}
	network, err := os.Stat(l.network()) // another lab may be up beside this one
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	var found []process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		dir := filepath.Join("/proc", e.Name())
		exe, err := os.Stat(filepath.Join(dir, "exe"))
		if err != nil || !os.SameFile(exe, binary) {
			continue // it has ended, or is a kernel thread or another program
		}
		if in, err := os.Stat(filepath.Join(dir, "ns/net")); err != nil || !os.SameFile(in, network) {
			continue
		}
		args, argsErr := os.ReadFile(filepath.Join(dir, "cmdline"))
		env, envErr := os.ReadFile(filepath.Join(dir, "environ"))
		info, infoErr := os.Stat(dir)
		if argsErr != nil || envErr != nil || infoErr != nil {
			continue // it has ended
		}
		if argv := strings.Split(string(args), "\x00"); len(argv) < 2 || argv[1] != role {
			continue
		}
		p := process{pid: pid, uid: info.Sys().(*syscall.Stat_t).Uid}
		for v := range strings.SplitSeq(string(env), "\x00") {
			if uid, ok := strings.CutPrefix(v, "SUDO_UID="); ok {
				p.caller = uid
			}
		}
		if p.uid == l.uid && p.caller == "" || p.caller == fmt.Sprint(l.uid) {
			found = append(found, p)
		}
	}
	return found
}

// process returns the only process with a role.
func (l *laptop) process(t *testing.T, role string) process {
	t.Helper()
	found := l.processes(t, role)
	if len(found) != 1 {
		t.Fatalf("%d processes are the %s, want 1: %+v", len(found), role, found)
	}
	return found[0]
}

// gone waits until no process has a role.
func (l *laptop) gone(t *testing.T, role string) {
	t.Helper()
	testenv.Eventually(t, time.Minute, func() error {
		if found := l.processes(t, role); len(found) > 0 {
			return fmt.Errorf("the %s is still there: %+v", role, found)
		}
		return nil
	})
}

// attempt is a `kubevpn connect` that runs concurrently with the test.
type attempt struct {
	cmd    *exec.Cmd
	events *json.Decoder
	stderr bytes.Buffer
}

func (l *laptop) begin(t *testing.T, args ...string) *attempt {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	a := &attempt{cmd: l.command(ctx, t, append([]string{"kubevpn", "connect", "-o", "json"}, args...)...)}
	a.cmd.Stderr = &a.stderr
	out, err := a.cmd.StdoutPipe()
	if err == nil {
		err = a.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cancel)
	a.events = json.NewDecoder(out)
	return a
}

// reach reads events until a step starts.
func (a *attempt) reach(t *testing.T, step string) {
	t.Helper()
	for {
		var e api.Event
		if err := a.events.Decode(&e); err != nil {
			t.Fatalf("waiting for %q: %v\n%s", step, err, &a.stderr)
		}
		if e.Error != nil {
			t.Fatalf("waiting for %q: %v", step, e.Error)
		}
		if e.Step == step {
			return
		}
	}
}

// end waits until the command ends, and returns its exit code and its last event.
func (a *attempt) end(t *testing.T) (code int, last api.Event) {
	t.Helper()
	for {
		var e api.Event
		err := a.events.Decode(&e)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		last = e
	}
	var exit *exec.ExitError
	switch err := a.cmd.Wait(); {
	case errors.As(err, &exit):
		return exit.ExitCode(), last
	case err != nil:
		t.Fatal(err)
	}
	return 0, last
}
