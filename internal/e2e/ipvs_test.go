//go:build e2e && linux

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/lab"
	"kubevpn/internal/testenv"
)

// TestIPVS is the scene that kubevpn was made for: kube-proxy in IPVS mode, on nodes whose kernel has it.
func TestIPVS(t *testing.T) {
	w := newWorld(t, lab.Config{Name: "e2e-ipvs", ProxyMode: lab.ProxyIPVS})
	t.Run("kube-proxy", func(t *testing.T) {
		out := w.node(t, "node1", "ipvsadm -Ln")
		if vip := w.clusterIP(t, "default", "web"); !strings.Contains(out, vip+":80 rr") {
			t.Fatalf("the node's virtual servers lack %s:\n%s", vip, out)
		}
		t.Logf("ipvsadm -Ln:\n%s", out)
		for _, place := range w.nodes() {
			if got := w.node(t, place, "sysctl -n net.ipv4.vs.conntrack"); got != "1" {
				t.Errorf("%s has net.ipv4.vs.conntrack=%s, which kube-proxy sets to 1 when it starts", place, got)
			}
		}
	})
	t.Run("auto", func(t *testing.T) {
		l := w.newLaptop(t, lab.Admin)
		l.connect(t)
		if c := l.connection(t); c.Netstack != api.NetstackGVisor || c.ProxyMode != "ipvs" || !strings.Contains(c.NetstackReason, "IPVS") {
			t.Errorf("netstack %q because %q, proxy mode %q", c.Netstack, c.NetstackReason, c.ProxyMode)
		}
	})
	t.Run("gvisor", func(t *testing.T) {
		// It asks IPVS nothing: what a stream is faithful to is the same as with any kube-proxy, and checked there.
		runSuites(t, w.in("gvisor"), slices.DeleteFunc(slices.Clone(everywhere), func(s suite) bool { return s.name == "faithful" }))
	})
	t.Run("system", func(t *testing.T) { runSuites(t, w.in("system"), everywhere, whole) })
	t.Run("endpoints", func(t *testing.T) { endpointsSuite(t, w) })
	t.Run("masquerade_on_the_node", func(t *testing.T) { masqueradeOnNode(t, w) })
	t.Run("bridge", func(t *testing.T) { bridgeSuite(t, w) }) // the last: it changes a node's pod network
}

// nodes are the places of the lab's nodes.
func (w *world) nodes() (places []string) {
	for n := range w.Config().Nodes {
		places = append(places, fmt.Sprintf("node%d", n+1))
	}
	return places
}

// node runs a shell script on a node and returns what it printed.
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

// afterwards runs a script on a node when the test has ended.
func (w *world) afterwards(t *testing.T, place, script string, args ...any) {
	t.Helper()
	t.Cleanup(func() {
		if _, err := w.tryNode(context.WithoutCancel(t.Context()), place, script, args...); err != nil {
			t.Error(err)
		}
	})
}

// conntrack sets whether the nodes' IPVS has netfilter track its connections.
func (w *world) conntrack(t *testing.T, value int) {
	t.Helper()
	for _, place := range w.nodes() {
		w.node(t, place, "sysctl -qw net.ipv4.vs.conntrack=%d", value)
	}
}

// managerPlace is the node that the laptop's traffic manager runs on, and another.
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

// endpointManifest is a pod on a node, and a Service that has no other endpoint.
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

// answers asks a web server once.
func (l *laptop) answers(t *testing.T, address string) error {
	t.Helper()
	if r := l.run(t, "curl", "-sS", "-o", "/dev/null", "--max-time", "2", "http://"+address+"/"); r.code != 0 {
		return fmt.Errorf("%v", r)
	}
	return nil
}

// endpointsSuite: Services whose endpoint is anywhere, with IPVS's connections tracked by netfilter, as kube-proxy has it,
// and not. Where not, the node's kernel masquerades none of them, and an endpoint has to have a way back to the
// traffic manager's pod: one outside of the cluster has none, and the pod itself takes packets from its own address for
// forged. It is the same for every pod of that node. The table is that of docs/netstacks.md.
func endpointsSuite(t *testing.T, w *world) {
	endpoints := []struct {
		name      string
		untracked bool // the system netstack reaches it with net.ipv4.vs.conntrack=0 too
		gvisor    bool
	}{
		{"near", true, true},
		{"far", true, true},
		{"near-host", true, true},
		{"far-host", true, true},
		{"web", true, true},
		{"outside", false, true},
		{"self", false, false}, // through the manager nobody reaches the manager itself: see its filter
	}
	// By way of IPVS last, and with a manager of which IPVS knows nothing: for two minutes a port that a pod had for a
	// connection to a ClusterIP is no good to it for one to the same endpoint itself (IPVS takes the endpoint's answers for
	// those of the ClusterIP), and a port is as easily the same as not.
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
	// What listens at the manager's own address: a container beside it.
	w.kubectl(t, "-n", c.ManagerNamespace, "debug", c.ManagerPod, "--image="+lab.EchoImage, "--image-pull-policy=Never", "--profile=general")
	w.kubectl(t, "wait", "--for=condition=Ready", "--timeout=30s", "pod/near", "pod/far", "pod/near-host", "pod/far-host")
	vip := func(name string) string {
		namespace := "default"
		if name == "self" {
			namespace = c.ManagerNamespace
		}
		return w.clusterIP(t, namespace, name)
	}
	t.Cleanup(func() {
		for _, place := range w.nodes() {
			if _, err := w.tryNode(context.WithoutCancel(t.Context()), place, "sysctl -qw net.ipv4.vs.conntrack=1"); err != nil {
				t.Error(err)
			}
		}
	})
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
								t.Error("it answers, and docs/netstacks.md says that it cannot")
							}
							return
						}
						testenv.Eventually(t, 10*time.Second, func() error { return l.answers(t, vip(e.name)) })
						for range 3 { // each of several
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

// masqueradeOnNode: why kubevpn does not masquerade there. Who has addresses that the cluster does not route, and leaves
// a node by way of its rules, reaches pods; Services on other nodes only as long as netfilter tracks what IPVS sends.
func masqueradeOnNode(t *testing.T, w *world) {
	// A tunnel's end on node 1, and in a namespace behind it who comes out of the tunnel.
	w.afterwards(t, "node1", `
		iptables -w -t nat -D POSTROUTING -s 192.168.77.0/24 ! -o tunnel -j MASQUERADE
		ip link del tunnel; ip netns del behind; sysctl -qw net.ipv4.vs.conntrack=1`)
	w.node(t, "node1", `
		ip netns add behind
		ip link add tunnel type veth peer name eth0 netns behind
		ip addr add 192.168.77.1/24 dev tunnel
		ip link set tunnel up
		ip -n behind addr add 192.168.77.2/24 dev eth0
		ip -n behind link set eth0 up
		ip -n behind route add default via 192.168.77.1
		iptables -w -t nat -A POSTROUTING -s 192.168.77.0/24 ! -o tunnel -j MASQUERADE`)
	w.apply(t, w.endpointManifest("there", "node2", false))
	w.kubectl(t, "wait", "--for=condition=Ready", "--timeout=30s", "pod/there")
	pod, vip := w.pods(t, "default", "endpoint=there")[0].String(), w.clusterIP(t, "default", "there")
	get := func(address string) error {
		_, err := w.tryNode(t.Context(), "node1", "ip netns exec behind curl -sS -o /dev/null --max-time 2 http://%s/", address)
		return err
	}
	testenv.Eventually(t, 10*time.Second, func() error { return get(vip) }) // tracked, both
	if err := get(pod + ":8080"); err != nil {
		t.Error(err)
	}
	w.conntrack(t, 0)
	if err := get(vip); err == nil {
		t.Error("what IPVS sends is masqueraded though nothing tracks it")
	}
	t.Logf("ipvsadm -Lnc:\n%s", w.node(t, "node1", "ipvsadm -Lnc | grep -e Expire -e %s:80", vip))
	if err := get(pod + ":8080"); err != nil {
		t.Error(err)
	}
	w.conntrack(t, 1)
	testenv.Eventually(t, 10*time.Second, func() error { return get(vip) })
}

// bridgeSuite: a node whose pods are ports of one bridge that does not show netfilter what it carries. A pod answers
// another of that node past IPVS, from its own address, and whoever asked the ClusterIP does not know it. With cluster DNS
// there the system netstack does not reach what the canary asks for.
func bridgeSuite(t *testing.T, w *world) {
	const network = "/var/lib/lab-cni/10-lab.conflist"
	unsee := "if [ -e /proc/sys/net/bridge ]; then sysctl -qw net.bridge.bridge-nf-call-iptables=0; fi"
	anew := func(ctx context.Context) error { // cluster DNS and the manager, by the network that node 1 has
		for _, args := range [][]string{
			{"-n", "kubevpn", "delete", "pod", "-l", "app.kubernetes.io/name=kubevpn", "--grace-period=0", "--force"},
			{"-n", "kube-system", "rollout", "restart", "deployment/coredns"},
			{"-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=60s"},
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
		for n := range w.nodes() {
			if _, err := w.tryKubectl(ctx, "uncordon", w.Config().NodeName(n+1)); err != nil {
				t.Error(err)
			}
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
	for n := range w.nodes()[1:] {
		w.kubectl(t, "cordon", w.Config().NodeName(n+2))
	}
	if err := anew(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.apply(t, w.endpointManifest("beside", "node1", false))
	w.kubectl(t, "wait", "--for=condition=Ready", "--timeout=30s", "pod/beside")
	reaches := func(t *testing.T, l *laptop) {
		t.Helper()
		for _, address := range []string{w.pods(t, "default", "endpoint=beside")[0].String() + ":8080", w.clusterIP(t, "default", "beside")} {
			testenv.Eventually(t, 10*time.Second, func() error { return l.answers(t, address) })
		}
	}
	system, gvisor := w.in("system").newLaptop(t, lab.Admin), w.in("gvisor").newLaptop(t, lab.Admin)
	before := system.snapshot(t)

	t.Run("system_says_so", func(t *testing.T) {
		failure{
			code: api.ExitNetstack, message: `the system netstack does not reach clusterIP [^;]*; dns .*kube-proxy: ipvs`, hint: "--netstack gvisor", within: 60 * time.Second,
		}.check(t, system.run(t, "kubevpn", "connect"))
		system.sameAs(t, before)
	})
	t.Run("gvisor_works", func(t *testing.T) {
		gvisor.connect(t)
		reaches(t, gvisor)
		gvisor.must(t, "kubevpn", "disconnect", "--all")
	})
	t.Run("system_with_br_netfilter", func(t *testing.T) {
		w.node(t, "node1", "modprobe br_netfilter; sysctl -qw net.bridge.bridge-nf-call-iptables=1")
		system.connect(t)
		reaches(t, system)
		system.must(t, "kubevpn", "disconnect", "--all")
	})
}
