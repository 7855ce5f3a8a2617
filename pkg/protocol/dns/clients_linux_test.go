package dns

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
)

// machine is a network and mount namespace of one thread, with its own files in /etc and a resolver at 127.0.0.1:53.
// run starts programs in it. It ends with its thread.
type machine struct {
	t     testing.TB
	tasks chan func()
	etc   string
}

func newMachine(t testing.TB, r *Resolver) *machine {
	t.Helper()
	testenv.NeedRoot(t)
	m := &machine{t: t, tasks: make(chan func()), etc: t.TempDir()}
	for name, content := range map[string]string{
		"resolv.conf": "nameserver 127.0.0.1\n", "hosts": "127.0.0.1 localhost\n", "nsswitch.conf": "hosts: files dns\n",
	} {
		m.write(name, content)
	}
	ready := make(chan error)
	var (
		pc net.PacketConn
		l  net.Listener
	)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread, and with it the namespaces, end with this goroutine
		err := m.enter()
		if err == nil {
			pc, err = net.ListenPacket("udp4", "127.0.0.1:53")
		}
		if err == nil {
			l, err = net.Listen("tcp4", "127.0.0.1:53")
		}
		ready <- err
		for task := range m.tasks {
			task()
		}
	}()
	t.Cleanup(func() { close(m.tasks) })
	if err := <-ready; err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Serve(ctx, []net.PacketConn{pc}, []net.Listener{l}) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	return m
}

// write changes a file in the machine's /etc.
func (m *machine) write(name, content string) {
	if err := os.WriteFile(filepath.Join(m.etc, name), []byte(content), 0o644); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) enter() error {
	if err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("making namespaces: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private: %w", err)
	}
	for _, name := range []string{"resolv.conf", "hosts", "nsswitch.conf"} {
		if err := unix.Mount(filepath.Join(m.etc, name), "/etc/"+name, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mounting /etc/%s: %w", name, err)
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	return err
}

// run runs a program in the machine, and returns its output and exit code.
func (m *machine) run(program string, args ...string) (out string, code int) {
	m.t.Helper()
	done := make(chan struct{})
	m.tasks <- func() {
		defer close(done)
		cmd := exec.Command(program, args...)
		b, err := cmd.CombinedOutput()
		out, code = string(b), cmd.ProcessState.ExitCode()
		if err != nil && code < 0 {
			m.t.Errorf("%s %v: %v", program, args, err)
		}
	}
	<-done
	return out, code
}

// getent resolves names with glibc.
func TestGetentResolvesNames(t *testing.T) {
	testenv.NeedPrograms(t, "getent")
	w := newWorld(t)
	m := newMachine(t, w.resolver)
	// addresses returns the addresses and the canonical name in lines like "10.0.0.1  STREAM name".
	addresses := func(out string) string {
		var list []string
		for line := range strings.Lines(out) {
			fields := strings.Fields(line)
			if len(fields) >= 2 && fields[1] == "STREAM" {
				list = append(list, fields[0])
				if len(fields) > 2 {
					list = append(list, fields[2])
				}
			}
		}
		return strings.Join(list, " ")
	}
	for _, conf := range []string{
		"nameserver 127.0.0.1\n",
		"nameserver 127.0.0.1\nsearch corp.example\noptions ndots:5\n",
		"nameserver 127.0.0.1\noptions use-vc\n",
		"nameserver 127.0.0.1\noptions edns0 trust-ad\n",
		"nameserver 127.0.0.1\noptions single-request\n",
	} {
		m.write("resolv.conf", conf)
		for name, want := range map[string]string{
			"web":                           "10.96.0.10 web.default.svc.cluster.local",
			"web.billing":                   "10.96.0.11 web.billing.svc.cluster.local",
			"web.billing.svc":               "10.96.0.11 web.billing.svc.cluster.local",
			"web.default.svc.cluster.local": "10.96.0.10 web.default.svc.cluster.local",
			"db-0.db":                       "10.244.0.5 db-0.db.default.svc.cluster.local",
			"docs":                          "192.0.2.1 cdn.example.net",
			"www.google.com":                "192.0.2.2 www.google.com",
			"printer":                       "192.0.2.4 printer",
		} {
			out, code := m.run("getent", "ahosts", name)
			if diff := cmp.Diff(want, addresses(out)); diff != "" || code != 0 {
				t.Errorf("getent ahosts %s with %q: code %d (-want +got):\n%s", name, conf, code, diff)
			}
		}
		if out, code := m.run("getent", "ahosts", "dual"); code != 0 || !strings.Contains(out, "10.96.0.30") || !strings.Contains(out, "fd00:96::30") {
			t.Errorf("getent ahosts dual with %q: code %d: %s", conf, code, out)
		}
		if out, code := m.run("getent", "hosts", "10.96.0.10"); code != 0 || strings.Join(strings.Fields(out), " ") != "10.96.0.10 web.default.svc.cluster.local" {
			t.Errorf("getent hosts with %q: code %d: %s", conf, code, out)
		}
		if out, code := m.run("getent", "ahosts", "nothing.billing.svc"); code != 2 {
			t.Errorf("getent ahosts nothing.billing.svc: code %d: %s", code, out)
		}
	}
	for _, asked := range w.cluster.got() {
		if strings.Contains(asked, "google") || strings.Contains(asked, "printer") || strings.Contains(asked, "corp.example") {
			t.Errorf("cluster DNS was asked %s", asked)
		}
	}
	for _, asked := range w.upstream.got() {
		if strings.Contains(asked, "cluster.local.") && !strings.HasSuffix(strings.Fields(asked)[1], ".corp.example.") {
			t.Errorf("the upstream was asked %s", asked)
		}
	}

	m.write("resolv.conf", "nameserver 127.0.0.1\n")
	w.zone.Cluster = handlerFunc(brokenTunnel)
	w.setZones(t, w.zone)
	begin := time.Now()
	if out, code := m.run("getent", "ahosts", "web"); code == 0 {
		t.Errorf("with a broken tunnel: %s", out)
	}
	if took := time.Since(begin); took >= 5*time.Second { // the timeout of glibc
		t.Errorf("with a broken tunnel it took %v", took)
	}
	if out, code := m.run("getent", "ahosts", "printer"); code != 0 || addresses(out) != "192.0.2.4 printer" {
		t.Errorf("with a broken tunnel: code %d: %s", code, out)
	}
}
