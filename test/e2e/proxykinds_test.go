//go:build e2e && linux

package e2e

import (
	"net"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/test/lab"
)

// container is the application's container, in every kind of workload.
const container = `
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        ports: [{containerPort: 8080, name: web}, {containerPort: 9001, name: raw}]
        readinessProbe: {httpGet: {path: /, port: web}, periodSeconds: 1}`

// kinds contains workloads of every kind. Kubernetes does not know the last: like Argo's Rollout, it has a pod
// template and a selector, and another controller creates its pods.
const kinds = `
apiVersion: v1
kind: Namespace
metadata: {name: kinds}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: store, namespace: kinds}
spec:
  serviceName: store
  replicas: 2
  podManagementPolicy: Parallel
  selector: {matchLabels: {app: store}}
  template:
    metadata: {labels: {app: store}}
    spec:
      terminationGracePeriodSeconds: 1` + container + `
---
apiVersion: v1
kind: Service
metadata: {name: store, namespace: kinds}
spec:
  clusterIP: None
  selector: {app: store}
  ports: [{name: web, port: 8080, targetPort: web}]
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: each, namespace: kinds}
spec:
  selector: {matchLabels: {app: each}}
  template:
    metadata: {labels: {app: each}}
    spec:
      terminationGracePeriodSeconds: 1` + container + `
---
apiVersion: apps/v1
kind: ReplicaSet
metadata: {name: plain, namespace: kinds}
spec:
  replicas: 1
  selector: {matchLabels: {app: plain}}
  template:
    metadata: {labels: {app: plain}}
    spec:
      terminationGracePeriodSeconds: 1` + container + `
---
apiVersion: v1
kind: Service
metadata: {name: front, namespace: kinds}
spec:
  selector: {app: plain}
  ports: [{name: http, port: 80, targetPort: web}]
---
apiVersion: v1
kind: Pod
metadata: {name: alone, namespace: kinds, labels: {app: alone}}
spec:
      terminationGracePeriodSeconds: 1` + container + `
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: releases.e2e.kubevpn.dev}
spec:
  group: e2e.kubevpn.dev
  scope: Namespaced
  names: {plural: releases, singular: release, kind: Release}
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`

const release = `
apiVersion: e2e.kubevpn.dev/v1
kind: Release
metadata: {name: plain, namespace: kinds}
spec:
  selector: {matchLabels: {app: plain}}
  template:
    metadata: {labels: {app: plain}}
    spec:
      terminationGracePeriodSeconds: 1` + container

// kindsSuite intercepts each kind of workload by its own name, and leaves it.
func kindsSuite(t *testing.T, w *world) {
	w.loadApp(t)
	fill := strings.NewReplacer("APP_IMAGE", appRef)
	w.apply(t, fill.Replace(kinds))
	w.kubectl(t, "wait", "--for=condition=Established", "crd/releases.e2e.kubevpn.dev", "--timeout=120s")
	w.apply(t, fill.Replace(release))
	w.kubectl(t, "-n", "kinds", "rollout", "status", "statefulset/store", "--timeout=120s")
	w.kubectl(t, "-n", "kinds", "rollout", "status", "daemonset/each", "--timeout=120s")
	w.kubectl(t, "-n", "kinds", "wait", "--for=condition=Ready", "pod", "--all", "--timeout=120s")
	l := w.newUser(t, lab.Admin)
	l.startApp(t, "laptop")
	v := w.visitor(t)
	for _, tt := range []struct{ workload, app string }{
		{"statefulset/store", "store"}, {"sts/store", "store"}, {"daemonset/each", "each"}, {"replicaset/plain", "plain"}, {"pod/alone", "alone"},
		{"service/front", "plain"}, {"svc/store", "store"}, {"releases.e2e.kubevpn.dev/plain", "plain"},
	} {
		t.Run(tt.workload, func(t *testing.T) {
			pods := w.pods(t, "kinds", "app="+tt.app)
			if r := l.run(t, "kubevpn", "proxy", tt.workload, "-n", "kinds", "--headers", mine+"="+me); r.code != 0 {
				t.Fatal(r)
			}
			for _, ip := range pods {
				url := "http://" + net.JoinHostPort(ip.String(), "8080") + "/"
				if err := v.want(url, "laptop", mine, me); err != nil {
					t.Errorf("%s: %v", ip, err)
				}
				if a, err := v.ask("GET", url, nil); err != nil || a.Name == "laptop" {
					t.Errorf("without the header %s answers, %v", a.Name, err)
				}
			}
			if i := l.intercept(t); i.State != api.InterceptActive || len(i.Pods) != len(pods) {
				t.Errorf("%+v", i)
			}
			l.must(t, "kubevpn", "leave", tt.workload, "-n", "kinds")
			for _, ip := range pods {
				if a, err := v.ask("GET", "http://"+net.JoinHostPort(ip.String(), "8080")+"/", nil, mine, me); err != nil || a.Name == "laptop" {
					t.Errorf("after leave %s answers, %v", a.Name, err)
				}
			}
		})
	}
	t.Run("names_of_a_headless_service_resolve", func(t *testing.T) {
		if r := l.run(t, "kubevpn", "proxy", "statefulset/store", "-n", "kinds"); r.code != 0 {
			t.Fatal(r)
		}
		for _, name := range []string{"store-0.store.kinds", "store-1.store.kinds"} {
			if out := l.must(t, "curl", "-sS", "--max-time", "5", "http://"+name+":8080/"); !strings.Contains(out, `"name":"laptop"`) {
				t.Errorf("%s: %s", name, out)
			}
		}
		l.must(t, "kubevpn", "leave", "--all")
	})
}
