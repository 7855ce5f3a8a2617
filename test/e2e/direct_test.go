//go:build e2e && linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// directTransport checks the transport direct: by a node port, which `kubevpn install --expose` creates, and by a pod's
// address that the laptop's network routes.
func directTransport(t *testing.T, w *world, l *laptop) {
	t.Run("without_an_address_direct_is_not_used", func(t *testing.T) {
		l.connect(t)
		l.transportIs(t, api.TransportAPIProxy, api.TransportInUse, "")
		l.transportIs(t, api.TransportDirect, api.TransportFailing, "no direct connection")
		l.must(t, "kubevpn", "disconnect", "--all")
		failure{code: api.ExitUnreachable, message: "the transport direct does not work: .*no direct connection", hint: "--transport port-forward"}.
			check(t, l.run(t, "kubevpn", "connect", "--transport", "direct"))
	})
	t.Run("node_port", func(t *testing.T) { nodePort(t, w, l) })
	t.Run("routable_pod", func(t *testing.T) { routablePod(t, w, l) })
}

// expose creates the node port, and removes it after the test. It returns its address at the manager's node.
func (l *laptop) expose(t *testing.T) (address string) {
	t.Helper()
	l.must(t, "kubevpn", "install") // of this version
	out := l.must(t, "kubevpn", "install", "--expose", "nodeport")
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 30*time.Second)
		defer cancel()
		if r := l.runContext(ctx, t, "kubevpn", "install", "--expose", "none"); r.code != 0 || !strings.Contains(r.stdout, "has been removed") {
			t.Errorf("%v", r)
		}
	})
	port := l.kubectl(t, "-n", "kubevpn", "get", "service", "kubevpn-traffic-manager-direct", "-o", "jsonpath={.spec.ports[0].nodePort}")
	if !strings.Contains(out, "node port "+port) {
		t.Errorf("install --expose does not name the node port %s: %s", port, out)
	}
	host := l.kubectl(t, "-n", "kubevpn", "get", "pods", "-l", ours, "--field-selector=status.phase=Running", "-o", "jsonpath={.items[0].status.hostIP}")
	return net.JoinHostPort(host, port)
}

func nodePort(t *testing.T, w *world, l *laptop) {
	address := l.expose(t)
	l.connect(t)
	l.transportIs(t, api.TransportDirect, api.TransportInUse, "")
	if c := l.connection(t); c.Transport != api.TransportDirect || len(c.Transports) != 3 || c.Status != api.StatusConnected {
		t.Errorf("%s by %q: %+v", c.Status, c.Transport, c.Transports)
	}
	l.reachesWeb(t, w)
	t.Run("scan_of_the_port_learns_nothing", func(t *testing.T) {
		for name, request := range map[string]string{
			"nothing": "",
			"http":    "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
			"upgrade": "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: kubevpn\r\nKubevpn-Ticket: " + strings.Repeat("ab", 16) + "." + strings.Repeat("A", 43) + "\r\n\r\n",
			"tls":     "\x16\x03\x01\x00\xf4\x01\x00\x00\xf0\x03\x03",
			"ssh":     "SSH-2.0-OpenSSH_9.9\r\n",
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel() // the port waits some seconds for the rest of a request
				learnsNothing(t, l.dial(t, address), request)
			})
		}
	})
	t.Run("another_node_does_not_answer", func(t *testing.T) {
		host, port, err := net.SplitHostPort(address)
		if err != nil {
			t.Fatal(err)
		}
		for _, node := range strings.Fields(l.kubectl(t, "get", "nodes", "-o", `jsonpath={.items[*].status.addresses[?(@.type=="InternalIP")].address}`)) {
			if node == host {
				continue
			}
			if conn, err := dialTimeout(l, net.JoinHostPort(node, port), time.Second); err == nil {
				conn.Close()
				t.Errorf("%s answers, which is not the manager's node", node)
			}
		}
	})
	t.Run("direct_returns_after_manager_restarts", func(t *testing.T) {
		managerDeleted(t, l, w.clusterIP(t, "default", "web"))
		l.transportIs(t, api.TransportDirect, api.TransportInUse, "")
		l.reachesWeb(t, w)
	})
	t.Run("two_managers_have_no_node_port", func(t *testing.T) { twoManagers(t, w, l) })
	l.must(t, "kubevpn", "disconnect", "--all")

	t.Run("direct_can_be_forced", func(t *testing.T) {
		r := l.connect(t, "--transport", "direct")
		if c := l.connection(t); c.Transport != api.TransportDirect || !strings.Contains(r.stderr, "Opening the tunnel: direct") {
			t.Errorf("%q, %v", c.Transport, r)
		}
		l.reachesWeb(t, w)
		l.must(t, "kubevpn", "disconnect", "--all")
	})
}

// learnsNothing checks that a server sends no byte to a client, and closes the conn. It owns the conn.
func learnsNothing(t *testing.T, conn net.Conn, request string) {
	t.Helper()
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(15 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write([]byte(request)); err != nil {
		t.Fatal(err)
	}
	var netErr net.Error
	if n, err := conn.Read(make([]byte, 1)); n > 0 || errors.As(err, &netErr) && netErr.Timeout() {
		t.Errorf("%d bytes, %v; want a closed connection", n, err)
	}
}

// twoManagers starts a second manager's pod. The node port then leads to either, so the laptop must not depend on it.
func twoManagers(t *testing.T, w *world, l *laptop) {
	replicas := func(n int) {
		w.kubectl(t, "-n", "kubevpn", "scale", "deployment", "kubevpn-traffic-manager", fmt.Sprintf("--replicas=%d", n))
		testenv.Eventually(t, time.Minute, func() error {
			if got := w.kubectl(t, "-n", "kubevpn", "get", "pods", "-l", ours, "-o", `jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}`); len(strings.Fields(got)) != n || strings.Contains(got, "False") {
				return fmt.Errorf("ready: %q, want %d", got, n)
			}
			return nil
		})
	}
	f := l.startFlow(t, net.JoinHostPort(w.clusterIP(t, "default", "web"), "9001"))
	f.goesOn(t, soon)
	replicas(2)
	f.goesOn(t, soon)
	f.finish(t)
	// A connection that begins now finds no node port that leads to its manager alone.
	l.must(t, "kubevpn", "disconnect", "--all")
	l.connect(t)
	l.transportIs(t, api.TransportAPIProxy, api.TransportInUse, "")
	l.transportIs(t, api.TransportDirect, api.TransportFailing, "")
	l.reachesWeb(t, w)
	replicas(1)
	left := w.kubectl(t, "-n", "kubevpn", "get", "pods", "-l", ours, "-o", "jsonpath={.items[0].metadata.name}")
	testenv.Eventually(t, 2*time.Minute, func() error {
		if c := l.connection(t); c.ManagerPod != left || c.Status != api.StatusConnected || c.Transport != api.TransportDirect {
			return fmt.Errorf("%s by %s to %s, want direct to %s", c.Status, c.Transport, c.ManagerPod, left)
		}
		return nil
	})
	l.reachesWeb(t, w)
}

// routablePod adds a route to the manager's pod to the laptop's network. The pod is then in a network that kubevpn
// routes into the tunnel.
func routablePod(t *testing.T, w *world, l *laptop) {
	route := func(verb, pod, node string) {
		cmd, err := w.Command(context.WithoutCancel(t.Context()), "router", "ip", "route", verb, pod, "via", node)
		if err != nil {
			t.Fatal(err)
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	}
	status := strings.Fields(w.kubectl(t, "-n", "kubevpn", "get", "pods", "-l", ours, "-o", "jsonpath={.items[0].status.podIP} {.items[0].status.hostIP}"))
	route("replace", status[0], status[1])
	t.Cleanup(func() { route("del", status[0], status[1]) })
	l.connect(t)
	l.transportIs(t, api.TransportDirect, api.TransportInUse, "")
	pod := netip.MustParseAddr(status[0])
	testenv.Eventually(t, soon, func() error {
		if c := l.connection(t); slices.ContainsFunc(c.CIDRs, func(p netip.Prefix) bool { return p.Contains(pod) }) {
			return fmt.Errorf("%v is routed into the tunnel: %v", pod, c.CIDRs)
		}
		return nil
	})
	l.reachesWeb(t, w)
	c := l.connection(t)
	if at := slices.IndexFunc(c.Transports, func(tr api.Transport) bool { return tr.Name == api.TransportDirect }); c.Transports[at].State != api.TransportInUse {
		t.Errorf("%+v", c.Transports)
	}
	l.must(t, "kubevpn", "disconnect", "--all")
}

// transportsSwitch breaks one transport after the other, and repairs them again. Flows must continue.
func transportsSwitch(t *testing.T, l *laptop, flows []*flow) {
	goOn := func(t *testing.T) {
		t.Helper()
		for _, f := range flows {
			f.goesOn(t, soon)
		}
	}
	_, port, err := net.SplitHostPort(l.expose(t))
	if err != nil {
		t.Fatal(err)
	}
	uses := func(name string) {
		t.Helper()
		start := time.Now()
		l.transportIs(t, name, api.TransportInUse, "")
		t.Logf("%s in use after %v", name, time.Since(start).Round(10*time.Millisecond))
		goOn(t)
	}
	uses(api.TransportDirect)
	heal := l.nft(t, "router", "forward", "tcp dport "+port+" drop")
	uses(api.TransportAPIProxy)
	heal()
	uses(api.TransportDirect)

	healProxy := l.nft(t, "node1", "output", "tcp dport 10802 reject with tcp reset")
	healDirect := l.nft(t, "router", "forward", "tcp dport "+port+" reject with tcp reset")
	testenv.Eventually(t, time.Minute, func() error {
		if c := l.connection(t); !strings.HasPrefix(c.Transport, "port-forward (") {
			return fmt.Errorf("the transport is %s", c.Transport)
		}
		return nil
	})
	goOn(t)
	healProxy()
	uses(api.TransportAPIProxy)
	healDirect()
	uses(api.TransportDirect)
}
