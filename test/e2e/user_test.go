//go:build e2e && linux

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/hostservice"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// person is an ordinary user of the laptop.
type person struct {
	name     string
	uid      uint32
	password string
	sudo     string // the rest of their line in sudoers; "": none
}

var (
	ann = person{name: "kvann", uid: 64010, sudo: "ALL=(root) NOPASSWD: ALL"}
	ben = person{name: "kvben", uid: 64011, password: "battery staple"}
	cat = person{name: "kvcat", uid: 64012, password: "correct horse", sudo: "ALL=(root) ALL"}
)

// sudoersDefaults are the relevant defaults of Debian, without those that write to the machine.
const sudoersDefaults = `Defaults env_reset
Defaults use_pty
Defaults secure_path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
Defaults lecture=never
Defaults timestamp_timeout=0
Defaults passwd_tries=1
Defaults !mail_no_user, !syslog
root ALL=(ALL:ALL) ALL
`

// populate adds users to the laptop: `ip netns exec` mounts these files over those of the machine, which do not change.
func (w *world) populate(t *testing.T, people ...person) {
	t.Helper()
	testenv.NeedPrograms(t, "sudo", "openssl", "setpriv")
	files := map[string]string{"sudoers": sudoersDefaults}
	for _, name := range []string{"passwd", "group", "shadow"} {
		content, err := os.ReadFile(filepath.Join("/etc", name))
		if err != nil {
			t.Fatal(err)
		}
		files[name] = strings.TrimRight(string(content), "\n") + "\n"
	}
	for _, p := range people {
		hash := "*"
		if p.password != "" {
			out, err := exec.Command("openssl", "passwd", "-6", p.password).Output()
			if err != nil {
				t.Fatal(err)
			}
			hash = strings.TrimSpace(string(out))
		}
		files["passwd"] += fmt.Sprintf("%s:x:%d:%d::/:/bin/sh\n", p.name, p.uid, p.uid)
		files["group"] += fmt.Sprintf("%s:x:%d:\n", p.name, p.uid)
		files["shadow"] += fmt.Sprintf("%s:%s:20000:0:99999:7:::\n", p.name, hash)
		if p.sudo != "" {
			files["sudoers"] += p.name + " " + p.sudo + "\n"
		}
	}
	dir := filepath.Join("/etc/netns", w.Config().Name+"-laptop")
	for name, content := range files {
		path := filepath.Join(dir, name)
		t.Cleanup(func() {
			if err := os.Remove(path); err != nil {
				t.Error(err)
			}
		})
		mode := os.FileMode(0o644)
		if name == "shadow" || name == "sudoers" {
			mode = 0o440
		}
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
	}
}

// laptopOf returns the laptop of one of its users, with their own home and kubeconfig.
func (w *world) laptopOf(t *testing.T, p person) *laptop {
	t.Helper()
	home, err := os.MkdirTemp("", "kubevpn-e2e-"+p.name+"-") // other users cannot enter t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(home); err != nil {
			t.Error(err)
		}
	})
	l := w.newLaptop(t, lab.Admin)
	kubeconfig, err := os.ReadFile(l.kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	l.home, l.kubeconfig, l.uid = home, filepath.Join(home, "kubeconfig"), p.uid
	err = errors.Join(
		os.WriteFile(l.kubeconfig, kubeconfig, 0o600), os.Mkdir(filepath.Join(home, "run"), 0o700),
		os.Chown(l.kubeconfig, int(p.uid), int(p.uid)), os.Chown(filepath.Join(home, "run"), int(p.uid), int(p.uid)),
		os.Chown(home, int(p.uid), int(p.uid)),
	)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// userSuite uses kubevpn as an ordinary user with sudo, and closes the terminal.
func userSuite(t *testing.T, w *world) {
	w.populate(t, ann, ben, cat)
	root := w.newLaptop(t, lab.Admin)
	before := root.snapshot(t)

	t.Run("connection_survives_a_closed_terminal", func(t *testing.T) {
		running := w.pids(t)
		l := w.laptopOf(t, ann)
		x := l.terminal(t, "sh")
		x.types(t, "kubevpn connect\n")
		x.shows(t, "Connected to ")
		x.hangUp(t)
		l.living(t)

		// Only the daemon and the helper run; sudo and the shell have ended.
		daemon, helper := l.process(t, theDaemon), l.process(t, theHelper)
		if got := slices.DeleteFunc(w.pids(t), func(pid int) bool { return slices.Contains(running, pid) }); !slices.Equal(got, sorted(daemon.pid, helper.pid)) {
			t.Errorf("processes %v, want the daemon %d and the helper %d", describe(got), daemon.pid, helper.pid)
		}
		t.Run("only_the_helper_is_root", func(t *testing.T) {
			if ids := field(t, daemon.pid, "Uid"); ids != fmt.Sprintf("%[1]d\t%[1]d\t%[1]d\t%[1]d", ann.uid) {
				t.Errorf("the daemon's users: %s", ids)
			}
			for _, set := range []string{"CapPrm", "CapEff", "CapInh", "CapAmb"} {
				if caps := field(t, daemon.pid, set); strings.Trim(caps, "0") != "" {
					t.Errorf("the daemon's capabilities, %s: %s", set, caps)
				}
			}
			if ids := field(t, helper.pid, "Uid"); ids != "0\t0\t0\t0" {
				t.Errorf("the helper's users: %s", ids)
			}
		})
		t.Run("processes_have_no_terminal", func(t *testing.T) {
			for _, p := range []process{daemon, helper} {
				stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.pid))
				if err != nil {
					t.Fatal(err)
				}
				f := strings.Fields(string(stat)) // pid (name) state ppid pgrp session tty_nr
				if f[5] != fmt.Sprint(p.pid) || f[6] != "0" {
					t.Errorf("process %d is in session %s and has terminal %s", p.pid, f[5], f[6])
				}
			}
		})
		t.Run("the_helper_listens_on_nothing", func(t *testing.T) {
			all := root.must(t, "ss", "-H", "-l", "-t", "-u", "-x", "-p")
			if !strings.Contains(all, fmt.Sprintf("pid=%d,", daemon.pid)) {
				t.Fatalf("ss does not show the daemon's sockets:\n%s", all)
			}
			for line := range strings.Lines(all) {
				if strings.Contains(line, fmt.Sprintf("pid=%d,", helper.pid)) {
					t.Errorf("the helper listens: %s", line)
				}
			}
		})
		t.Run("others_cannot_talk_to_the_daemon", func(t *testing.T) { l.closedToOthers(t, ben) })

		l.must(t, "kubevpn", "disconnect", "--all")
		root.sameAs(t, before)
		l.gone(t, theHelper)
	})
	t.Run("ctrl_c_ends_the_foreground", func(t *testing.T) {
		l := w.laptopOf(t, ann)
		x := l.terminal(t, "kubevpn", "connect", "--foreground")
		x.shows(t, "Ctrl-C disconnects.")
		if _, err := l.get(t, "http://web.default/"); err != nil {
			t.Error(err)
		}
		x.types(t, "\x03")
		if code := x.ends(t); code != int(api.ExitOK) {
			t.Errorf("exit %d: %s", code, x.text())
		}
		root.sameAs(t, before)
		l.gone(t, theHelper)
	})
	t.Run("closed_terminal_ends_the_foreground", func(t *testing.T) {
		l := w.laptopOf(t, ann)
		x := l.terminal(t, "kubevpn", "connect", "--foreground")
		x.shows(t, "Ctrl-C disconnects.")
		x.hangUp(t)
		root.soonAs(t, before)
		l.gone(t, theHelper)
	})
	t.Run("nothing_is_left_after_a_kill", func(t *testing.T) {
		l := w.laptopOf(t, ann)
		for _, d := range deaths {
			l.usable(t)
			l.dies(t, d.signal, d.of)
			root.soonAs(t, before)
			l.gone(t, theHelper)
		}
	})
	t.Run("missing_sudo_right_is_reported", func(t *testing.T) {
		l := w.laptopOf(t, ben)
		refused := func(code int, text string, parts ...string) {
			t.Helper()
			if code != int(api.ExitPrivilege) {
				t.Errorf("exit %d, want %d: %s", code, api.ExitPrivilege, text)
			}
			for _, part := range parts {
				if !strings.Contains(text, part) {
					t.Errorf("%q is not in %s", part, text)
				}
			}
			root.sameAs(t, before)
			l.gone(t, theHelper)
		}
		r := l.run(t, "kubevpn", "connect")
		refused(r.code, r.stderr, "cannot start the root helper", "sudo has no terminal", "sudoers")
		r = l.run(t, "env", "PATH="+filepath.Dir(l.kubeconfig), filepath.Join(bin, "kubevpn"), "connect")
		refused(r.code, r.stderr, "sudo is not installed", "run kubevpn as root, or install sudo")
	})
	t.Run("user_outside_sudoers_is_reported", func(t *testing.T) {
		l := w.laptopOf(t, ben)
		x := l.terminal(t, "kubevpn", "connect")
		x.shows(t, "password for kvben")
		x.types(t, ben.password+"\n")
		if code := x.ends(t); code != int(api.ExitPrivilege) || !strings.Contains(x.text(), "kvben is not in the sudoers file") || !strings.Contains(x.text(), "run kubevpn as root") {
			t.Errorf("exit %d: %s", code, x.text())
		}
		root.sameAs(t, before)
	})
	t.Run("sudo_asks_for_a_password", func(t *testing.T) {
		l := w.laptopOf(t, cat)
		const prompt = "password for kvcat"
		t.Run("wrong_password", func(t *testing.T) {
			x := l.terminal(t, "kubevpn", "connect")
			x.shows(t, prompt)
			x.types(t, "wrong\n")
			if code := x.ends(t); code != int(api.ExitPrivilege) || !strings.Contains(x.text(), "1 incorrect password attempt") || !strings.Contains(x.text(), "run kubevpn as root") {
				t.Errorf("exit %d: %s", code, x.text())
			}
			root.sameAs(t, before)
		})
		t.Run("ctrl_c", func(t *testing.T) {
			x := l.terminal(t, "kubevpn", "connect")
			x.shows(t, prompt)
			x.types(t, "\x03")
			if code := x.ends(t); code != int(api.ExitInterrupted) {
				t.Errorf("exit %d: %s", code, x.text())
			}
			root.sameAs(t, before)
		})
		t.Run("right_password", func(t *testing.T) {
			x := l.terminal(t, "kubevpn", "connect")
			x.shows(t, prompt)
			x.types(t, cat.password+"\n")
			x.shows(t, "Connected to ")
			if code := x.ends(t); code != 0 || strings.Contains(x.text(), cat.password) {
				t.Errorf("exit %d: %s", code, x.text())
			}
			l.living(t)
			l.must(t, "kubevpn", "disconnect", "--all")
			root.sameAs(t, before)
		})
	})
	t.Run("service_needs_no_sudo", func(t *testing.T) { byService(t, w, root, before) })
	t.Run("two_users_connect_at_once", func(t *testing.T) { twoUsers(t, w, root, before) })
}

// byService connects as a user without sudo rights, through a socket like that of the systemd service, in a separate
// /run.
func byService(t *testing.T, w *world, root *laptop, before string) {
	testenv.NeedPrograms(t, "systemd-socket-activate", "unshare", "nsenter")
	l := w.laptopOf(t, ben)
	// Only this listener and its clients see the socket and the policy.
	listener := root.command(t.Context(), t, "unshare", "--mount", "sh", "-c", "mount -t tmpfs -o mode=755 tmpfs /run && "+
		"mkdir /run/upper /run/work && cp -L /etc/resolv.conf /run/resolv.conf && "+
		"mount -t overlay etc -o lowerdir=/etc,upperdir=/run/upper,workdir=/run/work /etc && "+
		"cp --remove-destination /run/resolv.conf /etc/resolv.conf && mkdir -p /etc/kubevpn && "+
		"exec systemd-socket-activate --accept --inetd --listen "+hostservice.Socket+" "+l.program+" helper")
	if err := listener.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = listener.Process.Kill()
		_ = listener.Wait()
		l.within = nil
	}()
	pid := fmt.Sprint(listener.Process.Pid)
	testenv.Eventually(t, time.Minute, func() error {
		return os.Chmod(filepath.Join("/proc", pid, "root", hostservice.Socket), 0o666)
	})
	l.within = []string{"nsenter", "--mount", "--target", pid, "--"}

	r := l.run(t, "kubevpn", "connect")
	if r.code != int(api.ExitNetwork) || !strings.Contains(r.stderr, "the root helper refuses name resolution") ||
		!strings.Contains(r.stderr, "\n    allQueries: true\n") {
		t.Errorf("without systemd-resolved: %v", r)
	}
	root.sameAs(t, before)
	root.must(t, "nsenter", "--mount", "--target", pid, "--", "sh", "-c", "echo 'allQueries: true' >/etc/kubevpn/helper.yaml")
	r = l.run(t, "kubevpn", "connect", "--extra-cidr", "203.0.113.0/24")
	if r.code != int(api.ExitNetwork) || !strings.Contains(r.stderr, "the root helper refuses the route 203.0.113.0/24") ||
		!strings.Contains(r.stderr, "\n    networks: [203.0.113.0/24]\n") {
		t.Error(r)
	}
	root.sameAs(t, before)
	if r = l.run(t, "kubevpn", "connect"); r.code != 0 || !strings.Contains(r.stderr, "Using the root helper's service, kubevpn ") {
		t.Fatal(r)
	}
	l.living(t)
	if got := l.must(t, "kubevpn", "status", "-o", "jsonpath={.helper}"); got != "service" {
		t.Errorf("the helper was started by %q", got)
	}
	l.must(t, "kubevpn", "quit")
	root.sameAs(t, before)
	l.gone(t, theHelper)
}

// twoUsers checks that the connections of two users coexist if they do not route the same networks.
func twoUsers(t *testing.T, w *world, root *laptop, before string) {
	l := w.laptopOf(t, ann)
	root.connect(t)
	one := root.snapshot(t)
	device := root.connection(t).Device

	r := l.run(t, "kubevpn", "connect")
	if r.code != int(api.ExitOverlap) || !strings.Contains(r.stderr, device) {
		t.Errorf("the same networks: want exit %d and %s: %v", api.ExitOverlap, device, r)
	}
	// During the connect the manager leased the second laptop an address of another inner network, and root had a route
	// to it.
	root.soonAs(t, one)

	args := []string{"kubevpn", "connect", "--extra-cidr", w.Config().Families()[0].Outside.String() + "/32"}
	for _, p := range root.connection(t).CIDRs {
		args = append(args, "--exclude-cidr", p.String())
	}
	if r := l.run(t, args...); r.code != 0 {
		t.Fatal(r)
	}
	if got := l.connection(t).Device; got == device {
		t.Errorf("both have %s", got)
	}
	root.reaches(t)
	l.onDevice(t, w.Config().Families()[0].Outside.String(), true)
	if _, err := l.get(t, "http://web.default/"); err != nil {
		t.Error(err)
	}

	// Each connection survives the end of the other.
	kill(t, l.process(t, theHelper).pid)
	root.soonAs(t, one)
	root.reaches(t)
	root.must(t, "kubevpn", "disconnect", "--all")
	root.soonAs(t, before)
}

// living checks that the connection works and continues to work.
func (l *laptop) living(t *testing.T) {
	t.Helper()
	if c := l.connection(t); c.Status != api.StatusConnected {
		t.Errorf("%+v", c)
	}
	l.reaches(t)
}

// closedToOthers connects to the daemon's sockets as another user: first as they are, then with the directory opened,
// so that the daemon itself must reject the user.
func (l *laptop) closedToOthers(t *testing.T, other person) {
	t.Helper()
	dir := filepath.Join(l.home, "run", "kubevpn")
	info, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	if owner := info.Sys().(*syscall.Stat_t).Uid; info.Mode().Perm() != 0o700 || owner != l.uid {
		t.Errorf("%s has mode %v and belongs to user %d", dir, info.Mode().Perm(), owner)
	}
	ask := func(uid uint32) result {
		t.Helper()
		return (&laptop{world: l.world, home: l.home, kubeconfig: l.kubeconfig, uid: uid}).run(t,
			"curl", "-sS", "--max-time", "5", "--unix-socket", filepath.Join(dir, "daemon.sock"), "http://daemon"+api.PathStatus)
	}
	if r := ask(l.uid); r.code != 0 || !strings.Contains(r.stdout, `"connections"`) {
		t.Errorf("the user's own request: %v", r)
	}
	rejectedRequests := func() int {
		t.Helper()
		log, err := os.ReadFile(filepath.Join(l.home, "state", "kubevpn", "daemon.log"))
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(log), fmt.Sprintf(`msg="connection rejected" uid=%d`, other.uid))
	}
	if r := ask(other.uid); r.code == 0 || rejectedRequests() != 0 {
		t.Errorf("another user's request got through the directory: %v", r)
	}
	open := map[string]os.FileMode{l.home: 0o755, filepath.Join(l.home, "run"): 0o755, dir: 0o755}
	for _, name := range []string{"daemon.sock", "helper.sock"} {
		open[filepath.Join(dir, name)] = 0o777
	}
	for path, mode := range open {
		was, err := os.Stat(path)
		if err == nil {
			err = os.Chmod(path, mode)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.Chmod(path, was.Mode().Perm()); err != nil {
				t.Error(err)
			}
		})
	}
	if r := ask(other.uid); r.code == 0 || r.stdout != "" || rejectedRequests() != 1 {
		t.Errorf("another user's request was not rejected by the daemon (%d were): %v", rejectedRequests(), r)
	}
}

// field returns one line of /proc/PID/status.
func field(t *testing.T, pid int, name string) string {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	t.Fatalf("no %s in the status of process %d", name, pid)
	return ""
}

// pids returns the processes on the laptop in ascending order.
func (w *world) pids(t *testing.T) []int {
	t.Helper()
	out, err := exec.Command("ip", "netns", "pids", w.Config().Name+"-laptop").Output()
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for line := range strings.FieldsSeq(string(out)) {
		var pid int
		if _, err := fmt.Sscan(line, &pid); err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return sorted(pids...)
}

func sorted(pids ...int) []int {
	slices.Sort(pids)
	return pids
}

// describe returns the names of processes for a message.
func describe(pids []int) (out []string) {
	for _, pid := range pids {
		args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil {
			args = []byte(err.Error())
		}
		out = append(out, fmt.Sprintf("%d %s", pid, strings.ReplaceAll(string(args), "\x00", " ")))
	}
	return out
}

// terminal is a command with its own terminal.
type terminal struct {
	ours *os.File
	cmd  *exec.Cmd
	done chan error    // receives the result of the command
	read chan struct{} // closed when all output has been read and no writer is left

	mu  sync.Mutex
	out bytes.Buffer
}

// terminal starts a command as the laptop's user, as the leader of a session with a terminal. PATH contains the binary
// under test.
func (l *laptop) terminal(t *testing.T, argv ...string) *terminal {
	t.Helper()
	master, theirs, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	// Read the file without blocking, so that Close hangs up at once.
	fd, err := unix.FcntlInt(master.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		t.Fatal(err)
	}
	master.Close()
	ours := os.NewFile(uintptr(fd), "terminal")
	if err := theirs.Chown(int(l.uid), -1); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	path := "PATH=" + bin + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	x := &terminal{ours: ours, done: make(chan error, 1), cmd: l.command(ctx, t, append([]string{"env", path, "TERM=xterm"}, argv...)...)}
	x.cmd.Stdin, x.cmd.Stdout, x.cmd.Stderr = theirs, theirs, theirs
	x.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := x.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	x.read = make(chan struct{})
	go func() {
		defer close(x.read)
		b := make([]byte, 4096)
		for {
			n, err := ours.Read(b)
			x.mu.Lock()
			x.out.Write(b[:n])
			x.mu.Unlock()
			if err != nil {
				return // one side of the terminal is closed
			}
		}
	}()
	go func() { x.done <- x.cmd.Wait() }()
	t.Cleanup(func() {
		cancel()
		ours.Close()
		<-x.read
	})
	return x
}

func (x *terminal) text() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.out.String()
}

// shows waits until the terminal shows a text.
func (x *terminal) shows(t *testing.T, text string) {
	t.Helper()
	testenv.Eventually(t, time.Minute, func() error {
		if got := x.text(); !strings.Contains(got, text) {
			return fmt.Errorf("%q is not on the terminal: %q", text, got)
		}
		return nil
	})
}

func (x *terminal) types(t *testing.T, keys string) {
	t.Helper()
	if _, err := x.ours.WriteString(keys); err != nil {
		t.Fatal(err)
	}
}

// hangUp closes the terminal, and waits until the command ends.
func (x *terminal) hangUp(t *testing.T) {
	t.Helper()
	if err := x.ours.Close(); err != nil {
		t.Fatal(err)
	}
	x.ends(t)
}

// ends waits until the command ends and returns its exit code, or -1 if a signal ended it.
func (x *terminal) ends(t *testing.T) int {
	t.Helper()
	select {
	case err := <-x.done:
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		select {
		case <-x.read:
		case <-time.After(10 * time.Second):
			t.Errorf("a process keeps the terminal open: %q", x.text())
		}
		return x.cmd.ProcessState.ExitCode()
	case <-time.After(30 * time.Second):
		t.Fatalf("the command does not end: %q", x.text())
	}
	return 0
}
