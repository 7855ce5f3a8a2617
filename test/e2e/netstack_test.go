//go:build e2e && linux

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// autoSuite checks which netstack connect chooses, and that connect rejects one that cannot work.
func autoSuite(t *testing.T, w *world) {
	mode := w.Config().ProxyMode
	kernel := mode == lab.ProxyIPTables || mode == lab.ProxyNFTables // the kernel serves ClusterIPs to forwarded packets
	l := w.newLaptop(t, lab.Admin)
	before := l.snapshot(t)
	w.kubectl(t, "delete", "namespace", "kubevpn", "--ignore-not-found")

	connected := func(t *testing.T, netstack, reason string, args ...string) {
		t.Helper()
		r := l.connect(t, args...)
		c := l.connection(t)
		if c.Netstack != netstack || !strings.Contains(c.NetstackReason, reason) || c.ProxyMode != string(mode) {
			t.Errorf("netstack %q because %q, proxy mode %q; want %q because of %q", c.Netstack, c.NetstackReason, c.ProxyMode, netstack, reason)
		}
		if !strings.Contains(r.stderr+r.stdout, netstack) || !strings.Contains(r.stderr+r.stdout, reason) {
			t.Errorf("connect does not print the netstack and the reason: %v", r)
		}
		l.reachesWeb(t, w)
		l.must(t, "kubevpn", "disconnect", "--all")
		l.sameAs(t, before)
	}

	t.Run("restricted_namespace_uses_gvisor", func(t *testing.T) {
		reason := "PodSecurity"
		if !kernel {
			reason = "no kube-proxy serves ClusterIPs"
		}
		connected(t, "gvisor", reason)
	})
	t.Run("system_is_rejected_where_not_admitted", func(t *testing.T) {
		// kubevpn must not relabel a namespace that the user owns.
		w.apply(t, `
apiVersion: v1
kind: Namespace
metadata: {name: strict, labels: {pod-security.kubernetes.io/enforce: restricted}}
`)
		failure{
			code: api.ExitNetstack, message: "the system netstack is not available: .*PodSecurity", hint: "--netstack gvisor", within: 20 * time.Second,
		}.check(t, l.run(t, "kubevpn", "connect", "--netstack", "system", "--manager-namespace", "strict"))
		l.sameAs(t, before)
		if s := l.status(t); len(s.Connections) != 0 {
			t.Errorf("%+v", s)
		}
	})
	if !kernel {
		t.Run("system_is_rejected_where_it_cannot_work", func(t *testing.T) {
			failure{
				code: api.ExitNetstack, message: "the system netstack does not reach .*clusterIP", hint: "--netstack gvisor", within: 60 * time.Second,
			}.check(t, l.run(t, "kubevpn", "connect", "--netstack", "system"))
			l.sameAs(t, before)
			if s := l.status(t); len(s.Connections) != 0 {
				t.Errorf("%+v", s)
			}
		})
		return
	}
	t.Run("system_is_used_on_request", func(t *testing.T) { connected(t, "system", "asked for", "--netstack", "system") })
	t.Run("system_is_chosen_where_admitted", func(t *testing.T) { connected(t, "system", "kube-proxy is "+string(mode)) })
	if mode != lab.ProxyNFTables {
		return // one mode of kube-proxy shows the rest
	}
	t.Run("others_keep_theirs", func(t *testing.T) {
		// Two laptops share one manager: the second adds the gateway while the first has connections.
		w.kubectl(t, "delete", "namespace", "kubevpn")
		other := w.secondLaptop(t)
		l.connect(t, "--netstack", "gvisor")
		pod := w.pods(t, "default", "app=web")[0].String()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		flow := l.command(ctx, t, "sh", "-c", fmt.Sprintf(`(for i in 1 2 3 4 5 6 7 8 9 10; do echo $i; sleep 1; done) | nc -N %s 9001 | tail -1`, pod))
		var out strings.Builder
		flow.Stdout = &out
		if err := flow.Start(); err != nil {
			t.Fatal(err)
		}
		other.connect(t, "--netstack", "system")
		if a, b := l.connection(t), other.connection(t); a.Netstack != "gvisor" || b.Netstack != "system" || a.ManagerPod != b.ManagerPod {
			t.Errorf("%s with %s, %s with %s", a.Netstack, a.ManagerPod, b.Netstack, b.ManagerPod)
		}
		other.reachesWeb(t, w)
		if err := flow.Wait(); err != nil || strings.TrimSpace(out.String()) != "10" {
			t.Errorf("the first laptop's flow ended with %q, %v", out.String(), err)
		}
		l.reachesWeb(t, w)
	})
}

// laptopsSuite checks that two laptops of one cluster reach each other at their inner addresses, with any netstacks, at
// opened ports only.
func laptopsSuite(t *testing.T, w *world) {
	a, b := w.newLaptop(t, lab.Admin), w.secondLaptop(t)
	open := []string{"--allow-inbound", "8099", "--allow-inbound", "8098/udp"}
	a.connect(t, open...)
	b.connect(t, append(open, "--netstack", "gvisor")...)
	inner := func(l *laptop) netip.Addr {
		t.Helper()
		for _, addr := range l.connection(t).Addresses {
			if addr.Is4() {
				return addr
			}
		}
		t.Fatal("no inner address")
		return netip.Addr{}
	}
	addrA, addrB := inner(a), inner(b)
	if addrA == addrB {
		t.Fatalf("both have %v", addrA)
	}
	serve := func(t *testing.T, l *laptop, script string) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		cmd := l.command(ctx, t, "python3", "-c", script)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cancel(); cmd.Wait() })
	}
	for _, way := range []struct {
		name     string
		from, to *laptop
		at       netip.Addr
	}{{"first_to_second", a, b, addrB}, {"second_to_first", b, a, addrA}} {
		t.Run(way.name, func(t *testing.T) {
			t.Run("ping", func(t *testing.T) {
				testenv.Eventually(t, time.Minute, func() error {
					if r := way.from.run(t, "ping", "-n", "-c", "1", "-W", "1", way.at.String()); r.code != 0 {
						return fmt.Errorf("%v", r)
					}
					return nil
				})
			})
			t.Run("tcp", func(t *testing.T) {
				serve(t, way.to, `
import http.server, json
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps({"Host": "laptop", "Remote": self.client_address[0]}).encode())
    def log_message(self, *a): pass
http.server.HTTPServer(("0.0.0.0", 8099), H).serve_forever()
`)
				testenv.Eventually(t, time.Minute, func() error {
					_, err := way.from.get(t, "http://"+way.at.String()+":8099/")
					return err
				})
				var e echoed
				if err := json.Unmarshal([]byte(way.from.must(t, "curl", "-sS", "http://"+way.at.String()+":8099/")), &e); err != nil {
					t.Fatal(err)
				}
				if want := inner(way.from).String(); e.Remote != want {
					t.Errorf("the other laptop sees %q, want %q", e.Remote, want)
				}
			})
			t.Run("tcp_to_a_closed_port_is_refused", func(t *testing.T) {
				serve(t, way.to, `
import http.server
http.server.HTTPServer(("0.0.0.0", 8097), http.server.SimpleHTTPRequestHandler).serve_forever()
`)
				testenv.Eventually(t, time.Minute, func() error {
					if r := way.to.run(t, "curl", "-sS", "-o", "/dev/null", "http://127.0.0.1:8097/"); r.code != 0 {
						return fmt.Errorf("%v", r)
					}
					return nil
				})
				r := way.from.run(t, "curl", "-sS", "--max-time", "20", "http://"+way.at.String()+":8097/")
				if r.code != 7 { // curl failed to connect; a timeout is 28
					t.Error(r)
				}
			})
			t.Run("udp", func(t *testing.T) {
				serve(t, way.to, `
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("0.0.0.0", 8098))
while True:
    b, peer = s.recvfrom(65536)
    s.sendto(b, peer)
`)
				testenv.Eventually(t, time.Minute, func() error {
					if r := way.from.sh(t, "printf hello | nc -u -w 1 %s 8098", way.at); r.stdout != "hello" {
						return fmt.Errorf("%v", r)
					}
					return nil
				})
			})
		})
	}
	t.Run("unused_inner_address_does_not_answer", func(t *testing.T) {
		nobody := addrA.Next()
		for nobody == addrB {
			nobody = nobody.Next()
		}
		if r := a.run(t, "ping", "-n", "-c", "1", "-W", "2", nobody.String()); r.code == 0 {
			t.Error(r)
		}
	})
	t.Run("packets_from_another_source_are_dropped", func(t *testing.T) {
		before := w.spoofed(t, a.connection(t))
		a.must(t, "ip", "addr", "add", addrB.Next().String()+"/32", "dev", a.connection(t).Device)
		if r := a.run(t, "ping", "-n", "-c", "7", "-i", "0.1", "-W", "1", "-I", addrB.Next().String(), addrB.String()); r.code == 0 {
			t.Errorf("answered: %v", r)
		}
		a.must(t, "ip", "addr", "del", addrB.Next().String()+"/32", "dev", a.connection(t).Device)
		if n := w.spoofed(t, a.connection(t)) - before; n != 0 {
			t.Errorf("the laptop sent %d packets with another source to the traffic manager", n)
		}
	})
	t.Run("inner_address_survives_a_new_session", func(t *testing.T) {
		c := a.connection(t)
		w.kubectl(t, "-n", c.ManagerNamespace, "delete", "pod", c.ManagerPod, "--grace-period=0", "--force")
		testenv.Eventually(t, 60*time.Second, func() error {
			if c := a.connection(t); c.Status != api.StatusConnected {
				return fmt.Errorf("%s", c.Status)
			}
			if r := a.run(t, "ping", "-n", "-c", "1", "-W", "1", addrB.String()); r.code != 0 {
				return fmt.Errorf("%v", r)
			}
			return nil
		})
		if now := inner(a); now != addrA {
			t.Errorf("%v became %v", addrA, now)
		}
		if now := inner(b); now != addrB {
			t.Errorf("%v became %v", addrB, now)
		}
	})
}

// counted matches the log line of the traffic manager about packets with a wrong source.
var counted = regexp.MustCompile(`their session does not own" spoofed=(\d+)`)

// spoofed returns how many packets the connection's manager has dropped because of their source.
func (w *world) spoofed(t *testing.T, c api.Connection) int {
	t.Helper()
	lines := counted.FindAllStringSubmatch(w.kubectl(t, "-n", c.ManagerNamespace, "logs", c.ManagerPod, "-c", "manager"), -1)
	if len(lines) == 0 {
		return 0
	}
	n, err := strconv.Atoi(lines[len(lines)-1][1])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// secondLaptop returns another machine on the laptop's network, with the same files.
func (w *world) secondLaptop(t *testing.T) *laptop {
	t.Helper()
	f := w.Config().Families()[0]
	name, addr := w.Config().Name+"-laptop2", f.Laptop.Next().Next()
	// Create it in the machine's mount namespace: in that of the router, a new network namespace would have no name.
	script := func(format string, args ...any) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), "sh", "-euc", fmt.Sprintf(format, args...)).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	t.Cleanup(func() { // also of what a script leaves that fails
		if err := exec.Command("ip", "netns", "del", name).Run(); err != nil {
			t.Errorf("removing the second laptop: %v", err)
		}
	})
	router := w.Config().Name + "-router"
	script(`ip netns del %[1]s 2>/dev/null || true; ip netns add %[1]s
		ip -n %[4]s link add second type veth peer name eth0 netns %[1]s
		ip -n %[4]s link set second up
		ip -n %[4]s route add %[2]s dev second
		ip -n %[1]s link set lo up; ip -n %[1]s addr add %[2]s/32 dev eth0; ip -n %[1]s link set eth0 up
		ip -n %[1]s route add %[3]s dev eth0; ip -n %[1]s route add default via %[3]s`, name, addr, f.Gateway, router)
	l := w.in("").newLaptop(t, lab.Admin)
	l.within = []string{"nsenter", "--net=/run/netns/" + name, "--"}
	return l
}
