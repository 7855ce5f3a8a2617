//go:build e2e && linux

package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// cloneJobSuite checks that unusual workloads, and users with few permissions, can be cloned.
func cloneJobSuite(t *testing.T, w *world) {
	s, l, v, service := w.newClonedShop(t, "clonejob")
	t.Run("fits_into_a_quota", func(t *testing.T) { cloneWithinQuota(t, l, s, v) })
	t.Run("anti_affinity_does_not_block_it", func(t *testing.T) { cloneApart(t, l, s, v) })
	t.Run("failing_probes_do_not_replace_the_container", func(t *testing.T) { cloneProbed(t, l, s, v) })
	t.Run("arguments_arrive_unchanged", func(t *testing.T) { cloneWords(t, l, s, v, service) })
	t.Run("documented_role_is_enough", func(t *testing.T) { cloneRights(t, l, s, v, service) })
}

// oneService is a workload and a Service of the same name. POD and CONTAINER are placeholders for more fields.
const oneService = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: NAME, namespace: NAMESPACE}
spec:
  replicas: REPLICAS
  selector: {matchLabels: {app: NAME}}
  template:
    metadata: {labels: {app: NAME}}
    spec:
      terminationGracePeriodSeconds: 1
      volumes: [{name: scratch, emptyDir: {}}]
      POD
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        ports: [{containerPort: 8080, name: http}]
        volumeMounts: [{name: scratch, mountPath: /scratch}]
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
        CONTAINER
---
apiVersion: v1
kind: Service
metadata: {name: NAME, namespace: NAMESPACE}
spec: {selector: {app: NAME}, ports: [{port: 80, targetPort: http}]}
`

// another creates one more workload and returns the URL of its Service.
func (s *shop) another(t *testing.T, v *visitor, namespace, name, replicas, pod, container string) (*shop, string) {
	t.Helper()
	s.apply(t, strings.NewReplacer("NAMESPACE", namespace, "NAME", name, "REPLICAS", replicas, "POD", pod, "CONTAINER", container, "APP_IMAGE", appRef).Replace(oneService))
	o := &shop{world: s.world, namespace: namespace, workload: "deployment/" + name}
	o.rolledOut(t)
	service := "http://" + s.clusterIP(t, namespace, name) + "/"
	testenv.Eventually(t, time.Minute, func() error { return v.of(service, name+"-") })
	return o, service
}

// page returns a directory with one file with this content.
func page(t *testing.T, text string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "page"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// cloneWithinQuota checks that the init container that copies the supervisor declares resources when a quota requires
// them.
func cloneWithinQuota(t *testing.T, l *laptop, s *shop, v *visitor) {
	s.apply(t, `
apiVersion: v1
kind: Namespace
metadata: {name: clonejob-quota}
---
apiVersion: v1
kind: ResourceQuota
metadata: {name: compute, namespace: clonejob-quota}
spec: {hard: {requests.cpu: 100m, requests.memory: 256Mi, limits.cpu: 100m, limits.memory: 256Mi}}
`)
	o, service := s.another(t, v, "clonejob-quota", "counted", "1", "", "resources: {requests: {cpu: 50m, memory: 128Mi}, limits: {cpu: 50m, memory: 128Mi}}")
	l.clone(t, o, "--headers", mine+"="+me, "--name", "within", "--sync", page(t, "counted")+":/scratch/site", "--command", "/app")
	if text, _, err := v.content(service, "/scratch/site/page"); err != nil || text != "counted" {
		t.Errorf("%q, %v", text, err)
	}
	if got := s.kubectl(t, "-n", o.namespace, "get", "pod", o.clonePod(t, "within"), "-o", "jsonpath={.status.qosClass}"); got != "Guaranteed" {
		t.Errorf("the clone's pod is %s", got)
	}
	l.leave(t, o)
	o.noClone(t)
}

// cloneApart checks that a clone of pods with required anti-affinity is scheduled although each node has such a pod.
func cloneApart(t *testing.T, l *laptop, s *shop, v *visitor) {
	const rule = "affinity: {podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {app: apart}}}]}}"
	o, service := s.another(t, v, s.namespace, "apart", "2", rule, "")
	r := l.clone(t, o, "--headers", mine+"="+me, "--name", "beside")
	if want := "it ignores the podAntiAffinity of the workload's pods"; !strings.Contains(r.stdout+r.stderr, want) {
		t.Errorf("%v, want %q", r, want)
	}
	if err := v.of(service, "beside-", mine, me); err != nil {
		t.Error(err)
	}
	l.leave(t, o)
	o.noClone(t)
}

// cloneProbed checks that a save that breaks the program for longer than the probes allow does not replace the
// container, and that the next save repairs it.
func cloneProbed(t *testing.T, l *laptop, s *shop, v *visitor) {
	const probe = "{tcpSocket: {port: http}, periodSeconds: 1, failureThreshold: 2}"
	o, service := s.another(t, v, s.namespace, "probed", "1", "", "livenessProbe: "+probe+"\n        startupProbe: "+probe)
	program, err := os.ReadFile(filepath.Join(bin, "app"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	put := func(content []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "app~"), content, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "app~"), filepath.Join(dir, "app")); err != nil {
			t.Fatal(err)
		}
	}
	put(program)
	l.clone(t, o, "--headers", mine+"="+me, "--name", "mended", "--sync", dir+":/scratch/bin", "--restart-on-sync", "--", "/scratch/bin/app")
	pod := o.clonePod(t, "mended")
	state := func() string {
		t.Helper()
		return s.kubectl(t, "-n", s.namespace, "get", "pod", pod, "-o", `jsonpath={.status.containerStatuses[0].containerID} {.status.containerStatuses[0].restartCount}`)
	}
	before := state()
	put([]byte("a syntax error"))
	testenv.Eventually(t, time.Minute, func() error { return v.of(service, "probed-", mine, me) }) // the application answers, because no pod of the clone is ready
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); {
		if now := state(); now != before {
			t.Fatalf("the container was %s and is %s", before, now)
		}
	}
	put(program)
	testenv.Eventually(t, time.Minute, func() error { return v.of(service, "mended-", mine, me) })
	if now := state(); now != before {
		t.Errorf("the container was %s and is %s", before, now)
	}
	l.leave(t, o)
	o.noClone(t)
}

// cloneWords checks that arguments reach the program unchanged, with and without the supervisor.
func cloneWords(t *testing.T, l *laptop, s *shop, v *visitor, service string) {
	const typed = "$$ $(HOME) $HOME $$(HOME)"
	for name, args := range map[string][]string{"plain": nil, "supervised": {"--sync", page(t, "x") + ":/scratch/site"}} {
		t.Run(name, func(t *testing.T) {
			args := append([]string{"--headers", mine + "=" + me, "--name", name}, args...)
			l.clone(t, s, append(args, "--", "/app", "-name", typed)...)
			if a, err := v.ask(http.MethodGet, service, nil, mine, me); err != nil || a.Name != typed {
				t.Errorf("the program's argument is %q, want %q; %v", a.Name, typed, err)
			}
			l.leave(t, s)
			s.noClone(t)
		})
	}
}

// cloneRights checks that the Role of docs/clone.md is sufficient, also for a second clone.
func cloneRights(t *testing.T, l *laptop, s *shop, v *visitor, service string) {
	s.apply(t, strings.ReplaceAll(documentedRole(t), "namespace: shop", "namespace: "+s.namespace)+fmt.Sprintf(`
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: kubevpn-clone, namespace: %s}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: kubevpn-clone}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: dev}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: clonejob-dev, namespace: kubevpn}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: kubevpn-traffic-manager-user}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: dev}]
`, s.namespace))
	l.must(t, "kubevpn", "disconnect", "--all") // two laptops cannot route the same networks
	dev := s.newUser(t, lab.Developer)
	dev.connect(t, "-n", s.namespace)
	for n := range 2 {
		text := fmt.Sprint("page ", n)
		r := dev.clone(t, s, "--headers", mine+"="+me, "--name", "again", "--sync", page(t, text)+":/scratch/site", "--command", "/app")
		if got, _, err := v.content(service, "/scratch/site/page"); err != nil || got != text {
			t.Errorf("%q, %v, although\n%v", got, err, r)
		}
		if i := dev.intercept(t); i.Clone == nil || i.Clone.Host != "again."+s.namespace || len(i.Clone.Notes) > 0 {
			t.Errorf("%+v\n%v", i.Clone, r)
		}
		dev.leave(t, s)
	}
	s.noClone(t)
}

// documentedRole returns the Role of docs/clone.md.
func documentedRole(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/clone.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "```yaml\napiVersion: rbac.authorization.k8s.io/v1\n")
	role, _, found := strings.Cut(rest, "```\n")
	if !found {
		t.Fatal("docs/clone.md has no Role")
	}
	return "apiVersion: rbac.authorization.k8s.io/v1\n" + role
}
