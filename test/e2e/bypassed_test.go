//go:build e2e && linux

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// istioRules are the rules that istio-init 1.22 writes for IPv4 by default (`pilot-agent istio-iptables -p 15001 -z
// 15006 -u 1337 -m REDIRECT -i * -x "" -b * -d 15090,15021,15020`), except those for DNS.
const istioRules = `
*nat
:ISTIO_INBOUND - [0:0]
:ISTIO_REDIRECT - [0:0]
:ISTIO_IN_REDIRECT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A ISTIO_INBOUND -p tcp --dport 15008 -j RETURN
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A ISTIO_INBOUND -p tcp --dport 15090 -j RETURN
-A ISTIO_INBOUND -p tcp --dport 15021 -j RETURN
-A ISTIO_INBOUND -p tcp --dport 15020 -j RETURN
-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -o lo -s 127.0.0.6/32 -j RETURN
-A ISTIO_OUTPUT -o lo ! -d 127.0.0.1/32 -p tcp ! --dport 15008 -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -m owner ! --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -o lo ! -d 127.0.0.1/32 -p tcp ! --dport 15008 -m owner --gid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -m owner ! --gid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --gid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN
-A ISTIO_OUTPUT -j ISTIO_REDIRECT
COMMIT
`

// meshedShop is a workload whose pods belong to a mesh. The product's image runs iptables to write istioRules; the
// extensions that the image lacks come from the node.
const meshedShop = `
apiVersion: v1
kind: Namespace
metadata: {name: meshed-shop}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: rules, namespace: meshed-shop}
data:
  istio: RULES
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: shop, namespace: meshed-shop}
spec:
  replicas: 2
  selector: {matchLabels: {app: shop}}
  template:
    metadata: {labels: {app: shop}}
    spec:
      terminationGracePeriodSeconds: 1
      volumes:
      - {name: rules, configMap: {name: rules}}
      - {name: sbin, hostPath: {path: /usr/sbin}}
      - {name: lib, hostPath: {path: /usr/lib}}
      initContainers:
      - name: istio-init
        image: PRODUCT_IMAGE
        imagePullPolicy: Never
        command: [LOADER, /usr/sbin/xtables-nft-multi, iptables-restore, --noflush, /rules/istio]
        volumeMounts: [{name: rules, mountPath: /rules}, {name: sbin, mountPath: /usr/sbin}, {name: lib, mountPath: /usr/lib}]
        securityContext: {runAsUser: 0, runAsGroup: 0, capabilities: {drop: [ALL], add: [NET_ADMIN, NET_RAW]}}
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        ports: [{containerPort: 8080, name: http}, {containerPort: 9001, name: rawudp, protocol: UDP}]
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
      - name: istio-proxy
        image: APP_IMAGE
        imagePullPolicy: Never
        args: [-mesh]
        securityContext: {runAsUser: 1337, runAsGroup: 1337}
---
apiVersion: v1
kind: Service
metadata: {name: shop, namespace: meshed-shop}
spec:
  selector: {app: shop}
  ports: [{name: http, port: 80, targetPort: http}]
`

// bypassedSuite checks that proxy names whatever takes packets before the agent does, and undoes the intercept.
func bypassedSuite(t *testing.T, w *world) {
	l := w.newUser(t, lab.Admin)
	w.loadApp(t)
	l.startApp(t, "laptop")
	v := w.visitor(t)
	l.connect(t)
	t.Run("host_network_is_rejected", func(t *testing.T) { bypassedByHostNetwork(t, l) })
	t.Run("service_mesh_is_reported", func(t *testing.T) { bypassedByMesh(t, l, v) })
	t.Run("packets_past_netfilter_are_reported", func(t *testing.T) { bypassedByNetwork(t, l, v) })
}

// undone checks that a failed intercept left nothing, and that the pods answer themselves.
func (s *shop) undone(t *testing.T, l *laptop, v *visitor) {
	t.Helper()
	if now := l.status(t).Intercepts; len(now) != 0 {
		t.Errorf("%+v", now)
	}
	if err := s.everyPod(t, func(ip string) error { return v.want("http://"+net.JoinHostPort(ip, "8080")+"/", "a pod", mine, me) }); err != nil {
		t.Error(err)
	}
	for name, ip := range s.ready(t) {
		in := s.placeOf(t, netip.MustParseAddr(ip))
		testenv.Eventually(t, soon, func() error {
			if rules := in.must(t, "nft", "list", "ruleset"); strings.Contains(rules, "kubevpn") && strings.Contains(rules, "elements") {
				return fmt.Errorf("pod %s still redirects: %s", name, rules)
			}
			return nil
		})
	}
}

func bypassedByHostNetwork(t *testing.T, l *laptop) {
	l.apply(t, strings.NewReplacer("APP_IMAGE", appRef).Replace(`
apiVersion: v1
kind: Namespace
metadata: {name: node-shop}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: shop, namespace: node-shop}
spec:
  selector: {matchLabels: {app: shop}}
  template:
    metadata: {labels: {app: shop}}
    spec:
      hostNetwork: true
      terminationGracePeriodSeconds: 1
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        ports: [{containerPort: 8080, name: http}]
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
`))
	l.kubectl(t, "-n", "node-shop", "rollout", "status", "deployment/shop", "--timeout=120s")
	pod := strings.TrimPrefix(l.kubectl(t, "-n", "node-shop", "get", "pods", "-o", "name"), "pod/")
	for _, workload := range []string{"deployment/shop", "pod/" + pod} {
		failure{code: api.ExitWorkload, message: "hostNetwork", hint: "network of their own"}.
			check(t, l.run(t, "kubevpn", "proxy", workload, "-n", "node-shop", "--headers", mine+"="+me))
	}
	if agents := l.kubectl(t, "-n", "node-shop", "get", "pods", "-o", "jsonpath={.items[*].spec.ephemeralContainers}"); agents != "" {
		t.Errorf("agents were added to pods with hostNetwork: %s", agents)
	}
	if now := l.status(t).Intercepts; len(now) != 0 {
		t.Errorf("%+v", now)
	}
}

func bypassedByMesh(t *testing.T, l *laptop, v *visitor) {
	// The node's iptables, since the product's image lacks the extensions that a mesh uses. It needs its own libraries.
	loader, err := filepath.Glob("/usr/lib/*/ld-linux-*.so.*")
	if err != nil || len(loader) == 0 {
		t.Fatalf("no dynamic loader in /usr/lib: %v", err)
	}
	rules, err := json.Marshal(istioRules)
	if err != nil {
		t.Fatal(err)
	}
	l.apply(t, strings.NewReplacer("APP_IMAGE", appRef, "PRODUCT_IMAGE", imageRef, "LOADER", loader[0], "RULES", string(rules)).Replace(meshedShop))
	s := &shop{world: l.world, namespace: "meshed-shop", workload: "deployment/shop"}
	t.Cleanup(func() {
		if t.Failed() {
			ctx := context.WithoutCancel(t.Context())
			t.Log(s.tryKubectl(ctx, "-n", s.namespace, "describe", "pods"))
			t.Log(s.tryKubectl(ctx, "-n", s.namespace, "logs", "-l", "app=shop", "-c", "istio-init"))
		}
	})
	s.rolledOut(t)
	meshed := func(t *testing.T) {
		t.Helper()
		for name, ip := range s.ready(t) {
			a, err := v.ask("GET", "http://"+net.JoinHostPort(ip, "8080")+"/", nil, mine, me)
			if from, _, _ := net.SplitHostPort(a.Remote); err != nil || a.Name != name || from != "127.0.0.6" {
				t.Errorf("pod %s does not answer through its mesh: %+v, %v", name, a, err)
			}
		}
	}
	meshed(t)
	before := s.template(t)

	t.Run("ephemeral_agent_is_removed_again", func(t *testing.T) {
		failure{code: api.ExitIntercept, message: "did not reach the agent", hint: "(?s)service mesh, Istio.*istio-proxy.*undone", within: 15 * time.Second}.
			check(t, l.run(t, "kubevpn", "proxy", s.workload, "-n", s.namespace, "--headers", mine+"="+me, "--port", "8080:8080"))
		s.undone(t, l, v)
		meshed(t)
	})
	t.Run("several_causes_are_reported", func(t *testing.T) {
		l.apply(t, `
apiVersion: v1
kind: ConfigMap
metadata: {name: cilium-config, namespace: kube-system}
data: {kube-proxy-replacement: "true", enable-host-legacy-routing: "false"}
`)
		failure{code: api.ExitIntercept, message: "did not reach the agent", hint: "(?s)service mesh, Istio.*Cilium.*undone", within: 15 * time.Second}.
			check(t, l.run(t, "kubevpn", "proxy", s.workload, "-n", s.namespace, "--headers", mine+"="+me, "--port", "8080:8080"))
		s.undone(t, l, v)
		meshed(t)
	})
	t.Run("udp_is_intercepted_despite_the_mesh", func(t *testing.T) {
		l.proxy(t, s, "--port", "udp/9001")
		defer l.leave(t, s)
		for name, ip := range s.ready(t) {
			if got, err := v.datagram(net.JoinHostPort(ip, "9001"), "hi"); err != nil || got != "laptop: hi" {
				t.Errorf("pod %s: %q, %v", name, got, err)
			}
		}
		for _, c := range l.intercept(t).Checks {
			if !c.OK || !strings.HasPrefix(c.Target, "udp ") {
				t.Errorf("%+v", c)
			}
		}
	})
	t.Run("sidecar_is_intercepted_despite_the_mesh", func(t *testing.T) {
		l.proxy(t, s, "--headers", mine+"="+me, "--port", "8080:8080", "--mode", "sidecar")
		defer l.must(t, "kubevpn", "leave", "--all")
		testenv.Eventually(t, time.Minute, func() error { // kube-proxy learns of the new pods later
			for want, header := range map[string]string{`"name":"laptop"`: mine + ": " + me, `"name":"shop-`: mine + ": nobody"} {
				if r := l.run(t, "curl", "-sS", "--max-time", "1", "-H", header, "http://shop."+s.namespace+"/"); !strings.Contains(r.stdout, want) {
					return fmt.Errorf("want %s: %v", want, r)
				}
			}
			return nil
		})
		l.leave(t, s)
		s.rolledOut(t)
		if after := s.template(t); after != before {
			t.Errorf("the template was\n%s\nand is\n%s", before, after)
		}
		meshed(t)
	})
}

// bypassedByNetwork disables connection tracking for packets to the application, as a network plugin does that bypasses
// netfilter's NAT.
func bypassedByNetwork(t *testing.T, l *laptop, v *visitor) {
	s := l.newShop(t, "passed-shop", "privileged")
	bypass := func(t *testing.T, rules string) {
		t.Helper()
		for _, ip := range s.ready(t) {
			s.placeOf(t, netip.MustParseAddr(ip)).must(t, "sh", "-c", `printf '%s' "$1" | nft -f -`, "sh", rules)
		}
	}
	bypass(t, "table inet passed { chain c { type filter hook prerouting priority raw; iifname eth0 notrack; }; }")
	for what, port := range map[string]string{"tcp": "8080", "udp": "udp/9001"} {
		t.Run(what, func(t *testing.T) {
			args := []string{"kubevpn", "proxy", s.workload, "-n", s.namespace, "--port", port}
			failure{code: api.ExitIntercept, message: "did not reach the agent", hint: "(?s)bypass.*netfilter.*network plugin.*undone", within: 15 * time.Second}.check(t, l.run(t, args...))
			s.undone(t, l, v)
		})
	}
	bypass(t, "delete table inet passed")
	l.proxy(t, s, "--headers", mine+"="+me)
	s.taken(t, v, soon)
	l.leave(t, s)
}
