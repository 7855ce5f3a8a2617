//go:build e2e && linux

package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/lab"
	"kubevpn/internal/testenv"
)

// servicesSuite: ClusterIPs behave as kube-proxy would have them behave, whatever kube-proxy does here.
func servicesSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	l.connect(t)
	w.apply(t, `
apiVersion: v1
kind: Service
metadata: {name: sticky, namespace: default}
spec:
  selector: {app: web}
  sessionAffinity: ClientIP
  ports: [{name: http, port: 80, targetPort: http}]
---
apiVersion: v1
kind: Service
metadata: {name: nobody, namespace: default}
spec:
  selector: {app: nobody}
  ports: [{port: 80}]
---
apiVersion: v1
kind: Service
metadata: {name: moving, namespace: default}
spec:
  selector: {app: moving}
  ports: [{port: 80, targetPort: http}]
---
apiVersion: v1
kind: Service
metadata: {name: here, namespace: default}
spec:
  selector: {app: web}
  internalTrafficPolicy: Local
  ports: [{port: 80, targetPort: http}]
`)
	vip := func(name string) string { return w.clusterIP(t, "default", name) }

	t.Run("session_affinity", func(t *testing.T) {
		testenv.Eventually(t, 10*time.Second, func() error { _, err := l.get(t, "http://"+vip("sticky")+"/"); return err })
		if hosts := l.hosts(t, "http://"+vip("sticky")+"/", 8); len(hosts) != 1 {
			t.Errorf("one laptop went to %v", hosts)
		}
	})
	t.Run("no_endpoints_is_refused", func(t *testing.T) {
		r := l.run(t, "nc", "-v", "-w", "5", vip("nobody"), "80")
		if r.code == 0 || !strings.Contains(r.stderr, "refused") {
			t.Error(r)
		}
	})
	t.Run("internal_traffic_policy_local", func(t *testing.T) {
		node := w.kubectl(t, "-n", l.connection(t).ManagerNamespace, "get", "pod", l.connection(t).ManagerPod, "-o", "jsonpath={.spec.nodeName}")
		for range 4 {
			e, err := l.get(t, "http://"+vip("here")+"/")
			if err != nil {
				t.Fatal(err)
			}
			if got := w.kubectl(t, "get", "pod", e.Host, "-o", "jsonpath={.spec.nodeName}"); got != node {
				t.Errorf("answered on %s, the traffic manager is on %s", got, node)
			}
		}
	})
	if !w.isSystem() { // there kube-proxy chooses
		t.Run("source_hash", func(t *testing.T) { sourceHash(t, w, l) })
	}
	t.Run("endpoints_change_under_load", func(t *testing.T) {
		deploy := w.kubectl(t, "get", "deployment", "web", "-o", "jsonpath={.spec.template.spec.containers[0].image}")
		w.apply(t, strings.ReplaceAll(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: moving, namespace: default}
spec:
  replicas: 3
  strategy: {rollingUpdate: {maxUnavailable: 0, maxSurge: 1}}
  selector: {matchLabels: {app: moving}}
  template:
    metadata: {labels: {app: moving}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: echo
        image: IMAGE
        imagePullPolicy: Never
        ports: [{containerPort: 8080, name: http}]
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
`, "IMAGE", deploy))
		w.kubectl(t, "rollout", "status", "deployment/moving", "--timeout=60s")
		testenv.Eventually(t, 10*time.Second, func() error { _, err := l.get(t, "http://"+vip("moving")+"/"); return err })
		w.kubectl(t, "rollout", "restart", "deployment/moving")
		hosts, failed := map[string]int{}, []error{}
		deadline := time.Now().Add(12 * time.Second)
		for n := 0; time.Now().Before(deadline); n++ {
			e, err := l.get(t, "http://"+vip("moving")+"/")
			if err != nil {
				failed = append(failed, fmt.Errorf("request %d: %w", n, err))
			}
			hosts[e.Host]++
		}
		w.kubectl(t, "rollout", "status", "deployment/moving", "--timeout=60s")
		t.Logf("requests by pod: %v", hosts)
		// A pod that is told to end may still be asked by someone who has not heard: one in a rollout of three. In the
		// system netstack it is kube-proxy who has not heard, and does not try another pod: one for each pod that goes,
		// and more of them in a guest, where kube-proxy hears later.
		most := 1
		switch {
		case w.isSystem() && w.Config().ProxyMode == lab.ProxyIPVS:
			most = 10
		case w.isSystem():
			most = 3
		}
		if len(hosts) < 4 || len(failed) > most {
			t.Errorf("pods %v; failures: %v", hosts, failed)
		}
	})
}

// sourceHash: a laptop that asks for the scheduler sh stays with one pod.
func sourceHash(t *testing.T, w *world, l *laptop) {
	other := w.newLaptop(t, lab.Admin)
	l.must(t, "kubevpn", "disconnect", "--all") // one laptop: both would route the same networks
	other.connect(t, "--scheduler", "sh")
	if hosts := other.hosts(t, "http://web/", 6); len(hosts) != 1 {
		t.Errorf("the same laptop went to %v", hosts)
	}
	other.must(t, "kubevpn", "disconnect", "--all")
	l.must(t, "kubevpn", "connect") // until the suite's end, not this test's
}
