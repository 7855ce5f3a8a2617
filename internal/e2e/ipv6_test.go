//go:build e2e && linux

package e2e

import (
	"strings"
	"testing"

	"kubevpn/internal/lab"
)

// ipv6Suite: the second family of a dual-stack cluster.
func ipv6Suite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	l.connect(t)
	vip := w.kubectl(t, "get", "service", "web", "-o", "jsonpath={.spec.clusterIPs[1]}")
	pod := w.kubectl(t, "get", "pods", "-l", "app=web", "-o", "jsonpath={.items[0].status.podIPs[1].ip}")
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
}
