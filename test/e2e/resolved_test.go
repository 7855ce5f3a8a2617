//go:build e2e && linux

package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// furnish gives a laptop its own /etc, /run and /var/lib. Commands of `ip netns exec` otherwise share those of the
// machine, except for single files. It returns the directory that contains them.
func (w *world) furnish(t *testing.T) (*laptop, string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "kubevpn-e2e-root-")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	l := w.newLaptop(t, lab.Admin)
	l.must(t, "cp", "-a", "/etc", dir)
	l.must(t, "cp", l.kubeconfig, filepath.Join(dir, "kubeconfig"))
	l.must(t, "mkdir", "-p", dir+"/run/dbus", dir+"/run/systemd/resolve", dir+"/lib", dir+"/etc/systemd")
	l.kubeconfig = filepath.Join(dir, "kubeconfig")
	l.within = []string{"unshare", "--mount", "--propagation", "private", "sh", "-ec", `
		for d in etc run; do mount --bind "$0/$d" "/$d"; done
		mount --bind "$0/lib" /var/lib
		exec "$@"`, dir}
	return l, dir
}

// systemd is a real system bus and a real systemd-resolved on a laptop without systemd as PID 1.
type systemd struct {
	*laptop
	root     string // contains the unpacked systemd-resolved
	resolved *exec.Cmd
}

const bus = `<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN" "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:path=/run/dbus/system_bus_socket</listen>
  <auth>EXTERNAL</auth>
  <policy context="default"><allow user="*"/><allow own="*"/><allow send_destination="*"/><allow receive_sender="*"/></policy>
</busconfig>
`

// startSystemd furnishes a laptop and starts both there. resolved queries the lab's router; resolv.conf links to the
// file that names resolved's stub, as Debian's package does.
func (w *world) startSystemd(t *testing.T) *systemd {
	t.Helper()
	s := &systemd{root: testenv.ResolvedRoot(t)}
	testenv.NeedPrograms(t, "dbus-daemon")
	l, dir := w.furnish(t)
	s.laptop = l
	l.must(t, "sh", "-ec", `
		ln -sf ../run/systemd/resolve/stub-resolv.conf /etc/resolv.conf
		grep -q ^systemd-resolve: /etc/passwd || {
			echo 'systemd-resolve:x:64901:64901::/:/usr/sbin/nologin' >>/etc/passwd
			echo 'systemd-resolve:x:64901:' >>/etc/group
		}
		chown systemd-resolve:systemd-resolve /run/systemd/resolve`)
	for name, content := range map[string]string{
		"run/bus.conf":              bus,
		"etc/systemd/resolved.conf": "[Resolve]\nDNS=" + w.Config().Families()[0].Gateway.String() + "\nFallbackDNS=\nDNSSEC=no\nLLMNR=no\nMulticastDNS=no\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s.start(t, "dbus-daemon", "--config-file=/run/bus.conf", "--nofork", "--nopidfile", "--nosyslog")
	testenv.Eventually(t, time.Minute, func() error { _, err := os.Stat(dir + "/run/dbus/system_bus_socket"); return err })
	s.startResolved(t)
	return s
}

// start starts a program that the test stops at its end.
func (s *systemd) start(t *testing.T, argv ...string) *exec.Cmd {
	t.Helper()
	cmd := s.command(context.WithoutCancel(t.Context()), t, append([]string{"env",
		"LD_LIBRARY_PATH=" + testenv.ResolvedLibraries(t, s.root), "SYSTEMD_LOG_TARGET=console"}, argv...)...)
	// No Pdeathsig: it kills the program when the thread that started it ends, which a lab beside this one may cause
	// (golang.org/issue/27505). The lab ends what runs in its namespaces.
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // the test may have killed it
		_ = cmd.Wait()
	})
	return cmd
}

func (s *systemd) startResolved(t *testing.T) {
	t.Helper()
	s.resolved = s.start(t, filepath.Join(s.root, "lib/systemd/systemd-resolved"))
	testenv.Eventually(t, time.Minute, func() error {
		if r := s.resolvectl(t, "status"); r.code != 0 {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
}

func (s *systemd) resolvectl(t *testing.T, args ...string) result {
	t.Helper()
	return s.run(t, append([]string{"env", "LD_LIBRARY_PATH=" + testenv.ResolvedLibraries(t, s.root), "COLUMNS=200",
		filepath.Join(s.root, "usr/bin/resolvectl")}, args...)...)
}

// snapshot returns the state of the laptop and of resolved, without the server that answered last.
func (s *systemd) snapshot(t *testing.T) string {
	t.Helper()
	var r result
	testenv.Eventually(t, time.Minute, func() error { // it fails if a link disappears while it lists them
		if r = s.resolvectl(t, "status"); r.code != 0 {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
	current := regexp.MustCompile(`(?m)^ *Current DNS Server:.*\n`)
	return s.laptop.snapshot(t) + "== resolvectl status\n" + current.ReplaceAllString(r.stdout, "")
}

func (s *systemd) soonAs(t *testing.T, before string) {
	t.Helper()
	testenv.Eventually(t, time.Minute, func() error {
		if d := cmp.Diff(before, s.snapshot(t)); d != "" {
			return fmt.Errorf("the laptop is not as before (-before +after):\n%s", d)
		}
		return nil
	})
}

// resolvedSuite checks that systemd-resolved sends each name to the server that knows it, and is otherwise unchanged.
func resolvedSuite(t *testing.T, w *world) {
	s := w.startSystemd(t)
	vip := w.clusterIP(t, "default", "web")
	router := s.must(t, "dig", "+short", "www.outside.test")
	if router != w.Config().Families()[0].Outside.String() {
		t.Fatalf("before connect, www.outside.test is %q", router)
	}
	before := s.snapshot(t)
	if r := s.run(t, "getent", "ahostsv4", "web.default.svc.cluster.local"); r.code == 0 {
		t.Fatalf("resolved without kubevpn: %v", r)
	}

	s.connect(t, "--extra-domain", "corp.test")
	t.Run("extra_domain", func(t *testing.T) {
		device := s.connection(t).Device
		testenv.Eventually(t, time.Minute, func() error { // the TTL may pass between the two
			s.resolves(t, dbName, dbAddress)
			return s.routedTo(t, dbAddress, device)
		})
	})
	t.Run("connect_uses_resolved", func(t *testing.T) {
		if got := s.connection(t).DNS; got.Mode != api.ResolverResolved {
			t.Errorf("%+v", got)
		}
		if out := s.must(t, "nft", "list", "ruleset"); strings.Contains(out, "dnat") || strings.Contains(out, "redirect to") {
			t.Errorf("queries are redirected as well:\n%s", out)
		}
		r := s.resolvectl(t, "status", s.connection(t).Device)
		for _, part := range []string{"-DefaultRoute", "~default", "default.svc.cluster.local"} {
			if !strings.Contains(r.stdout, part) {
				t.Errorf("%q is not in %v", part, r)
			}
		}
	})
	queries, err := w.Queries()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"web", "web.default", "web.default.svc", "web.default.svc.cluster.local"} {
		t.Run(name, func(t *testing.T) {
			if out := s.must(t, "getent", "ahostsv4", name); !strings.HasPrefix(out, vip+" ") {
				t.Errorf("getent: %s", out)
			}
			if r := s.resolvectl(t, "query", "--legend=no", name); !strings.Contains(r.stdout, ": "+vip+" ") {
				t.Errorf("%v", r)
			}
			if _, err := s.get(t, "http://"+name+"/"); err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("reverse_lookup_works", func(t *testing.T) {
		if r := s.resolvectl(t, "query", "--legend=no", vip); !strings.Contains(r.stdout, "web.default.svc.cluster.local") {
			t.Error(r)
		}
	})
	t.Run("each_nameserver_gets_only_its_names", func(t *testing.T) {
		for _, name := range []string{"secret-cluster.default.svc.cluster.local", "secret-cluster.default.svc", "secret-cluster"} {
			s.run(t, "getent", "hosts", name)
		}
		if out := s.must(t, "getent", "ahostsv4", "www.outside.test"); !strings.HasPrefix(out, router+" ") {
			t.Error(out)
		}
		s.run(t, "getent", "hosts", "secret-outside.outside.test")
		all, err := w.Queries()
		if err != nil {
			t.Fatal(err)
		}
		asked := all[len(queries):]
		if left := ofTheCluster(asked); len(left) > 0 {
			t.Errorf("queries for cluster names left the cluster: %+v", left)
		}
		if !slices.ContainsFunc(asked, func(q lab.Query) bool { return q.Name == "secret-outside.outside.test." }) {
			t.Errorf("a query for an outside name did not reach the outside nameserver: %+v", asked)
		}
	})
	suite := t // resolved runs until the end of the suite
	t.Run("names_resolve_after_resolved_is_killed", func(t *testing.T) {
		if err := s.resolved.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = s.resolved.Wait() // the signal makes it fail
		mode := func(want api.ResolverMode) {
			t.Helper()
			testenv.Eventually(t, time.Minute, func() error {
				if got := s.connection(t).DNS.Mode; got != want {
					return fmt.Errorf("mode %s, want %s", got, want)
				}
				return nil
			})
			s.reaches(t)
		}
		mode(api.ResolverNFTables) // names still resolve
		s.startResolved(suite)
		mode(api.ResolverResolved)
		if r := s.resolvectl(t, "status", s.connection(t).Device); !strings.Contains(r.stdout, "~default") {
			t.Error(r)
		}
	})
	t.Run("disconnect_leaves_nothing", func(t *testing.T) {
		s.must(t, "kubevpn", "disconnect", "--all")
		s.soonAs(t, before) // the kernel tells resolved that the link is gone
	})
	for _, d := range deaths {
		t.Run(d.name, func(t *testing.T) {
			s.usable(t)
			s.dies(t, d.signal, d.of)
			s.soonAs(t, before)
			s.gone(t, theHelper)
		})
	}
}

// resolvConfSuite checks that resolv.conf is edited where queries cannot be redirected, and restored after any
// failure. Here the nameserver has an IPv6 address and the loopback device has none, so nothing can be redirected to
// it.
func resolvConfSuite(t *testing.T, w *world) {
	l, dir := w.furnish(t)
	vip := w.clusterIP(t, "default", "web")
	l.must(t, "sysctl", "-qw", "net.ipv6.conf.lo.disable_ipv6=1")
	l.finally(t, "sysctl", "-qw", "net.ipv6.conf.lo.disable_ipv6=0")
	const original = "# of the house\nnameserver 2001:db8::53\noptions timeout:1 attempts:1\nsearch house.test\n"
	file := filepath.Join(dir, "etc/resolv.conf")
	if err := os.WriteFile(file, []byte(original), 0o640); err != nil {
		t.Fatal(err)
	}
	// Only the directory of root's journal stays, with its lock.
	l.must(t, "install", "-D", "-m", "600", "/dev/null", "/var/lib/kubevpn/lock")
	l.must(t, "chmod", "700", "/var/lib/kubevpn")
	// The journal replaces the file by a rename, so compare what a reader sees.
	inode := regexp.MustCompile(`inode=\d+`)
	snapshot := func() string { return inode.ReplaceAllString(l.snapshot(t), "") }
	before := snapshot()
	same := func(t *testing.T) {
		t.Helper()
		testenv.Eventually(t, time.Minute, func() error {
			if d := cmp.Diff(before, snapshot()); d != "" {
				return fmt.Errorf("the laptop is not as before (-before +after):\n%s", d)
			}
			return nil
		})
	}
	connect := func(t *testing.T) {
		t.Helper()
		l.usable(t)
		if got := l.connection(t).DNS.Mode; got != api.ResolverFile {
			t.Fatalf("mode %s: %+v", got, l.connection(t).Warnings)
		}
		if out := l.must(t, "getent", "ahostsv4", "web"); !strings.HasPrefix(out, vip+" ") {
			t.Errorf("getent: %s", out)
		}
		if now, err := os.ReadFile(file); err != nil || string(now) == original {
			t.Fatalf("resolv.conf was not edited, %v: %s", err, now)
		}
	}

	t.Run("disconnect_leaves_nothing", func(t *testing.T) {
		connect(t)
		l.must(t, "kubevpn", "disconnect", "--all")
		same(t)
	})
	for _, d := range deaths {
		t.Run(d.name, func(t *testing.T) {
			connect(t)
			l.dies(t, d.signal, d.of)
			l.gone(t, theHelper)
			if d.signal == syscall.SIGKILL && slices.Contains(d.of, theHelper) {
				// No process was left to restore it; the next start does.
				l.usable(t)
				l.must(t, "kubevpn", "disconnect", "--all")
			}
			same(t)
		})
	}
}
