//go:build e2e && linux

package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// proxiedSuite tests what depends on the packet path of an intercept: the server of ClusterIPs, the address family,
// and the laptop's netstack.
func proxiedSuite(t *testing.T, w *world) {
	s := w.newShop(t, "shop"+w.netstack, "privileged") // the namespace of the other netstack may still be terminating
	l := w.newUser(t, lab.Admin)
	l.startApp(t, "laptop")
	v := w.visitor(t)
	l.connect(t)

	t.Run("matching_requests_reach_the_laptop", func(t *testing.T) { proxyHeaders(t, l, s, v) })
	t.Run("probes_reach_every_agent", func(t *testing.T) { proxyProbes(t, l, s) })
	t.Run("own_requests_stay_on_the_laptop", func(t *testing.T) { proxyShortcut(t, l, s) })
	t.Run("every_kind_of_request_passes", func(t *testing.T) { proxyRequests(t, l, s, v) })
	t.Run("all_traffic_reaches_the_laptop", func(t *testing.T) { proxyEverything(t, l, s, v) })
	if w.Config().IPv6 {
		t.Run("ipv6_reaches_the_laptop", func(t *testing.T) { proxyIPv6(t, l, s, v) })
	}
	l.proxy(t, s, "--headers", mine+"="+me, "--port", "8080:8080")
	t.Run("pods_of_a_rollout_are_intercepted", func(t *testing.T) { s.restart(t); s.taken(t, v, soon) })
	t.Run("agent_is_replaced_after_kill", func(t *testing.T) { s.killAgents(t, v) })
	l.leave(t, s)
}

// proxyProbes checks that `proxy` probed the agent of each pod, and the Service through its ClusterIPs, and that the
// laptop, which reaches ClusterIPs in any cluster, receives its own requests there.
func proxyProbes(t *testing.T, l *laptop, s *shop) {
	l.proxy(t, s, "--headers", mine+"="+me)
	defer l.leave(t, s)
	checks := l.intercept(t).Checks
	proved := func(what, begin string) {
		t.Helper()
		for _, c := range checks {
			if c.What == what && strings.HasPrefix(c.Target, begin) {
				if !c.OK {
					t.Errorf("%+v", c)
				}
				return
			}
		}
		t.Errorf("no probe by %s to %s: %+v", what, begin, checks)
	}
	for _, ip := range s.ready(t) {
		proved("pod", ip+":") // one port is enough
		proved("pod", "udp "+ip+":")
	}
	vips := strings.Fields(s.kubectl(t, "-n", s.namespace, "get", "service", "shop", "-o", "jsonpath={.spec.clusterIPs[*]}"))
	if want := len(s.Config().Families()); len(vips) != want {
		t.Fatalf("the Service has the addresses %v, want %d", vips, want)
	}
	for _, vip := range vips {
		for _, to := range []string{net.JoinHostPort(vip, "80"), net.JoinHostPort(vip, "9090"), "udp " + net.JoinHostPort(vip, "53")} {
			proved("clusterIP", to)
		}
		url := "http://" + net.JoinHostPort(vip, "80") + "/"
		if out := l.must(t, "curl", "-gsS", "--max-time", "5", "-H", mine+": "+me, url); !strings.Contains(out, `"name":"laptop"`) {
			t.Errorf("%s: %s", url, out)
		}
		if out := l.must(t, "curl", "-gsS", "--max-time", "5", url); !strings.Contains(out, `"name":"shop-`) {
			t.Errorf("%s without the header: %s", url, out)
		}
	}
	for _, c := range checks {
		if !c.OK {
			t.Errorf("%+v", c)
		}
	}
	if i := l.intercept(t); len(i.Warnings) > 0 || i.State != api.InterceptActive {
		t.Errorf("%+v", i)
	}
}

// proxyShortcut checks that requests of the laptop's own programs that match do not pass the cluster, that open flows
// stay where they are, and that commands say so.
func proxyShortcut(t *testing.T, l *laptop, s *shop) {
	name, ip := first(s.ready(t))
	at := net.JoinHostPort(ip, "8080")
	// ask sends a request over a connection, and returns who answers.
	ask := func(c net.Conn, r *bufio.Reader) string {
		t.Helper()
		if _, err := fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: shop\r\n%s: %s\r\n\r\n", mine, me); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var a answer
		if err := json.NewDecoder(resp.Body).Decode(&a); err != nil {
			t.Fatal(err)
		}
		return a.Name
	}
	dial := func() (net.Conn, *bufio.Reader) {
		t.Helper()
		c, err := dialIn(l.network(), at)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c, bufio.NewReader(c)
	}
	// shortcuts counts the flows that do not leave the laptop.
	shortcuts := func() int {
		var list api.FlowList
		if err := json.Unmarshal([]byte(l.must(t, "kubevpn", "flows", "-o", "json")), &list); err != nil {
			t.Fatal(err)
		}
		return len(slices.DeleteFunc(list.Items, func(f api.Flow) bool { return f.Transport != api.Shortcut }))
	}
	before, reader := dial()
	if got := ask(before, reader); got != name {
		t.Fatalf("before the intercept, %s answers", got)
	}
	l.proxy(t, s, "--headers", mine+"="+me, "--port", "8080:8080")
	if got := ask(before, reader); got != name && got != "laptop" { // through the agent, if it sees the open flow
		t.Errorf("on an open connection, %s answers", got)
	}
	testenv.Eventually(t, soon, func() error { // the daemon hears of the agents a moment later
		c, r := dial()
		if got := ask(c, r); got != "laptop" || shortcuts() == 0 {
			return fmt.Errorf("%s answers, by %d shortcuts", got, shortcuts())
		}
		return nil
	})
	if out := l.must(t, "curl", "-sS", "--max-time", "5", "http://"+at+"/"); !strings.Contains(out, `"name":"`+name+`"`) {
		t.Errorf("without the header: %s", out)
	}
	if out := l.must(t, "kubevpn", "why", "http://"+at+"/", "-H", mine+": "+me); !strings.Contains(out, "it stays on this machine") {
		t.Error(out)
	}
	during, duringReader := dial()
	if got := ask(during, duringReader); got != "laptop" {
		t.Errorf("%s answers", got)
	}
	l.leave(t, s)
	if got := ask(during, duringReader); got != "laptop" && got != name {
		t.Errorf("after leave, on an open connection, %s answers", got)
	}
	c, r := dial()
	if got := ask(c, r); got != name {
		t.Errorf("after leave, %s answers", got)
	}
	during.Close()
	l.proxy(t, s, "--headers", mine+"="+me, "--port", "8080:8080", "--no-shortcut")
	defer l.leave(t, s)
	c, r = dial()
	if got := ask(c, r); got != "laptop" {
		t.Errorf("with --no-shortcut, %s answers", got)
	}
	testenv.Eventually(t, soon, func() error { // the agents count it
		if l.intercept(t).Requests == 0 {
			return errors.New("the agents have seen no request")
		}
		return nil
	})
}

// proxyIPv6 checks that IPv6 requests reach the same laptop, and that the application sees the client's address.
func proxyIPv6(t *testing.T, l *laptop, s *shop, v *visitor) {
	pods := map[string]string{}
	for name := range s.ready(t) {
		addr, err := netip.ParseAddr(s.kubectl(t, "-n", s.namespace, "get", "pod", name, "-o", "jsonpath={.status.podIPs[1].ip}"))
		if err != nil || !addr.Is6() {
			t.Fatalf("pod %s has no IPv6: %v", name, err)
		}
		pods[name] = addr.String()
	}
	vip := s.kubectl(t, "-n", s.namespace, "get", "service", "shop", "-o", "jsonpath={.spec.clusterIPs[1]}")

	t.Run("matching_requests_reach_the_laptop", func(t *testing.T) {
		l.proxy(t, s, "--headers", mine+"="+me)
		defer l.leave(t, s)
		for name, ip := range pods {
			url := "http://" + net.JoinHostPort(ip, "8080") + "/"
			if err := v.want(url, "laptop", mine, me); err != nil {
				t.Errorf("pod %s: %v", name, err)
			}
			a, err := v.ask(http.MethodGet, url, nil)
			if err != nil || a.Name != name {
				t.Errorf("pod %s: %+v, %v", name, a, err)
			} else if from, err := netip.ParseAddrPort(a.Remote); err != nil || !from.Addr().Is6() || from.Addr().String() == ip || from.Addr().IsLoopback() {
				t.Errorf("the application of %s sees %s (%v), not the client", name, a.Remote, err)
			}
			v.grpc(t, net.JoinHostPort(ip, "9090"), "laptop", []string{mine, me})
			c := v.webSocket(t, "ws://"+net.JoinHostPort(ip, "8080")+"/ws", "laptop", []string{mine, me})
			echoes(t, c, "six")
			c.Close()
		}
		url := "http://" + net.JoinHostPort(vip, "80") + "/"
		if err := v.want(url, "laptop", mine, me); err != nil {
			t.Error(err)
		}
		if err := v.want(url, "a pod"); err != nil {
			t.Error(err)
		}
	})
	t.Run("all_traffic_reaches_the_laptop", func(t *testing.T) {
		l.proxy(t, s)
		defer l.leave(t, s)
		for name, ip := range pods {
			v.firstLine(t, net.JoinHostPort(ip, "9004"), "220 laptop")
			v.rawEcho(t, net.JoinHostPort(ip, "9001"), "laptop")
			if got, err := v.datagram(net.JoinHostPort(ip, "9001"), "hi"); err != nil || got != "laptop: hi" {
				t.Errorf("by UDP to %s: %q, %v", name, got, err)
			}
			if err := v.txt(t, ip, "5300", "laptop"); err != nil {
				t.Error(err)
			}
		}
		if err := v.txt(t, vip, "53", "laptop"); err != nil {
			t.Error(err)
		}
	})
	for name, ip := range pods {
		if got, err := v.datagram(net.JoinHostPort(ip, "9001"), "hi"); err != nil || got != name+": hi" {
			t.Errorf("after leave, by UDP: %q, %v", got, err)
		}
	}
}

// txt queries a DNS server with dig. The error contains the answer if it differs from want.
func (v *visitor) txt(t *testing.T, ip, port, want string) error {
	t.Helper()
	out, err := v.run(t, "dig", "+short", "+time=15", "+tries=1", "@"+ip, "-p", port, "TXT", "who.is.it")
	if err != nil || strings.TrimSpace(out) != `"`+want+`"` {
		return fmt.Errorf("dig @%s -p %s: %q, %v; want %s", ip, port, out, err, want)
	}
	return nil
}
