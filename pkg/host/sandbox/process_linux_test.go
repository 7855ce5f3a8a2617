package sandbox_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/host/sandbox"
)

type unixStat = syscall.Stat_t

// unixSocket serves a socket that greets each client.
func unixSocket(t *testing.T, path string) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Write([]byte("hello from outside"))
			c.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
}

func statusField(status, name string) string {
	for line := range strings.Lines(status) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.Join(strings.Fields(value), " ")
		}
	}
	return "none"
}

func TestIdentityIsTheUsers(t *testing.T) {
	outside, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	inside := run(t, config("cat", "/proc/self/status"))
	for _, name := range []string{"Uid", "Gid"} {
		if got, want := statusField(inside, name), statusField(string(outside), name); got != want {
			t.Errorf("%s: %s inside, %s outside", name, got, want)
		}
	}
	const none = "0000000000000000"
	for name, want := range map[string]string{"CapInh": none, "CapPrm": none, "CapEff": none, "CapBnd": "0000000000002000", "CapAmb": none, "NoNewPrivs": "1"} {
		if got := statusField(inside, name); got != want {
			t.Errorf("%s: %s", name, got)
		}
	}
	if out := run(t, sh("mount -t tmpfs x /mnt 2>&1 && echo mounted || true; hostname sandbox-test 2>&1 || true")); strings.Contains(out, "mounted") {
		t.Errorf("mount: %s", out)
	}
}

func TestSetuidAndGroups(t *testing.T) {
	work := os.Getenv(workVar)
	if work == "" {
		t.Skip("for root it shows nothing; TestEverythingWorksAsNobody runs it as nobody")
	}
	outside, err := exec.Command(work+"/setuid-id", "-u").Output()
	if err != nil || string(outside) != "0\n" {
		t.Fatalf("outside, a set-user-ID program runs as %q (%v), so the test shows nothing", outside, err)
	}
	if out := run(t, config(work+"/setuid-id", "-u")); out != fmt.Sprintln(os.Getuid()) {
		t.Errorf("a set-user-ID program runs as %s", out)
	}
	if out := run(t, sh("cat "+work+"/group/key; stat -c '%u %g' "+work+"/group; grep Groups /proc/self/status")); out != "for the group\n65534 65534\nGroups:\t65534 \n" {
		t.Errorf("%q", out)
	}
}

func TestScriptsAndInterpretersRun(t *testing.T) {
	testenv.NeedPrograms(t, "python3", "bash")
	script := write(t, t.TempDir()+"/script", "#!/bin/sh\necho \"$0\" \"$@\"\n")
	if err := os.Chmod(script, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"echo", "from", "PATH"}, "from PATH\n"},
		{[]string{"/bin/echo", "by path"}, "by path\n"},
		{[]string{script, "a b", "c"}, script + " a b c\n"},
		{[]string{"bash", "-c", "cat <(echo substituted)"}, "substituted\n"},
		{[]string{"python3", "-c", "import subprocess; print(subprocess.check_output(['id', '-u']).decode().strip())"}, strconv.Itoa(os.Getuid()) + "\n"},
	} {
		t.Run(filepath.Base(tt.args[0]), func(t *testing.T) {
			if out := run(t, config(tt.args...)); out != tt.want {
				t.Errorf("it printed %q, want %q", out, tt.want)
			}
		})
	}
	t.Run("static", func(t *testing.T) {
		cfg := config(probe(t), "environ")
		cfg.Env = []string{"A=1", "B=" + strings.Repeat("x", 100_000), "PATH=/nowhere"}
		for i := range 9 {
			cfg.Env = append(cfg.Env, fmt.Sprintf("C%d=%s", i, strings.Repeat("y", 100_000)))
		}
		if out := run(t, cfg); out != strings.Join(cfg.Env, "\n")+"\n" {
			t.Errorf("of an environment of %d bytes, %d arrived", len(strings.Join(cfg.Env, "\n")), len(out))
		}
	})
	t.Run("standard-files", func(t *testing.T) {
		outside, err := exec.Command("ls", "/proc/self/fd").Output() // inherited ones count, too
		if err != nil {
			t.Fatal(err)
		}
		if out := run(t, config("ls", "/proc/self/fd")); out != string(outside) {
			t.Errorf("descriptors inside: %q, outside: %q", out, outside)
		}
	})
}

func TestStartFailsWithTheErrorOfExec(t *testing.T) {
	plain := write(t, t.TempDir()+"/plain", "")
	for _, tt := range []struct {
		name string
		args []string
		dir  string
		want error
	}{
		{"no-such-program", []string{"sandbox-test-nothing"}, "/", unix.ENOENT},
		{"no-such-path", []string{"/sandbox-test-nothing"}, "/", unix.ENOENT},
		{"not-executable", []string{plain}, "/", unix.EACCES},
		{"no-such-directory", []string{"true"}, "/sandbox-test-nothing", unix.ENOENT},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := config(tt.args...)
			cfg.Dir = tt.dir
			s, err := sandbox.New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.Start(t.Context()); !errors.Is(err, tt.want) {
				t.Errorf("Start: %v, want %v", err, tt.want)
			}
		})
	}
}

func TestExitStatusIsThePrograms(t *testing.T) {
	for _, tt := range []struct {
		script string
		want   sandbox.ExitStatus
	}{
		{"exit 0", sandbox.ExitStatus{}},
		{"exit 3", sandbox.ExitStatus{Code: 3}},
		{"exit 255", sandbox.ExitStatus{Code: 255}},
		{"kill -TERM $$", sandbox.ExitStatus{Code: 143, Signal: unix.SIGTERM}},
		{"kill -KILL $$", sandbox.ExitStatus{Code: 137, Signal: unix.SIGKILL}},
		{"kill -TERM 1; kill -KILL 1; kill -INT 1; exit 4", sandbox.ExitStatus{Code: 4}},
		{"(sleep 0.05; exit 9) & exit 5", sandbox.ExitStatus{Code: 5}},
		{"(exit 9) & (setsid sh -c 'exit 9' &) ; sleep 0.1; exit 6", sandbox.ExitStatus{Code: 6}},
	} {
		r := start(t, sh(tt.script))
		for range 2 {
			if status, err := r.Wait(); status != tt.want || err != nil {
				t.Errorf("%s: %+v, %v, want %+v", tt.script, status, err, tt.want)
			}
		}
		if err := r.Signal(unix.SIGTERM); !errors.Is(err, os.ErrProcessDone) {
			t.Errorf("a signal after the end: %v", err)
		}
	}
}

func TestSignalReachesTheProgram(t *testing.T) {
	r := start(t, sh(`trap 'echo got HUP' HUP; trap 'echo got TERM; exit 8' TERM; echo ready; while :; do sleep 0.02; done`))
	r.await("ready")
	if err := r.Signal(unix.SIGHUP); err != nil {
		t.Fatal(err)
	}
	r.await("got HUP")
	if err := r.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if status, err := r.Wait(); status.Code != 8 || err != nil || !strings.HasSuffix(r.printed(), "got TERM\n") {
		t.Errorf("%+v, %v: %s", status, err, r.printed())
	}
}

// Without a terminal, the program gets a signal once, whether the parent or the parent's process group received it.
func TestSignalToTheGroup(t *testing.T) {
	// The test sends each signal only once, because the kernel merges equal signals that are pending.
	const tell = `for s in TERM INT HUP; do trap "echo $s" $s; done; trap 'exit 3' USR1; echo ready; while :; do sleep 0.3 & wait $!; done`
	for _, tt := range []struct{ name, script string }{
		{"shared", tell},
		{"a_group_of_its_own", `exec setsid sh -c "$TELL"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := sh(tt.script)
			cfg.Env = append(cfg.Env, "TELL="+tell)
			cmd := parentCommand(t, cfg)
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			limit := time.AfterFunc(20*time.Second, func() { cmd.Process.Kill() }) // if a signal does not arrive
			defer limit.Stop()
			var lines []string
			step := map[string]func() error{
				"ready": func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGTERM) },
				"TERM":  func() error { return cmd.Process.Signal(unix.SIGINT) },
				"INT":   func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGHUP) },
				"HUP":   func() error { return cmd.Process.Signal(unix.SIGUSR1) },
			}
			for in := bufio.NewScanner(out); in.Scan(); {
				if strings.HasPrefix(in.Text(), runInParent) {
					continue
				}
				lines = append(lines, in.Text())
				if do := step[in.Text()]; do != nil {
					if err := do(); err != nil {
						t.Fatal(err)
					}
				}
			}
			var exit *exec.ExitError
			if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 3 {
				t.Error(err)
			}
			if got := strings.Join(lines, ", "); got != "ready, TERM, INT, HUP" {
				t.Errorf("%q", got)
			}
		})
	}
}

// stubborn starts processes in sessions of their own that ignore signals.
const stubborn = `
	for i in 1 2 3; do setsid sh -c 'trap "" INT TERM HUP; (trap "" INT TERM HUP; while :; do sleep 1; done) & while :; do sleep 1; done' & done
	echo started
`

// namespaces are the namespaces of a sandbox, in which processes might remain. The test holds them open, so that no
// other namespace gets their numbers.
type namespaces map[string]bool

func namespacesOf(t *testing.T, pid int) namespaces {
	t.Helper()
	n := namespaces{}
	for _, kind := range []string{"mnt", "pid", "user", "net"} {
		theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
		if err != nil {
			t.Fatal(err)
		}
		ours, err := os.Readlink("/proc/self/ns/" + kind)
		if err != nil {
			t.Fatal(err)
		}
		if theirs == ours {
			continue
		}
		n[theirs] = true
		f, err := os.Open(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
	}
	if len(n) < 3 {
		t.Fatalf("the sandbox has only the namespaces %v of its own", n)
	}
	return n
}

// in returns the processes in these namespaces.
func (n namespaces) in() (pids []string) {
	links, err := filepath.Glob("/proc/[0-9]*/ns/*")
	if err != nil {
		panic(err)
	}
	seen := map[string]bool{}
	for _, link := range links {
		pid := strings.Split(link, "/")[2]
		if target, err := os.Readlink(link); err == nil && n[target] && !seen[pid] {
			seen[pid] = true
			pids = append(pids, pid)
		}
	}
	return pids
}

func (n namespaces) expectNone(t *testing.T) {
	t.Helper()
	for _, pid := range n.in() {
		status, err := os.ReadFile("/proc/" + pid + "/status")
		t.Errorf("process %s is left in %v: %s%v", pid, n, status, err)
	}
}

func mountsHere(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestEverythingEndsWithTheProgram(t *testing.T) {
	mounts := mountsHere(t)
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cfg := sh(stubborn+"read x </dev/zero & read go; exit 3", sandbox.Mount{Path: "/sandbox-test", Source: t.TempDir()})
	cfg.Stdin = in
	r := start(t, cfg)
	in.Close()
	r.await("started")
	n := namespacesOf(t, r.Pid())
	if len(n.in()) < 4 {
		t.Fatalf("only the processes %v run", n.in())
	}
	fmt.Fprintln(out, "go")
	if status, err := r.Wait(); err != nil || status.Code != 3 {
		t.Errorf("%+v, %v", status, err)
	}
	n.expectNone(t)
	if now := mountsHere(t); now != mounts {
		t.Errorf("the laptop's mounts were\n%s\nand are\n%s", mounts, now)
	}
}

func TestEndOfContextKillsAll(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	s, err := sandbox.New(sh(stubborn + "sleep 100"))
	if err != nil {
		t.Fatal(err)
	}
	p, err := s.Start(ctx)
	if err != nil {
		t.Fatal(err)
	}
	n := namespacesOf(t, p.Pid())
	why := errors.New("enough")
	cancel(why)
	if status, err := p.Wait(); !errors.Is(err, why) || status.Code != 137 {
		t.Errorf("%+v, %v", status, err)
	}
	n.expectNone(t)
	if _, err := s.Start(ctx); !errors.Is(err, why) {
		t.Errorf("Start after the end: %v", err)
	}
}

func TestDeathOfInitLeavesNothing(t *testing.T) {
	r := start(t, sh(stubborn+"sleep 100"))
	r.await("started")
	n := namespacesOf(t, r.Pid())
	if err := unix.Kill(r.Pid(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if status, err := r.Wait(); err == nil || status.Code != 137 {
		t.Errorf("%+v, %v", status, err)
	}
	n.expectNone(t)
	if _, err := r.Dial(t.Context(), "tcp", "127.0.0.1:1"); err == nil {
		t.Error("Dial succeeded after the end")
	}
}

func TestDeathOfProgramLeavesNothing(t *testing.T) {
	r := start(t, sh(stubborn+"sleep 100"))
	r.await("started")
	n := namespacesOf(t, r.Pid())
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", r.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	program := 0
	for _, child := range strings.Fields(string(children)) {
		b, err := os.ReadFile("/proc/" + child + "/cmdline")
		if err == nil && strings.HasPrefix(string(b), "sh\x00-c\x00\n\tfor i") {
			if program, err = strconv.Atoi(child); err != nil {
				t.Fatal(err)
			}
			break
		}
	}
	if program == 0 {
		t.Skipf("the kernel shows no children of init: %q", children)
	}
	if err := unix.Kill(program, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if status, err := r.Wait(); err != nil || status != (sandbox.ExitStatus{Code: 137, Signal: unix.SIGKILL}) {
		t.Errorf("%+v, %v", status, err)
	}
	n.expectNone(t)
}

func TestDeathOfParentLeavesNothing(t *testing.T) {
	for _, stopped := range []bool{false, true} {
		t.Run(fmt.Sprintf("init-stopped=%v", stopped), func(t *testing.T) {
			out := t.TempDir() + "/out"
			cfg := sh(stubborn+"sleep 100", sandbox.Mount{Path: "/sandbox-test", Source: t.TempDir()})
			cfg.Network = true
			cmd := parentCommand(t, cfg)
			f, err := os.Create(out)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			cmd.Stdout, cmd.Stderr = f, f
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			init := 0
			testenv.Until(t, "the sandbox runs", func() bool {
				b, err := os.ReadFile(out)
				if err != nil {
					t.Fatal(err)
				}
				_, rest, found := strings.Cut(string(b), runInParent)
				number, _, line := strings.Cut(rest, "\n")
				if !found || !line || !strings.Contains(string(b), "started\n") {
					return false
				}
				if init, err = strconv.Atoi(number); err != nil {
					t.Fatal(err)
				}
				return true
			})
			n := namespacesOf(t, init)
			if len(n) != 4 || len(n.in()) < 4 {
				t.Fatalf("%v in %v", n.in(), n)
			}
			if stopped {
				// Only the death signal can end a stopped init.
				if err := unix.Kill(init, unix.SIGSTOP); err != nil {
					t.Fatal(err)
				}
			}
			began := time.Now()
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			cmd.Wait()
			testenv.Until(t, "no process is left", func() bool { return len(n.in()) == 0 })
			t.Logf("no process was left after %v", time.Since(began).Round(time.Millisecond))
		})
	}
}

func TestClosedOutputIsSeen(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cfg := sh("echo last; exec >/dev/null; sleep 100")
	cfg.Stdout = w
	s, err := sandbox.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	p, err := s.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := r.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 100)
	n, err := r.Read(buf)
	if string(buf[:n]) != "last\n" || err != nil {
		t.Errorf("read %q, %v", buf[:n], err)
	}
	if n, err := r.Read(buf); n != 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after the program closed its output: %d bytes, %v", n, err)
	}
	if err := p.Signal(unix.SIGKILL); err != nil {
		t.Error(err)
	}
	p.Wait()
}
