package helper

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/routable"
)

// pair returns both ends of a socketpair like that of Start.
func pair(t *testing.T) (daemon, helper *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fds[0]), "daemon"), os.NewFile(uintptr(fds[1]), "helper")
}

// processes are a daemon and its helper.
type processes struct {
	daemon, helper *exec.Cmd
	orders         io.WriteCloser // the daemon's input
	report         string         // the daemon's first line
}

func startBoth(t *testing.T, env ...string) *processes {
	t.Helper()
	d, h := pair(t)
	p := &processes{daemon: child("daemon"), helper: child("serve", env...)}
	p.daemon.ExtraFiles, p.helper.ExtraFiles = []*os.File{d}, []*os.File{h}
	var err error
	if p.orders, err = p.daemon.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	stdout, err := p.daemon.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	for _, cmd := range []*exec.Cmd{p.helper, p.daemon} {
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
	}
	d.Close()
	h.Close()
	if p.report, err = bufio.NewReader(stdout).ReadString('\n'); err != nil {
		t.Fatalf("the daemon says %q, %v", p.report, err)
	}
	return p
}

// However daemon and helper end, the machine is as before, immediately or after the next start.
func TestEveryEndRestoresTheMachine(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	kill := func(cmd *exec.Cmd, s os.Signal) func() error { return func() error { return cmd.Process.Signal(s) } }
	ends := []struct {
		name    string
		end     func(p *processes) func() error
		recover bool // resolv.conf needs the next start
	}{
		{"close", func(p *processes) func() error {
			return func() error { _, err := io.WriteString(p.orders, "close\n"); return err }
		}, false},
		{"daemon_killed", func(p *processes) func() error { return kill(p.daemon, syscall.SIGKILL) }, false},
		{"helper_killed", func(p *processes) func() error {
			return func() error {
				_, err := io.WriteString(p.orders, "hold\n")
				return errors.Join(err, p.helper.Process.Kill())
			}
		}, true},
		{"helper_terminated", func(p *processes) func() error {
			return func() error {
				_, err := io.WriteString(p.orders, "hold\n")
				return errors.Join(err, p.helper.Process.Signal(syscall.SIGTERM))
			}
		}, false},
		{"both_killed", func(p *processes) func() error {
			return func() error { return errors.Join(p.helper.Process.Kill(), p.daemon.Process.Kill()) }
		}, true},
	}
	privateEtc(t, "# home\nsearch home.example\nnameserver 192.0.2.1\n")
	modes := []struct{ name, env, report string }{
		{"nftables", "X=1", "nftables [192.0.2.1:53]\n"},
		{"file", "NO_NFTABLES=1", "resolv.conf [192.0.2.1:53]\n"},
	}
	for _, mode := range modes {
		for _, e := range ends {
			t.Run(mode.name+"/"+e.name, func(t *testing.T) {
				before := machine(t)
				p := startBoth(t, mode.env)
				if p.report != mode.report {
					t.Errorf("the daemon says %q, want %q", p.report, mode.report)
				}
				during := machine(t)
				for _, want := range []string{`"kubevpn0"`, `"10.96.0.0/12"`, `"fd00:10:96::/112"`} {
					if !strings.Contains(during, want) {
						t.Errorf("%s is not there:\n%s", want, during)
					}
				}
				if err := e.end(p)(); err != nil {
					t.Fatal(err)
				}
				herr, derr := p.helper.Wait(), p.daemon.Wait()
				if e.name == "close" && (herr != nil || derr != nil) {
					t.Errorf("helper: %v, daemon: %v", herr, derr)
				}
				testenv.WaitGone(t, "kubevpn0")
				if e.recover && mode.name == "file" {
					if machine(t) == before {
						t.Error("resolv.conf was not edited, so this shows nothing")
					}
					did, err := Recover(LocalConfig{})
					if err != nil || did == "" {
						t.Errorf("Recover: %q, %v", did, err)
					}
				}
				if diff := cmp.Diff(before, machine(t)); diff != "" {
					t.Errorf("left behind: -before +after\n%s", diff)
				}
				if did, err := Recover(LocalConfig{}); err != nil || did != "" {
					t.Errorf("Recover when there is nothing: %q, %v", did, err)
				}
			})
		}
	}
}

// inProcess is a Client whose helper is a goroutine.
func inProcess(t *testing.T) (*Client, <-chan error) {
	t.Helper()
	d, h := pair(t)
	ended := make(chan error, 1)
	go func() { ended <- Serve(context.Background(), h, LocalConfig{UID: 1000}) }()
	c, err := NewClient(d, nil)
	if err != nil {
		t.Fatal(err)
	}
	return c, ended
}

func TestClientUsesTheHelper(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	privateEtc(t, "nameserver 192.0.2.1\n")
	before := machine(t)
	c, ended := inProcess(t)
	ctx := context.Background()

	tun, err := c.CreateTUN(ctx, "kubevpn0", 1500)
	if err != nil {
		t.Fatal(err)
	}
	if tun.Name() != "kubevpn0" {
		t.Errorf("the name of the descriptor is %q", tun.Name())
	}
	if flags, err := unix.FcntlInt(tun.Fd(), unix.F_GETFL, 0); err != nil || flags&unix.O_ACCMODE != unix.O_RDWR {
		t.Errorf("the TUN's flags are %#x, %v", flags, err)
	}
	for range 2 {
		applied, err := c.Apply(ctx, wanted())
		if err != nil {
			t.Fatal(err)
		}
		want := api.NetworkApplied{ResolverMode: api.ResolverNFTables, Upstreams: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:53")}}
		if diff := cmp.Diff(fmt.Sprint(want), fmt.Sprint(applied)); diff != "" {
			t.Errorf("-want +got\n%s", diff)
		}
	}
	if !strings.Contains(testenv.Run(t, "nft list ruleset"), fmt.Sprintf("table inet kubevpn-1000-%d ", os.Getpid())) {
		t.Error(testenv.Run(t, "nft list ruleset"))
	}
	// The descriptor that the helper passed delivers a packet for a pod, perhaps after packets of the kernel.
	conn, err := net.Dial("udp4", "10.244.1.5:7")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	conn.Close()
	for packet := make([]byte, 1<<17); ; {
		n, err := unix.Read(int(tun.Fd()), packet)
		if err != nil && !errors.Is(err, unix.EINTR) {
			t.Fatal(err)
		}
		if strings.HasSuffix(string(packet[:max(n, 0)]), "ping") {
			break
		}
	}

	for _, network := range []string{"udp4", "udp6", "tcp4", "tcp6"} {
		f, err := c.MarkedSocket(ctx, network)
		if err != nil {
			t.Fatal(err)
		}
		flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0)
		if err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("%s: descriptor flags %#x, %v", network, flags, err)
		}
		if mark, err := unix.GetsockoptInt(int(f.Fd()), unix.SOL_SOCKET, unix.SO_MARK); err != nil || mark != 0x4b560035 {
			t.Errorf("%s: mark %#x, %v", network, mark, err)
		}
		f.Close()
	}

	// A rejected request returns its error code and changes nothing.
	for name, err := range map[string]error{
		`the root helper refuses the link name "eth0": it must be kubevpn and at most 8 letters or digits`:     errorOf(c.CreateTUN(ctx, "eth0", 1500)),
		`the root helper refuses a socket of type "raw": it must be udp4, udp6, tcp4 or tcp6`:                  errorOf(c.MarkedSocket(ctx, "raw")),
		`the root helper refuses the link kubevpn1: this helper has created no such link, or the link is gone`: errorOf(c.Apply(ctx, api.NetworkState{Links: []api.Link{{Name: "kubevpn1", MTU: 1500}}})),
		`the root helper refuses the route 0.0.0.0/0: it is a default route (link kubevpn0)`:                   errorOf(c.Apply(ctx, api.NetworkState{Links: []api.Link{{Name: "kubevpn0", MTU: 1500, Routes: prefixes("0.0.0.0/0")}}})),
		`creating interface kubevpn0: device or resource busy`:                                                 errorOf(c.CreateTUN(ctx, "kubevpn0", 1500)),
	} {
		var e *api.Error
		if !errors.As(err, &e) || e.Message != name || e.Code != api.ExitNetwork {
			t.Errorf("got %#v, want %s", err, name)
		}
	}

	// Only the daemon has the device open, so the device ends when the daemon closes it.
	tun.Close()
	testenv.WaitGone(t, "kubevpn0")
	if _, err := c.Apply(ctx, wanted()); err == nil || !strings.Contains(err.Error(), "refuses the link kubevpn0") {
		t.Errorf("Apply without the device: %v", err)
	}
	if _, err := c.Apply(ctx, api.NetworkState{}); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(before, machine(t)); diff != "" {
		t.Errorf("left behind: -before +after\n%s", diff)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if _, err := c.CreateTUN(ctx, "kubevpn0", 1500); !errors.Is(err, ErrEnded) {
		t.Errorf("after Close: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

func errorOf[T any](_ T, err error) error { return err }

// The helper passes sockets while it receives the largest state.
func TestLargestStateFitsIntoAMessage(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	privateEtc(t, "nameserver 192.0.2.1\n")
	c, ended := inProcess(t)
	ctx := context.Background()
	tun, err := c.CreateTUN(ctx, "kubevpn0", 1500)
	if err != nil {
		t.Fatal(err)
	}
	defer tun.Close()
	state := wanted()
	state.Links[0].Routes = nil
	state.Links[0].Named = prefixes("2001:db8::/32")
	for i := range routable.MaxRoutes {
		a := netip.MustParseAddr("2001:db8:ffff:ffff:ffff:ffff:ffff:0").As16()
		a[12], a[13] = byte(i>>8), byte(i)
		state.Links[0].Routes = append(state.Links[0].Routes, netip.PrefixFrom(netip.AddrFrom16(a), 112))
	}
	sockets := make(chan error, 1)
	go func() {
		for range 200 {
			f, err := c.MarkedSocket(ctx, "udp4")
			if err != nil {
				sockets <- err
				return
			}
			f.Close()
		}
		sockets <- nil
	}()
	if _, err := c.Apply(ctx, state); err != nil {
		t.Fatal(err)
	}
	if err := <-sockets; err != nil {
		t.Error(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestDaemonReceivesChangedUpstreams(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	privateEtc(t, "nameserver 192.0.2.1\n")
	c, ended := inProcess(t)
	ctx := context.Background()
	tun, err := c.CreateTUN(ctx, "kubevpn0", 1500)
	if err != nil {
		t.Fatal(err)
	}
	defer tun.Close()
	if _, err := c.Apply(ctx, wanted()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("/etc/resolv.conf.new", []byte("nameserver 192.0.2.2\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename("/etc/resolv.conf.new", "/etc/resolv.conf"); err != nil {
		t.Fatal(err)
	}
	select {
	case a := <-c.Changes():
		if fmt.Sprintf("%s %v", a.ResolverMode, a.Upstreams) != "nftables [192.0.2.2:53]" {
			t.Errorf("changed to %+v", a)
		}
	case <-time.After(10 * time.Second):
		t.Error("no change was reported")
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// An invalid message ends the helper, which cleans up. The helper uses only sockets of a daemon.
func TestServeRejectsInvalidRequests(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	privateEtc(t, "nameserver 192.0.2.1\n")
	for name, bytes := range map[string]string{
		"not_json": "\x00\x00\x00\x05hello",
		"empty":    "\x00\x00\x00\x00",
		"list":     "\x00\x00\x00\x02[]",
		"too_long": "\x01\x00\x00\x01",
	} {
		d, h := pair(t)
		ended := make(chan error, 1)
		go func() { ended <- Serve(context.Background(), h, LocalConfig{}) }()
		if _, err := d.WriteString(bytes); err != nil {
			t.Fatal(err)
		}
		if err := <-ended; err == nil || !strings.Contains(err.Error(), "cannot read a request") {
			t.Errorf("%s: %v", name, err)
		}
		d.Close()
	}
	// The helper closes a descriptor that it receives.
	d, h := pair(t)
	ended := make(chan error, 1)
	go func() { ended <- Serve(context.Background(), h, LocalConfig{}) }()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	daemon, err := openWire(d)
	if err != nil {
		t.Fatal(err)
	}
	if err := daemon.Send(request{ID: 1, Op: "exec"}, w); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if n, err := r.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("the helper holds a descriptor that it was sent: %d, %v", n, err)
	}
	var got response
	if _, err := daemon.Receive(&got, ""); err != nil || got.Error == nil ||
		got.Error.Message != `the root helper refuses the operation "exec": it is unknown` {
		t.Errorf("got %+v, %v", got.Error, err)
	}
	daemon.Close()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	file, err := os.Open("/etc/hosts")
	if err != nil {
		t.Fatal(err)
	}
	if err := Serve(context.Background(), file, LocalConfig{}); err == nil {
		t.Error("it serves a file")
	}
}
