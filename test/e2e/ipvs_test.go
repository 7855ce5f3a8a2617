//go:build e2e && linux

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// TestIPVS runs suites with kube-proxy in IPVS mode on the node of the traffic manager, whose kernel supports it. The
// other node has endpoints; only what a test puts there runs on it.
func TestIPVS(t *testing.T) {
	first := []suite{{"kube-proxy", ipvsSuite}, {"auto", ipvsAutoSuite}}
	last := []suite{
		{"endpoints", endpointsSuite},
		{"bridge", bridgeSuite}, // changes a node's pod network
		{"mixed", mixedSuite},   // last, because it leaves IPVS
	}
	w := newWorld(t, lab.Config{Name: "e2e-ipvs", ProxyMode: lab.ProxyIPVS, NodeModes: []lab.ProxyMode{"", lab.ProxyIPTables}}, first, kubeProxy, last)
	w.kubectl(t, "cordon", w.Config().NodeName(2))
	runSuites(t, w, first)
	t.Run("gvisor", func(t *testing.T) { runSuites(t, w.in("gvisor"), kubeProxy) })
	t.Run("system", func(t *testing.T) { runSuites(t, w.in("system"), kubeProxy) })
	runSuites(t, w, last)
}

// ipvsSuite checks that kube-proxy really serves Services with IPVS.
func ipvsSuite(t *testing.T, w *world) {
	out := w.node(t, "node1", "ipvsadm -Ln")
	if vip := w.clusterIP(t, "default", "web"); !strings.Contains(out, vip+":80 rr") {
		t.Fatalf("the node's virtual servers lack %s:\n%s", vip, out)
	}
	t.Logf("ipvsadm -Ln:\n%s", out)
	if got := w.node(t, "node1", "sysctl -n net.ipv4.vs.conntrack"); got != "1" {
		t.Errorf("net.ipv4.vs.conntrack=%s, and kube-proxy sets it to 1 when it starts", got)
	}
}

// ipvsAutoSuite checks that connect chooses gvisor because of IPVS.
func ipvsAutoSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	l.connect(t)
	if c := l.connection(t); c.Netstack != api.NetstackGVisor || c.ProxyMode != "ipvs" || !strings.Contains(c.NetstackReason, "IPVS") {
		t.Errorf("netstack %q because %q, proxy mode %q", c.Netstack, c.NetstackReason, c.ProxyMode)
	}
}

// nodes returns the places of the lab's nodes.
func (w *world) nodes() (places []string) {
	for n := range w.Config().Nodes {
		places = append(places, fmt.Sprintf("node%d", n+1))
	}
	return places
}

// node runs a shell script on a node and returns its output.
func (w *world) node(t *testing.T, place, script string, args ...any) string {
	t.Helper()
	out, err := w.tryNode(t.Context(), place, script, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (w *world) tryNode(ctx context.Context, place, script string, args ...any) (string, error) {
	script = fmt.Sprintf(script, args...)
	cmd, err := w.Command(ctx, place, "sh", "-ec", script)
	if err != nil {
		return "", err
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %s: %w: %s", place, script, err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

// afterwards runs a script on a node at the end of the test.
func (w *world) afterwards(t *testing.T, place, script string, args ...any) {
	t.Helper()
	t.Cleanup(func() {
		if _, err := w.tryNode(context.WithoutCancel(t.Context()), place, script, args...); err != nil {
			t.Error(err)
		}
	})
}

// conntrack sets whether netfilter tracks the connections of the node's IPVS.
func (w *world) conntrack(t *testing.T, value int) {
	t.Helper()
	w.node(t, "node1", "sysctl -qw net.ipv4.vs.conntrack=%d", value)
}

// managerPlace returns the node of the laptop's traffic manager, and another node.
func (l *laptop) managerPlace(t *testing.T) (near, far string) {
	t.Helper()
	c := l.connection(t)
	node := l.kubectl(t, "-n", c.ManagerNamespace, "get", "pod", c.ManagerPod, "-o", "jsonpath={.spec.nodeName}")
	for _, place := range l.nodes() {
		if strings.HasSuffix(node, "-"+place) {
			near = place
		} else {
			far = place
		}
	}
	return near, far
}

// endpointManifest returns a pod on a node, and a Service whose only endpoint is that pod.
func (w *world) endpointManifest(name, place string, hostNetwork bool) string {
	return strings.NewReplacer("NAME", name, "NODE", w.Config().Name+"-"+place, "HOST", fmt.Sprint(hostNetwork), "IMAGE", lab.EchoImage).Replace(`
---
apiVersion: v1
kind: Pod
metadata: {name: NAME, namespace: default, labels: {endpoint: NAME}}
spec:
  nodeName: NODE
  hostNetwork: HOST
  terminationGracePeriodSeconds: 0
  containers: [{name: echo, image: IMAGE, imagePullPolicy: Never}]
---
apiVersion: v1
kind: Service
metadata: {name: NAME, namespace: default}
spec:
  selector: {endpoint: NAME}
  ports: [{port: 80, targetPort: 8080}]
`)
}

// answers sends one request to a web server.
func (l *laptop) answers(t *testing.T, address string) error {
	t.Helper()
	if r := l.run(t, "curl", "-sS", "-o", "/dev/null", "--max-time", "2", "http://"+address+"/"); r.code != 0 {
		return fmt.Errorf("%v", r)
	}
	return nil
}

// endpointsSuite uses Services whose endpoints are at different places, with and without netfilter tracking IPVS
// connections (kube-proxy enables tracking). Without tracking, the node's kernel does not masquerade, so an endpoint
// needs a route back to the traffic manager's pod. An endpoint outside of the cluster has none, and the pod drops
// packets from its own address as forged. The same holds for every pod of that node. docs/netstacks.md contains this
// table.
func endpointsSuite(t *testing.T, w *world) {
	endpoints := []struct {
		name      string
		untracked bool // whether the system netstack reaches it with net.ipv4.vs.conntrack=0
		gvisor    bool
	}{
		{"near", true, true},
		{"far", true, true},
		{"near-host", true, true},
		{"far-host", true, true},
		{"web", true, true},
		{"outside", false, true},
		{"self", false, false}, // the manager's filter drops connections to itself
	}
	// Test IPVS last, and with a new manager: for two minutes after a connection to a ClusterIP, its source port
	// cannot connect to the same endpoint directly, because IPVS takes the endpoint's answers for those of the
	// ClusterIP. A new manager pod has no such ports.
	w.kubectl(t, "-n", "kubevpn", "delete", "pod", "-l", "app.kubernetes.io/name=kubevpn", "--grace-period=0", "--force")
	gvisor := w.in("gvisor").newLaptop(t, lab.Admin)
	gvisor.connect(t)
	near, far := gvisor.managerPlace(t)
	c := gvisor.connection(t)
	w.apply(t, w.endpointManifest("near", near, false)+w.endpointManifest("far", far, false)+
		w.endpointManifest("near-host", near, true)+w.endpointManifest("far-host", far, true)+
		strings.NewReplacer("MANAGERS", c.ManagerNamespace, "OUTSIDE", w.Config().Families()[0].Outside.String()).Replace(`
---
apiVersion: v1
kind: Service
metadata: {name: outside, namespace: default}
spec:
  ports: [{name: http, port: 80}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: outside-1, namespace: default, labels: {kubernetes.io/service-name: outside}}
addressType: IPv4
ports: [{name: http, port: 80, protocol: TCP}]
endpoints: [{addresses: ["OUTSIDE"], conditions: {ready: true}}]
---
apiVersion: v1
kind: Service
metadata: {name: self, namespace: MANAGERS}
spec:
  selector: {app.kubernetes.io/name: kubevpn}
  ports: [{port: 80, targetPort: 8080}]
`))
	// A container beside the manager listens at the manager's own address.
	w.kubectl(t, "-n", c.ManagerNamespace, "debug", c.ManagerPod, "--image="+lab.EchoImage, "--image-pull-policy=Never", "--profile=restricted")
	w.kubectl(t, "wait", "--for=condition=Ready", "--timeout=120s", "pod/near", "pod/far", "pod/near-host", "pod/far-host")
	vip := func(name string) string {
		namespace := "default"
		if name == "self" {
			namespace = c.ManagerNamespace
		}
		return w.clusterIP(t, namespace, name)
	}
	w.afterwards(t, "node1", "sysctl -qw net.ipv4.vs.conntrack=1")
	try := func(l *laptop) {
		for _, conntrack := range []int{1, 0} {
			t.Run(fmt.Sprintf("%s/conntrack=%d", l.netstack, conntrack), func(t *testing.T) {
				w.conntrack(t, conntrack)
				for _, e := range endpoints {
					t.Run(e.name, func(t *testing.T) {
						want := e.gvisor
						if l.isSystem() {
							want = e.untracked || conntrack == 1
						}
						if !want {
							if err := l.answers(t, vip(e.name)); err == nil {
								t.Error("the endpoint answers, but docs/netstacks.md says that it cannot")
							}
							return
						}
						testenv.Eventually(t, time.Minute, func() error { return l.answers(t, vip(e.name)) })
						for range 3 { // try more than once
							if err := l.answers(t, vip(e.name)); err != nil {
								t.Error(err)
							}
						}
					})
				}
				for _, name := range []string{"near", "far"} {
					if err := l.answers(t, w.pods(t, "default", "endpoint="+name)[0].String()+":8080"); err != nil {
						t.Error(err)
					}
				}
				r := l.run(t, "dig", "+short", "+notcp", "+time=2", "+tries=1", "@"+w.clusterIP(t, "kube-system", "kube-dns"), "web.default.svc.cluster.local")
				if strings.TrimSpace(r.stdout) != w.clusterIP(t, "default", "web") {
					t.Errorf("cluster DNS over UDP: %v", r)
				}
			})
		}
	}
	try(gvisor)
	gvisor.must(t, "kubevpn", "disconnect", "--all")
	system := w.in("system").newLaptop(t, lab.Admin)
	system.connect(t)
	if now := system.connection(t).ManagerPod; now != c.ManagerPod {
		t.Fatalf("the traffic manager's pod is %s, and was %s", now, c.ManagerPod)
	}
	try(system)
}

// bridgeSuite uses a node whose pods share one bridge that bypasses netfilter. A pod then answers another pod of that
// node past IPVS, from its own address, which the client of the ClusterIP does not expect. With cluster DNS on that
// node, the system netstack fails the probe.
func bridgeSuite(t *testing.T, w *world) {
	const network = "/var/lib/lab-cni/10-lab.conflist"
	unsee := "if [ -e /proc/sys/net/bridge ]; then sysctl -qw net.bridge.bridge-nf-call-iptables=0; fi"
	anew := func(ctx context.Context) error { // cluster DNS and the manager restart on the new network of node 1
		for _, args := range [][]string{
			{"-n", "kubevpn", "delete", "pod", "-l", "app.kubernetes.io/name=kubevpn", "--grace-period=0", "--force"},
			{"-n", "kube-system", "rollout", "restart", "deployment/coredns"},
			{"-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=300s"},
		} {
			if _, err := w.tryKubectl(ctx, args...); err != nil {
				return err
			}
		}
		return nil
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if _, err := w.tryNode(ctx, "node1", `if [ -e %[1]s.was ]; then mv %[1]s.was %[1]s; fi; %s`, network, unsee); err != nil {
			t.Error(err)
		}
		if err := anew(ctx); err != nil {
			t.Error(err)
		}
		if _, err := w.tryNode(ctx, "node1", "ip link del cni0"); err != nil {
			t.Error(err)
		}
	})
	w.node(t, "node1", `%[2]s
		cp %[1]s %[1]s.was
		sed 's/"ptp"/"bridge", "bridge": "cni0", "isGateway": true/' %[1]s.was >%[1]s.new
		mv %[1]s.new %[1]s`, network, unsee)
	if err := anew(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.apply(t, w.endpointManifest("beside", "node1", false))
	w.kubectl(t, "wait", "--for=condition=Ready", "--timeout=120s", "pod/beside")
	reaches := func(t *testing.T, l *laptop) {
		t.Helper()
		for _, address := range []string{w.pods(t, "default", "endpoint=beside")[0].String() + ":8080", w.clusterIP(t, "default", "beside")} {
			testenv.Eventually(t, time.Minute, func() error { return l.answers(t, address) })
		}
	}
	system, gvisor := w.in("system").newLaptop(t, lab.Admin), w.in("gvisor").newLaptop(t, lab.Admin)
	before := system.snapshot(t)

	t.Run("system_reports_what_it_does_not_reach", func(t *testing.T) {
		failure{
			code: api.ExitNetstack, message: `the system netstack does not reach clusterIP [^;]*; dns .*kube-proxy: ipvs`, hint: "--netstack gvisor", within: 60 * time.Second,
		}.check(t, system.run(t, "kubevpn", "connect"))
		system.sameAs(t, before)
	})
	t.Run("gvisor_reaches_it", func(t *testing.T) {
		gvisor.connect(t)
		reaches(t, gvisor)
		gvisor.must(t, "kubevpn", "disconnect", "--all")
	})
	t.Run("system_reaches_it_with_br_netfilter", func(t *testing.T) {
		w.node(t, "node1", "modprobe br_netfilter; sysctl -qw net.bridge.bridge-nf-call-iptables=1")
		system.connect(t)
		reaches(t, system)
		system.must(t, "kubevpn", "disconnect", "--all")
	})
}

// leaveIPVS begins to leave IPVS as an administrator does: the ConfigMap states the new mode, which node 2 has. Both
// kube-proxies report their mode to other machines.
func (w *world) leaveIPVS(t *testing.T) {
	t.Helper()
	conf := w.kubectl(t, "-n", "kube-system", "get", "configmap", "kube-proxy", "-o", `jsonpath={.data.config\.conf}`)
	patch, err := json.Marshal(map[string]any{"data": map[string]string{"config.conf": strings.Replace(conf, "mode: ipvs", "mode: iptables", 1)}})
	if err != nil {
		t.Fatal(err)
	}
	w.kubectl(t, "-n", "kube-system", "patch", "configmap", "kube-proxy", "--patch", string(patch))
	for _, node := range w.nodes() {
		file := filepath.Join(w.Dir(), node, "kube-proxy.yaml")
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		text = append(text, "metricsBindAddress: 0.0.0.0:10249\n"...)
		if err := os.WriteFile(file, text, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := w.Restart(t.Context(), "kube-proxy-"+node); err != nil {
			t.Fatal(err)
		}
	}
}

// mixedSuite checks that the mode of kube-proxy on the traffic manager's node decides, because packets meet its rules,
// and that doctor names the modes of both nodes.
func mixedSuite(t *testing.T, w *world) {
	w.leaveIPVS(t)
	l := w.newLaptop(t, lab.Admin)
	l.connect(t) // creates the namespace
	l.must(t, "kubevpn", "disconnect", "--all")
	w.kubectl(t, "label", "namespace", "kubevpn", "pod-security.kubernetes.io/enforce=privileged", "--overwrite")
	for n, want := range []api.Connection{
		{ProxyMode: "ipvs", Netstack: api.NetstackGVisor, NetstackReason: "which end at the node"},
		{ProxyMode: "iptables", Netstack: api.NetstackSystem, NetstackReason: "by the ConfigMap kube-system/kube-proxy"},
	} {
		t.Run("manager_on_a_node_with_"+want.ProxyMode, func(t *testing.T) {
			own, other := w.Config().NodeName(n+1), w.Config().NodeName(2-n)
			w.kubectl(t, "cordon", other)
			defer w.kubectl(t, "uncordon", other)
			w.kubectl(t, "-n", "kubevpn", "delete", "pod", "-l", "app.kubernetes.io/name=kubevpn", "--grace-period=0", "--force")
			l.connect(t)
			c := l.connection(t)
			if at := w.kubectl(t, "-n", c.ManagerNamespace, "get", "pod", c.ManagerPod, "-o", "jsonpath={.spec.nodeName}"); at != own {
				t.Fatalf("the traffic manager is on %s, want %s", at, own)
			}
			if c.ProxyMode != want.ProxyMode || c.Netstack != want.Netstack || !strings.Contains(c.NetstackReason, want.NetstackReason) {
				t.Errorf("netstack %q because %q, proxy mode %q; want %q because of %q, %q", c.Netstack, c.NetstackReason, c.ProxyMode,
					want.Netstack, want.NetstackReason, want.ProxyMode)
			}
			l.reachesWeb(t, w)
			modes := fmt.Sprintf("iptables on %s, ipvs on %s; in the cluster's configuration it is iptables", w.Config().NodeName(2), w.Config().NodeName(1))
			if r := l.run(t, "kubevpn", "doctor"); !strings.Contains(strings.Join(strings.Fields(r.stdout), " "), modes) {
				t.Errorf("doctor does not say %q: %v", modes, r)
			}
			l.must(t, "kubevpn", "disconnect", "--all")
		})
	}
}
