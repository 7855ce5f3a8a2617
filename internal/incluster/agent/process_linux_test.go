package agent

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/tun/tuntest"
	"kubevpn/pkg/protocol/httpmatch"
)

// netns is a pod in the kernel: this process is in its network namespace, at 10.1.0.2 and fd00:1::2. A client outside
// of it is at 10.1.0.9 and fd00:1::9.
type netns struct {
	t      *testing.T
	client *tuntest.Namespace
}

func newNetns(t *testing.T) *netns {
	t.Helper()
	n := &netns{t, tuntest.NewNamespace(t)}
	runtime.LockOSThread() // the thread's ID names the namespace
	n.client.Run("ip", "link", "add", "veth0", "type", "veth", "peer", "name", "eth0", "netns", strconv.Itoa(unix.Gettid()))
	runtime.UnlockOSThread()
	for _, args := range []string{"link set veth0 up", "addr add 10.1.0.9/24 dev veth0", "addr add fd00:1::9/64 dev veth0 nodad"} {
		n.client.Run("ip", strings.Fields(args)...)
	}
	for _, args := range []string{
		"link set eth0 up", "addr add 10.1.0.2/24 dev eth0", "addr add fd00:1::2/64 dev eth0 nodad",
		"route add default via 10.1.0.9", "-6 route add default via fd00:1::9",
	} {
		testenv.Run(t, "ip "+args)
	}
	testenv.Until(t, "IPv6 is up", func() bool {
		l, err := net.Listen("tcp", "[fd00:1::2]:0")
		if err != nil {
			return false
		}
		defer l.Close()
		conn, err := n.dial(t.Context(), "tcp", l.Addr().String())
		if err != nil {
			return false
		}
		conn.Close()
		return true
	})
	return n
}

// dial connects from the client.
func (n *netns) dial(ctx context.Context, network, to string) (conn net.Conn, err error) {
	err = n.client.Do(func() error {
		conn, err = new(net.Dialer).DialContext(ctx, network, to)
		return err
	})
	return conn, err
}

// get requests a page over a connection of its own, and returns the body.
func (n *netns) get(to string, header ...string) (string, error) {
	client := &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DialContext: n.dial, DisableKeepAlives: true}}
	r, err := http.NewRequest(http.MethodGet, "http://"+to+"/", nil)
	if err != nil {
		return "", err
	}
	for _, h := range header {
		name, value, _ := strings.Cut(h, "=")
		r.Header.Set(name, value)
	}
	answer, err := client.Do(r)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	return string(body), err
}

// expect fails the test unless the page is want.
func (n *netns) expect(want, to string, header ...string) {
	n.t.Helper()
	if got, err := n.get(to, header...); got != want || err != nil {
		n.t.Errorf("%s %v: %q, %v; want %q", to, header, got, err, want)
	}
}

// until waits for an answer.
func (n *netns) until(within time.Duration, want, to string, header ...string) {
	n.t.Helper()
	testenv.Eventually(n.t, within, func() error {
		got, err := n.get(to, header...)
		if err == nil && got != want {
			err = errors.New(got)
		}
		return err
	})
}

// serve runs an application that answers with the client's address, until stop is called or the test ends.
func (n *netns) serve(address string) (stop func()) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		n.t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		fmt.Fprint(w, "application for "+host)
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			n.t.Errorf("serving: %v", err)
		}
	}()
	stop = sync.OnceFunc(func() {
		server.Close()
		<-done
	})
	n.t.Cleanup(stop)
	return stop
}

// servePackets runs an application that answers datagrams.
func (n *netns) servePackets(address string) {
	pc, err := net.ListenPacket("udp", address)
	if err != nil {
		n.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 2048)
		for {
			k, from, err := pc.ReadFrom(buf)
			if err != nil {
				return
			}
			if _, err := pc.WriteTo(append(buf[:k], " for the application"...), from); err != nil {
				n.t.Errorf("answering: %v", err)
			}
		}
	}()
	n.t.Cleanup(func() {
		pc.Close()
		<-done
	})
}

// query sends a datagram over a socket of its own, and returns the answer.
func (n *netns) query(to, say string) string {
	n.t.Helper()
	conn, err := n.dial(n.t.Context(), "udp", to)
	if err != nil {
		n.t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(2 * time.Second))
	if _, err := io.WriteString(conn, say); err != nil {
		return err.Error()
	}
	buf := make([]byte, 2048)
	k, err := conn.Read(buf)
	if err != nil {
		return err.Error()
	}
	return string(buf[:k])
}

// process is `traffic agent` in the pod.
type process struct {
	*netns
	cmd   *exec.Cmd
	log   *testenv.Buffer
	infos *infos
	ended chan error
}

// run starts the agent of an owner with the capabilities that its container has, and ends it with the test.
func (n *netns) run(by *person, capabilities string, args ...string) *process {
	n.t.Helper()
	program, err := os.Executable()
	if err != nil {
		n.t.Fatal(err)
	}
	p := &process{netns: n, log: new(testenv.Buffer), infos: newInfos(), ended: make(chan error, 1)}
	p.cmd = exec.Command("setpriv", append([]string{
		"--bounding-set", capabilities, "--inh-caps", capabilities, "--no-new-privs", program, "--log-level", "debug",
	}, args...)...)
	p.cmd.Env = append(os.Environ(), asAgent+"=1", api.AgentOwnerVariable+"="+by.hash, api.AgentNameVariable+"="+by.name,
		api.AgentAddressesVariable+"=10.1.0.2,fd00:1::2", testenv.EndAtOnce())
	p.cmd.Stderr = p.log
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			p.infos.lines <- append([]byte(nil), lines.Bytes()...)
		}
		p.ended <- p.cmd.Wait()
	}()
	n.t.Cleanup(func() {
		p.cmd.Process.Kill()
		err := <-p.ended
		p.ended <- err
		if n.t.Failed() {
			n.t.Logf("%s's agent (%v):\n%s", by.name, err, p.log)
		}
	})
	return p
}

// connect attaches a laptop that connects from outside of the pod, as through the traffic manager.
func (n *netns) connect(by *person, g api.AgentInfo) *testLaptop {
	n.t.Helper()
	m := attach(n.t, by, func(ctx context.Context) (net.Conn, error) {
		return n.dial(ctx, "tcp", fmt.Sprintf("10.1.0.2:%d", g.Port))
	})
	m.hello(api.AgentHello{Protocol: api.Protocol, Version: "test"})
	return m
}

// end waits for the agent's end.
func (p *process) end(within time.Duration) error {
	p.t.Helper()
	select {
	case err := <-p.ended:
		p.ended <- err
		return err
	case <-time.After(within):
		p.t.Fatalf("the agent has not ended within %v", within)
		panic("unreachable")
	}
}

// The info port serves the pod alone, until the owner connects.
func TestProcessPrintsItsInfo(t *testing.T) {
	if !testenv.InNamespace(t, "nft", "setpriv") {
		return
	}
	n := newNetns(t)
	const at = "127.0.0.1:20001"
	t.Setenv(api.AgentInfoPortVariable, "20001")
	alice, bob := newPerson(t, "alice@laptop"), newPerson(t, "bob@desk")
	ask := func() (string, error) {
		conn, err := net.Dial("tcp", at)
		if err != nil {
			return "", err
		}
		defer conn.Close()
		said, err := io.ReadAll(conn)
		return string(said), err
	}
	first := n.run(alice, "-all,+net_admin")
	line := string(<-first.infos.lines) + "\n"
	if said, err := ask(); said != line || err != nil {
		t.Errorf("%q, %v; the log has %q", said, err, line)
	}
	if conn, err := n.dial(t.Context(), "tcp", "10.1.0.2:20001"); err == nil {
		conn.Close()
		t.Error("the info port is open outside of the pod")
	}
	second := n.run(bob, "-all,+net_admin") // the info port is in use, so only the log has the info
	info := second.infos.next(t)
	testenv.Until(t, "the agent logs that its port is in use", func() bool {
		return strings.Contains(second.log.String(), "address already in use")
	})
	n.connect(bob, info) // bob is not the first agent's own owner, so the port stays open
	if _, err := ask(); err != nil {
		t.Error(err)
	}
	n.connect(alice, info)
	testenv.Until(t, "the agent has closed the info port", func() bool { _, err := ask(); return errors.Is(err, syscall.ECONNREFUSED) })
}

// kernelState is what an agent changes in the pod's kernel.
func kernelState(t *testing.T) string {
	var state strings.Builder
	for _, of := range []string{"nft list ruleset", "ip rule", "ip -6 rule", "ip route show table all type local", "ip -6 route show table all type local"} {
		for line := range strings.Lines(testenv.Run(t, of)) {
			if !strings.Contains(line, "fe80:") { // the kernel adds it in its own time
				state.WriteString(line)
			}
		}
	}
	return state.String()
}

func TestProcessRedirectsAndRestores(t *testing.T) {
	if !testenv.InNamespace(t, "nft", "setpriv") {
		return
	}
	n := newNetns(t)
	n.serve(":8080")
	n.serve("127.0.0.1:8081")
	n.servePackets(":5353")
	before := kernelState(t)

	alice, bob, mallory := newPerson(t, "alice@laptop"), newPerson(t, "bob@desk"), newPerson(t, "mallory@pod")
	first := n.run(alice, "-all,+net_admin")
	info := first.infos.next(t)
	a := n.connect(alice, info)
	claim := func(m *testLaptop, id string, match ...string) error {
		o := claimOrder(id, match...)
		o.Ports = append(o.Ports, api.AgentPort{Protocol: "tcp", Port: 8081})
		return m.order(api.AgentOrder{Claim: o})
	}

	t.Run("claims", func(t *testing.T) {
		if err := claim(a, "1", "x-user=me"); err != nil {
			t.Fatal(err)
		}
		for _, to := range []string{"10.1.0.2:8080", "[fd00:1::2]:8080"} {
			n.expect("alice@laptop", to, "X-User=me")
		}
		s := a.state("the claim", func(s *api.AgentState) bool { return len(s.Claims) == 1 })
		if s.Source != "address" {
			t.Errorf("the source is %q", s.Source)
		}
		n.expect("application for 10.1.0.9", "10.1.0.2:8080", "X-User=you")
		n.expect("application for fd00:1::9", "[fd00:1::2]:8080", "X-User=you")
		n.expect("alice@laptop", "10.1.0.2:8081", "X-User=me")
		n.expect("application for 127.0.0.1", "10.1.0.2:8081", "X-User=you") // it listens on localhost only
	})
	t.Run("without its proxy an application is not reachable", func(t *testing.T) {
		n.serve("127.0.0.1:8082")
		stop := n.serve("10.1.0.2:8082")
		o := &api.ClaimOrder{ID: "front", Match: httpmatch.Spec{Path: "/none"}, Ports: []api.AgentPort{{Protocol: "tcp", Port: 8082}}}
		if err := a.order(api.AgentOrder{Claim: o}); err != nil {
			t.Fatal(err)
		}
		stop()
		if got, err := n.get("10.1.0.2:8082"); got == "application for 127.0.0.1" {
			t.Errorf("without the proxy: got %q, %v; want a refusal", got, err)
		}
		if err := a.order(api.AgentOrder{Release: "front"}); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("datagrams", func(t *testing.T) {
		o := &api.ClaimOrder{ID: "udp", Ports: []api.AgentPort{{Protocol: "udp", Port: 5353}}}
		if err := a.order(api.AgentOrder{Claim: o}); err != nil {
			t.Fatal(err)
		}
		for _, to := range []string{"10.1.0.2:5353", "[fd00:1::2]:5353"} {
			if got := n.query(to, "news"); got != "news for alice@laptop" {
				t.Errorf("%s: %s", to, got)
			}
		}
		if err := a.order(api.AgentOrder{Release: "udp"}); err != nil {
			t.Fatal(err)
		}
		if got := n.query("10.1.0.2:5353", "news"); got != "news for the application" {
			t.Errorf("released: %s", got)
		}
	})
	t.Run("unauthorized-clients", func(t *testing.T) {
		for name, by := range map[string]*person{"a-key-of-its-own": mallory, "an-owner-of-no-agent-here": bob} {
			conn, err := n.dial(t.Context(), "tcp", fmt.Sprintf("10.1.0.2:%d", info.Port))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(10 * time.Second))
			if got, err := io.ReadAll(clientTLS(conn, by)); len(got) > 0 || err == nil || os.IsTimeout(err) {
				t.Errorf("%s: got %q, %v", name, got, err)
			}
		}
		conn, err := n.dial(t.Context(), "tcp", fmt.Sprintf("10.1.0.2:%d", info.Port))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(500 * time.Millisecond))
		if got, err := io.ReadAll(conn); len(got) > 0 || !os.IsTimeout(err) {
			t.Errorf("a silent client gets %q, %v", got, err)
		}
	})
	t.Run("other-users-of-the-pod", func(t *testing.T) {
		got, err := asNobody(func() (string, error) {
			conn, err := net.Dial("unix", api.AgentSocket)
			if err != nil {
				return "", err
			}
			defer conn.Close()
			fmt.Fprintf(conn, `{"owner":%q}`+"\n", mallory.hash)
			conn.SetDeadline(time.Now().Add(10 * time.Second))
			got, err := io.ReadAll(conn)
			if errors.Is(err, syscall.ECONNRESET) {
				err = nil
			}
			return string(got), err
		})
		if got != "" || err != nil {
			t.Errorf("got %q, %v", got, err)
		}
		if strings.Contains(first.log.String(), mallory.hash) {
			t.Error("the process of another user became an owner")
		}
	})
	t.Run("laptop-silent", func(t *testing.T) {
		n.client.Run("nft", "add table inet hole")
		n.client.Run("nft", "add chain inet hole out { type filter hook output priority 0; }")
		n.client.Run("nft", fmt.Sprintf("add rule inet hole out tcp dport %d drop", info.Port))
		began := time.Now()
		n.until(20*time.Second, "application for 10.1.0.9", "10.1.0.2:8080", "X-User=me")
		took := time.Since(began)
		t.Logf("requests go to the application %v after the laptop fell silent", took.Round(time.Millisecond))
		n.client.Run("nft", "delete table inet hole")
		n.until(20*time.Second, "alice@laptop", "10.1.0.2:8080", "X-User=me")
		t.Logf("and to the laptop again %v later", time.Since(began.Add(took)).Round(time.Millisecond))
	})

	second := n.run(bob, "-all,+net_admin")
	told := info
	told.Leader = api.LeaderOther
	if g := second.infos.next(t); g != told {
		t.Errorf("the second agent has the info %+v, want %+v", g, told)
	}
	b := n.connect(bob, info)
	t.Run("two-owners", func(t *testing.T) {
		if err := claim(b, "1", "x-user=you"); err != nil {
			t.Fatal(err)
		}
		n.expect("alice@laptop", "10.1.0.2:8080", "X-User=me")
		n.expect("bob@desk", "10.1.0.2:8080", "X-User=you")
		n.expect("application for 10.1.0.9", "10.1.0.2:8080", "X-User=her")
		want(t, claim(b, "2", "x-team=blue"), api.ExitConflict, "alice@laptop has intercepted x-user=me on ports 8080 and 8081 since ")
	})
	t.Run("leader-killed", func(t *testing.T) {
		began := time.Now()
		if err := first.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		first.end(5 * time.Second) // "signal: killed"
		n.expect("application for 10.1.0.9", "10.1.0.2:8080", "X-User=you")
		t.Logf("the application answers %v after the leader was killed", time.Since(began).Round(time.Millisecond))
		next := second.infos.next(t)
		if next.Key == info.Key {
			t.Errorf("the new leader has the old key: %+v", next)
		}
		b = n.connect(bob, next)
		if err := claim(b, "1", "x-user=you"); err != nil {
			t.Fatal(err)
		}
		n.expect("bob@desk", "10.1.0.2:8080", "X-User=you")
		n.expect("application for 10.1.0.9", "10.1.0.2:8080", "X-User=me")
		t.Logf("the other owner gets its requests again after %v", time.Since(began).Round(time.Millisecond))
	})
	t.Run("end", func(t *testing.T) {
		if err := second.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := second.end(10 * time.Second); err != nil {
			t.Errorf("the agent ended with %v", err)
		}
		n.expect("application for 10.1.0.9", "10.1.0.2:8080", "X-User=you")
		if got := kernelState(t); got != before {
			t.Errorf("left in the kernel:\n%s\nbefore:\n%s", got, before)
		}
	})
}

func TestSidecarNeedsNoCapability(t *testing.T) {
	if !testenv.InNamespace(t, "setpriv") {
		return
	}
	n := newNetns(t)
	n.serve(":8080")
	n.servePackets(":5353")
	alice := newPerson(t, "alice@laptop")
	p := n.run(alice, "-all", "--listen", "8080:18080", "--listen", "udp/5353:15353")
	m := n.connect(alice, p.infos.next(t))
	n.expect("application for 10.1.0.2", "10.1.0.2:18080")
	o := &api.ClaimOrder{ID: "1", Ports: []api.AgentPort{{Protocol: "tcp", Port: 8080, Listen: 18080}, {Protocol: "udp", Port: 5353, Listen: 15353}}}
	if err := m.order(api.AgentOrder{Claim: o}); err != nil {
		t.Fatal(err)
	}
	n.expect("alice@laptop", "10.1.0.2:18080")
	n.expect("alice@laptop", "[fd00:1::2]:18080")
	n.expect("application for 10.1.0.9", "10.1.0.2:8080")
	if got := n.query("[fd00:1::2]:15353", "news"); got != "news for alice@laptop" {
		t.Error(got)
	}
	m.stop()
	testenv.Until(t, "released", func() bool {
		got, err := n.get("10.1.0.2:18080")
		return err == nil && got == "application for 10.1.0.2"
	})
	if got := n.query("10.1.0.2:15353", "news"); got != "news for the application" {
		t.Error(got)
	}
}

// clientTLS returns the TLS client of a laptop with this key.
func clientTLS(conn net.Conn, by *person) *tls.Conn { return tls.Client(conn, by.towards()) }

// asNobody runs f on a thread of another user.
func asNobody(f func() (string, error)) (got string, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		const nobody = 65534
		// This system call changes only this thread; syscall.Setresuid changes all.
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, nobody, nobody, nobody); errno != 0 {
			err = errno
			return
		}
		got, err = f()
	}()
	<-done
	return got, err
}
