//go:build e2e && linux

package intercept

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"kubevpn/internal/cluster"
	"kubevpn/internal/lab"
	"kubevpn/internal/testenv"
)

// The application is the lab's pause program; so is the agent, as it is only asked where Services lead.
const sidecarObjects = `
apiVersion: v1
kind: Namespace
metadata: {name: sidecar, labels: {pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: sidecar}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 0
      securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
      containers:
      - name: app
        image: docker.io/kubevpn-lab/pause:1
        imagePullPolicy: Never
        ports: [{name: http, containerPort: 8080}]
        securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
---
apiVersion: v1
kind: Service
metadata: {name: named, namespace: sidecar}
spec: {selector: {app: web}, ports: [{port: 80, targetPort: http}]}
---
apiVersion: v1
kind: Service
metadata: {name: numbered, namespace: sidecar}
spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: undeclared, namespace: sidecar}
spec: {selector: {app: web}, ports: [{port: 81, targetPort: 9000}]}`

// TestSidecarOfACluster shows on a real control plane where Services lead when an agent is in the template, and that without
// it the pods are those of before, by the template's hash.
func TestSidecarOfACluster(t *testing.T) {
	testenv.NeedRoot(t)
	var l *lab.Lab
	if name := os.Getenv("KUBEVPN_E2E_LAB"); name != "" {
		var err error
		if l, err = lab.Attach(lab.Config{Name: name}); err != nil {
			t.Fatal(err)
		}
	} else {
		l = lab.New(lab.Config{Name: "sidecar", Nodes: 2, Progress: os.Stderr})
		t.Cleanup(func() {
			if _, err := l.Down(); err != nil {
				t.Error(err)
			}
		})
		if err := l.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	kubectl := func(ctx context.Context, input string, args ...string) (string, error) {
		cmd, err := l.Kubectl(ctx, lab.Admin, append([]string{"-n", "sidecar"}, args...)...)
		if err != nil {
			return "", err
		}
		var stderr bytes.Buffer
		cmd.Stdin, cmd.Stderr = strings.NewReader(input), &stderr
		out, err := cmd.Output()
		if err != nil {
			err = fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, stderr.String())
		}
		return strings.TrimSpace(string(out)), err
	}
	must := func(input string, args ...string) string {
		t.Helper()
		out, err := kubectl(t.Context(), input, args...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	t.Cleanup(func() {
		if _, err := kubectl(context.Background(), sidecarObjects, "delete", "--wait", "--ignore-not-found", "-f", "-"); err != nil {
			t.Error(err)
		}
	})
	must(sidecarObjects, "apply", "-f", "-")
	read := func(what string) map[string]any {
		t.Helper()
		o := new(unstructured.Unstructured)
		if err := o.UnmarshalJSON([]byte(must("", "get", what, "-o", "json"))); err != nil {
			t.Fatal(err)
		}
		return o.Object
	}
	// kubectl replace itself would note in an annotation that it is the user who wants the agent.
	replace := func(what string, o map[string]any) {
		t.Helper()
		data, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		must(string(data), "replace", "--raw", what, "-f", "-")
	}
	templateOf := func(o map[string]any) map[string]any {
		t.Helper()
		template, _, err := unstructured.NestedMap(o, "spec", "template")
		if err != nil {
			t.Fatal(err)
		}
		return template
	}
	rollout := func(change func(map[string]any) map[string]any) {
		t.Helper()
		o := read("deployment/web")
		if err := unstructured.SetNestedMap(o, change(templateOf(o)), "spec", "template"); err != nil {
			t.Fatal(err)
		}
		replace("/apis/apps/v1/namespaces/sidecar/deployments/web", o)
		must("", "rollout", "status", "deployment/web", "--timeout=1m")
	}
	hashes := func() string {
		all := strings.Fields(must("", "get", "pods", "-o", `jsonpath={.items[?(@.status.phase=="Running")].metadata.labels.pod-template-hash}`))
		slices.Sort(all)
		return strings.Join(slices.Compact(all), " ")
	}
	leads := func(service, want string) {
		t.Helper()
		testenv.Eventually(t, 30*time.Second, func() error {
			got, err := kubectl(t.Context(), "", "get", "endpointslices", "-l", "kubernetes.io/service-name="+service, "-o", "jsonpath={range .items[*].ports[*]}{.port} {end}")
			if err == nil && strings.TrimSpace(got) != want {
				err = fmt.Errorf("%s leads to %q, want %s", service, got, want)
			}
			return err
		})
	}
	must("", "rollout", "status", "deployment/web", "--timeout=1m")
	leads("named", "8080")
	before := hashes()

	ports := []cluster.Port{
		{Protocol: "tcp", Port: 8080, Name: "http", Container: "app", Services: []cluster.ServicePort{{Service: "named", Port: 80, Target: "http"}, {Service: "numbered", Port: 80}}},
		{Protocol: "tcp", Port: 9000, Services: []cluster.ServicePort{{Service: "undeclared", Port: 81}}},
	}
	var p sidecarPlan
	rollout(func(template map[string]any) map[string]any {
		var err error
		if p, err = planSidecar(template, "app", ports, sidecarAgent{"docker.io/kubevpn-lab/pause:1", "5e2f", "me@here"}); err != nil {
			t.Fatal(err)
		}
		return p.template
	})
	leads("named", "18080") // without any change of it
	leads("numbered", "8080")
	const serviceAPI = "/api/v1/namespaces/sidecar/services/"
	services := []string{"named", "numbered", "undeclared"}
	for _, s := range services {
		patched, err := patchService(read("service/"+s), p.services)
		if err != nil {
			t.Fatal(err)
		}
		replace(serviceAPI+s, patched)
	}
	leads("numbered", "18080")
	leads("undeclared", "19000")

	// CI applies its manifests again, with something new: the agent stays, as it is not theirs.
	ci := strings.Replace(sidecarObjects, "name: app\n", "name: app\n        env: [{name: VERSION, value: '2'}]\n", 1)
	must(ci, "apply", "-f", "-")
	must("", "rollout", "status", "deployment/web", "--timeout=1m")
	leads("named", "18080")
	for _, s := range services {
		undone, err := undoService(read("service/" + s))
		if err != nil {
			t.Fatal(err)
		}
		replace(serviceAPI+s, undone)
	}
	leads("numbered", "8080")
	leads("undeclared", "9000")
	undo := func(template map[string]any) map[string]any {
		without, last, err := undoSidecar(template, "5e2f")
		if err != nil || !last {
			t.Fatal(last, err)
		}
		return without
	}
	rollout(undo)
	leads("named", "8080")
	newer := hashes()

	must(sidecarObjects, "apply", "-f", "-") // CI goes back
	must("", "rollout", "status", "deployment/web", "--timeout=1m")
	testenv.Eventually(t, 30*time.Second, func() error {
		if got := hashes(); got != before || got == newer {
			return fmt.Errorf("the pods' template has the hash %s, and had %s; with CI's change it was %s", got, before, newer)
		}
		return nil
	})
	// CI's change alone, to an API server that never saw an agent there, has the same hash as what undo left.
	must(ci, "apply", "-f", "-")
	must("", "rollout", "status", "deployment/web", "--timeout=1m")
	testenv.Eventually(t, 30*time.Second, func() error {
		if got := hashes(); got != newer {
			return fmt.Errorf("the pods' template has the hash %s, want %s", got, newer)
		}
		return nil
	})
}
