//go:build e2e && linux

package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/e2e/build"
	"kubevpn/test/lab"
)

const hostileRef = "docker.io/kubevpn/hostile:e2e"

// hostileSuite attacks a laptop as a tenant who may write in one namespace, as a malicious traffic manager, and as a
// neighbor on the laptop's network. A pod of the cluster attacks all that other pods can reach. Each attack must fail.
func hostileSuite(t *testing.T, w *world) {
	t.Run("tenant", func(t *testing.T) { hostileTenant(t, w) })
	t.Run("manager", func(t *testing.T) { hostileManager(t, w) })
	t.Run("neighbour", func(t *testing.T) { hostileNeighbour(t, w) })
	t.Run("pod", func(t *testing.T) { hostilePod(t, w) })
}

func hostileTenant(t *testing.T, w *world) {
	l := w.newUser(t, lab.Admin)
	w.apply(t, tenantManifest(w))
	l.connect(t)
	t.Run("endpoints_capture_no_route", func(t *testing.T) { tenantRoutes(t, l) })
	t.Run("a_namespace_captures_no_domain", func(t *testing.T) { tenantDomain(t, l) })
	t.Run("a_ConfigMap_runs_nothing_on_the_laptop", func(t *testing.T) { tenantVariables(t, l) })
	t.Run("a_prepared_manager_is_not_used", func(t *testing.T) { tenantManager(t, l) })
}

// captured returns addresses that a tenant would like to redirect into the cluster: public and reserved ones, and the
// laptop's own gateway.
func captured(w *world) []string {
	lan := w.Config().Families()[0]
	return []string{"140.82.121.3", "8.8.8.8", "0.0.0.5", "240.66.0.9", "172.31.9.9", lan.Gateway.String(), lan.Outside.String()}
}

// tenantManifest returns what a tenant can create: EndpointSlices that pretend to belong to pods, a namespace named
// like a private domain, and last the Service marker.
func tenantManifest(w *world) string {
	var b strings.Builder
	b.WriteString(`
apiVersion: v1
kind: Namespace
metadata: {name: corp}
---
apiVersion: v1
kind: Service
metadata: {name: git, namespace: corp}
spec: {selector: {app: none}, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: trap, namespace: corp}
spec: {ports: [{port: 80}]}
`)
	slice := func(name string, addresses []string) {
		fmt.Fprintf(&b, "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: %s, namespace: corp, labels: {kubernetes.io/service-name: trap}}\n"+
			"addressType: IPv4\nports: [{name: '', port: 80, protocol: TCP}]\nendpoints:\n", name)
		for _, a := range addresses {
			fmt.Fprintf(&b, "- {addresses: [%s], conditions: {ready: true}, targetRef: {kind: Pod, name: trap, namespace: corp}}\n", a)
		}
	}
	slice("captured", captured(w))
	for i := range 5 { // 5000 blocks, more than the routes that a laptop accepts
		var many []string
		for j := range 1000 {
			many = append(many, fmt.Sprintf("10.%d.%d.9", 100+(i*1000+j)/250, (i*1000+j)%250))
		}
		slice(fmt.Sprintf("many-%d", i), many)
	}
	b.WriteString("---\napiVersion: v1\nkind: Service\nmetadata: {name: marker, namespace: corp}\nspec: {selector: {app: none}, ports: [{port: 80}]}\n")
	return b.String()
}

func tenantRoutes(t *testing.T, l *laptop) {
	testenv.Eventually(t, time.Minute, func() error {
		if r := l.run(t, "getent", "hosts", "marker.corp.svc.cluster.local"); r.code != 0 {
			return fmt.Errorf("the manager has not reported the tenant's objects: %v", r)
		}
		return nil
	})
	nothing := func(t *testing.T) {
		t.Helper()
		for _, address := range append(captured(l.world), "10.100.7.9", "10.119.7.9") {
			r := l.run(t, "ip", "route", "get", address)
			if strings.Contains(r.stdout, " dev kubevpn") {
				t.Errorf("%s goes into the tunnel: %s", address, r.stdout)
			}
		}
		if c := l.connection(t); c.Status != api.StatusConnected || len(c.CIDRs) > 100 {
			t.Errorf("%s, %d networks routed: %v", c.Status, len(c.CIDRs), c.CIDRs)
		}
		l.reachesWeb(t, l.world)
	}
	nothing(t)
	// A second connection is not stopped, either.
	l.must(t, "kubevpn", "disconnect", "--all")
	l.must(t, "kubevpn", "connect")
	nothing(t)
}

func tenantDomain(t *testing.T, l *laptop) {
	for name, want := range map[string]bool{"git.corp": true, "vault.corp": true, "git.corp.svc.cluster.local": false} {
		before, err := l.Queries()
		if err != nil {
			t.Fatal(err)
		}
		l.run(t, "dig", "+tries=1", "+time=3", name)
		after, err := l.Queries()
		if err != nil {
			t.Fatal(err)
		}
		asked := false
		for _, q := range after[len(before):] {
			asked = asked || strings.TrimSuffix(q.Name, ".") == name
		}
		if asked != want {
			t.Errorf("the laptop's own nameserver was asked for %s: %v, want %v", name, asked, want)
		}
	}
}

// tenantVariables checks that the tenant's ConfigMap cannot set variables that make the developer's programs run code.
func tenantVariables(t *testing.T, l *laptop) {
	s := l.newShop(t, "hostile-shop", "baseline")
	l.apply(t, `
apiVersion: v1
kind: ConfigMap
metadata: {name: trap, namespace: hostile-shop}
data: {LD_PRELOAD: /tmp/trap.so, BASH_ENV: /tmp/trap.sh, HOME: /tmp/trap, NODE_OPTIONS: --require=/tmp/trap.js, COLOR: blue}
`)
	l.kubectl(t, "-n", s.namespace, "set", "env", s.workload, "--from=configmap/trap")
	s.rolledOut(t)
	r := l.dev(t, s, "--", "env")
	if r.code != 0 || !strings.Contains(r.stdout, "COLOR=blue\n") {
		t.Fatal(r)
	}
	for _, name := range []string{"LD_PRELOAD", "BASH_ENV", "NODE_OPTIONS", "HOME=/tmp/trap"} {
		if strings.Contains("\n"+r.stdout, "\n"+name) {
			t.Errorf("%s of the pod reached the laptop's program", name)
		}
	}
	for _, name := range []string{"LD_PRELOAD", "BASH_ENV", "HOME", "NODE_OPTIONS"} {
		if !strings.Contains(r.stderr, name) {
			t.Errorf("the output does not say that %s was kept: %s", name, r.stderr)
		}
	}
}

// tenantManager prepares a Deployment with the manager's name and an additional container.
func tenantManager(t *testing.T, l *laptop) {
	l.apply(t, "apiVersion: v1\nkind: Namespace\nmetadata: {name: prepared}\n")
	l.finally(t, "kubevpn", "uninstall", "--manager-namespace", "prepared")
	if r := l.run(t, "kubevpn", "install", "--manager-namespace", "prepared"); r.code != 0 {
		t.Fatal(r)
	}
	l.kubectl(t, "-n", "prepared", "patch", "deployment", "kubevpn-traffic-manager", "--type=json", "-p",
		`[{"op": "add", "path": "/spec/template/spec/containers/-", "value": {"name": "trap", "image": "`+imageRef+`", "args": ["manager"]}}]`)
	before := l.snapshot(t)
	r := l.run(t, "kubevpn", "connect", "--manager-namespace", "prepared", "--kubeconfig",
		l.variant(t, func(*clientcmdapi.Cluster, *clientcmdapi.AuthInfo) {}))
	if r.code == 0 || !strings.Contains(r.stderr, "trap") {
		t.Errorf("want an error that names the container trap: %v", r)
	}
	l.sameAs(t, before)
}

// buildHostile builds the hostile image once.
var buildHostile = sync.OnceValue(func() error { return build.Hostile(context.Background(), bin, hostileRef) })

func (w *world) loadHostile(t *testing.T) {
	t.Helper()
	if err := buildHostile(); err != nil {
		t.Fatal(err)
	}
	if err := w.Load(t.Context(), filepath.Join(bin, "hostile.tar")); err != nil {
		t.Fatal(err)
	}
}

// hostileManager connects to a manager that attacks as the connection's namespace tells it.
func hostileManager(t *testing.T, w *world) {
	w.loadHostile(t)
	const namespace = "hostile-manager"
	l := w.newUser(t, lab.Admin)
	if r := l.run(t, "kubevpn", "install", "--manager-namespace", namespace, "--image", hostileRef); r.code != 0 {
		t.Fatal(r)
	}
	t.Cleanup(func() { uninstall(t, l, namespace) })
	before := l.snapshot(t)
	connect := func(t *testing.T, attack string) result {
		t.Helper()
		return l.run(t, "kubevpn", "connect", "--netstack", "gvisor", "--transport", "port-forward", "--manager-namespace", namespace, "-n", attack)
	}
	t.Run("unknown_image_needs_consent", func(t *testing.T) {
		other := w.newUser(t, lab.Admin)
		other.asks = true
		r := other.run(t, "kubevpn", "connect", "--manager-namespace", namespace)
		if r.code != int(api.ExitConsent) || !strings.Contains(r.stderr, hostileRef) || !strings.Contains(r.stderr, "--yes") {
			t.Errorf("want exit %d, the image and the flag: %v", api.ExitConsent, r)
		}
		other.sameAs(t, before)
	})
	for attack, code := range map[string]api.ExitCode{
		"route-resolver": api.ExitIncompatible,
		"route-world":    api.ExitConsent,
		"domain":         api.ExitConsent,
	} {
		t.Run(attack, func(t *testing.T) {
			l.asks = true
			defer func() { l.asks = false }()
			r := connect(t, attack)
			if r.code != int(code) {
				t.Errorf("want exit %d: %v", code, r)
			}
			l.sameAs(t, before)
		})
	}
	t.Run("control_characters_do_not_reach_the_terminal", func(t *testing.T) {
		r := connect(t, "terminal")
		if r.code == 0 || strings.ContainsAny(r.stdout+r.stderr, "\x1b\x07\r\u202e") {
			t.Errorf("want an error without control characters: %q", r.stderr)
		}
		l.sameAs(t, before)
	})
	for _, attack := range []string{"names", "message", "streams"} {
		t.Run(attack, func(t *testing.T) { exhaust(t, l, attack, connect) })
	}
	l.must(t, "kubevpn", "quit")
	l.sameAs(t, before)
}

// maxDaemonMemory is the limit for an attacked daemon in KiB. An idle daemon uses about 60 MiB.
const maxDaemonMemory = 400 << 10

// exhaust lets the manager send more than a laptop can hold. The connection may end, but the daemon must stay alive
// and its memory must stay bounded.
func exhaust(t *testing.T, l *laptop, attack string, connect func(*testing.T, string) result) {
	before := l.snapshot(t)
	r := connect(t, attack)
	pid := l.daemonPID(t)
	testenv.Eventually(t, 60*time.Second, func() error {
		out, err := l.tryKubectl(t.Context(), "-n", "hostile-manager", "logs", "deploy/kubevpn-traffic-manager")
		if err == nil && !strings.Contains(out, "attack over: "+attack) {
			err = fmt.Errorf("the manager has not sent everything: %s", tail(out, 3))
		}
		return err
	})
	if attack == "streams" { // the connection survives, because the laptop accepts no streams
		if r.code != 0 {
			t.Error(r)
		}
		l.reachesWeb(t, l.world)
	}
	used := peakMemory(t, pid)
	t.Logf("connect: exit %d, %s; the daemon used up to %d KiB", r.code, tail(r.stderr, 2), used)
	if used > maxDaemonMemory {
		t.Errorf("the daemon used more than %d KiB", maxDaemonMemory)
	}
	l.must(t, "kubevpn", "disconnect", "--all")
	l.sameAs(t, before)
}

// peakMemory returns the peak memory of a process in KiB (proc(5), VmHWM).
func peakMemory(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, line, _ := strings.Cut(string(text), "\nVmHWM:")
	kib, err := strconv.Atoi(strings.Fields(line)[0])
	if err != nil {
		t.Fatal(err)
	}
	return kib
}

// hostileNeighbour routes the cluster's networks from another machine to the laptop, which forwards packets as
// machines with containers do. A container on the laptop itself must still reach the cluster.
func hostileNeighbour(t *testing.T, w *world) {
	l := w.newUser(t, lab.Admin)
	before := l.snapshot(t)
	t.Run("forwarding", func(t *testing.T) { neighbourForwarded(t, l) })
	l.sameAs(t, before)
}

func neighbourForwarded(t *testing.T, l *laptop) {
	w, lan := l.world, l.Config().Families()[0]
	l.connect(t)
	device := l.connection(t).Device
	vip := w.clusterIP(t, "default", "web")
	fetch := []string{"curl", "-sS", "--max-time", "3", "http://" + vip + "/"}

	l.must(t, "sysctl", "-qw", "net.ipv4.ip_forward=1")
	l.finally(t, "sysctl", "-qw", "net.ipv4.ip_forward=0")
	l.must(t, "nft", "add table ip hostile; add chain ip hostile post { type nat hook postrouting priority srcnat; }; "+
		"add rule ip hostile post oifname "+device+" masquerade")
	l.finally(t, "nft", "delete table ip hostile")

	t.Run("neighbour_reaches_nothing", func(t *testing.T) {
		w.onRouter(t, "ip", "route", "add", vip, "via", lan.Laptop.String())
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 10*time.Second)
			defer cancel()
			if cmd, err := w.Command(ctx, "router", "ip", "route", "del", vip); err != nil || cmd.Run() != nil {
				t.Errorf("the router keeps a route to %s: %v", vip, err)
			}
		})
		cmd, err := w.Command(t.Context(), "router", fetch...)
		if err != nil {
			t.Fatal(err)
		}
		if out, err := cmd.CombinedOutput(); err == nil {
			t.Errorf("the neighbor reached a Service through the laptop: %s", out)
		}
	})
	t.Run("container_reaches_the_Service", func(t *testing.T) {
		within := l.container(t, netip.MustParsePrefix("172.30.0.0/24"))
		if r := l.run(t, append(within, fetch...)...); r.code != 0 {
			t.Error(r)
		}
	})
}

// container creates a network namespace behind the laptop, on a bridge like that of a container engine, and returns the
// command that runs others in it.
func (l *laptop) container(t *testing.T, network netip.Prefix) []string {
	t.Helper()
	cmd := l.command(t.Context(), t, "unshare", "--net", "sleep", "120")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	pid := strconv.Itoa(cmd.Process.Pid)
	testenv.Eventually(t, soon, func() error { // `ip netns exec`, setpriv and unshare replace themselves with the next command
		name, err := os.ReadFile("/proc/" + pid + "/comm")
		if err == nil && strings.TrimSpace(string(name)) != "sleep" {
			err = fmt.Errorf("%s is not sleep yet", name)
		}
		return err
	})
	gateway, own := at(network, 1), at(network, 2)
	l.must(t, "ip", "link", "add", "ctr0", "type", "veth", "peer", "name", "eth0", "netns", pid)
	l.finally(t, "sh", "-c", "ip link del ctr0 2>/dev/null || true") // the container may have removed it
	l.must(t, "ip", "addr", "add", netip.PrefixFrom(gateway, network.Bits()).String(), "dev", "ctr0")
	l.must(t, "ip", "link", "set", "ctr0", "up")
	within := []string{"nsenter", "--net=/proc/" + pid + "/ns/net"}
	for _, argv := range [][]string{
		{"ip", "link", "set", "lo", "up"},
		{"ip", "addr", "add", netip.PrefixFrom(own, network.Bits()).String(), "dev", "eth0"},
		{"ip", "link", "set", "eth0", "up"},
		{"ip", "route", "add", "default", "via", gateway.String()},
	} {
		l.must(t, append(within, argv...)...)
	}
	return within
}
