//go:build e2e && linux

package e2e

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// bastion is an SSH server on the router, and a user's keys and SSH configuration for it.
type bastion struct {
	dir     string
	address netip.AddrPort
}

// newBastion starts the server. Its address is in the network of the nodes.
func (w *world) newBastion(t *testing.T) *bastion {
	t.Helper()
	testenv.NeedPrograms(t, "ssh", "sshd", "ssh-keygen")
	b := &bastion{t.TempDir(), netip.AddrPortFrom(w.Config().Families()[0].Router, 2222)}
	for _, name := range []string{"host", "key", "other"} {
		if out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", b.path(name)).CombinedOutput(); err != nil {
			t.Fatalf("ssh-keygen: %v\n%s", err, out)
		}
	}
	b.write(t, "sshd_config", fmt.Sprintf(`ListenAddress %s
HostKey %[2]s/host
AuthorizedKeysFile %[2]s/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
`, b.address, b.dir))
	b.write(t, "config", fmt.Sprintf(`Host bastion inner
HostName %s
Port %d
User root
IdentityFile %[3]s/key
IdentitiesOnly yes
UserKnownHostsFile %[3]s/known
`, b.address.Addr(), b.address.Port(), b.dir))
	// ssh finds the configuration by the user's entry in passwd, and not by HOME.
	if err := os.Mkdir(b.path("bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	b.write(t, "bin/ssh", fmt.Sprintf("#!/bin/sh\nexec /usr/bin/ssh -F %s \"$@\"\n", b.path("config")))
	b.knows(t, "host")
	w.startBeside(t, "router", b.address.String(), "unshare", "-m", "sh", "-c",
		`mount -t tmpfs none /run && mkdir /run/sshd && exec /usr/sbin/sshd -D -e -f "$0"`, b.path("sshd_config"))
	return b
}

func (b *bastion) path(name string) string { return filepath.Join(b.dir, name) }

func (b *bastion) write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(b.path(name), []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
}

// knows makes a key the known host key of the bastion. If key is empty, no key is known.
func (b *bastion) knows(t *testing.T, key string) {
	t.Helper()
	line := ""
	if key != "" {
		public, err := os.ReadFile(b.path(key + ".pub"))
		if err != nil {
			t.Fatal(err)
		}
		line = fmt.Sprintf("[%s]:%d %s", b.address.Addr(), b.address.Port(), public)
	}
	b.write(t, "known", line)
}

// args returns the arguments that run the laptop's kubevpn with the bastion's SSH configuration.
func (b *bastion) args(l *laptop, args ...string) []string {
	return append([]string{"env", "PATH=" + b.path("bin") + ":/usr/sbin:/usr/bin:/sbin:/bin", l.program}, args...)
}

// ssh returns the processes of ssh that use a control socket of the laptop and have an argument.
func (l *laptop) ssh(t *testing.T, argument string) (pids []int) {
	t.Helper()
	for _, pid := range l.pids(t) {
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err == nil && bytes.Contains(line, []byte(filepath.Join(l.home, "run/kubevpn/ssh-"))) &&
			bytes.Contains(line, []byte("\x00"+argument+"\x00")) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// killMaster kills the ssh process that has the connection to the bastion.
func (l *laptop) killMaster(t *testing.T) {
	t.Helper()
	var master int
	testenv.Eventually(t, soon, func() error { // the daemon may be replacing one that was killed before
		masters := l.ssh(t, "-N")
		if len(masters) != 1 {
			return fmt.Errorf("%v, want one master", describe(masters))
		}
		master = masters[0]
		return nil
	})
	kill(t, master)
	testenv.Until(t, "the master has ended", func() bool { return !slices.Contains(l.ssh(t, "-N"), master) })
}

// noSSH waits until no ssh runs and no control socket exists.
func (l *laptop) noSSH(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		sockets, err := filepath.Glob(filepath.Join(l.home, "run/kubevpn/ssh-*"))
		if pids := l.ssh(t, "-S"); err != nil || len(pids)+len(sockets) > 0 {
			return fmt.Errorf("%v %v, %v", describe(pids), sockets, err)
		}
		return nil
	})
}

// startBeside runs a program at a place of the lab until the test ends, and waits until the address accepts
// connections there.
func (w *world) startBeside(t *testing.T, place, address string, argv ...string) {
	t.Helper()
	cmd, err := w.Command(t.Context(), place, argv...)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Cancel() // it fails if the program has ended
		_ = cmd.Wait()   // with the signal
	})
	testenv.Eventually(t, soon, func() error {
		conn, err := w.Dial(t.Context(), place, "tcp", address)
		if err != nil {
			return err
		}
		return conn.Close()
	})
}

// blockAPI rejects connections from the laptop to the API server.
func (w *world) blockAPI(t *testing.T) {
	t.Helper()
	f := w.Config().Families()[0]
	w.nft(t, "router", "forward", fmt.Sprintf("ip saddr %v ip daddr %v tcp dport %d reject with tcp reset", f.LaptopNet,
		w.Config().APIServer(f), lab.APIPort))
}

// noCat is the message of `kubevpn env` about the lab's image. Only an exec that reached the node can return it.
const noCat = `"cat": executable file not found`

// jumpSuite reaches the API server only through a bastion: OpenSSH's ssh and sshd.
func jumpSuite(t *testing.T, w *world) {
	l := w.newUser(t, lab.Admin)
	b := w.newBastion(t)
	vip := w.clusterIP(t, "default", "web")
	w.blockAPI(t)
	before := l.snapshot(t)
	run := func(args ...string) result { return l.run(t, b.args(l, args...)...) }

	t.Run("errors_are_clear", func(t *testing.T) { jumpErrors(t, l, b, run) })
	t.Run("several_hosts", func(t *testing.T) {
		if r := run("list", "--ssh-jump", "bastion,inner"); r.code != 0 || !strings.Contains(r.stdout, "deployment/web") {
			t.Error(r)
		}
	})
	t.Run("exec", func(t *testing.T) {
		if r := run("env", "deployment/web", "--ssh-jump", "bastion"); r.code != 0 || !strings.Contains(r.stderr, noCat) {
			t.Error(r)
		}
	})
	t.Run("doctor", func(t *testing.T) {
		f := l.diagnose(t, b.args(l, "doctor", "-o", "json", "--ssh-jump", "bastion")...)
		if seen := f["address"].Seen; !strings.Contains(seen, "by the SSH jump host bastion") {
			t.Errorf("the way to the API server: %q", seen)
		}
		only(t, f)
	})
	t.Run("question_is_on_the_terminal", func(t *testing.T) {
		l.noSSH(t)
		b.knows(t, "")
		x := l.terminal(t, b.args(l, "connect", "--ssh-jump", "bastion")...)
		x.shows(t, "Are you sure you want to continue connecting")
		x.types(t, "\x03")
		if code := x.ends(t); code != int(api.ExitInterrupted) {
			t.Errorf("exit %d after Ctrl-C: %s", code, x.text())
		}
		nodes := w.Config().Families()[0].NodeNet.String() // contains the bastion, which must stay reachable
		x = l.terminal(t, b.args(l, "connect", "--ssh-jump", "bastion", "--extra-cidr", nodes)...)
		x.shows(t, "Are you sure you want to continue connecting")
		x.types(t, "yes\n")
		x.shows(t, "Connected to ")
		if code := x.ends(t); code != 0 {
			t.Fatalf("exit %d: %s", code, x.text())
		}
	})
	if _, err := l.get(t, "http://web.default/"); err != nil {
		t.Fatal(err)
	}
	f := l.startFlow(t, net.JoinHostPort(vip, "9001"))
	f.goesOn(t, soon)
	t.Run("flows_continue_after_the_master_is_killed", func(t *testing.T) {
		l.killMaster(t)
		f.goesOn(t, soon)
		l.connectedAgain(t, soon)
	})
	t.Run("status_names_the_command_that_helps", func(t *testing.T) {
		b.knows(t, "other")
		l.killMaster(t)
		testenv.Eventually(t, soon, func() error {
			c := l.connection(t)
			if c.Error == nil || !strings.Contains(c.Error.Message, "Host key verification failed") || !strings.Contains(c.Error.Hint, "kubevpn connect --ssh-jump bastion") {
				return fmt.Errorf("status %s: %v", c.Status, c.Error)
			}
			return nil
		})
		b.knows(t, "host")
		if r := run("connect", "--ssh-jump", "bastion"); r.code != 0 {
			t.Error(r)
		}
		l.connectedAgain(t, soon)
		f.goesOn(t, soon)
	})
	f.finish(t)
	l.must(t, "kubevpn", "disconnect", "--all")
	l.noSSH(t)
	l.sameAs(t, before)

	t.Run("nothing_is_left_after_a_kill", func(t *testing.T) {
		if r := run("connect", "--ssh-jump", "bastion"); r.code != 0 {
			t.Fatal(r)
		}
		l.dies(t, syscall.SIGKILL, []string{theDaemon})
		l.noSSH(t)
		l.soonAs(t, before)
	})
}

// jumpErrors checks what users read if the bastion cannot be used.
func jumpErrors(t *testing.T, l *laptop, b *bastion, run func(args ...string) result) {
	defer b.knows(t, "host")
	unreachable := func(message, hint string) failure {
		return failure{code: api.ExitUnreachable, message: message, hint: hint}
	}
	b.knows(t, "other")
	unreachable("cannot use the jump host bastion: Host key verification failed", "`ssh -- bastion` must log in").
		check(t, run("connect", "--ssh-jump", "bastion"))
	b.knows(t, "")
	unreachable("Host key verification failed", "kubevpn connect --ssh-jump bastion").check(t, run("connect", "--ssh-jump", "bastion"))
	b.knows(t, "host")
	b.write(t, "config", strings.Replace(b.read(t, "config"), "/key\n", "/other\n", 1))
	unreachable("Permission denied \\(publickey", "`ssh -- bastion` must log in").check(t, run("connect", "--ssh-jump", "bastion"))
	b.write(t, "config", strings.Replace(b.read(t, "config"), "/other\n", "/key\n", 1))
	unreachable("bastion cannot connect to 192.0.2.1:6443", "must allow TCP forwarding").
		check(t, run("list", "--ssh-jump", "bastion", "--server", "https://192.0.2.1:6443"))
	r := l.run(t, "env", "PATH="+l.home, l.program, "connect", "--ssh-jump", "bastion")
	failure{code: api.ExitUsage, message: "--ssh-jump needs the program ssh", hint: "Install OpenSSH's client"}.check(t, r)
	failure{code: api.ExitUsage, message: `"-oProxyCommand=id" is not a jump host`}.check(t, run("connect", "--ssh-jump=-oProxyCommand=id"))
}

func (b *bastion) read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(b.path(name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
