package redirect

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
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/tun/tuntest"
	"kubevpn/pkg/host/unixsocket"
)

// roleVariable names a function of roles that a child process runs instead of the tests.
const roleVariable = "KUBEVPN_TEST_ROLE"

// timeout limits the wait for an expected event.
const timeout = 10 * time.Second

func TestMain(m *testing.M) {
	roles := map[string]func() error{"redirect": redirectRole, "unprivileged": unprivilegedRole, "ask": askRole}
	if role, ok := roles[os.Getenv(roleVariable)]; ok {
		if err := role(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// nobody is the credential of a process that drops all capabilities.
var nobody = syscall.Credential{Uid: 65534, Gid: 65534}

// child returns a command that runs a role of this test binary. The role ends with its input, not by Pdeathsig: the
// kernel sends that when the thread that started the process ends, as threads do that have been in the client's
// namespace.
func child(role string, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), roleVariable+"="+role, testenv.EndAtOnce())
	cmd.Stderr = os.Stderr
	return cmd
}

// testMark is Config.Mark.
const testMark = 0x4b560100

// pod consists of the network namespace of the test, with 10.1.0.2, 10.1.0.3 and fd00:1::2, and that of a client, with
// 10.1.0.9 and fd00:1::9. The client's namespace is also the pod's router to 203.0.113.7 and 2001:db8::7, because most
// clients are behind a router.
type pod struct {
	t      *testing.T
	client *tuntest.Namespace
}

func newPod(t *testing.T) pod {
	t.Helper()
	p := pod{t, tuntest.NewNamespace(t)}
	// Name the namespace by a thread that is in it: the process stands for its first thread, which may have been in
	// the client's.
	runtime.LockOSThread()
	p.client.Run("ip", "link", "add", "veth0", "type", "veth", "peer", "name", "eth0", "netns", strconv.Itoa(unix.Gettid()))
	runtime.UnlockOSThread()
	// Without link-local addresses, which the kernel adds a second later, the state of the pod is complete at once.
	p.client.Run("ip", "link", "set", "veth0", "addrgenmode", "none")
	testenv.Run(t, "ip link set eth0 addrgenmode none")
	for _, args := range []string{
		"link set veth0 up", "addr add 10.1.0.9/24 dev veth0", "addr add fd00:1::9/64 dev veth0 nodad", "addr add 203.0.113.7/32 dev lo", "addr add 2001:db8::7/128 dev lo nodad",
	} {
		p.client.Run("ip", strings.Fields(args)...)
	}
	for _, args := range []string{
		"link set eth0 up", "addr add 10.1.0.2/24 dev eth0", "addr add 10.1.0.3/24 dev eth0", "addr add fd00:1::2/64 dev eth0 nodad",
		"route add default via 10.1.0.9", "-6 route add default via fd00:1::9",
	} {
		testenv.Run(t, "ip "+args)
	}
	waitLocal(t, output, "fd00:1::2")
	waitLocal(t, p.client.Output, "fd00:1::9")
	waitLocal(t, p.client.Output, "2001:db8::7")
	for _, of := range []string{"all", "default", "eth0", "lo"} {
		sysctl(t, "ipv4/conf/"+of+"/rp_filter", "1")
	}
	return p
}

// waitLocal waits for the route of an IPv6 address, which the kernel makes a moment after the address.
func waitLocal(t *testing.T, output func(string, ...string) (string, error), addr string) {
	t.Helper()
	testenv.Until(t, addr+" is local", func() bool {
		out, err := output("ip", "-6", "route", "show", "table", "local", addr)
		return err == nil && strings.Contains(out, "local "+addr)
	})
}

// output runs a program in the pod, as Namespace.Output does in the client's namespace.
func output(name string, args ...string) (string, error) {
	out, err := exec.Command(name, args...).CombinedOutput()
	return string(out), err
}

func sysctl(t *testing.T, name, value string) {
	t.Helper()
	if err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0); err != nil {
		t.Fatal(err)
	}
}

// open creates Redirects, and closes them with the test.
func open(t *testing.T, name string) *Redirects {
	t.Helper()
	r, err := New(Config{Name: name, Mark: testMark, Within: true, Exempt: []uint32{nobody.Uid}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func set(t *testing.T, r *Redirects, ports map[Port]uint16) {
	t.Helper()
	if err := r.Set(ports); err != nil {
		t.Fatal(err)
	}
}

// server answers each line or datagram with a line of its name and the result of about.
type server struct {
	network, address, name string
	about                  func(net.Conn) string // nil: the peer's address
}

// start serves until stop is called.
func (s server) start() (stop func(), err error) {
	if s.about == nil {
		s.about = func(c net.Conn) string { return host(c.RemoteAddr()) }
	}
	if strings.HasPrefix(s.network, UDP) {
		return s.startPackets()
	}
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(context.Background(), s.network, s.address)
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for lines := bufio.NewScanner(c); lines.Scan(); {
					if _, err := fmt.Fprintf(c, "%s %s\n", s.name, s.about(c)); err != nil {
						return
					}
				}
			}()
		}
	}()
	return func() { l.Close() }, nil
}

func (s server) startPackets() (stop func(), err error) {
	pc, err := net.ListenPacket(s.network, s.address)
	if err != nil {
		return nil, err
	}
	go func() {
		buf := make([]byte, 1<<16)
		for {
			n, from, err := pc.ReadFrom(buf)
			if err != nil {
				return
			}
			answer := fmt.Sprintf("%s %s", s.name, host(from))
			if _, err := pc.WriteTo(fmt.Appendf(nil, "%-*s\n", n-1, answer), from); err != nil { // as long as the question
				fmt.Fprintln(os.Stderr, "answering", from, err)
			}
		}
	}()
	return func() { pc.Close() }, nil
}

func serve(t *testing.T, servers ...server) {
	t.Helper()
	for _, s := range servers {
		stop, err := s.start()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(stop)
	}
}

// application serves a port at all addresses, in both families and by both protocols.
func application(port int) []server {
	at := fmt.Sprintf(":%d", port)
	return []server{{TCP, at, "app", nil}, {UDP, at, "app", nil}}
}

// redirector serves a local port of a redirect: it answers with the original destination of the connection.
func redirector(port int) []server {
	at := fmt.Sprintf(":%d", port)
	return []server{{TCP, at, "us", func(c net.Conn) string {
		to, err := OriginalDestination(c.(*net.TCPConn))
		if err != nil {
			return err.Error()
		}
		return "for " + to.String()
	}}, {UDP, at, "us", nil}}
}

func host(a net.Addr) string {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return err.Error()
	}
	return ap.Addr().Unmap().String()
}

// dial connects from the client's namespace.
func (p pod) dial(network, address string, d net.Dialer) (c net.Conn, err error) {
	d.Timeout = timeout
	err = p.client.Do(func() error {
		c, err = d.Dial(network, address)
		return err
	})
	return c, err
}

func (p pod) connect(network, address string) net.Conn {
	p.t.Helper()
	c, err := p.dial(network, address, net.Dialer{})
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { c.Close() })
	return c
}

// ask sends one question from the client's namespace, with a new connection.
func (p pod) ask(network, address string) string {
	c, err := p.dial(network, address, net.Dialer{})
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	return ask(c)
}

func ask(c net.Conn) string { return askAt(c, 1, timeout) }

// askAt sends a question of that length.
func askAt(c net.Conn, length int, timeout time.Duration) string {
	if err := c.SetDeadline(time.Now().Add(timeout)); err != nil {
		return err.Error()
	}
	if _, err := io.WriteString(c, strings.Repeat("?", length)+"\n"); err != nil {
		return err.Error()
	}
	answer, err := bufio.NewReaderSize(c, 1<<16).ReadString('\n')
	if err != nil {
		return err.Error()
	}
	if _, isUDP := c.(*net.UDPConn); isUDP && len(answer) < length+1 {
		return fmt.Sprintf("%d bytes", len(answer))
	}
	return strings.TrimSpace(answer)
}

// within sends a question from the pod's own namespace.
func within(network, address string, d net.Dialer) string {
	d.Timeout = timeout
	c, err := d.Dial(network, address)
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	return ask(c)
}

func check(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %q, want %q", what, got, want)
	}
}

// redirectRole redirects the ports 80 and 53 with all features of the package, until its input ends or it is killed.
func redirectRole() error {
	for _, s := range append(redirector(8080), redirector(5353)...) {
		stop, err := s.start()
		if err != nil {
			return err
		}
		defer stop()
	}
	// Later connections get lower descriptor numbers than the files of New: the order in which the kernel closes them
	// must not matter.
	var lower []*os.File
	for range 30 {
		f, err := os.Open(os.DevNull)
		if err != nil {
			return err
		}
		lower = append(lower, f)
	}
	r, err := New(Config{Name: os.Args[1], Mark: testMark, Within: true})
	if err != nil {
		return err
	}
	for _, f := range lower {
		f.Close()
	}
	if err := r.Set(map[Port]uint16{{TCP, 80}: 8080, {UDP, 53}: 5353}); err != nil {
		return err
	}
	if err := r.Transparent(); err != nil {
		return err
	}
	if _, err := Flush([]Port{{TCP, 80}, {UDP, 53}}, testMark); err != nil {
		return err
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin)
	return errors.Join(err, r.Close())
}

// holder starts a process that runs redirectRole. Its only capability is NET_ADMIN.
func holder(t *testing.T, name string) *exec.Cmd {
	t.Helper()
	cmd := child("redirect", name)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &nobody, AmbientCaps: []uintptr{unix.CAP_NET_ADMIN}}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		if cmd.ProcessState == nil {
			if err := cmd.Wait(); err != nil {
				t.Error(err)
			}
		}
	})
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the holder says %q, %v", line, err)
	}
	return cmd
}

func kill(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // "signal: killed"
}

// askRole prints the answer to a question from within the pod.
func askRole() error {
	fmt.Println(within(os.Args[1], os.Args[2], net.Dialer{}))
	return nil
}

// unprivilegedRole prints the error of New in a process without capabilities.
func unprivilegedRole() error {
	r, err := New(Config{Name: "test", Mark: testMark})
	if err == nil {
		return errors.Join(errors.New("New succeeded without capabilities"), r.Close())
	}
	fmt.Println(err)
	return nil
}

// noChecksum makes a socket send UDP datagrams over IPv4 without a checksum.
func noChecksum(_, _ string, c syscall.RawConn) error {
	return unixsocket.DialControl(func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_NO_CHECK, 1) })("", "", c)
}
