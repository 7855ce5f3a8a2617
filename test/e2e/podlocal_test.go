//go:build e2e && linux

package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// podNames checks that the files of the pod decide what a name means.
func podNames(t *testing.T, p *podded) {
	pid := p.podProcess(t, p.namespace, "app=shop")
	resolv, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/etc/resolv.conf", pid))
	if err != nil {
		t.Fatal(err)
	}
	r := p.eve.dev(t, p.shop, "--via-pod", "--", "sh", "-c",
		"LC_ALL=C sort /etc/resolv.conf; getent hosts alias.test; getent hosts $(uname -n) >/dev/null && echo own")
	lines := strings.Split(strings.TrimSpace(string(resolv)), "\n")
	want := strings.Join(slices.Sorted(slices.Values(lines)), "\n") + "\n10.1.2.3        alias.test\nown\n"
	if r.stdout != want {
		t.Errorf("%v\nwant\n%s", r, want)
	}
	// web is in another namespace, which only the search list of the pod names.
	page := []string{"curl", "-sS", "--max-time", "20", "http://web/"}
	if r := p.eve.dev(t, p.shop, append([]string{"--via-pod", "--"}, page...)...); p.podAt(t, r.seen()) == "" {
		t.Error(r)
	}
	if r := p.eve.dev(t, p.shop, append([]string{"--isolate", "--"}, page...)...); r.code != 0 || p.podAt(t, r.seen()) != "" {
		t.Errorf("without --via-pod: %v", r)
	}
}

// podEgress checks that with --egress all, and only with it, the rest of the world sees the pod: rules of the pod apply.
func podEgress(t *testing.T, p *podded) {
	outside := p.Config().Families()[0].Outside.String()
	ask := func(flags ...string) result {
		args := append([]string{"kubevpn", "run", "-n", p.namespace, "--via", p.workload}, flags...)
		return p.eve.run(t, append(args, "--", "sh", "-c", "printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -v -w 9 "+outside+" 80")...)
	}
	if r := ask("--egress", "all"); !strings.Contains(r.stdout, "outside: GET") {
		t.Error(r)
	}
	for _, ip := range p.ready(t) {
		pod := p.placeOf(t, netip.MustParseAddr(ip))
		pod.must(t, "nft", "table inet inward { chain c { type filter hook output priority 0; "+
			"ip daddr "+outside+" reject with icmp host-unreachable; }; }")
		t.Cleanup(func() { pod.must(t, "nft", "delete table inet inward") })
	}
	if r := ask("--egress", "all"); !strings.Contains(r.stderr, "No route to host") {
		t.Errorf("the pod cannot reach the host: %v", r)
	}
	if r := ask(); !strings.Contains(r.stdout, "outside: GET") {
		t.Errorf("this machine can reach the host: %v", r)
	}
	failure{code: api.ExitUsage, message: "network of the program's own", hint: "kubevpn run --via", within: 20 * time.Second}.
		checkProgress(t, p.eve.run(t, "kubevpn", "connect", "-n", p.namespace, "--via", p.workload, "--egress", "all"))
}

// podLocalhost checks both directions of localhost, with PostgreSQL beside the container that the program replaces.
func podLocalhost(t *testing.T, p *podded) {
	pair := &shop{p.world, p.namespace, "deployment/pair"}
	pod := p.within(t, p.namespace, "app=pair")
	pod.startPostgres(t, "localhost")
	testenv.Eventually(t, soon, func() error {
		if r := pod.run(t, "psql", "-h", "localhost", "-U", "postgres", "-c", "select 1"); r.code != 0 {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
	query := func(host, port string) []string {
		return []string{"psql", "-At", "-d", "user=postgres connect_timeout=9 host=" + host + " port=" + port,
			"-c", "select host(inet_client_addr())"}
	}
	for name, flags := range map[string][]string{"isolate": {"--isolate"}, "via_pod": {"--via-pod"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, host := range []string{"127.0.0.1", "::1", "localhost"} {
				r := p.eve.dev(t, pair, append(append(flags, "-c", "app", "--"), query(host, "5432")...)...)
				if r.code != 0 || !strings.Contains("127.0.0.1 ::1", strings.TrimSpace(r.stdout)) {
					t.Errorf("%s: %v", host, r)
				}
			}
		})
	}
	t.Run("own_ports_stay", func(t *testing.T) {
		t.Parallel()
		r := p.eve.dev(t, pair, "--isolate", "-c", "app", "--", "python3", "-c", `
import socket
own = socket.create_server(("127.0.0.1", 5432))
socket.create_connection(("127.0.0.1", 5432), 9)
own.settimeout(9)
own.accept()
try: socket.create_connection(("127.0.0.1", 4444), 9)
except ConnectionRefusedError: print("own and refused")`)
		if r.code != 0 || r.stdout != "own and refused\n" {
			t.Error(r)
		}
	})
	t.Run("on_this_machine", func(t *testing.T) {
		t.Parallel()
		r := p.root.dev(t, pair, append([]string{"-c", "app", "--localhost", "5432:15432", "--"}, query("127.0.0.1", "15432")...)...)
		if r.code != 0 || strings.TrimSpace(r.stdout) == "" {
			t.Error(r)
		}
	})
	t.Run("program_sees_what_the_container_sees", func(t *testing.T) {
		t.Parallel()
		podSame(t, p, pair)
	})
	t.Run("calls_within_the_pod_reach_the_program", func(t *testing.T) {
		t.Parallel()
		podCalled(t, p, pair, pod)
	})
}

// podCalled checks that a call of another container of the pod at localhost reaches the program.
func podCalled(t *testing.T, p *podded, pair *shop, pod *laptop) {
	cmd := p.eve.command(t.Context(), t, "kubevpn", "dev", pair.workload, "-n", p.namespace, "--isolate", "-c", "app",
		"--proxy", "--port", "8080", "--", filepath.Join(bin, "app"), "-name", "developer", "-host", "127.0.0.1")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, func() error {
		// as another user than the container of the program, which may reach itself
		r := pod.run(t, "setpriv", "--reuid=65534", "--clear-groups", "curl", "-sS", "--max-time", "9", "http://127.0.0.1:8080/")
		if !strings.Contains(r.stdout, `"name":"developer"`) {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil { // kubevpn forwards it to the program
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
}
