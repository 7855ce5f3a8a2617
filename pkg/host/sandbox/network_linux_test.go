package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/netstack"
	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/host/sandbox"
)

// network returns the network of all tests: sandboxes that run at the same time have the same addresses.
func network() sandbox.Network {
	return sandbox.Network{
		Addresses: []netip.Prefix{netip.MustParsePrefix("10.244.1.9/32"), netip.MustParsePrefix("fd00:244::9/128")},
		MTU:       1500,
		DNS:       []netip.Addr{netip.MustParseAddr("10.96.0.10")},
		Search:    []string{"prod.svc.cluster.local", "svc.cluster.local", "cluster.local"},
		Options:   []string{"ndots:5"},
		Hosts:     "127.0.0.1 localhost\n10.96.1.7 alias.example # of the pod",
	}
}

// cluster is the other end of a sandbox's network. It serves HTTP at every address and every port but 81, which
// refuses connections, and DNS at 10.96.0.10.
type cluster struct{ web, dns string }

func newCluster(t *testing.T, name string) cluster {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	web := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "%s for %s", name, r.Host) })}
	done := make(chan struct{})
	go func() { defer close(done); web.Serve(l) }()
	t.Cleanup(func() { web.Close(); <-done })

	packets, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	names := &dns.Server{PacketConn: packets, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		switch {
		case !strings.HasSuffix(q.Question[0].Name, ".prod.svc.cluster.local."):
			m.Rcode = dns.RcodeNameError
		case q.Question[0].Qtype == dns.TypeA:
			m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 5}, A: net.IPv4(10, 96, 7, 7)})
		}
		w.WriteMsg(m)
	})}
	ended := make(chan struct{})
	go func() { defer close(ended); names.ActivateAndServe() }()
	t.Cleanup(func() { packets.Close(); <-ended })
	return cluster{l.Addr().String(), packets.LocalAddr().String()}
}

type stream struct{ *net.TCPConn }

func (s stream) Reset() error { s.SetLinger(0); return s.Close() }

type datagrams struct{ net.Conn }

func (d datagrams) ReadPacket(p []byte) (int, error) { return d.Read(p) }
func (d datagrams) WritePacket(p []byte) error       { _, err := d.Write(p); return err }

func (c cluster) DialTCP(ctx context.Context, _, dst netip.AddrPort) (netstack.Stream, error) {
	if dst.Port() == 81 {
		return nil, syscall.ECONNREFUSED
	}
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", c.web)
	if err != nil {
		return nil, err
	}
	return stream{conn.(*net.TCPConn)}, nil
}

func (c cluster) DialUDP(ctx context.Context, _, dst netip.AddrPort) (netstack.PacketStream, error) {
	if dst != netip.MustParseAddrPort("10.96.0.10:53") {
		return nil, syscall.ECONNREFUSED
	}
	conn, err := new(net.Dialer).DialContext(ctx, "udp", c.dns)
	if err != nil {
		return nil, err
	}
	return datagrams{conn}, nil
}

func (c cluster) DialEcho(context.Context, netip.Addr, netip.Addr) (netstack.PacketStream, error) {
	return nil, syscall.EHOSTUNREACH
}

// connected starts a sandbox whose network leads to the cluster.
func connected(t *testing.T, c cluster, cfg sandbox.Config) *running {
	t.Helper()
	cfg.Network = true
	r := begin(t, cfg)
	c.serve(t, r)
	if err := errors.Join(r.SetNetwork(t.Context(), network()), r.Run(t.Context())); err != nil {
		t.Fatal(err)
	}
	return r
}

// serve connects the TUN of r to the cluster until the test ends.
func (c cluster) serve(t *testing.T, r interface{ TUN() *os.File }) {
	t.Helper()
	device, err := tun.Adopt(r.TUN(), r.TUN().Name(), network().MTU)
	if err != nil {
		t.Fatal(err)
	}
	s, err := netstack.New(netstack.Config{Device: device, Dialer: c})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("the netstack ended: %v", err)
		}
		device.Close()
	})
}

func (r *running) finish() string {
	r.t.Helper()
	if status, err := r.Wait(); err != nil || status.Code != 0 {
		r.t.Fatalf("the program ended with %+v, %v\n%s", status, err, r.printed())
	}
	return r.printed()
}

func TestNetworkOfItsOwn(t *testing.T) {
	c := newCluster(t, "cluster")
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{"static-by-address", []string{probe(t), "get", "http://10.96.1.2:8080/"}, "cluster for 10.96.1.2:8080"},
		{"static-by-ipv6", []string{probe(t), "get", "http://[fd00:96::2]/"}, "cluster for [fd00:96::2]"},
		{"static-by-name", []string{probe(t), "get", "http://db/"}, "cluster for db"},
		{"libc-by-name", []string{"python3", "-c", "import urllib.request as u; print(u.urlopen('http://db').read().decode(), end='')"}, "cluster for db"},
		{"resolv-conf", []string{"cat", "/etc/resolv.conf"}, "nameserver 10.96.0.10\nsearch prod.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5\n"},
		{"nsswitch", []string{"grep", "^hosts", "/etc/nsswitch.conf"}, "hosts: files dns\n"},
		{"hosts", []string{"getent", "hosts", "alias.example"}, "10.96.1.7       alias.example\n"},
		{"own-host-name", []string{"sh", "-c", "getent ahostsv4 $(uname -n) | cut -d' ' -f1 | uniq"}, "10.244.1.9\n"},
		{"ping-socket", []string{"python3", "-c", "from socket import *; socket(AF_INET, SOCK_DGRAM, IPPROTO_ICMP); print('made')"}, "made\n"},
		{"refused", []string{"python3", "-c", "import socket\ntry: socket.create_connection(('10.96.1.2', 81))\nexcept ConnectionRefusedError: print('refused')"}, "refused\n"},
		{"interfaces", []string{"python3", "-c", "import socket; print(sorted(n for _, n in socket.if_nameindex() if n in ('lo', 'eth0') or not n.endswith('0')))"}, "['eth0', 'lo']\n"},
		{"not-the-laptops-loopback", []string{"python3", "-c", fmt.Sprintf("import socket\ntry: socket.create_connection(('127.0.0.1', %s))\nexcept ConnectionRefusedError: print('refused')", c.web[strings.LastIndex(c.web, ":")+1:])}, "refused\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			testenv.NeedPrograms(t, "python3")
			if out := connected(t, c, config(tt.args...)).finish(); out != tt.want {
				t.Errorf("it printed %q, want %q", out, tt.want)
			}
		})
	}
}

func TestHostNameOfItsOwn(t *testing.T) {
	outside, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	cfg := config("sh", "-c", "uname -n; getent ahostsv4 web-1 | cut -d' ' -f1 | uniq")
	cfg.Hostname = "web-1"
	if out := connected(t, newCluster(t, "cluster"), cfg).finish(); out != "web-1\n10.244.1.9\n" {
		t.Errorf("it printed %q", out)
	}
	if now, err := os.Hostname(); err != nil || now != outside {
		t.Errorf("this machine is called %s, and was called %s (%v)", now, outside, err)
	}
}

func get(t *testing.T, r *running, address string) (string, error) {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, network, _ string) (net.Conn, error) { return r.Dial(ctx, network, address) },
	}, Timeout: 20 * time.Second}
	response, err := client.Get("http://inside/")
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	b, err := io.ReadAll(response.Body)
	return string(b), err
}

func TestDialReachesPortsInside(t *testing.T) {
	r := connected(t, newCluster(t, "cluster"), config(probe(t), "serve", "from inside", "127.0.0.1:80", "[::1]:8080", "10.244.1.9:443"))
	r.await("listening")
	for _, address := range []string{"127.0.0.1:80", "[::1]:8080", "10.244.1.9:443", "localhost:80"} {
		if body, err := get(t, r, address); body != "from inside" || err != nil {
			t.Errorf("%s answers %q, %v", address, body, err)
		}
	}
	if _, err := r.Dial(t.Context(), "tcp", "127.0.0.1:81"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("Dial to a port without a listener: %v", err)
	}
	if _, err := r.Dial(t.Context(), "nonsense", "127.0.0.1:81"); err == nil {
		t.Error("Dial accepted an unknown network")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.Dial(ctx, "tcp", "127.0.0.1:80"); !errors.Is(err, context.Canceled) {
		t.Errorf("Dial with a context that has ended: %v", err)
	}
	conn, err := r.Dial(t.Context(), "tcp", "127.0.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if conn.RemoteAddr().String() != "127.0.0.1:80" {
		t.Errorf("connected to %v", conn.RemoteAddr())
	}
	if err := r.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	r.Wait()
	conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	if n, err := conn.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("after the program's end: %d bytes, %v", n, err)
	}
}

// A program inside reaches what listens elsewhere at ports of its loopback addresses, except at ports of its own.
func TestLocalhostArrivesAtTheListener(t *testing.T) {
	testenv.NeedPrograms(t, "python3")
	const program = `
import socket, sys
def ask(host, port):
    try:
        with socket.create_connection((host, port), 20) as c:
            c.shutdown(socket.SHUT_WR)
            return c.makefile().read()
    except OSError as e:
        return e.strerror
own = socket.create_server(("", 7001))
own.settimeout(20)
for line in sys.stdin:
    host, port = line.split()
    if port == "7001":
        with socket.create_connection((host, 7001), 20) as c:
            print("own" if own.accept()[1] == c.getsockname() else "another", flush=True)
    else:
        print(ask(host, int(port)), flush=True)
`
	cfg := config("python3", "-c", program)
	in, stdin, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	cfg.Stdin = in
	r := connected(t, newCluster(t, "cluster"), cfg)
	ports := func(of ...string) {
		t.Helper()
		var all []netip.AddrPort
		for _, p := range of {
			all = append(all, netip.MustParseAddrPort(p))
		}
		l, err := r.Localhost(t.Context(), all)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				io.Copy(io.Discard, c)
				fmt.Fprint(c, "the pod's ", c.LocalAddr())
				c.Close()
			}
		}()
	}
	var asked strings.Builder
	answers := func(to, want string) {
		t.Helper()
		if _, err := io.WriteString(stdin, strings.Replace(to, "@", " ", 1)+"\n"); err != nil {
			t.Fatal(err)
		}
		asked.WriteString(want + "\n")
		testenv.Eventually(t, 20*time.Second, func() error {
			if got := r.printed(); got != asked.String() {
				return fmt.Errorf("%s: it printed %q, want %q", to, got, asked.String())
			}
			return nil
		})
	}
	answers("127.0.0.1@5432", "Connection refused")
	ports("127.0.0.1:5432", "[::1]:5432", "[::1]:5433", "127.0.0.1:7001")
	answers("127.0.0.1@5432", "the pod's 127.0.0.1:5432")
	answers("::1@5432", "the pod's [::1]:5432")
	answers("127.0.0.1@5433", "Connection refused")
	answers("::1@5433", "the pod's [::1]:5433")
	answers("127.0.0.1@7001", "own")
	ports("127.0.0.1:5433")
	answers("127.0.0.1@5432", "Connection refused")
	answers("127.0.0.1@5433", "the pod's 127.0.0.1:5433")
	stdin.Close()
	if status, err := r.Wait(); err != nil || status.Code != 0 {
		t.Errorf("the program ended with %+v, %v", status, err)
	}
}

// No test code reads the TUN, so no connection is established.
func TestDialEndsWithItsContext(t *testing.T) {
	cfg := sh("sleep 100")
	cfg.Network = true
	r := start(t, cfg)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := r.Dial(ctx, "tcp", "10.96.0.1:80"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Dial: %v", err)
	}
	result := make(chan error, 1)
	go func() {
		_, err := r.Dial(context.Background(), "tcp", "10.96.0.1:80")
		result <- err
	}()
	if _, err := r.Dial(t.Context(), "tcp", "127.0.0.1:1"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("Dial beside one that waits: %v", err)
	}
	if err := r.SetNetwork(t.Context(), network()); err != nil {
		t.Errorf("SetNetwork beside a Dial that waits: %v", err)
	}
	if err := r.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	r.Wait()
	if err := <-result; err == nil {
		t.Error("Dial outlived the sandbox")
	}
}

func TestTwoAtOnce(t *testing.T) {
	var rs []*running
	for _, name := range []string{"one", "two"} {
		r := connected(t, newCluster(t, name), sh(probe(t)+" get http://db/ && echo && exec "+probe(t)+" serve "+name+" 127.0.0.1:80"))
		rs = append(rs, r)
	}
	for i, name := range []string{"one", "two"} {
		rs[i].await(name + " for db\nlistening\n")
		if body, err := get(t, rs[i], "127.0.0.1:80"); body != name || err != nil {
			t.Errorf("%s answers %q, %v", name, body, err)
		}
	}
	var all []namespaces
	for _, r := range rs {
		all = append(all, namespacesOf(t, r.Pid()))
		if err := r.Signal(unix.SIGTERM); err != nil {
			t.Error(err)
		}
		r.Wait()
	}
	for _, n := range all {
		n.expectNone(t)
	}
}

func TestProgramUsesTheLaptopsNetworkByDefault(t *testing.T) {
	c := newCluster(t, "laptop")
	if out := run(t, config(probe(t), "get", "http://"+c.web+"/")); out != "laptop for "+c.web {
		t.Errorf("it printed %q", out)
	}
	r := start(t, sh("sleep 100"))
	if r.TUN() != nil {
		t.Error("there is a TUN")
	}
	conn, err := r.Dial(t.Context(), "tcp", c.web)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

func TestNetworkIsPreparedBeforeTheProgramRuns(t *testing.T) {
	other := network()
	other.Addresses, other.MTU, other.DNS = []netip.Prefix{netip.MustParsePrefix("10.244.1.10/32")}, 1400, []netip.Addr{netip.MustParseAddr("10.96.0.11")}
	cfg := sh("cat /etc/resolv.conf; echo first; read go </dev/stdin; cat /etc/resolv.conf; ip -4 -o addr show eth0; cat /sys/class/net/eth0/mtu; exit 7")
	testenv.NeedPrograms(t, "ip")
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cfg.Network, cfg.Stdin = true, in
	r := begin(t, cfg)
	in.Close()
	if r.TUN().Name() != sandbox.Interface {
		t.Errorf("the device is called %q", r.TUN().Name())
	}
	if err := r.SetNetwork(t.Context(), sandbox.Network{}); err == nil {
		t.Error("SetNetwork accepted a network without an address")
	}
	if r.printed() != "" {
		t.Errorf("the program runs before Run: %s", r.printed())
	}
	if err := errors.Join(r.SetNetwork(t.Context(), network()), r.Run(t.Context())); err != nil {
		t.Fatal(err)
	}
	r.await("first\n")
	if err := r.Run(t.Context()); err == nil {
		t.Error("Run started the program twice")
	}
	if err := r.SetNetwork(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(out, "go")
	if status, err := r.Wait(); err != nil || status.Code != 7 {
		t.Errorf("it ended with %+v, %v", status, err)
	}
	before, after, _ := strings.Cut(r.printed(), "first\n")
	if !strings.Contains(before, "nameserver 10.96.0.10\n") {
		t.Errorf("before the second SetNetwork: %s", before)
	}
	for _, want := range []string{"nameserver 10.96.0.11\n", "10.244.1.10/32", "1400"} {
		if !strings.Contains(after, want) || strings.Contains(after, "10.244.1.9") {
			t.Errorf("after the second SetNetwork, without %q: %s", want, after)
		}
	}
	if err := r.SetNetwork(t.Context(), other); !errors.Is(err, os.ErrProcessDone) && !errors.Is(err, syscall.EPIPE) {
		t.Errorf("SetNetwork after the end: %v", err)
	}
}

func TestProgramThatCannotRunLeavesNoNamespaces(t *testing.T) {
	t.Run("no-such-program", func(t *testing.T) {
		cfg := config("sandbox-test-nothing")
		cfg.Network = true
		r := begin(t, cfg)
		n := namespacesOf(t, r.Pid())
		if err := r.Run(t.Context()); !errors.Is(err, unix.ENOENT) {
			t.Errorf("Run: %v", err)
		}
		n.expectNone(t)
	})
	t.Run("start-ended", func(t *testing.T) {
		why := errors.New("why")
		cfg := config("true")
		cfg.Network = true
		s, err := sandbox.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		p, err := s.Start(ctx)
		if err != nil {
			t.Fatal(err)
		}
		cancel(why)
		if _, err := p.Wait(); !errors.Is(err, why) {
			t.Errorf("Wait: %v", err)
		}
		if err := p.Run(t.Context()); !errors.Is(err, why) {
			t.Errorf("Run: %v", err)
		}
	})
	t.Run("run-ended", func(t *testing.T) {
		cfg := config("true")
		cfg.Network = true
		r := begin(t, cfg)
		n := namespacesOf(t, r.Pid())
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := r.Run(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v", err)
		}
		n.expectNone(t)
	})
}

// Dials that are in progress when the program ends must not hide its exit status.
func TestEndAmongDials(t *testing.T) {
	for range 20 {
		cfg := sh("exit 7")
		cfg.Network = true
		r := begin(t, cfg)
		ctx, cancel := context.WithCancel(t.Context())
		var dials sync.WaitGroup
		for range 4 {
			dials.Go(func() {
				for ctx.Err() == nil {
					if conn, err := r.Dial(ctx, "tcp", "127.0.0.1:1"); err == nil {
						conn.Close()
					}
				}
			})
		}
		if err := errors.Join(r.SetNetwork(t.Context(), network()), r.Run(t.Context())); err != nil {
			t.Error(err)
		}
		status, err := r.Wait()
		cancel()
		dials.Wait()
		if err != nil || status.Code != 7 {
			t.Fatalf("it ended with %+v, %v", status, err)
		}
	}
}

// Most ping binaries have a file capability, which a sandbox does not grant.
func TestPingWorksInside(t *testing.T) {
	testenv.NeedPrograms(t, "ping")
	cfg := config("ping", "-c", "1", "-W", "10", "127.0.0.1")
	cfg.Network = true
	if out := run(t, cfg); !strings.Contains(out, "ttl=") {
		t.Errorf("it prints %q", out)
	}
}
