//go:build e2e && linux

package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// servicesSuite checks that ClusterIPs behave as with kube-proxy, in any mode of kube-proxy.
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

	t.Run("session_affinity_keeps_one_pod", func(t *testing.T) {
		hosts := map[string]bool{}
		for range 8 {
			testenv.Eventually(t, time.Minute, func() error { // IPVS once refused a new Service after its first answer
				e, err := l.get(t, "http://"+vip("sticky")+"/")
				if err == nil {
					hosts[e.Host] = true
				}
				return err
			})
		}
		if len(hosts) != 1 {
			t.Errorf("one laptop went to %v", hosts)
		}
	})
	t.Run("no_endpoints_is_refused", func(t *testing.T) {
		// Until kube-proxy knows the new Service, the node looks for a route to its ClusterIP.
		testenv.Eventually(t, time.Minute, func() error {
			r := l.run(t, "nc", "-v", "-w", "5", vip("nobody"), "80")
			if r.code == 0 || !strings.Contains(r.stderr, "refused") {
				return fmt.Errorf("not refused: %v", r)
			}
			return nil
		})
	})
	t.Run("internal_traffic_policy_local_is_kept", func(t *testing.T) {
		// In the system netstack kube-proxy chooses, and refuses until it knows the endpoints of the new Service.
		testenv.Eventually(t, time.Minute, func() error { _, err := l.get(t, "http://"+vip("here")+"/"); return err })
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
	if !w.isSystem() { // in the system netstack, kube-proxy chooses
		t.Run("source_hash", func(t *testing.T) { sourceHash(t, w, l) })
	}
	t.Run("requests_succeed_while_endpoints_change", func(t *testing.T) {
		deploy := w.kubectl(t, "get", "deployment", "web", "-o", "jsonpath={.spec.template.spec.containers[0].image}")
		// The traffic manager stops choosing a pod when the pod starts to terminate. In the system netstack, kube-proxy
		// chooses and learns of it later on a busy machine: there a pod ends some seconds later, as Kubernetes advises for a
		// rollout without errors. In a guest kube-proxy is later still.
		grace, lifecycle := "1", "{}"
		switch {
		case w.isSystem() && w.Config().ProxyMode == lab.ProxyIPVS:
			grace, lifecycle = "31", "{preStop: {sleep: {seconds: 30}}}"
		case w.isSystem():
			grace, lifecycle = "6", "{preStop: {sleep: {seconds: 5}}}"
		}
		w.apply(t, strings.NewReplacer("IMAGE", deploy, "GRACE", grace, "LIFECYCLE", lifecycle).Replace(`
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
      terminationGracePeriodSeconds: GRACE
      tolerations: [{operator: Exists}] # a cordoned node may take them: it has time
      containers:
      - name: echo
        image: IMAGE
        imagePullPolicy: Never
        ports: [{containerPort: 8080, name: http}]
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
        lifecycle: LIFECYCLE
`))
		w.kubectl(t, "rollout", "status", "deployment/moving", "--timeout=120s")
		testenv.Eventually(t, time.Minute, func() error { _, err := l.get(t, "http://"+vip("moving")+"/"); return err })
		w.kubectl(t, "rollout", "restart", "deployment/moving")
		hosts, failed := map[string]int{}, []error{}
		rolledOut := make(chan error, 1)
		go func() {
			_, err := w.tryKubectl(t.Context(), "rollout", "status", "deployment/moving", "--timeout=120s")
			rolledOut <- err
		}()
		// kube-proxy learns of the new pods at any time after the rollout.
		last := time.Now().Add(time.Minute)
		for n, waits := 0, true; waits || len(hosts) < 4 && time.Now().Before(last); n++ {
			e, err := l.get(t, "http://"+vip("moving")+"/")
			if err != nil {
				failed = append(failed, fmt.Errorf("request %d: %w", n, err))
			} else {
				hosts[e.Host]++
			}
			select {
			case err := <-rolledOut:
				if err != nil {
					t.Error(err)
				}
				waits = false
			default:
			}
		}
		t.Logf("requests by pod: %v", hosts)
		// A request may be in flight to a pod that ends. kube-proxy in a guest may learn of it some seconds later still.
		most := 1
		if w.isSystem() && w.Config().ProxyMode == lab.ProxyIPVS {
			most = 10
		}
		if len(hosts) < 4 || len(failed) > most {
			t.Errorf("pods %v; failures: %v", hosts, failed)
		}
	})
}

// sourceHash checks that a laptop that asks for the scheduler sh keeps one pod.
func sourceHash(t *testing.T, w *world, l *laptop) {
	other := w.newLaptop(t, lab.Admin)
	l.must(t, "kubevpn", "disconnect", "--all") // both laptops would route the same networks
	other.connect(t, "--scheduler", "sh")
	if hosts := other.hosts(t, "http://web/", 6); len(hosts) != 1 {
		t.Errorf("the same laptop went to %v", hosts)
	}
	other.must(t, "kubevpn", "disconnect", "--all")
	l.must(t, "kubevpn", "connect") // connected until the end of the suite, not of this test
}
