package hostservice_test

import (
	"bufio"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/testenv"
)

// waitTime limits the wait for an expected condition on a busy machine.
const waitTime = time.Minute

// The users of the machine. alice and bob are members of the group vpn.
const (
	alice   = "alice"
	bob     = "bob"
	mallory = "mallory"
	root    = "root"

	users  = "alice:x:64910:64910::/:/bin/sh\nbob:x:64911:64911::/:/bin/sh\nmallory:x:64912:64912::/:/bin/sh\n"
	groups = "alice:x:64910:\nbob:x:64911:\nmallory:x:64912:\nvpn:x:64913:alice,bob\n"
)

// machine is a booted systemd with a network of its own.
type machine struct {
	t   *testing.T
	pid string // of systemd, on this machine
}

// boot boots a machine with kubevpn and this test in /usr/local/bin, and ends it with the test.
func boot(t *testing.T) *machine {
	t.Helper()
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "/lib/systemd/systemd", "dbus-daemon", "sudo", "unshare", "nsenter", "setpriv", "ip", "nft", "go")
	dir := t.TempDir()
	resolved := testenv.ResolvedRoot(t)
	for name, content := range files(t, resolved) {
		path := filepath.Join(dir, "files", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	units := "basic.target sockets.target shutdown.target umount.target final.target dbus.service dbus.socket " +
		"systemd-journald.service systemd-journald.socket systemd-journald-dev-log.socket"
	if err := os.WriteFile(filepath.Join(dir, "units"), []byte(strings.ReplaceAll(units, " ", "\n")+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if resolved != "/" {
		testenv.Run(t, "cp -r "+resolved+" "+filepath.Join(dir, "files/opt"))
	}
	bin := filepath.Join(dir, "files/usr/local/bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	build := exec.Command("go", "build", "-trimpath", "-o", filepath.Join(bin, "kubevpn"), "./cmd/kubevpn")
	build.Dir, build.Env = "../../..", append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-trimpath")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	testenv.Run(t, fmt.Sprintf("cp /proc/%d/exe %s/kubevpn-test", os.Getpid(), bin))
	if err := os.Mkdir(filepath.Join(dir, "root"), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("testdata/boot.sh", dir, cgroup(t))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var log testenv.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	m := &machine{t: t}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // unshare kills process 1, and the kernel the rest
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("boot: %s", log.String())
		}
	})
	testenv.Eventually(t, waitTime, func() error {
		children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", cmd.Process.Pid))
		if err != nil {
			return err
		}
		if m.pid = strings.TrimSpace(string(children)); m.pid == "" {
			return fmt.Errorf("process 1 has not started")
		}
		out, err := m.command(root, "systemctl", "is-active", "test.target").CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	return m
}

// files returns the files that the machine has besides those of this one. resolved is the result of
// testenv.ResolvedRoot.
func files(t *testing.T, resolved string) map[string]string {
	t.Helper()
	out := map[string]string{
		"etc/resolv.conf":    "nameserver 192.0.2.1\n",
		"etc/sudoers.d/test": "alice ALL=(ALL) NOPASSWD: ALL\n",
	}
	read := func(name string) string {
		content, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(content)
	}
	out["etc/passwd"], out["etc/group"] = read("/etc/passwd")+users, read("/etc/group")+groups
	if !strings.Contains(out["etc/passwd"], "systemd-resolve:") {
		out["etc/passwd"] += "systemd-resolve:x:64919:64919::/:/usr/sbin/nologin\n"
		out["etc/group"] += "systemd-resolve:x:64919:\n"
	}
	unit := "[Service]\nType=dbus\nBusName=org.freedesktop.resolve1\nExecStart="
	if resolved == "/" {
		unit += "/lib/systemd/systemd-resolved\n"
	} else {
		unit += "/opt/lib/systemd/systemd-resolved\n"
		libraries := testenv.ResolvedLibraries(t, resolved)
		unit += "Environment=LD_LIBRARY_PATH=/opt" + strings.TrimPrefix(libraries, resolved) + "\n"
		const bus = "org.freedesktop.resolve1.conf"
		out["etc/dbus-1/system.d/"+bus] = read(filepath.Join(resolved, "usr/share/dbus-1/system.d", bus))
	}
	out["etc/systemd/system/systemd-resolved.service"] = unit
	return out
}

// cgroup creates a control group for the machine, in the hierarchy of version 2, and removes it after the test.
func cgroup(t *testing.T) string {
	t.Helper()
	parents := []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"}
	i := slices.IndexFunc(parents, func(dir string) bool {
		_, err := os.Stat(filepath.Join(dir, "cgroup.procs"))
		return err == nil
	})
	if i < 0 {
		t.Fatal("no control groups of version 2 are mounted")
	}
	dir, err := os.MkdirTemp(parents[i], "kubevpn-systemd-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		testenv.Eventually(t, waitTime, func() error { // the kernel still ends processes
			var dirs []string
			err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
				if err == nil && d.IsDir() {
					dirs = append(dirs, path)
				}
				return err
			})
			for _, d := range slices.Backward(dirs) {
				if err == nil {
					err = os.Remove(d)
				}
			}
			return err
		})
	})
	return dir
}

// command is a command that a user runs on the machine.
func (m *machine) command(user string, args ...string) *exec.Cmd {
	as := []string{"--target", m.pid, "--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup", "--",
		"setpriv", "--reuid", user, "--regid", user, "--init-groups", "--"}
	cmd := exec.Command("nsenter", append(as, args...)...)
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/tmp", testenv.EndAtOnce()}
	return cmd
}

// run runs a command line, split at spaces, and returns its output.
func (m *machine) run(t *testing.T, user, line string, env ...string) string {
	t.Helper()
	cmd := m.command(user, strings.Fields(line)...)
	cmd.Env = append(cmd.Env, env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %s: %v\n%s", user, line, err, out)
	}
	return string(out)
}

// instances runs a command of systemctl for the instances of the service. It fails if one ended after the pattern had
// matched it, and works for the others.
func (m *machine) instances(t *testing.T, command string) {
	t.Helper()
	testenv.Eventually(t, time.Minute, func() error {
		out, err := m.command(root, strings.Fields("systemctl "+command+" kubevpn-helper@*.service")...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("systemctl %s: %w\n%s", command, err, out)
		}
		return nil
	})
}

// client is a daemon of a user on the machine, which runs a role of this test.
type client struct {
	t     *testing.T
	cmd   *exec.Cmd
	lines *bufio.Scanner
}

// start starts a role as a user.
func (m *machine) start(t *testing.T, user, role string, env ...string) *client {
	t.Helper()
	cmd := m.command(user, "kubevpn-test")
	cmd.Env = append(append(cmd.Env, roleVariable+"="+role), env...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return &client{t: t, cmd: cmd, lines: bufio.NewScanner(out)}
}

// line returns the next line of the role. A role that hangs is ended by the time limit of the test.
func (c *client) line() string {
	c.t.Helper()
	if !c.lines.Scan() {
		c.t.Fatalf("the role has ended: %v", c.lines.Err())
	}
	return c.lines.Text()
}
