//go:build e2e && linux

package intercept

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"kubevpn/internal/kube/workloads"
	"kubevpn/internal/testenv"
)

// The application is the lab's pause program. So is the agent: the test checks only the endpoints of Services.
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

// The test checks the endpoints of Services on a real control plane when the template contains an agent, and that the
// pods have the original template hash without it.
func TestSidecarOfACluster(t *testing.T) {
	testenv.NeedRoot(t)
	name := os.Getenv("KUBEVPN_E2E_LAB")
	if name == "" {
		t.Skip("SKIPPED: set KUBEVPN_E2E_LAB to the name of a running lab (make lab, bin/lab --name NAME up)")
	}
	kubectl := func(ctx context.Context, input string, args ...string) (string, error) {
		cmd := exec.CommandContext(ctx, "../../../bin/lab", append([]string{"--name", name, "kubectl", "-n", "sidecar"}, args...)...)
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
	// A plain kubectl replace would record the agent in its last-applied annotation.
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
	sendsTo := func(service, want string) {
		t.Helper()
		testenv.Eventually(t, 30*time.Second, func() error {
			got, err := kubectl(t.Context(), "", "get", "endpointslices", "-l", "kubernetes.io/service-name="+service, "-o", "jsonpath={range .items[*].ports[*]}{.port} {end}")
			if err == nil && strings.TrimSpace(got) != want {
				err = fmt.Errorf("%s sends to %q, want %s", service, got, want)
			}
			return err
		})
	}
	must("", "rollout", "status", "deployment/web", "--timeout=1m")
	sendsTo("named", "8080")
	before := hashes()

	ports := []workloads.Port{
		{Protocol: "tcp", Port: 8080, Name: "http", Container: "app", Services: []workloads.ServicePort{{Service: "named", Port: 80, Target: "http"}, {Service: "numbered", Port: 80}}},
		{Protocol: "tcp", Port: 9000, Services: []workloads.ServicePort{{Service: "undeclared", Port: 81}}},
	}
	var p sidecarPlan
	rollout(func(template map[string]any) map[string]any {
		var err error
		if p, err = planSidecar(template, "app", ports, workloads.Agent{Image: "docker.io/kubevpn-lab/pause:1", Owner: "5e2f", OwnerName: "me@here"}); err != nil {
			t.Fatal(err)
		}
		return p.template
	})
	sendsTo("named", "18080") // without a change of the Service
	sendsTo("numbered", "8080")
	const serviceAPI = "/api/v1/namespaces/sidecar/services/"
	services := []string{"named", "numbered", "undeclared"}
	for _, s := range services {
		patched, err := patchService(read("service/"+s), p.services)
		if err != nil {
			t.Fatal(err)
		}
		replace(serviceAPI+s, patched)
	}
	sendsTo("numbered", "18080")
	sendsTo("undeclared", "19000")

	// CI applies changed manifests: the agent stays, because they do not contain it.
	ci := strings.Replace(sidecarObjects, "name: app\n", "name: app\n        env: [{name: VERSION, value: '2'}]\n", 1)
	must(ci, "apply", "-f", "-")
	must("", "rollout", "status", "deployment/web", "--timeout=1m")
	sendsTo("named", "18080")
	for _, s := range services {
		undone, err := undoService(read("service/" + s))
		if err != nil {
			t.Fatal(err)
		}
		replace(serviceAPI+s, undone)
	}
	sendsTo("numbered", "8080")
	sendsTo("undeclared", "9000")
	undo := func(template map[string]any) map[string]any {
		without, last, err := undoSidecar(template, "5e2f")
		if err != nil || !last {
			t.Fatal(last, err)
		}
		return without
	}
	rollout(undo)
	sendsTo("named", "8080")
	newer := hashes()

	must(sidecarObjects, "apply", "-f", "-") // CI reverts its change
	must("", "rollout", "status", "deployment/web", "--timeout=1m")
	testenv.Eventually(t, 30*time.Second, func() error {
		if got := hashes(); got != before || got == newer {
			return fmt.Errorf("the pods' template has the hash %s, and had %s; with CI's change it was %s", got, before, newer)
		}
		return nil
	})
	// CI's change alone has the same hash as the template after undo.
	must(ci, "apply", "-f", "-")
	must("", "rollout", "status", "deployment/web", "--timeout=1m")
	testenv.Eventually(t, 30*time.Second, func() error {
		if got := hashes(); got != newer {
			return fmt.Errorf("the pods' template has the hash %s, want %s", got, newer)
		}
		return nil
	})
}
