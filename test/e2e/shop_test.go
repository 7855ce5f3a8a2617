//go:build e2e && linux

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/e2e/build"
)

const appRef = "docker.io/kubevpn/app:e2e"

// buildApp builds the application once.
var buildApp = sync.OnceValue(func() error { return build.App(context.Background(), bin, appRef) })

func (w *world) loadApp(t *testing.T) {
	t.Helper()
	if err := buildApp(); err != nil {
		t.Fatal(err)
	}
	if err := w.Load(t.Context(), filepath.Join(bin, "app.tar")); err != nil {
		t.Fatal(err)
	}
}

// buildShell builds the image with a shell once.
var buildShell = sync.OnceValue(func() error {
	return errors.Join(buildApp(), build.Shell(context.Background(), bin, shellRef))
})

func (w *world) loadShell(t *testing.T) {
	t.Helper()
	if err := buildShell(); err != nil {
		t.Fatal(err)
	}
	if err := w.Load(t.Context(), filepath.Join(bin, "shell.tar")); err != nil {
		t.Fatal(err)
	}
}

// shop is a workload whose requests developers intercept.
type shop struct {
	*world
	namespace string
	workload  string // TYPE/NAME
}

// newShop creates a namespace with the application: two pods, and a Service whose port 5432 the application does not
// serve. The namespace enforces the pod security level.
func (w *world) newShop(t *testing.T, namespace, level string) *shop {
	t.Helper()
	w.loadApp(t)
	w.apply(t, strings.NewReplacer("NAMESPACE", namespace, "LEVEL", level, "APP_IMAGE", appRef).Replace(`
apiVersion: v1
kind: Namespace
metadata: {name: NAMESPACE, labels: {pod-security.kubernetes.io/enforce: LEVEL}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: shop, namespace: NAMESPACE}
spec:
  replicas: 2
  selector: {matchLabels: {app: shop}}
  template:
    metadata: {labels: {app: shop}}
    spec:
      terminationGracePeriodSeconds: 2
      securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
      volumes: [{name: scratch, emptyDir: {}}]
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
        volumeMounts: [{name: scratch, mountPath: /scratch}]
        ports:
        - {containerPort: 8080, name: http}
        - {containerPort: 9090, name: grpc}
        - {containerPort: 9004, name: first}
        - {containerPort: 9001, name: raw}
        - {containerPort: 9001, name: rawudp, protocol: UDP}
        - {containerPort: 5300, name: dns, protocol: UDP}
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1, timeoutSeconds: 10} # on a busy machine too
---
apiVersion: v1
kind: Service
metadata: {name: shop, namespace: NAMESPACE}
spec:
  ipFamilyPolicy: PreferDualStack
  selector: {app: shop}
  ports:
  - {name: http, port: 80, targetPort: http}
  - {name: grpc, port: 9090, targetPort: grpc}
  - {name: first, port: 9004, targetPort: first}
  - {name: raw, port: 9001, targetPort: 9001}
  - {name: rawudp, port: 9001, targetPort: 9001, protocol: UDP}
  - {name: dns, port: 53, targetPort: dns, protocol: UDP}
  - {name: postgres, port: 5432, targetPort: 5432}
`))
	s := &shop{world: w, namespace: namespace, workload: "deployment/shop"}
	s.rolledOut(t)
	return s
}

func (s *shop) rolledOut(t *testing.T) {
	t.Helper()
	s.kubectl(t, "-n", s.namespace, "rollout", "status", s.workload, "--timeout=120s")
}

// ready returns the addresses of the Ready pods by name.
func (s *shop) ready(t *testing.T) map[string]string {
	t.Helper()
	out := s.kubectl(t, "-n", s.namespace, "get", "pods", "-l", "app=shop", "-o",
		`jsonpath={range .items[?(@.status.phase=="Running")]}{.metadata.name} {.status.podIP} {.metadata.deletionTimestamp} {.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}`)
	pods := map[string]string{}
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) == 3 && f[2] == "True" { // a fourth field means that the pod is being deleted
			pods[f[0]] = f[1]
		}
	}
	return pods
}

// startApp runs the application on the laptop until the test ends; it answers with name.
func (l *laptop) startApp(t *testing.T, name string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	cmd := l.command(ctx, t, append([]string{filepath.Join(bin, "app"), "-name", name, "-host", "127.0.0.1"}, args...)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		if err := cmd.Wait(); err != nil && t.Failed() {
			t.Logf("the application on the laptop: %v\n%s", err, out.String())
		}
	})
	testenv.Eventually(t, time.Minute, func() error {
		c, err := dialIn(l.network(), "127.0.0.1:9090")
		if err == nil {
			c.Close()
		}
		return err
	})
}

// visitor is a client in the cluster outside of the workload's pods: a process on a node.
type visitor struct {
	network string
	http    *http.Client
}

// visitor opens a connection for each request, because connections from before an intercept stay with the application.
func (w *world) visitor(t *testing.T) *visitor { return w.visits(t, false) }

// regular returns a visitor that keeps connections.
func (w *world) regular(t *testing.T) *visitor { return w.visits(t, true) }

func (w *world) visits(t *testing.T, keepAlive bool) *visitor {
	v := &visitor{network: "/run/netns/" + w.Config().Name + "-node1"}
	tr := &http.Transport{DisableKeepAlives: !keepAlive, DialContext: func(_ context.Context, _, address string) (net.Conn, error) {
		conn, err := dialIn(v.network, address)
		// The lab's router sends this error for a ClusterIP that the node has not translated: before kube-proxy knows
		// it, and for some seconds after that from a source port that was tried before, because of conntrack. kubevpn
		// changes nothing on a node.
		if errors.Is(err, syscall.ENETUNREACH) {
			t.Logf("asked again: %v", err)
			if conn, err = dialIn(v.network, address); err != nil {
				t.Logf("and again: %v\n%s", err, v.wayTo(t, address))
			}
		}
		return conn, err
	}}
	t.Cleanup(tr.CloseIdleConnections)
	v.http = &http.Client{Transport: tr, Timeout: 30 * time.Second}
	return v
}

// wayTo describes what the visitor's node does with packets for an address.
func (v *visitor) wayTo(t *testing.T, address string) string {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	said := ""
	for _, command := range []string{
		"iptables-save -t nat | grep -e " + host + " -e DNAT", "ip route", "grep -w dst=" + host + " /proc/net/nf_conntrack",
	} {
		out, err := v.run(t, "sh", "-c", command)
		said += fmt.Sprintf("%s: %v\n%s", command, err, out)
	}
	return said
}

// answer is the answer of the application's page /.
type answer struct {
	Name   string      `json:"name"`
	Remote string      `json:"remote"`
	Method string      `json:"method"`
	Path   string      `json:"path"`
	Proto  string      `json:"proto"`
	Header http.Header `json:"header"`
	Body   struct {
		Length int64  `json:"length"`
		SHA256 string `json:"sha256"`
	} `json:"body"`
}

func (v *visitor) ask(method, url string, body io.Reader, header ...string) (answer, error) {
	var a answer
	req, err := http.NewRequest(method, url, body)
	if err != nil {
		return a, err
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	resp, err := v.http.Do(req)
	if err != nil {
		return a, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return a, err
	}
	if resp.StatusCode != http.StatusOK {
		return a, fmt.Errorf("%s: %s", resp.Status, text)
	}
	return a, json.Unmarshal(text, &a)
}

// want checks who answers a GET. "a pod" stands for any program that is not on a laptop.
func (v *visitor) want(url, want string, header ...string) error {
	a, err := v.ask(http.MethodGet, url, nil, header...)
	if err != nil {
		return err
	}
	if want == "a pod" && strings.HasPrefix(a.Name, "shop-") || a.Name == want {
		return nil
	}
	return fmt.Errorf("%s answers, want %s", a.Name, want)
}

// run runs a command in the visitor's network namespace.
func (v *visitor) run(t *testing.T, argv ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + v.network, "--"}, argv...)...).CombinedOutput()
	return string(out), err
}

// proxy runs `kubevpn proxy`, which must succeed.
func (l *laptop) proxy(t *testing.T, s *shop, args ...string) result {
	t.Helper()
	r := l.run(t, append([]string{"kubevpn", "proxy", s.workload, "-n", s.namespace}, args...)...)
	if r.code != 0 {
		t.Fatal(r)
	}
	return r
}

func (l *laptop) leave(t *testing.T, s *shop) {
	t.Helper()
	l.must(t, "kubevpn", "leave", s.workload, "-n", s.namespace)
}

// intercept returns the laptop's only intercept.
func (l *laptop) intercept(t *testing.T) api.Intercept {
	t.Helper()
	s := l.status(t)
	if len(s.Intercepts) != 1 {
		t.Fatalf("%d intercepts, want 1: %+v", len(s.Intercepts), s.Intercepts)
	}
	return s.Intercepts[0]
}

// everyPod runs a check for the address of each Ready pod.
func (s *shop) everyPod(t *testing.T, check func(address string) error) error {
	t.Helper()
	pods := s.ready(t)
	if len(pods) == 0 {
		return errors.New("no pod is ready")
	}
	for name, ip := range pods {
		if err := check(ip); err != nil {
			return fmt.Errorf("pod %s: %w", name, err)
		}
	}
	return nil
}
