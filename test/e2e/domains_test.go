//go:build e2e && linux

package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// The names of the lab's zone corp.test, and the address of the first. serveBehind gives both private ones to a node.
const (
	dbName, queueName, wwwName = "db.corp.test", "queue.corp.test", "www.corp.test"
	dbAddress, queueAddress    = "10.95.0.7", "10.95.0.8"
)

// behindScript serves HTTP at an address. It answers a request only when it is complete.
const behindScript = `
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
	def do_GET(self):
		self.send_response(200); self.send_header("Content-Length", "6"); self.end_headers(); self.wfile.write(b"behind")
	def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer((sys.argv[1], 80), Handler)
print("ready", flush=True)
server.serve_forever()
`

// flowScript opens a flow, completes a request when it reads a line, and ends the flow when it reads another.
const flowScript = `
import socket, sys
c = socket.create_connection((sys.argv[1], 80), 20)
c.sendall(b"GET / HTTP/1.1\r\n")
print("open", flush=True)
sys.stdin.readline()
c.sendall(b"Host: x\r\n\r\n")
data = b""
while not data.endswith(b"behind"): data += c.recv(4096)
print("answered", flush=True)
sys.stdin.readline()
c.close()
`

// serveBehind gives two addresses to node 2, to which only the nodes have a route, and serves HTTP there.
func (w *world) serveBehind(t *testing.T) {
	t.Helper()
	w.node(t, "node2", "ip addr replace %s/32 dev lo; ip addr replace %s/32 dev lo", dbAddress, queueAddress)
	w.afterwards(t, "node2", "ip addr del %s/32 dev lo; ip addr del %s/32 dev lo", dbAddress, queueAddress)
	w.node(t, "node1", "ip route replace 10.95.0.0/24 via %s", w.Config().Families()[0].Node(2))
	w.afterwards(t, "node1", "ip route del 10.95.0.0/24")
	cmd, err := w.Command(context.WithoutCancel(t.Context()), "node2", "python3", "-c", behindScript, dbAddress)
	if err != nil {
		t.Fatal(err)
	}
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
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the server behind the cluster: %q, %v", line, err)
	}
}

// domainsSuite checks that names under an extra domain resolve in the cluster, that their addresses are routed for as
// long as they are used, and that no other query changes.
func domainsSuite(t *testing.T, w *world) {
	w.serveBehind(t)
	l := w.newLaptop(t, lab.Admin)
	if r := l.run(t, "curl", "-sS", "--max-time", "2", "http://"+dbAddress+"/"); r.code == 0 {
		t.Fatalf("without kubevpn, the laptop reaches %s: %v", dbAddress, r)
	}
	t.Run("contradictions_are_rejected", func(t *testing.T) {
		for _, tt := range []struct{ args, says string }{
			{"--extra-domain co.uk", "public suffix"},
			{"--extra-domain .", "is not a domain"},
			{"--extra-domain corp.test --exclude-domain corp.test", "corp.test is excluded"},
			{"--exclude-domain cluster.local", "the cluster's own domain is cluster.local"},
		} {
			r := l.run(t, append([]string{"kubevpn", "connect"}, strings.Fields(tt.args)...)...)
			if r.code != int(api.ExitUsage) || !strings.Contains(r.stderr, tt.says) {
				t.Errorf("%v\nwant exit %d and %q", r, api.ExitUsage, tt.says)
			}
		}
	})
	l.connect(t)
	without := l.asked(t)
	l.must(t, "kubevpn", "disconnect", "--all")
	l.connect(t, "--extra-domain", "corp.test", "--exclude-domain", "old.corp.test")
	flow := l.beginFlow(t) // the other tests take a part of its TTL
	t.Run("other_queries_are_the_same", func(t *testing.T) {
		testenv.Eventually(t, time.Minute, func() error { // a busy nameserver may be asked twice
			if d := cmp.Diff(without, l.asked(t)); d != "" {
				return fmt.Errorf("queries at the laptop's nameserver (-without +with an extra domain):\n%s", d)
			}
			return nil
		})
	})
	t.Run("each_nameserver_gets_its_names_once", func(t *testing.T) { l.countQueries(t) })
	t.Run("address_that_may_not_be_routed", func(t *testing.T) {
		address := w.Config().Families()[0].Outside.String()
		testenv.Eventually(t, time.Minute, func() error { // the TTL may pass between two commands
			l.resolves(t, wwwName, address)
			h := l.shownHost(t, address)
			if h == nil || h.Routed || h.Name != wwwName || !strings.Contains(h.Reason, "--extra-cidr "+address) {
				return fmt.Errorf("status: %+v", h)
			}
			if out := l.must(t, "kubevpn", "status"); !strings.Contains(out, "! "+address+" ("+wwwName+") is not routed: it is outside") {
				return errors.New(out)
			}
			return nil
		})
		l.onDevice(t, address, false)
	})
	t.Run("programs_without_the_device", func(t *testing.T) {
		for _, args := range []string{"", "--socks 127.0.0.1:0"} {
			argv := append([]string{"kubevpn", "run", "--extra-domain", "corp.test"}, strings.Fields(args)...)
			argv = append(argv, "--", "curl", "-sS", "--max-time", "20", "http://"+dbName+"/")
			if r := l.run(t, argv...); r.stdout != "behind" {
				t.Errorf("%v", r)
			}
		}
	})
	t.Run("route_stays_for_the_flow", func(t *testing.T) { flow.outlivesTTL(t) })
}

// resolves checks the address of a name.
func (l *laptop) resolves(t *testing.T, name, address string) {
	t.Helper()
	if got := l.must(t, "dig", "+short", "+time=5", "+tries=3", name); got != address {
		t.Errorf("%s is %q, want %s", name, got, address)
	}
}

// routedTo returns nil if packets to an address go into a device.
func (l *laptop) routedTo(t *testing.T, address, device string) error {
	t.Helper()
	if out := l.must(t, "ip", "route", "get", address); !strings.Contains(out, " dev "+device+" ") {
		return errors.New(out)
	}
	return nil
}

// asked asks for names outside and inside of the cluster, and returns the queries at the laptop's nameserver.
func (l *laptop) asked(t *testing.T) (asked []string) {
	t.Helper()
	before, err := l.Queries()
	if err != nil {
		t.Fatal(err)
	}
	for _, query := range []string{"www.outside.test A", "www.outside.test AAAA", "big.outside.test TXT", "nosuch.outside.test A", "corp.test.outside.test A",
		"web A", "web.default A", "web.default.svc.cluster.local AAAA", "nosuch.default.svc.cluster.local A", "xcorp.test A", "git.corp A"} {
		l.must(t, append([]string{"dig", "+short", "+time=5", "+tries=1"}, strings.Fields(query)...)...)
	}
	all, err := l.Queries()
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range all[len(before):] {
		if from, err := netip.ParseAddrPort(q.From); err == nil && from.Addr() == l.Config().Families()[0].Laptop {
			asked = append(asked, fmt.Sprint(q.Proto, " ", q.Name, " ", q.Type))
		}
	}
	if len(asked) == 0 {
		t.Fatal("no query came to the laptop's nameserver")
	}
	return asked
}

// countQueries asks for names under the extra and the excluded domain, and counts the queries at both nameservers.
func (l *laptop) countQueries(t *testing.T) {
	count := func(name string) (cluster, laptop int) {
		logs := l.kubectl(t, "-n", "kube-system", "logs", "deployment/coredns", "--tail=-1")
		all, err := l.Queries()
		if err != nil {
			t.Fatal(err)
		}
		for _, q := range all {
			if q.Name == name+"." {
				laptop++
			}
		}
		return strings.Count(logs, " IN "+name+". "), laptop
	}
	for name, want := range map[string][2]int{"once.corp.test": {1, 0}, "once.old.corp.test": {0, 1}} {
		cluster, laptop := count(name)
		l.must(t, "dig", "+short", "+time=5", "+tries=1", name, "A")
		testenv.Eventually(t, soon, func() error {
			c, n := count(name)
			if got := [2]int{c - cluster, n - laptop}; got != want {
				return fmt.Errorf("%s: %v queries at cluster DNS and at the laptop's nameserver, want %v", name, got, want)
			}
			return nil
		})
	}
}

// shownHost returns what the status says of an address, or nil.
func (l *laptop) shownHost(t *testing.T, address string) *api.Host {
	t.Helper()
	hosts := l.connection(t).DNS.Hosts
	i := slices.IndexFunc(hosts, func(h api.Host) bool { return h.Address.String() == address })
	if i < 0 {
		return nil
	}
	return &hosts[i]
}

// hostFlow is a flow from a laptop to dbAddress. The laptop has asked for queueName after dbName, with the same TTL.
type hostFlow struct {
	l   *laptop
	cmd *exec.Cmd
	in  io.Writer
	out *bufio.Reader
}

func (l *laptop) beginFlow(t *testing.T) *hostFlow {
	t.Helper()
	f := &hostFlow{l: l, cmd: l.command(context.WithoutCancel(t.Context()), t, "python3", "-c", flowScript, dbName)}
	in, err := f.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := f.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := f.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = f.cmd.Process.Kill() // it may have ended
		_ = f.cmd.Wait()
	})
	f.in, f.out = in, bufio.NewReader(out)
	f.expect(t, "open")
	l.onDevice(t, dbAddress, true)
	device := l.connection(t).Device
	testenv.Eventually(t, time.Minute, func() error { // on a slow machine, the TTL may pass between the two
		l.resolves(t, queueName, queueAddress)
		return l.routedTo(t, queueAddress, device)
	})
	return f
}

// expect reads a line of the flow's program.
func (f *hostFlow) expect(t *testing.T, want string) {
	t.Helper()
	if line, err := f.out.ReadString('\n'); line != want+"\n" {
		t.Fatalf("the flow says %q (%v), want %q", line, err, want)
	}
}

// outlivesTTL waits until the TTL has passed, continues the flow and ends it.
func (f *hostFlow) outlivesTTL(t *testing.T) {
	l, device := f.l, f.l.connection(t).Device
	awaitGone := func(address string) {
		t.Helper()
		testenv.Eventually(t, time.Minute, func() error {
			if l.routedTo(t, address, device) == nil {
				return fmt.Errorf("%s is still routed", address)
			}
			return nil
		})
		if h := l.shownHost(t, address); h != nil {
			t.Errorf("the status shows %+v", h)
		}
	}
	awaitGone(queueAddress)
	if h := l.shownHost(t, dbAddress); h == nil || !h.Routed || h.Name != dbName {
		t.Errorf("the address of an open flow: %+v", h)
	}
	l.onDevice(t, dbAddress, true)
	if out := l.must(t, "kubevpn", "status", "-o", "wide"); !strings.Contains(out, "routed "+dbAddress+": "+dbName) {
		t.Error(out)
	}
	_, err := io.WriteString(f.in, "go on\n")
	f.expect(t, "answered")
	_, err2 := io.WriteString(f.in, "end\n")
	if err := errors.Join(err, err2, f.cmd.Wait()); err != nil {
		t.Error(err)
	}
	awaitGone(dbAddress)
}
