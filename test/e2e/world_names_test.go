//go:build e2e && linux

package e2e

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"kubevpn/internal/testenv"
)

// worldNamesManifest has two namespaces with a Service of the same name, and Services that lead out of the cluster.
const worldNamesManifest = `
apiVersion: v1
kind: Namespace
metadata: {name: names-a}
---
apiVersion: v1
kind: Namespace
metadata: {name: names-b}
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: names-a}
spec: {ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: names-b}
spec: {ports: [{port: 80}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: idle, namespace: names-a}
spec:
  replicas: 0
  selector: {matchLabels: {app: idle}}
  template:
    metadata: {labels: {app: idle}}
    spec:
      dnsConfig: {searches: [default.svc.cluster.local], options: [{name: ndots, value: "4"}]}
      containers: [{name: app, image: APP_IMAGE, imagePullPolicy: Never}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: idle, namespace: names-b}
spec:
  replicas: 0
  selector: {matchLabels: {app: idle}}
  template:
    metadata: {labels: {app: idle}}
    spec:
      containers: [{name: app, image: APP_IMAGE, imagePullPolicy: Never}]
---
apiVersion: v1
kind: Service
metadata: {name: alias, namespace: names-a}
spec: {type: ExternalName, externalName: db.corp.test}
---
apiVersion: v1
kind: Service
metadata: {name: chain, namespace: names-a}
spec: {type: ExternalName, externalName: alias.names-a.svc.cluster.local.}
---
apiVersion: v1
kind: Service
metadata: {name: by-hand, namespace: names-a}
spec: {clusterIP: None, ports: [{name: http, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: by-hand-1, namespace: names-a, labels: {kubernetes.io/service-name: by-hand}}
addressType: IPv4
ports: [{name: http, port: 80}]
endpoints: [{addresses: [10.95.0.7], hostname: first}]
---
apiVersion: v1
kind: Service
metadata: {name: virtual, namespace: names-a}
spec: {ports: [{name: http, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: virtual-1, namespace: names-a, labels: {kubernetes.io/service-name: virtual}}
addressType: IPv4
ports: [{name: http, port: 80}]
endpoints: [{addresses: [10.95.0.7]}]
---
apiVersion: v1
kind: Service
metadata: {name: here, namespace: names-a}
spec: {clusterIP: None, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: here-1, namespace: names-a, labels: {kubernetes.io/service-name: here}}
addressType: IPv4
ports: [{port: 80}]
endpoints: [{addresses: [GATEWAY]}]
`

// worldNames checks that names and addresses mean what they mean in the pod.
func worldNames(t *testing.T, w *world, l *laptop) {
	gateway := strings.Fields(l.must(t, "ip", "-4", "route", "show", "default"))[2]
	w.serveBehind(t)
	w.apply(t, strings.NewReplacer("APP_IMAGE", appRef, "GATEWAY", gateway).Replace(worldNamesManifest))
	t.Run("services_that_lead_out_of_the_cluster", func(t *testing.T) { worldBehind(t, l, gateway) })
	t.Run("short_names_belong_to_the_workload", func(t *testing.T) { worldShortNames(t, l) })
}

// worldShortNames runs programs in two namespaces at once, beside a connection whose namespace is default.
func worldShortNames(t *testing.T, l *laptop) {
	a, b, web := l.clusterIP(t, "names-a", "db"), l.clusterIP(t, "names-b", "db"), l.clusterIP(t, "default", "web")
	var runs sync.WaitGroup
	defer runs.Wait()
	for _, tt := range []struct{ namespace, name, want string }{
		{"names-a", "db", a}, {"names-b", "db", b}, // the same name, at once
		{"names-a", "db.names-b", b}, {"names-b", "db.names-a.svc", a}, {"names-b", "db.names-a.svc.cluster.local", a},
		{"names-a", "web", web}, // by the pod's dnsConfig
		{"names-b", "web", ""},  // as in a pod, although the connection's namespace has it
		{"names-b", "www.outside.test", l.must(t, "dig", "+short", "www.outside.test")},
	} {
		runs.Go(func() {
			r := l.run(t, "kubevpn", "dev", "deployment/idle", "-n", tt.namespace, "--", "getent", "ahostsv4", tt.name)
			got, _, _ := strings.Cut(r.stdout, " ")
			if got != tt.want {
				t.Errorf("%s in %s is %q, want %q: %v", tt.name, tt.namespace, got, tt.want, r)
			}
		})
	}
	if out := l.must(t, "getent", "ahostsv4", "web"); !strings.HasPrefix(out, web+" ") {
		t.Errorf("beside the programs, web is %s", out)
	}
}

// worldBehind reaches a host that only nodes and pods reach, by the names of Services, and not one of the laptop's own
// network.
func worldBehind(t *testing.T, l *laptop, gateway string) {
	for _, name := range []string{"alias", "chain", "by-hand", "first.by-hand", "virtual"} {
		url := "http://" + name + ".names-a.svc/"
		testenv.Eventually(t, soon, func() error {
			if r := l.run(t, "curl", "-sS", "--max-time", "5", url); r.stdout != "behind" {
				return fmt.Errorf("%s: %v", url, r)
			}
			return nil
		})
	}
	if r := l.run(t, "kubevpn", "why", "http://by-hand.names-a/"); r.code != 0 {
		t.Errorf("%v", r)
	}
	if r := l.run(t, "kubevpn", "run", "--socks", "127.0.0.1:0", "--", "curl", "-sS", "--max-time", "20",
		"http://alias.names-a.svc/"); r.stdout != "behind" {
		t.Errorf("by the proxy: %v", r)
	}
	if r := l.run(t, "getent", "ahostsv4", "here.names-a.svc"); r.code == 0 {
		t.Errorf("a Service has the address of the laptop's gateway: %v", r)
	}
	says := "here.names-a.svc.cluster.local leads to " + gateway
	if out := l.must(t, "kubevpn", "status"); !strings.Contains(out, says) || !strings.Contains(out, "--exclude-cidr "+gateway) {
		t.Errorf("the status does not say that %s:\n%s", says, out)
	}
	if r := l.run(t, "kubevpn", "why", "http://here.names-a.svc/"); !strings.Contains(r.stdout+r.stderr, gateway) {
		t.Errorf("%v", r)
	}
}
