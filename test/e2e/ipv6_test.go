//go:build e2e && linux

package e2e

import (
	"net/netip"
	"strings"
	"testing"

	"kubevpn/test/lab"
)

// ipv6Suite tests the second family of a dual-stack cluster. With the system netstack, IPv6 uses the gvisor netstack
// unless the traffic manager's pod forwards it, which only the owner of the node can enable.
func ipv6Suite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	l.connect(t)
	elsewhere := strings.Contains(strings.Join(l.connection(t).Warnings, "\n"), "gvisor carries IPv6")
	if elsewhere != w.isSystem() {
		t.Errorf("IPv6 uses another netstack: %v; warnings %q", elsewhere, l.connection(t).Warnings)
	}
	vip, pod := ipv6Reached(t, l)
	if !w.isSystem() {
		return
	}
	t.Run("manager_s_pod_forwards_IPv6", func(t *testing.T) {
		l.forwardIPv6(t)
		l.connect(t)
		c := l.connection(t)
		if len(c.Warnings) > 0 || len(c.Addresses) != 2 {
			t.Fatalf("IPv6 is not carried: addresses %v, warnings %q", c.Addresses, c.Warnings)
		}
		ipv6Reached(t, l)
		var inner netip.Addr
		for _, p := range c.CIDRs {
			if p.Contains(c.Addresses[1]) {
				inner = p.Addr().Next()
			}
		}
		if r := l.run(t, "ping", "-6", "-n", "-c", "1", "-t", "1", "-W", "3", pod); !strings.Contains(r.stdout, "From "+inner.String()+" ") || !strings.Contains(r.stdout, "Hop limit") {
			t.Errorf("the first hop is not the gateway %v: %v", inner, r)
		}
		l.must(t, "ping", "-6", "-n", "-c", "1", "-s", "60000", "-W", "3", pod)
		if r := l.run(t, "nc", "-6", "-v", "-w", "5", vip, "4444"); r.code == 0 || !strings.Contains(r.stderr, "refused") {
			t.Errorf("a port that the Service does not have: %v", r)
		}
		var far place
		for _, addr := range w.pods(t, "default", "app=web") {
			if v6 := w.kubectl(t, "get", "pods", "-A", "-o", `jsonpath={.items[?(@.status.podIP=="`+addr.String()+`")].status.podIPs[1].ip}`); v6 == pod {
				far = w.placeOf(t, addr)
			}
		}
		far.shrink(t, "1400")
		if r := l.run(t, "python3", "-c", tooLargeScript, pod); strings.TrimSpace(r.stdout) != "EMSGSIZE by ICMPv6 2/0, MTU 1400" {
			t.Error(r)
		}
	})
}

// forwardIPv6 has a new pod of the traffic manager forward IPv6. The laptop is connected before, and not afterwards.
func (l *laptop) forwardIPv6(t *testing.T) {
	t.Helper()
	c := l.connection(t)
	l.kubectl(t, "-n", c.ManagerNamespace, "delete", "pod", c.ManagerPod, "--grace-period=0", "--force")
	l.must(t, "kubevpn", "disconnect", "--all")
	l.connect(t, "--netstack", "gvisor") // to a pod without a gateway
	c = l.connection(t)
	pod := l.placeOf(t, netip.MustParseAddr(l.kubectl(t, "-n", c.ManagerNamespace, "get", "pod", c.ManagerPod, "-o", "jsonpath={.status.podIP}")))
	pod.must(t, "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
	l.must(t, "kubevpn", "disconnect", "--all")
}

// ipv6Reached checks what every netstack carries, and returns the addresses of a Service and of a pod.
func ipv6Reached(t *testing.T, l *laptop) (vip, pod string) {
	t.Helper()
	w := l.world
	vip = w.kubectl(t, "get", "service", "web", "-o", "jsonpath={.spec.clusterIPs[1]}")
	pod = w.kubectl(t, "get", "pods", "-l", "app=web", "-o", "jsonpath={.items[0].status.podIPs[1].ip}")
	if !strings.Contains(vip, ":") || !strings.Contains(pod, ":") {
		t.Fatalf("not dual-stack: ClusterIP %q, pod %q", vip, pod)
	}
	for _, url := range []string{"http://[" + vip + "]/", "http://[" + pod + "]:8080/"} {
		if _, err := l.get(t, url); err != nil {
			t.Error(err)
		}
	}
	if out := l.must(t, "dig", "+short", "web.default.svc.cluster.local", "AAAA"); out != vip {
		t.Errorf("AAAA %q, want %s", out, vip)
	}
	if out := l.must(t, "dig", "+short", "-x", vip); out != "web.default.svc.cluster.local." {
		t.Errorf("PTR %q", out)
	}
	l.must(t, "curl", "-6", "-sS", "--max-time", "8", "http://web.default/")
	l.must(t, "ping", "-6", "-n", "-c", "2", "-i", "0.2", "-W", "3", pod)
	if r := l.sh(t, "printf hello | nc -6 -u -w 2 %s 9001", vip); r.stdout != "hello" {
		t.Error(r)
	}
	if r := l.run(t, "nc", "-6", "-v", "-w", "5", pod, "4444"); r.code == 0 || !strings.Contains(r.stderr, "refused") {
		t.Error(r)
	}
	return vip, pod
}
