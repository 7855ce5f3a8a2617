//go:build e2e && linux

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// comparing is a running `kubevpn diff -o json`.
type comparing struct {
	t              *testing.T
	cmd            *exec.Cmd
	stdout, stderr testenv.Buffer
	ended          chan struct{}
}

// diff starts `kubevpn diff` with the application on the laptop, whose /price has this total, and returns when the
// agents record.
func (l *laptop) diff(t *testing.T, s *shop, price string, args ...string) *comparing {
	t.Helper()
	argv := append([]string{"kubevpn", "diff", s.workload, "-n", s.namespace, "--port", "8080", "-o", "json"}, args...)
	argv = append(argv, "--", filepath.Join(bin, "app"), "-name", "laptop", "-host", "127.0.0.1", "-price", price)
	d := &comparing{t: t, cmd: l.command(context.WithoutCancel(t.Context()), t, argv...)}
	d.cmd.Stdout, d.cmd.Stderr = &d.stdout, &d.stderr
	d.ended = make(chan struct{})
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(d.ended)
		_ = d.cmd.Wait() // ends looks at the exit code
	}()
	t.Cleanup(func() { // a test that fails leaves no program
		_ = d.cmd.Process.Signal(syscall.SIGINT)
		<-d.ended
	})
	d.shows("comparing the answers of " + s.workload + " in 2 pods")
	return d
}

// shows waits until the command has printed a text on standard error.
func (d *comparing) shows(text string) {
	d.t.Helper()
	testenv.Eventually(d.t, 2*time.Minute, func() error {
		if got := d.stderr.String(); !strings.Contains(got, text) {
			select {
			case <-d.ended:
				d.t.Fatalf("the command has ended: %s", got)
			default:
			}
			return fmt.Errorf("no %q in %s", text, got)
		}
		return nil
	})
}

// program returns the process of the command after --.
func (d *comparing) program() int {
	d.t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", d.cmd.Process.Pid))
	if err != nil {
		d.t.Fatal(err)
	}
	for _, thread := range threads {
		children, _ := os.ReadFile(thread) // the thread may have ended
		for _, child := range strings.Fields(string(children)) {
			if name, err := os.ReadFile("/proc/" + child + "/comm"); err == nil && string(name) == "app\n" {
				pid, _ := strconv.Atoi(child)
				return pid
			}
		}
	}
	d.t.Fatalf("no program among the children of %d", d.cmd.Process.Pid)
	return 0
}

// gone checks that a program has ended.
func gone(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("the program %d is left: %v", pid, err)
	}
}

// ends waits for the end of the command, after a signal unless that is 0, and returns its result.
func (d *comparing) ends(signal syscall.Signal, code api.ExitCode) api.Diff {
	d.t.Helper()
	if signal != 0 {
		if err := d.cmd.Process.Signal(signal); err != nil {
			d.t.Fatal(err)
		}
	}
	<-d.ended
	if got := d.cmd.ProcessState.ExitCode(); got != int(code) {
		d.t.Errorf("exit %d, want %d\n%s\n%s", got, code, d.stdout.String(), d.stderr.String())
	}
	var result api.Diff
	if err := json.Unmarshal([]byte(d.stdout.String()), &result); err != nil || result.Kind != api.KindDiff {
		d.t.Fatalf("%v: %s\n%s", err, d.stdout.String(), d.stderr.String())
	}
	return result
}

// has checks that the result has exactly these differences, as "ROUTE: PLACE".
func (d *comparing) has(r api.Diff, want ...string) {
	d.t.Helper()
	var got []string
	for _, g := range r.Differences {
		got = append(got, g.Route+": "+g.Where)
	}
	if slices.Sort(got); !slices.Equal(got, want) {
		d.t.Errorf("differences %q, want %q\n%+v", got, want, r)
	}
}

// asks sends requests to the pods, as many as n, and requires the application's answers.
func (v *visitor) asks(t *testing.T, s *shop, n int, method, path string) {
	t.Helper()
	pods := s.ready(t)
	_, ip := first(pods)
	for range n {
		req, err := http.NewRequestWithContext(t.Context(), method, "http://"+ip+":8080"+path, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer secret")
		resp, err := v.http.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK || resp.Header.Get("X-Name") == "laptop" {
			t.Fatalf("%s %s: %s %v", method, path, resp.Status, resp.Header)
		}
	}
}

// diffSuite compares two versions of the application: in the pods and on the laptop.
func diffSuite(t *testing.T, w *world) {
	l, v := w.newUser(t, lab.Admin), w.visitor(t)
	s := w.newShop(t, "diff-shop", "privileged")
	l.connect(t)
	for _, test := range []struct {
		name string
		run  func(*testing.T, *laptop, *shop, *visitor)
	}{
		{"differences", diffDiffers},
		{"ignored", diffIgnored},
		{"unsafe", diffUnsafe},
		{"stopped_program", diffStopped},
		{"exit_codes", diffExits},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, l, s, v) })
	}
}

// diffDiffers checks differences, the detector, Ctrl-C, the archive and what is left.
func diffDiffers(t *testing.T, l *laptop, s *shop, v *visitor) {
	har := filepath.Join(l.home, "diff.har")
	d := l.diff(t, s, "10.50", "--har", har, "--ignore", "$.header", "--ignore", "$.remote")
	program := d.program()
	v.asks(t, s, 5, "GET", "/price?item=tea")
	v.asks(t, s, 3, "GET", "/download?bytes=7")
	v.asks(t, s, 2, "POST", "/price")
	d.shows(`GET /price: body $.total 10.5 -> 10.50  (/price?item=tea)`)
	v.asks(t, s, 1, "GET", "/last/17")
	d.shows(`GET /last/{id}: header X-Name`)
	r := d.ends(syscall.SIGINT, api.ExitDiffer)
	d.has(r, "GET /download: header X-Name", "GET /last/{id}: body $.name",
		"GET /last/{id}: header X-Name", "GET /price: body $.total")
	if r.Requests < 6 || r.Differ < 3 || !slices.Contains(r.NotCompared, api.DiffSkipped{Reason: "not GET, HEAD or OPTIONS", Requests: 2}) ||
		!slices.ContainsFunc(r.Ignored, func(i api.DiffIgnored) bool { return i.Where == "body $.items[*].id" }) {
		t.Errorf("%+v", r)
	}
	text, err := os.ReadFile(har)
	if err != nil {
		t.Fatal(err)
	}
	var archive struct {
		Log struct {
			Entries []struct {
				Comment string
				To      string `json:"_destination"`
				Request struct{ URL string }
			}
		}
	}
	if err := json.Unmarshal(text, &archive); err != nil || len(archive.Log.Entries) < 2 || strings.Contains(string(text), `"value":"Bearer secret"`) {
		t.Fatalf("%v: %s", err, text)
	}
	if a, b := archive.Log.Entries[0], archive.Log.Entries[1]; a.To != api.ToApplication || b.To != api.ToLaptop || a.Request.URL != b.Request.URL || a.Comment == "" {
		t.Errorf("%+v", archive.Log.Entries)
	}
	if left := l.status(t).Intercepts; len(left) > 0 {
		t.Errorf("intercepts are left: %+v", left)
	}
	gone(t, program)
}

func diffIgnored(t *testing.T, l *laptop, s *shop, v *visitor) {
	d := l.diff(t, s, "10.50", "--ignore", "$.total", "--ignore", "x-name", "--requests", "4")
	v.asks(t, s, 10, "GET", "/price")
	if r := d.ends(0, api.ExitOK); r.Requests != 4 || r.Differ != 0 {
		t.Errorf("%+v", r)
	}
}

func diffUnsafe(t *testing.T, l *laptop, s *shop, v *visitor) {
	d := l.diff(t, s, "11", "--unsafe")
	v.asks(t, s, 3, "POST", "/price")
	d.shows("POST /price: body $.total 10.5 -> 11")
	d.has(d.ends(syscall.SIGINT, api.ExitDiffer), "POST /price: body $.at", "POST /price: body $.items[*].id", "POST /price: body $.total")
}

// diffStopped checks that a program which hangs fails no request of a client, and that what it misses is counted.
func diffStopped(t *testing.T, l *laptop, s *shop, v *visitor) {
	d := l.diff(t, s, "11")
	program := d.program()
	signal := func(s syscall.Signal) {
		if err := syscall.Kill(program, s); err != nil {
			t.Fatal(err)
		}
	}
	signal(syscall.SIGSTOP)
	v.asks(t, s, 400, "GET", "/price")
	d.shows("! requests are dropped")
	signal(syscall.SIGCONT)
	d.shows("GET /price: body $.total 10.5 -> 11")
	if r := d.ends(syscall.SIGINT, api.ExitDiffer); r.Dropped == 0 || r.Requests == 0 {
		t.Errorf("%+v", r)
	}
	gone(t, program)
}

func diffExits(t *testing.T, l *laptop, s *shop, v *visitor) {
	argv := []string{"kubevpn", "diff", s.workload, "-n", s.namespace, "--port", "8080"}
	for _, test := range []struct {
		name, message string
		code          api.ExitCode
		args          []string
	}{
		{"nothing was compared", "no request was compared", api.ExitNotCompared, []string{"--for", "1ms", "--", filepath.Join(bin, "app"), "-host", "127.0.0.1"}},
		{"no program", "no program listens on port 8080 of this machine", api.ExitLocalPort, nil},
		{"the program ends", "false ended: exit status 1", api.ExitLocalPort, []string{"--", "false"}},
		{"no such program", "cannot start /nonexistent", api.ExitUsage, []string{"--", "/nonexistent"}},
		{"bad path", "is invalid", api.ExitUsage, []string{"--ignore", "$["}},
	} {
		if r := l.run(t, append(slices.Clone(argv), test.args...)...); r.code != int(test.code) || !strings.Contains(r.stderr, test.message) {
			t.Errorf("%s: %v", test.name, r)
		}
	}
}
