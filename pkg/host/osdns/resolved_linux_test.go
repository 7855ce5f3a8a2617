package osdns

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/testenv"
)

// systemd is a real system bus and a real systemd-resolved in the test's namespaces, without systemd as PID 1.
type systemd struct {
	root     string // where systemd-resolved is unpacked
	resolved *exec.Cmd
}

// startSystemd gives the test its own /etc and /run, with resolv.conf a link to one of resolved's files, and
// starts the bus and resolved, whose server is 192.0.2.1.
func startSystemd(t *testing.T, resolvConf string) *systemd {
	t.Helper()
	s := &systemd{root: testenv.ResolvedRoot(t)}
	private := t.TempDir()
	for _, c := range []string{
		"cp -a /etc " + private + "/etc",
		"mount --bind " + private + "/etc /etc",
		"mount -t tmpfs tmpfs /run",
		"mkdir -p /run/dbus /run/systemd/resolve /etc/systemd",
		"rm -f /etc/resolv.conf",
		"ln -s " + resolvConf + " /etc/resolv.conf",
	} {
		testenv.Run(t, c)
	}
	t.Cleanup(func() { testenv.Run(t, "umount -l /etc"); testenv.Run(t, "umount -l /run") })
	add := func(path, line string) {
		f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteString(line + "\n"); err != nil {
			t.Fatal(err)
		}
	}
	if passwd, _ := os.ReadFile("/etc/passwd"); !strings.Contains(string(passwd), "systemd-resolve:") {
		add("/etc/passwd", "systemd-resolve:x:64901:64901::/:/usr/sbin/nologin")
		add("/etc/group", "systemd-resolve:x:64901:")
	}
	testenv.Run(t, "chown systemd-resolve:systemd-resolve /run/systemd/resolve")
	write(t, "/etc/systemd/resolved.conf", "[Resolve]\nDNS=192.0.2.1\nFallbackDNS=\nDNSSEC=no\nLLMNR=yes\n", 0o644)
	write(t, "/run/bus.conf", `<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN" "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:path=/run/dbus/system_bus_socket</listen>
  <auth>EXTERNAL</auth>
  <policy context="default"><allow user="*"/><allow own="*"/><allow send_destination="*"/><allow receive_sender="*"/></policy>
</busconfig>
`, 0o644)
	s.start(t, "dbus-daemon", "--config-file=/run/bus.conf", "--nofork", "--nopidfile", "--nosyslog")
	testenv.Eventually(t, testTimeout, func() error { _, err := os.Stat("/run/dbus/system_bus_socket"); return err })
	s.startResolved(t)
	return s
}

// same returns an error that shows how two texts differ, or nil.
func same(want, got string) error {
	if diff := cmp.Diff(want, got); diff != "" {
		return fmt.Errorf("-want +got\n%s", diff)
	}
	return nil
}

func (s *systemd) start(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+testenv.ResolvedLibraries(t, s.root), "SYSTEMD_LOG_TARGET=console")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}

func (s *systemd) startResolved(t *testing.T) {
	t.Helper()
	s.resolved = s.start(t, filepath.Join(s.root, "lib/systemd/systemd-resolved"))
	testenv.Eventually(t, testTimeout, func() error {
		out, err := s.resolvectl(t, "status").CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

func (s *systemd) resolvectl(t *testing.T, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(s.root, "usr/bin/resolvectl"), args...)
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+testenv.ResolvedLibraries(t, s.root), "COLUMNS=200")
	return cmd
}

// status returns the output of resolvectl for a link, or for everything, without the server that answered last.
func (s *systemd) status(t *testing.T, link ...string) string {
	t.Helper()
	out, err := s.resolvectl(t, append([]string{"status"}, link...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("resolvectl status: %v\n%s", err, out)
	}
	var b strings.Builder
	for line := range strings.Lines(string(out)) {
		if !strings.Contains(line, "Current DNS Server") {
			b.WriteString(strings.Join(strings.Fields(line), " ") + "\n")
		}
	}
	return b.String()
}

// who asks resolved's stub which server answers a name.
func who(t *testing.T, name string) string {
	t.Helper()
	return strings.TrimSpace(testenv.Run(t, "dig +short +tries=1 +time=3 TXT "+name+" @127.0.0.53"))
}

const stub = "/run/systemd/resolve/stub-resolv.conf"

func resolvedConfig() Config {
	return Config{
		Listen4: netip.MustParseAddrPort("127.0.0.1:5399"),
		Links: []Link{{
			Name: "kubevpn0", Addrs: addrs("198.19.0.1"), Resolver: netip.MustParseAddr("198.19.255.53"),
			MatchDomains:  []string{"cluster.local", "96.10.in-addr.arpa"},
			SearchDomains: []string{"default.svc.cluster.local", "svc.cluster.local"},
		}},
	}
}

func TestSystemdResolvedRoutesClusterNames(t *testing.T) {
	if !testenv.InNamespace(t, "dbus-daemon", "dig", "nft") {
		return
	}
	startUpstream(t, "192.0.2.1", "192.0.2.2")
	startNameserver(t, "kubevpn0", []string{"198.19.255.53"}, "198.19.0.1/16")
	s := startSystemd(t, stub)
	const lan, cluster = `"upstream 192.0.2.1 udp"`, `"upstream 198.19.255.53 udp"`
	before := s.status(t) + namespaceState(t, "/etc/resolv.conf")
	if got := who(t, "web.default.svc.cluster.local") + who(t, "example.org"); got != lan {
		t.Errorf("before (resolved asks nobody for .local): %s", got)
	}

	changes := make(chan Applied, 10)
	c := New(Options{StateDir: filepath.Join(t.TempDir(), "state"), OnChange: func(a Applied) { changes <- a }})
	c.poll = 20 * time.Millisecond
	applied, err := c.Set(resolvedConfig())
	if err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(applied), "{systemd-resolved [192.0.2.1:53] []}"; got != want {
		t.Errorf("applied %s, want %s", got, want)
	}
	link := s.status(t, "kubevpn0")
	for _, want := range []string{
		"Current Scopes: DNS\n", "-DefaultRoute -LLMNR -mDNS -DNSOverTLS DNSSEC=no", "DNS Servers: 198.19.255.53\n",
		"DNS Domain: default.svc.cluster.local svc.cluster.local ~cluster.local ~96.10.in-addr.arpa\n",
	} {
		if !strings.Contains(link, want) {
			t.Errorf("resolvectl status kubevpn0 is without %q:\n%s", want, link)
		}
	}
	asCluster := func(when string) {
		t.Helper()
		for _, name := range []string{"web.default.svc.cluster.local", "1.0.96.10.in-addr.arpa"} {
			if got := who(t, name); got != cluster {
				t.Errorf("%s: %s is answered by %s", when, name, got)
			}
		}
		for _, name := range []string{"example.org", "1.0.97.10.in-addr.arpa", "cluster.local.example.org"} {
			if got := who(t, name); got != lan {
				t.Errorf("%s: %s is answered by %s", when, name, got)
			}
		}
	}
	asCluster("set")
	// A program that expands names with the search list of resolv.conf finds short names.
	if got := testenv.Run(t, "dig +search +short +tries=1 TXT web"); !strings.Contains(got, "198.19.255.53") {
		t.Errorf("dig +search web: %s\n%s", got, testenv.Run(t, "cat /etc/resolv.conf"))
	}

	// NetworkManager, or a user, reverts the settings.
	if out, err := s.resolvectl(t, "revert", "kubevpn0").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	testenv.Eventually(t, testTimeout, func() error { return same(link, s.status(t, "kubevpn0")) })
	asCluster("after a revert")

	// resolved dies, loses its state, and starts again.
	if err := s.resolved.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = s.resolved.Wait()
	if got := next(t, changes); got.Mode != ModeNFTables {
		t.Errorf("while resolved is down: %+v", got)
	}
	testenv.Run(t, "rm -rf /run/systemd/resolve/netif")
	s.startResolved(t)
	for got := next(t, changes); got.Mode != ModeResolved; got = next(t, changes) {
	}
	testenv.Eventually(t, testTimeout, func() error { return same(link, s.status(t, "kubevpn0")) })
	asCluster("after a restart")

	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, s.status(t)+namespaceState(t, "/etc/resolv.conf")); diff != "" {
		t.Errorf("left behind: -before +after\n%s", diff)
	}
	if got := who(t, "web.default.svc.cluster.local") + who(t, "example.org"); got != lan {
		t.Errorf("after: %s", got)
	}
}

// The settings disappear with the link, whichever process dies.
func TestSystemdResolvedForgetsADeletedLink(t *testing.T) {
	if !testenv.InNamespace(t, "dbus-daemon", "dig", "nft") {
		return
	}
	startUpstream(t, "192.0.2.1")
	s := startSystemd(t, stub)
	before := s.status(t) + namespaceState(t, "/etc/resolv.conf") + testenv.Run(t, "cat "+stub)
	testenv.Run(t, "ip tuntap add dev kubevpn0 mode tun")
	testenv.Run(t, "ip addr add 198.19.0.1/32 dev kubevpn0")
	testenv.Run(t, "ip link set kubevpn0 up")
	h := hold(t, resolvedConfig(), Options{StateDir: filepath.Join(t.TempDir(), "state")})
	if h.applied.Mode != ModeResolved || !strings.Contains(s.status(t), "198.19.255.53") {
		t.Errorf("%+v\n%s", h.applied, s.status(t))
	}
	if err := h.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = h.cmd.Wait()
	testenv.Run(t, "ip link del kubevpn0") // as the kernel does when the TUN's owner dies
	testenv.Eventually(t, testTimeout, func() error {
		return same(before, s.status(t)+namespaceState(t, "/etc/resolv.conf")+testenv.Run(t, "cat "+stub))
	})
	if left, _ := filepath.Glob("/run/systemd/resolve/netif/*"); len(left) > 0 {
		t.Errorf("resolved remembers %v", left)
	}
}

// resolv.conf lists the uplinks, so the redirect covers the programs that read it and resolved itself.
func TestRedirectCoversABypassedSystemdResolved(t *testing.T) {
	if !testenv.InNamespace(t, "dbus-daemon", "dig", "nft") {
		return
	}
	startUpstream(t, "192.0.2.1", "192.0.2.2")
	startNameserver(t, "kubevpn0", []string{"198.19.255.53"}, "198.19.0.1/16")
	s := startSystemd(t, "/run/systemd/resolve/resolv.conf")
	cfg := startUs(t)
	if out, err := s.resolvectl(t, "dns", "eth0", "192.0.2.2").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	testenv.Until(t, "resolv.conf lists both uplinks", func() bool {
		got := testenv.Run(t, "cat /etc/resolv.conf")
		return strings.Contains(got, "192.0.2.1") && strings.Contains(got, "192.0.2.2")
	})
	cfg.Links = resolvedConfig().Links
	before := s.status(t) + namespaceState(t, "/etc/resolv.conf")
	c := New(Options{StateDir: filepath.Join(t.TempDir(), "state")})
	applied, err := c.Set(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if applied.Mode != ModeNFTables || len(applied.Upstreams) != 2 {
		t.Errorf("applied %+v", applied)
	}
	if got := testenv.Run(t, "dig +short +tries=1 TXT web.default.svc.cluster.local"); got != "\"us udp\"\n" {
		t.Errorf("by resolv.conf: %s", got)
	}
	for name, want := range map[string]string{
		"web.default.svc.cluster.local": `"upstream 198.19.255.53 udp"`, // by the link's settings
		"example.org":                   `"us udp"`,                     // redirected on its way to the uplink
	} {
		if got := who(t, name); got != want {
			t.Errorf("resolved is answered %s for %s", got, name)
		}
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, testTimeout, func() error {
		return same(before, s.status(t)+namespaceState(t, "/etc/resolv.conf"))
	})
}

// In another network namespace the bus is still the host's, for which the same index belongs to another link.
func TestSystemdResolvedOfAnotherNamespaceIsIgnored(t *testing.T) {
	if !testenv.InNamespace(t, "dbus-daemon", "nft") {
		return
	}
	startUpstream(t, "192.0.2.1")
	s := startSystemd(t, stub)
	testenv.Run(t, "ip tuntap add dev kubevpn0 mode tun")
	testenv.Run(t, "ip addr add 198.19.0.1/32 dev kubevpn0")
	testenv.Run(t, "ip link set kubevpn0 up")
	before := s.status(t)
	opt := Options{StateDir: filepath.Join(t.TempDir(), "state")}
	h := hold(t, resolvedConfig(), opt, syscall.CLONE_NEWNET)
	want := "{nftables [127.0.0.53:53] [resolv.conf points to systemd-resolved, which cannot be used: it runs in another network namespace]}"
	if got := fmt.Sprint(h.applied); got != want {
		t.Errorf("applied %s, want %s", got, want)
	}
	if diff := cmp.Diff(before, s.status(t)); diff != "" {
		t.Errorf("resolved was changed: -before +after\n%s", diff)
	}
	if err := h.eof(); err != nil {
		t.Fatal(err)
	}
	if err := h.cmd.Wait(); err != nil {
		t.Error(err)
	}
}
