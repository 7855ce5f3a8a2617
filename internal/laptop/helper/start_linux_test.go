package helper

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/creack/pty"
	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

const testerUID = 64900

// installed copies the binary of this test to a directory where every user can run it, and returns its path.
func installed(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kubevpn-helper")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	exe := filepath.Join(dir, "kubevpn")
	testenv.Run(t, fmt.Sprintf("cp /proc/%d/exe %s", os.Getpid(), exe))
	testenv.Run(t, "chmod 755 "+dir+" "+exe)
	return exe
}

// tester creates the user tester with the password secret and the given line in sudoers.
func tester(t *testing.T, sudoers string) {
	t.Helper()
	hash := strings.TrimSpace(testenv.Run(t, "openssl passwd -6 -salt kubevpn secret"))
	for path, content := range map[string]string{
		"/etc/passwd":          fmt.Sprintf("tester:x:%d:%d::/:/bin/sh\n", testerUID, testerUID),
		"/etc/group":           fmt.Sprintf("tester:x:%d:\n", testerUID),
		"/etc/shadow":          "tester:" + hash + ":19000:0:99999:7:::\n",
		"/etc/sudoers.d/000-t": sudoers + "\n",
	} {
		f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o440)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(content); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
}

// terminal is a connectRole of the user tester, with or without a terminal.
type terminal struct {
	cmd    *exec.Cmd
	tty    *os.File // nil: none
	report *bufio.Reader
	orders *os.File
}

func connect(t *testing.T, exe string, onTerminal bool, env ...string) *terminal {
	t.Helper()
	reportR, reportW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	ordersR, ordersW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append([]string{"PATH=/usr/bin:/bin", "TERM=dumb", roleVariable + "=connect", "HELPER_EXE=" + exe}, env...)
	cmd.ExtraFiles = []*os.File{reportW, ordersR}
	cmd.Dir = "/"
	attr := &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: testerUID, Gid: testerUID}, Setsid: true, Setctty: onTerminal, Pdeathsig: syscall.SIGKILL,
	}
	x := &terminal{cmd: cmd, report: bufio.NewReader(reportR), orders: ordersW}
	if onTerminal {
		x.tty, err = pty.StartWithAttrs(cmd, nil, attr)
	} else {
		cmd.SysProcAttr = attr
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	reportW.Close()
	ordersR.Close()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		reportR.Close()
		ordersW.Close()
		if x.tty != nil {
			x.tty.Close()
		}
	})
	return x
}

func (x *terminal) line(t *testing.T) string {
	t.Helper()
	got := make(chan string, 1)
	go func() {
		s, err := x.report.ReadString('\n')
		if err != nil {
			s += err.Error()
		}
		got <- s
	}()
	select {
	case s := <-got:
		return s
	case <-time.After(30 * time.Second):
		x.cmd.Process.Kill()
		t.Fatalf("no report; processes:\n%s", testenv.Run(t, "ps -ef --forest"))
		return ""
	}
}

// helpers returns the processes that run EXE helper, as ps shows them.
func helpers(t *testing.T, exe string) []string {
	t.Helper()
	var out []string
	for line := range strings.Lines(testenv.Run(t, "ps -ww -eo pid=,sid=,tty=,args=")) {
		if f := strings.Fields(line); len(f) >= 5 && strings.Contains(line, exe+" helper") {
			out = append(out, strings.Join(f, " "))
		}
	}
	return out
}

// noHelper waits until no process runs EXE helper.
func noHelper(t *testing.T, exe string) {
	t.Helper()
	testenv.Eventually(t, testTimeout, func() error {
		if h := helpers(t, exe); len(h) > 0 {
			return fmt.Errorf("the helper lives on: %q", h)
		}
		return nil
	})
}

const connected = "connected as 64900: nftables [192.0.2.1:53]\n"

// The helper runs as root in a new session without a terminal. sudo and the first process have ended. The helper
// continues when the terminal closes, until the daemon ends.
func TestStartBySudoOutlivesTheTerminal(t *testing.T) {
	if !testenv.InNamespace(t, "nft", "sudo", "ps", "openssl") {
		return
	}
	privateEtc(t, "nameserver 192.0.2.1\n")
	before := machine(t)
	tester(t, "Defaults use_pty\ntester ALL=(ALL) NOPASSWD: ALL")
	exe := installed(t)
	x := connect(t, exe, true)
	if got := x.line(t); got != connected {
		out := make([]byte, 4096)
		n, _ := x.tty.Read(out)
		t.Fatalf("%s; the terminal shows %q", got, out[:n])
	}
	var only string
	testenv.Eventually(t, testTimeout, func() error {
		h := helpers(t, exe)
		if len(h) != 1 {
			return fmt.Errorf("processes of the helper: %q", h)
		}
		only = h[0]
		return nil
	})
	f := strings.Fields(only)
	pid, sid, tty := f[0], f[1], f[2]
	if sid != pid || tty != "?" {
		t.Errorf("the helper is process %s of session %s on terminal %s", pid, sid, tty)
	}
	status := testenv.Run(t, "cat /proc/"+pid+"/status")
	for _, want := range []string{"Umask:\t0077", "Uid:\t0\t0\t0\t0"} {
		if !strings.Contains(status, want) {
			t.Errorf("the helper's status is without %q:\n%s", want, status)
		}
	}
	for link, want := range map[string]string{"cwd": "/", "fd/0": "/dev/null", "fd/1": "/dev/null", "fd/2": "/dev/null"} {
		if got, err := os.Readlink("/proc/" + pid + "/" + link); got != want {
			t.Errorf("the helper's %s is %s, %v", link, got, err)
		}
	}
	fds, err := os.ReadDir("/proc/" + pid + "/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if to, _ := os.Readlink("/proc/" + pid + "/fd/" + fd.Name()); strings.Contains(to, "tun") {
			t.Errorf("the helper holds %s", to)
		}
	}
	// The terminal closes, and the helper receives its signals.
	x.tty.Close()
	for _, s := range []string{"HUP", "INT"} {
		testenv.Run(t, "kill -"+s+" "+pid)
	}
	if _, err := io.WriteString(x.orders, "socket\n"); err != nil {
		t.Fatal(err)
	}
	if got := x.line(t); got != "a socket with mark 0x4b560035, <nil>\n" {
		t.Errorf("after the terminal: %s", got)
	}
	// The daemon dies.
	if err := x.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	noHelper(t, exe)
	testenv.Eventually(t, testTimeout, func() error {
		if diff := cmp.Diff(before, machine(t)); diff != "" {
			return fmt.Errorf("left behind: -before +after\n%s", diff)
		}
		return nil
	})
}

func TestStartAsksForThePassword(t *testing.T) {
	if !testenv.InNamespace(t, "nft", "sudo", "ps", "openssl") {
		return
	}
	privateEtc(t, "nameserver 192.0.2.1\n")
	tester(t, "Defaults use_pty, passwd_tries=1\ntester ALL=(ALL) ALL")
	exe := installed(t)
	prompt := func(x *terminal, password string) {
		t.Helper()
		shown := ""
		b := make([]byte, 256)
		for !strings.Contains(shown, "password") {
			n, err := x.tty.Read(b)
			if err != nil {
				t.Fatalf("the terminal shows %q: %v", shown, err)
			}
			shown += string(b[:n])
		}
		if _, err := io.WriteString(x.tty, password+"\n"); err != nil {
			t.Fatal(err)
		}
	}
	x := connect(t, exe, true)
	prompt(x, "secret")
	if got := x.line(t); got != connected {
		t.Error(got)
	}
	if err := x.orders.Close(); err != nil {
		t.Fatal(err)
	}
	noHelper(t, exe)

	x = connect(t, exe, true)
	prompt(x, "wrong")
	want := "error 30: cannot start the root helper: 1 incorrect password attempt; links, routes and name resolution require root: " +
		"run kubevpn as root, or as a user whom sudoers allows to run `" + exe + " helper`\n"
	if diff := cmp.Diff(want, x.line(t)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}

	x = connect(t, exe, false)
	want = "error 30: cannot start the root helper: a password is required; sudo has no terminal to ask for a password: run " +
		"`kubevpn connect` in a terminal, run kubevpn as root, or allow `" + exe + " helper` in sudoers without a password\n"
	if diff := cmp.Diff(want, x.line(t)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if h := helpers(t, exe); len(h) > 0 {
		t.Errorf("a helper was started: %q", h)
	}

	// If the user can replace the program, NOPASSWD for it would let every program of the user run as root.
	if err := os.Chown(filepath.Dir(exe), testerUID, testerUID); err != nil {
		t.Fatal(err)
	}
	x = connect(t, exe, false)
	if got, want := x.line(t), "you can replace "+exe+", so NOPASSWD for it would make every program that you run root"; !strings.Contains(got, want) {
		t.Errorf("%s\nlacks %q", got, want)
	}
}

// The first process of the helper starts its own program again, even if its path now names another one.
func TestSecondHelperIsTheSameProgram(t *testing.T) {
	if !testenv.InNamespace(t, "nft", "ps") {
		return
	}
	privateEtc(t, "nameserver 192.0.2.1\n")
	exe := installed(t)
	program, err := os.Open(exe)
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	marker := filepath.Join(filepath.Dir(exe), "pwned")
	if err := os.Remove(exe); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(exe, []byte("#!/bin/sh\ntouch "+marker+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	socket, err := Start(context.Background(), StartConfig{Executable: fmt.Sprintf("/proc/self/fd/%d", program.Fd())})
	if _, e := os.Stat(marker); e == nil {
		t.Fatal("the program that took its place ran as root")
	}
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewClient(socket, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

// Ctrl-C on the terminal interrupts kubevpn and sudo, in any order.
func TestInterruptIsNotReportedAsAFailureOfSudo(t *testing.T) {
	failure := errors.New("sudo: a password is required")
	tests := []struct {
		name       string
		ends       error
		endsAt     time.Duration
		interrupt  time.Duration // 0: none
		want       error
		wantWithin time.Duration
	}{
		{"interrupt_first", failure, 20 * time.Millisecond, time.Millisecond, context.Canceled, time.Millisecond},
		{"sudo_first", failure, time.Millisecond, 20 * time.Millisecond, context.Canceled, 20 * time.Millisecond},
		{"at_once", failure, time.Millisecond, time.Millisecond, context.Canceled, time.Millisecond},
		{"not_interrupted", failure, time.Second, 0, failure, time.Second + interruptTime},
		{"good", nil, time.Second, 0, nil, time.Second},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if tt.interrupt > 0 {
					time.AfterFunc(tt.interrupt, cancel)
				}
				ended := make(chan error, 1)
				time.AfterFunc(tt.endsAt, func() { ended <- tt.ends })
				begin := time.Now()
				if err := unlessInterrupted(ctx, ended); err != tt.want || time.Since(begin) > tt.wantWithin {
					t.Errorf("%v after %v, want %v within %v", err, time.Since(begin), tt.want, tt.wantWithin)
				}
			})
		})
	}
}

func TestStartFailsWithoutSudo(t *testing.T) {
	if !testenv.InNamespace(t, "nft", "sudo", "ps", "openssl") {
		return
	}
	privateEtc(t, "nameserver 192.0.2.1\n")
	tester(t, "tester ALL=(ALL) NOPASSWD: /bin/true")
	exe := installed(t)
	tests := []struct {
		name string
		env  []string
		want string
	}{
		{"not_allowed", nil, "error 30: cannot start the root helper: "},
		{"no_sudo", []string{"PATH=/nowhere"}, "error 30: links, routes and name resolution require root, and sudo is not installed; run kubevpn as root, or install sudo\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := connect(t, exe, false, tt.env...).line(t); !strings.HasPrefix(got, tt.want) {
				t.Errorf("got %s", got)
			}
		})
	}
}

func TestRootStartsTheHelperWithoutSudo(t *testing.T) {
	if !testenv.InNamespace(t, "nft", "ps") {
		return
	}
	privateEtc(t, "nameserver 192.0.2.1\n")
	exe := installed(t)
	ctx := context.Background()
	path := os.Getenv("PATH")
	t.Setenv("PATH", "/nowhere") // no sudo
	socket, err := Start(ctx, StartConfig{Executable: exe})
	t.Setenv("PATH", path)
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewClient(socket, nil)
	if err != nil {
		t.Fatal(err)
	}
	tun, err := c.CreateTUN(ctx, "kubevpn0", 1500)
	if err != nil {
		t.Fatal(err)
	}
	defer tun.Close()
	if _, err := c.Apply(ctx, wanted()); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	noHelper(t, exe)

	for _, tt := range []struct{ exe, want string }{
		{"/bin/false", "cannot start the root helper: exit status 1"},
		{"/bin/true", "the root helper has started but is not ready: it ended immediately"},
		{"/nowhere", "cannot start the root helper: fork/exec /nowhere: no such file or directory"},
	} {
		_, err := Start(ctx, StartConfig{Executable: tt.exe})
		var e *api.Error
		if !errors.As(err, &e) || e.Message != tt.want || e.Code != api.ExitPrivilege {
			t.Errorf("%s: %v", tt.exe, err)
		}
	}
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := Start(canceled, StartConfig{Executable: "/bin/cat"}); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	noHelper(t, exe)
}

// The helper restores an edited resolv.conf before it is ready, or reports why it cannot.
func TestStartRestoresResolvConf(t *testing.T) {
	if !testenv.InNamespace(t, "nft", "ps") {
		return
	}
	privateEtc(t, "nameserver 192.0.2.1\n")
	before := machine(t)
	p := startBoth(t, "NO_NFTABLES=1")
	if err := errors.Join(p.helper.Process.Kill(), p.daemon.Process.Kill()); err != nil {
		t.Fatal(err)
	}
	_, _ = p.helper.Wait(), p.daemon.Wait()
	testenv.WaitGone(t, "kubevpn0")
	if machine(t) == before {
		t.Fatal("nothing was left, so this shows nothing")
	}
	exe := installed(t)
	socket, err := Start(context.Background(), StartConfig{Executable: exe})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, machine(t)); diff != "" {
		t.Errorf("not recovered: -before +after\n%s", diff)
	}
	socket.Close()
	noHelper(t, exe)

	if err := os.WriteFile("/var/lib/kubevpn/resolv.conf.json", []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if socket, err = Start(context.Background(), StartConfig{Executable: exe}); err != nil {
		t.Fatalf("with a broken journal: %v", err)
	}
	socket.Close()
	noHelper(t, exe)
	if _, err := os.Stat("/var/lib/kubevpn/resolv.conf.json.damaged"); err != nil {
		t.Error(err)
	}
}

func TestHelperFailsWithoutASocket(t *testing.T) {
	cmd := exec.Command("/proc/self/exe", "helper")
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "standard input: not a socket of `kubevpn connect`") && !strings.Contains(string(out), "must run as root") {
		t.Errorf("%v: %s", err, out)
	}
}
