//go:build linux && lab

package lab

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"kubevpn/internal/testenv"
)

// checkIPVS checks that IPVS serves ClusterIPs, that they answer on its nodes and in their pods over TCP and UDP, and
// that the programs beside kube-proxy work: a TUN device, and iptables in a separate network namespace.
func checkIPVS(t *testing.T, l *Lab) {
	t.Helper()
	var services []netip.Addr
	for a := range strings.FieldsSeq(kubectl(t, l, Admin, "get", "service", "web", "-o", "jsonpath={.spec.clusterIPs[*]}")) {
		services = append(services, netip.MustParseAddr(a))
	}
	backends := pods(t, l)
	for n := 1; n <= l.config.Nodes; n++ {
		place := fmt.Sprintf("node%d", n)
		if l.config.proxyMode(n) != ProxyIPVS {
			continue
		}
		table := output(t, l, place, "ipvsadm", "-Ln")
		for _, a := range services {
			// The scheduler is the one of the lab's settings.
			if want := fmt.Sprintf("TCP  %s lc", netip.AddrPortFrom(a, 80)); !strings.Contains(table, want) {
				t.Errorf("%s has no virtual server %q:\n%s", place, want, table)
			}
		}
		for _, b := range backends {
			if want := fmt.Sprintf("-> %s ", netip.AddrPortFrom(b, 8080)); !strings.Contains(table, want) {
				t.Errorf("%s has no real server %q:\n%s", place, want, table)
			}
		}
		if got := output(t, l, place, "sysctl", "-n", "net.ipv4.conf.all.arp_ignore"); got != "1\n" {
			t.Errorf("%s: ipvs.strictARP is set, and arp_ignore is %q", place, got)
		}
		namespaces := strings.Fields(output(t, l, place, "ls", "/run/netns"))
		if len(namespaces) == 0 {
			t.Errorf("%s has no pods", place)
		}
		for _, namespace := range append([]string{""}, namespaces...) {
			var within []string
			if namespace != "" {
				within = []string{"ip", "netns", "exec", namespace}
			}
			for _, a := range services {
				page := output(t, l, place, append(within, "curl", "--silent", "--max-time", "5", fmt.Sprintf("http://%s/", netip.AddrPortFrom(a, 80)))...)
				if !strings.Contains(page, `"host":"web-`) {
					t.Errorf("%s %s: %s answers %q", place, namespace, a, page)
				}
			}
			for i, f := range l.config.Families() {
				kind := []string{"A", "AAAA"}[i]
				answer := output(t, l, place, append(within, "dig", "+short", "+time=5", "+tries=1", "@"+f.ClusterDNS.String(), "web.default.svc.cluster.local", kind)...)
				if want := services[i].String() + "\n"; answer != want {
					t.Errorf("%s %s: %s says that web is %q, want %q", place, namespace, f.ClusterDNS, answer, want)
				}
			}
		}
		output(t, l, place, "sh", "-ec", `
			ip netns add test
			trap "ip netns del test" EXIT
			ip netns exec test ip tuntap add tun0 mode tun
			ip netns exec test iptables -t nat -A POSTROUTING -o tun0 -j MASQUERADE
			ip netns exec test ip6tables -t nat -A POSTROUTING -o tun0 -j MASQUERADE`)
	}
	if l.config.guests {
		checkGuests(t, l)
	}
}

// checkGuests checks that the programs of node 2's guest, which take turns, keep their registers (OpenSSL uses the
// extended ones); how they end, and that they end with their stand-ins.
func checkGuests(t *testing.T, l *Lab) {
	t.Helper()
	const sum = "openssl sha512 %[1]s & openssl sha512 %[1]s & openssl sha512 %[1]s; wait"
	want := output(t, l, "laptop", "sh", "-c", fmt.Sprintf(sum, l.programs.Kube))
	if got := output(t, l, "node2", "sh", "-c", fmt.Sprintf(sum, l.programs.Kube)); got != want {
		t.Errorf("sums in a guest:\n%swant\n%s", got, want)
	}
	if code := exitCode(t, l, "node2", "sh", "-c", "exit 7"); code != 7 {
		t.Errorf("exit code %d", code)
	}
	if code := exitCode(t, l, "node2", "no-such-program"); code != 127 {
		t.Errorf("exit code %d of a program that is not there", code)
	}
	before := output(t, l, "node2", "pgrep", "-f", "kube-proxy --config")
	if err := l.Restart(t.Context(), "kube-proxy-node2"); err != nil {
		t.Fatal(err)
	}
	testenv.Until(t, "kube-proxy to be another one", func() bool {
		after := output(t, l, "node2", "sh", "-c", "pgrep -f 'kube-proxy [-]-config' || true")
		return after != "" && after != before
	})
}

// killGuest kills the guest of node 2. Its programs are processes that its kernel traces. They must not outlive it,
// because they would then be processes of this machine.
func killGuest(t *testing.T, l *Lab) {
	t.Helper()
	kernel, _ := l.process("node-node2")
	traced := tracedBy(t, kernel.PID)
	if len(traced) < 3 {
		t.Fatalf("the guest's kernel traces %v", traced)
	}
	if err := l.Kill(t.Context(), "node-node2"); err != nil {
		t.Fatal(err)
	}
	testenv.Until(t, "the guest's processes to end", func() bool {
		return !slices.ContainsFunc(traced, func(pid int) bool { return !zombie(pid) })
	})
	if _, err := l.Command(t.Context(), "node2", "true"); err == nil || !strings.Contains(err.Error(), "the guest of node2 has died") {
		t.Errorf("a command in a dead guest: %v", err)
	}
}

func exitCode(t *testing.T, l *Lab, place string, argv ...string) int {
	t.Helper()
	command, err := l.Command(t.Context(), place, argv...)
	if err != nil {
		t.Fatal(err)
	}
	_ = command.Run() // the test checks the exit code
	return command.ProcessState.ExitCode()
}

// tracedBy lists the processes that a process traces.
func tracedBy(t *testing.T, tracer int) []int {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, e := range entries {
		var pid int
		if _, err := fmt.Sscan(e.Name(), &pid); err != nil {
			continue
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err == nil && bytes.Contains(status, fmt.Appendf(nil, "\nTracerPid:\t%d\n", tracer)) {
			pids = append(pids, pid)
		}
	}
	return pids
}
