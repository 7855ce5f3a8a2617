//go:build e2e && linux

package workloads_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/podconn"
	"kubevpn/internal/kube/workloads"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// TestWorkloadsOfACluster uses a real API server and kubelet: go test -tags e2e ./workloads. It starts a cluster, or
// uses the one that KUBEVPN_E2E_LAB names.
func TestWorkloadsOfACluster(t *testing.T) {
	testenv.NeedRoot(t)
	if name := os.Getenv("KUBEVPN_E2E_LAB"); name != "" {
		l, err := lab.Attach(lab.Config{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		ofCluster(t, l)
		return
	}
	l := lab.New(lab.Config{Name: "workloads", Nodes: 2, Progress: os.Stderr})
	t.Cleanup(func() {
		if _, err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	if err := l.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	ofCluster(t, l)
}

// laptopProxy returns the URL of an HTTP proxy that connects from the laptop.
func laptopProxy(t *testing.T, l *lab.Lab) string {
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		server, err := l.Dial(r.Context(), "laptop", "tcp", r.Host)
		if r.Method != http.MethodConnect || err != nil {
			http.Error(w, fmt.Sprint(err), http.StatusBadGateway)
			return
		}
		defer server.Close()
		client, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer client.Close()
		if _, err := io.WriteString(client, "HTTP/1.1 200 OK\r\n\r\n"); err != nil {
			return // the client reports the error
		}
		ended := make(chan struct{}, 2)
		for _, pair := range [][2]net.Conn{{server, client}, {client, server}} {
			go func() {
				_, _ = io.Copy(pair[0], pair[1]) // both ends see an error
				ended <- struct{}{}
			}()
		}
		<-ended
	}))
	t.Cleanup(proxy.Close)
	return proxy.URL
}

type labUser struct {
	workloads.Client
	*podconn.Dialer
}

// onLab is a real cluster with workloads.yaml in it.
type onLab struct {
	*lab.Lab
	admin, dev labUser
}

func ofCluster(t *testing.T, l *lab.Lab) {
	via := laptopProxy(t, l)
	as := func(user string) labUser {
		file, err := l.Kubeconfig(user)
		if err != nil {
			t.Fatal(err)
		}
		config, err := clientcmd.LoadFromFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range config.Clusters {
			c.ProxyURL = via
		}
		data, err := clientcmd.Write(*config)
		if err != nil {
			t.Fatal(err)
		}
		c, err := client.Load(data, client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return labUser{workloads.New(c), podconn.New(c)}
	}
	o := onLab{Lab: l, admin: as(lab.Admin), dev: as(lab.Developer)}
	file, err := filepath.Abs("workloads.yaml")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := o.kubectl(context.Background(), "delete", "--wait", "--ignore-not-found", "-f", file); err != nil {
			t.Error(err)
		}
	})
	// The kinds of the custom objects, and the default ServiceAccounts of the namespaces, exist a moment later.
	testenv.Eventually(t, time.Minute, func() error {
		_, err := o.kubectl(t.Context(), "apply", "-f", file)
		return err
	})
	o.must(t, "wait", "--for=condition=Established", "crd/rollouts.rollout.test", "crd/engines.engine.test")
	o.must(t, "-n", "workloads", "rollout", "status", "deployment/web", "--timeout=1m")
	o.must(t, "-n", "workloads", "wait", "--for=condition=Ready", "pod", "--all", "--timeout=1m")
	hash := o.must(t, "-n", "workloads", "get", "rs", "-l", "app=web,track!=preview", "-o", "jsonpath={.items[0].metadata.name}")

	t.Run("kinds", func(t *testing.T) { o.kinds(t, hash) })
	t.Run("recurs", o.recurs)
	t.Run("custom", o.custom)
	t.Run("watch", o.watch)
	t.Run("rights", o.rights)
	t.Run("inject", o.inject)
	t.Run("together", o.together)
	t.Run("dial", o.dial)
}

func (o onLab) kubectl(ctx context.Context, args ...string) (string, error) {
	cmd, err := o.Kubectl(ctx, lab.Admin, args...)
	if err != nil {
		return "", err
	}
	out, err := cmd.Output()
	if e := (*exec.ExitError)(nil); errors.As(err, &e) {
		err = fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, e.Stderr)
	}
	return strings.TrimSpace(string(out)), err
}

func (o onLab) must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := o.kubectl(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (o onLab) workload(t *testing.T, name string) *workloads.Workload {
	t.Helper()
	w, err := o.admin.Workload(t.Context(), "workloads", name)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// kinds compares the kind of each argument with kubectl's, and checks pods and ports.
func (o onLab) kinds(t *testing.T, set string) {
	for _, tt := range []struct {
		name      string
		container string
		ports     string
		pods      int
	}{
		{"deployment/web", "echo", "8080/tcp 9001/udp 9002/tcp", 2},
		{"deploy.v1.apps/web", "echo", "8080/tcp 9001/udp 9002/tcp", 2},
		{"deploy/web-preview", "c", "9002/tcp", 1},
		{"StatefulSet/db", "c", "5432/tcp", 2},
		{"sts/db", "c", "5432/tcp", 2},
		{"daemonsets.apps/each", "c", "", o.Config().Nodes},
		{"rs/" + set, "echo", "8080/tcp 9001/udp 9002/tcp", 2},
		{"rs/set", "main", "8080/tcp", 1},
		{"po/alone", "c", "", 1},
		{"pod/db-1", "c", "5432/tcp", 1},
		{"svc/db", "c", "5432/tcp", 2},
		{"services/api", "main", "8080/tcp", 1},
		{"cj/nightly", "report", "", 0},
		{"cronjobs.batch/nightly", "report", "", 0},
	} {
		t.Run(strings.ReplaceAll(tt.name, "/", "."), func(t *testing.T) {
			w := o.workload(t, tt.name)
			kubectl := o.must(t, "-n", "workloads", "get", tt.name, "-o", "name")
			if got := o.must(t, "-n", "workloads", "get", w.String(), "-o", "name"); got != kubectl {
				t.Errorf("got %s, kubectl %s", got, kubectl)
			}
			c, err := w.Container("")
			if err != nil {
				t.Fatal(err)
			}
			var ports []string
			for _, p := range w.PortsOf(c.Name) {
				ports = append(ports, fmt.Sprintf("%d/%s", p.Port, p.Protocol))
			}
			if got := strings.Join(ports, " "); c.Name != tt.container || got != tt.ports {
				t.Errorf("container %s with ports %s, want %s with %s", c.Name, got, tt.container, tt.ports)
			}
			if got := o.podsOf(t, w); len(got) != tt.pods {
				t.Errorf("pods %v, want %d", got, tt.pods)
			}
		})
	}
	_, err := o.admin.Workload(t.Context(), "workloads", "ds/nodes")
	wants(t, err, api.ExitWorkload, "hostNetwork")
	_, err = o.admin.Workload(t.Context(), "workloads", "gizmo/x")
	wants(t, err, api.ExitWorkload, `no resource type "gizmo"`)
	_, err = o.admin.Workload(t.Context(), "workloads", "deploy/none")
	wants(t, err, api.ExitWorkload, "there is no deployment/none")
}

// recurs checks a CronJob, and the pods of its runs.
func (o onLab) recurs(t *testing.T) {
	file := filepath.Join(t.TempDir(), "every-minute.yaml")
	if err := os.WriteFile(file, []byte(`{"spec": {"schedule": "* * * * *"}}`), 0o644); err != nil {
		t.Fatal(err)
	}
	o.must(t, "-n", "workloads", "patch", "cronjob/nightly", "--patch-file", file)
	testenv.Eventually(t, 90*time.Second, func() error {
		pods := o.podsOf(t, o.workload(t, "cj/nightly"))
		if len(pods) != 1 || !strings.HasPrefix(pods[0], "nightly-") {
			return fmt.Errorf("its pods are %q", pods)
		}
		return nil
	})
}

// podsOf returns the names of the pods that a watch reports first.
func (o onLab) podsOf(t *testing.T, w *workloads.Workload) (names []string) {
	t.Helper()
	for _, p := range o.pods(t, w) {
		names = append(names, p.Name)
	}
	return names
}

func (o onLab) pods(t *testing.T, w *workloads.Workload) (first []corev1.Pod) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	err := o.admin.WatchPods(ctx, w, func(pods []corev1.Pod) {
		if ctx.Err() == nil {
			first = pods
		}
		cancel()
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	return first
}

// custom checks kinds that only this cluster has: some like Argo's Rollout, and one that only has a scale.
func (o onLab) custom(t *testing.T) {
	const template = `{metadata: {labels: {app: web}}, spec: {containers: [{name: own, image: i, ports: [{containerPort: 7070}]}]}}`
	apply := func(object string) {
		t.Helper()
		file := filepath.Join(t.TempDir(), "object.yaml")
		if err := os.WriteFile(file, []byte(object), 0o644); err != nil {
			t.Fatal(err)
		}
		o.must(t, "-n", "workloads", "apply", "-f", file)
	}
	apply("{apiVersion: rollout.test/v1alpha1, kind: Rollout, metadata: {name: own}, spec: {selector: {matchLabels: {app: web}}, template: " + template + "}}")
	apply("{apiVersion: rollout.test/v1alpha1, kind: Rollout, metadata: {name: refers}, spec: {workloadRef: {apiVersion: apps/v1, kind: Deployment, name: web}}}")
	apply("{apiVersion: engine.test/v1, kind: Engine, metadata: {name: scales}, spec: {replicas: 2}, status: {selector: 'app in (db)'}}")
	apply("{apiVersion: engine.test/v1, kind: Engine, metadata: {name: silent}, spec: {replicas: 2}}")
	for _, tt := range []struct {
		name, want, container string
		pods                  int
	}{
		{"ro/own", "rollout.rollout.test/own", "own", 3}, // by the selector: the preview's as well
		{"rollouts.v1alpha1.rollout.test/refers", "rollout.rollout.test/refers", "echo", 3},
		{"Engine/scales", "engine.engine.test/scales", "c", 2},
	} {
		w := o.workload(t, tt.name)
		c, err := w.Container("")
		if err != nil {
			t.Fatal(err)
		}
		if got := o.podsOf(t, w); w.String() != tt.want || c.Name != tt.container || len(got) != tt.pods {
			t.Errorf("%s is %s with container %s and pods %v; want %s, %s, %d", tt.name, w, c.Name, got, tt.want, tt.container, tt.pods)
		}
		if err := o.admin.MayPatch(t.Context(), w); err != nil {
			t.Errorf("%s: %v", w, err)
		}
	}
	_, err := o.admin.Workload(t.Context(), "workloads", "eng/silent")
	wants(t, err, api.ExitWorkload, "neither a selector of pods nor a scale")
}

// watch scales a workload while a watch reports its pods.
func (o onLab) watch(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	numbers, done := make(chan int, 100), make(chan error, 1)
	go func() {
		done <- o.admin.WatchPods(ctx, o.workload(t, "sts/db"), func(pods []corev1.Pod) { numbers <- len(pods) })
	}()
	for _, want := range []int{2, 4, 1, 2} {
		o.must(t, "-n", "workloads", "scale", "sts/db", fmt.Sprintf("--replicas=%d", want))
		for timeout := time.After(30 * time.Second); ; {
			var got int
			select {
			case got = <-numbers:
			case <-timeout:
				t.Fatalf("never %d pods", want)
			}
			if got == want {
				break
			}
		}
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// rights checks the rights of the developer, who has the role edit in the namespace default, and no rights elsewhere.
func (o onLab) rights(t *testing.T) {
	w, err := o.dev.Workload(t.Context(), "default", "deploy/web")
	if err != nil {
		t.Fatal(err)
	}
	if err := o.dev.MayPatch(t.Context(), w); err != nil {
		t.Error(err)
	}
	before := o.must(t, "-n", "default", "get", "deploy/web", "-o", "jsonpath={.metadata.resourceVersion}")
	if w.Object.GetResourceVersion() != before {
		t.Errorf("the workload was changed: %s, %s", w.Object.GetResourceVersion(), before)
	}
	_, err = o.dev.Workload(t.Context(), "workloads", "deploy/web")
	wants(t, err, api.ExitPermission, "dev may not get deployments in namespace workloads")
	theirs := o.workload(t, "sts/db")
	wants(t, o.dev.MayPatch(t.Context(), theirs), api.ExitPermission, "you may not intercept statefulset/db: this requires the right to patch statefulsets in namespace workloads")
	wants(t, o.dev.WatchPods(t.Context(), theirs, func([]corev1.Pod) {}), api.ExitPermission, "dev may not")

	// The role edit does not allow ephemeral containers. The error tells an admin what to grant.
	pod := o.podNamed(t, "default", o.podsOf(t, w)[0])
	me := workloads.Agent{Image: "registry.example/kubevpn:1", Owner: "5e2f", OwnerName: "me@here"}
	err = o.dev.MayInject(t.Context(), pod, me)
	wants(t, err, api.ExitPermission, "this requires the right to patch pods/ephemeralcontainers in namespace default")
	grants := api.AsError(err).Hint
	for command := range strings.SplitSeq(grants, "\n") {
		if args, is := strings.CutPrefix(command, "kubectl create "); is {
			kind, rest, _ := strings.Cut(args, " ")
			name, _, _ := strings.Cut(rest, " ")
			o.must(t, append([]string{"create"}, strings.Fields(args)...)...)
			t.Cleanup(func() {
				if _, err := o.kubectl(context.Background(), "-n", "default", "delete", kind, name); err != nil {
					t.Error(err)
				}
			})
		}
	}
	testenv.Eventually(t, 10*time.Second, func() error { return o.dev.MayInject(t.Context(), pod, me) })
	if after := o.podNamed(t, "default", pod.Name); len(after.Spec.EphemeralContainers) > 0 {
		t.Errorf("the check of the right has added %v", after.Spec.EphemeralContainers)
	}

	guarded := o.podNamed(t, "guarded", "alone")
	err = o.admin.MayInject(t.Context(), guarded, me)
	wants(t, err, api.ExitInject, `pod security does not admit the traffic agent in the namespace guarded: violates PodSecurity "baseline:latest"`)
	if hint := api.AsError(err).Hint; !strings.Contains(hint, "kubectl label namespace guarded pod-security.kubernetes.io/enforce=privileged --overwrite") {
		t.Errorf("hint %q", hint)
	}
}

func (o onLab) podNamed(t *testing.T, namespace, name string) *corev1.Pod {
	t.Helper()
	p, err := o.admin.Kube().CoreV1().Pods(namespace).Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// inject adds the echo server in the place of the agent, to a pod that does not allow root. The echo server finds its
// ports in use and ends.
func (o onLab) inject(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	a := workloads.Agent{Image: "docker.io/kubevpn-lab/echo:1", Owner: "aa", OwnerName: "me@here"}
	seen := o.podNamed(t, "workloads", "alone")
	began := time.Now()
	for n := range 2 { // the pod was read before the end of the first one
		name, _, err := o.admin.Inject(ctx, seen, a)
		if want := fmt.Sprintf("kubevpn-agent-%d", n+1); err != nil || name != want {
			t.Fatalf("%s, %v, want %s", name, err, want)
		}
		var lines []string
		err = o.followLog(ctx, t, "alone", name, func(line string) { lines = append(lines, line) })
		t.Logf("%v after %v: %q", err, time.Since(began), lines)
		var end *workloads.ContainerEnded
		if !errors.As(err, &end) || end.ExitCode != 1 || end.Reason != "Error" {
			t.Errorf("got %v", err)
		}
		if len(lines) != 1 || !strings.Contains(lines[0], "address already in use") {
			t.Errorf("its log is %q", lines)
		}
		wants(t, err, api.ExitInject, "has ended, with exit code 1 (Error): ")
	}
	a.Image = "registry.invalid/none:1"
	name, _, err := o.admin.Inject(ctx, seen, a)
	if err != nil {
		t.Fatal(err)
	}
	wants(t, o.followLog(ctx, t, "alone", name, func(string) {}), api.ExitImagePull, "cannot pull the image registry.invalid/none:1")

	// A pod that is deleted while its log is followed.
	deleted, follow := make(chan error, 1), o.follower(ctx, t, "db-0", "c")
	go func() { deleted <- follow(func(string) {}) }()
	o.must(t, "-n", "workloads", "delete", "pod", "db-0", "--wait")
	err = <-deleted
	if end := (*workloads.ContainerEnded)(nil); !errors.Is(err, client.ErrPodGone) && !errors.As(err, &end) {
		t.Errorf("got %v", err)
	}
}

// together lets several owners add their agents to one pod at the same time.
func (o onLab) together(t *testing.T) {
	seen := o.podNamed(t, "workloads", o.podsOf(t, o.workload(t, "rs/set"))[0])
	names, errs := make([]string, 4), make([]error, 4)
	var wg sync.WaitGroup
	for i := range names {
		wg.Go(func() {
			names[i], _, errs[i] = o.admin.Inject(t.Context(), seen, workloads.Agent{Image: "docker.io/kubevpn-lab/pause:1", Owner: fmt.Sprint(i), OwnerName: "x"})
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, c := range o.podNamed(t, "workloads", seen.Name).Spec.EphemeralContainers {
		got[c.Env[0].Value] = c.Name
	}
	want := map[string]string{}
	for i, name := range names {
		want[fmt.Sprint(i)] = name
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("agents by owner (-returned +in the pod):\n%s", d)
	}
	slices.Sort(names)
	if d := cmp.Diff([]string{"kubevpn-agent-1", "kubevpn-agent-2", "kubevpn-agent-3", "kubevpn-agent-4"}, names); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func (o onLab) dial(t *testing.T) {
	pods := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return o.admin.DialPod(ctx, "workloads", "alone", 8080)
	}}}
	answer, err := pods.Get("http://pod/")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		t.Errorf("got %s", answer.Status)
	}
	_, err = o.admin.DialPod(t.Context(), "workloads", "none", 8080)
	wants(t, err, api.ExitInject, "has gone")
	if !errors.Is(err, client.ErrPodGone) {
		t.Errorf("got %v", err)
	}
	_, err = o.dev.DialPod(t.Context(), "workloads", "alone", 8080)
	wants(t, err, api.ExitPermission, "pods/portforward")
}

// follower returns a function that follows a container's log. It watches the pod until the test ends.
func (o onLab) follower(ctx context.Context, t *testing.T, pod, container string) func(func(string)) error {
	t.Helper()
	var states workloads.Pods
	w := o.workload(t, "pod/"+pod)
	watching, stop := context.WithCancel(ctx)
	var watch sync.WaitGroup
	watch.Go(func() { _ = o.admin.WatchPods(watching, w, states.Update) }) // it ends with ctx
	t.Cleanup(func() {
		stop()
		watch.Wait()
	})
	p := o.podNamed(t, "workloads", pod)
	return func(line func(string)) error {
		return o.admin.FollowLog(ctx, workloads.Log{Namespace: "workloads", Pod: pod, Container: container, Await: states.Await(p)}, line)
	}
}

func (o onLab) followLog(ctx context.Context, t *testing.T, pod, container string, line func(string)) error {
	t.Helper()
	return o.follower(ctx, t, pod, container)(line)
}

func wants(t *testing.T, err error, code api.ExitCode, message string) {
	t.Helper()
	var e *api.Error
	if !errors.As(err, &e) || e.Code != code || !strings.Contains(e.Message, message) || e.Hint == "" {
		t.Errorf("got %+v, want code %d, %q", e, code, message)
	}
}
