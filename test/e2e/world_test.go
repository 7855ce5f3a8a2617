//go:build e2e && linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wakeup"
	"kubevpn/test/lab"
)

// worldManifest has workloads as users have them: one that allows many streams and answers odd requests, and others in
// a namespace that admits no ephemeral container and has a quota.
const worldManifest = `
apiVersion: v1
kind: Namespace
metadata: {name: wide}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: wide, namespace: wide}
spec:
  selector: {matchLabels: {app: wide}}
  template:
    metadata: {labels: {app: wide}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        ports: [{containerPort: 8080, name: http}, {containerPort: 9002, name: heads}]
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: wide, namespace: wide}
spec:
  selector: {app: wide}
  ports: [{name: http, port: 80, targetPort: http}, {name: heads, port: 9002, targetPort: heads}]
---
apiVersion: v1
kind: Namespace
metadata: {name: tight, labels: {pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: v1
kind: ResourceQuota
metadata: {name: all, namespace: tight}
spec: {hard: {limits.cpu: "2", limits.memory: 2Gi, requests.cpu: "1", requests.memory: 1Gi}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: tight}
spec: &tight
  replicas: 1
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
        resources: {limits: {cpu: 500m, memory: 128Mi}, requests: {cpu: 10m, memory: 32Mi}}
        ports: [{containerPort: 8080, name: http}]
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: tight}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: http}]}
`

// worldSuite uses workloads as users have them. It checks that an intercept does not affect requests that do not match,
// and that kubevpn soon reports what cannot work.
func worldSuite(t *testing.T, w *world) {
	w.loadApp(t)
	w.apply(t, strings.NewReplacer("APP_IMAGE", appRef, " &tight", "").Replace(worldManifest))
	wide, tight := &shop{w, "wide", "deployment/wide"}, &shop{w, "tight", "deployment/web"}
	wide.rolledOut(t)
	tight.rolledOut(t)
	l := w.newUser(t, lab.Admin)
	l.connect(t)
	l.startApp(t, "laptop")
	t.Run("streams_are_the_applications", func(t *testing.T) { worldStreams(t, l, wide) })
	t.Run("bytes_cross_unchanged", func(t *testing.T) { worldBytes(t, l, wide) })
	t.Run("cases", func(t *testing.T) { worldCases(t, l) })
	t.Run("rollouts_that_cannot_happen", func(t *testing.T) { worldRollouts(t, l, tight) })
	t.Run("probes_and_calls_within_the_pod", func(t *testing.T) { worldProbes(t, l) })
	t.Run("others_change_the_workload", func(t *testing.T) { worldChanges(t, l) })
	t.Run("a_pod_has_no_kubeconfig", func(t *testing.T) { worldInPod(t, w) })
	t.Run("names_mean_what_they_mean_in_the_pod", func(t *testing.T) { worldNames(t, w, l) })
	t.Run("places", func(t *testing.T) { worldPlaces(t, l, wide) })
	t.Run("policies_demand_something", func(t *testing.T) { worldGoverned(t, l) })
}

// hold opens n requests for /hold on one connection of HTTP/2, and returns how many got a head.
func (v *visitor) hold(t *testing.T, url string, n int, header ...string) int {
	t.Helper()
	tr := &http.Transport{Protocols: new(http.Protocols), HTTP2: &http.HTTP2Config{StrictMaxConcurrentRequests: true},
		DialContext: func(_ context.Context, _, address string) (net.Conn, error) { return dialIn(v.network, address) }}
	tr.Protocols.SetUnencryptedHTTP2(true)
	ctx, cancel := context.WithTimeout(t.Context(), 12*time.Second)
	heads := make(chan struct{}, n)
	var requests sync.WaitGroup
	ask := func() error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
		if err != nil {
			return err
		}
		for i := 0; i+1 < len(header); i += 2 {
			req.Header.Add(header[i], header[i+1])
		}
		resp, err := tr.RoundTrip(req)
		if err != nil {
			return err // after the last head: the client goes
		}
		heads <- struct{}{}
		_, _ = io.Copy(io.Discard, resp.Body) // until the client goes
		return resp.Body.Close()
	}
	got := 0
	requests.Go(func() { // the others share its connection. kube-proxy may not know the pod yet: then again
		for err := ask(); err != nil && wakeup.Pause(ctx, 100*time.Millisecond); err = ask() {
			t.Logf("%s: %v", url, err)
		}
	})
	select {
	case <-heads:
		got++
	case <-ctx.Done():
	}
	for range n - 1 {
		requests.Go(func() { _ = ask() })
	}
	for got < n && ctx.Err() == nil {
		select {
		case <-heads:
			got++
		case <-ctx.Done():
		}
	}
	cancel()
	requests.Wait()
	tr.CloseIdleConnections()
	return got
}

func worldStreams(t *testing.T, l *laptop, s *shop) {
	v := s.visitor(t)
	url := "http://" + s.clusterIP(t, "wide", "wide") + "/hold"
	const n = 500
	if got := v.hold(t, url, n); got != n {
		t.Fatalf("without an intercept %d of %d requests are answered", got, n)
	}
	l.proxy(t, s, "--headers", mine+"="+me)
	defer l.leave(t, s)
	for _, header := range [][]string{nil, {mine, me}} {
		if got := v.hold(t, url, n, header...); got != n {
			t.Errorf("with the header %q %d of %d requests are answered", header, got, n)
		}
	}
}

func worldBytes(t *testing.T, l *laptop, s *shop) {
	v := s.visitor(t)
	at := net.JoinHostPort(s.clusterIP(t, "wide", "wide"), "9002")
	heads := []string{
		"GET /pay/%transId%/1 HTTP/1.1\r\nHost: web\r\n\r\n",
		"GET /a% HTTP/1.1\r\nx-api-KEY: 1\r\nSOAPAction: a\r\nhost: web\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: web\r\nX b(: 1\r\nX-A: \x01\xff\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "GET / HTTP/1.1\r\n\r\n",
	}
	check := func() {
		t.Helper()
		conn, err := dialIn(v.network, at)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		for _, head := range heads { // on one connection
			want := fmt.Sprintf("HTTP/1.1 200\r\nx-Name : %d\r\ncontent-LENGTH: %[1]d\r\n\r\n%s", len(head), head)
			if err := conn.SetDeadline(time.Now().Add(soon)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(conn, head); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len(want))
			if n, err := io.ReadFull(conn, got); string(got[:n]) != want {
				t.Errorf("%q is answered with %q (%v)", head, got[:n], err)
				return
			}
		}
	}
	check()
	l.proxy(t, s, "--headers", mine+"="+me, "--cache") // else answers to GET get a line
	defer l.leave(t, s)
	check()
	for n, head := range heads { // and to the laptop
		line, rest, _ := strings.Cut(head, "\r\n")
		heads[n] = line + "\r\n" + mine + ": " + me + "\r\n" + rest
	}
	check()
}

func worldRollouts(t *testing.T, l *laptop, s *shop) {
	t.Run("quota_with_room", func(t *testing.T) { // the agent has limits, as the application has
		l.proxy(t, s, "--headers", mine+"="+me)
		testenv.Eventually(t, soon, func() error {
			return s.visitor(t).want("http://"+s.clusterIP(t, "tight", "web")+"/", "laptop", mine, me)
		})
		l.leave(t, s)
		s.rolledOut(t)
	})
	before := s.template(t)
	fails := func(t *testing.T, within time.Duration, message string) {
		t.Helper()
		failure{code: api.ExitInject, message: message, hint: ".", within: within}.check(t,
			l.run(t, "kubevpn", "proxy", s.workload, "-n", s.namespace, "--headers", mine+"="+me))
		if after := s.template(t); after != before {
			t.Errorf("the template was\n%s\nand is\n%s", before, after)
		}
		if got := l.status(t).Intercepts; len(got) > 0 {
			t.Errorf("intercepts: %+v", got)
		}
	}
	t.Run("quota_without_room", func(t *testing.T) {
		s.kubectl(t, "-n", "tight", "patch", "resourcequota", "all", "--type=merge", "-p", `{"spec":{"hard":{"limits.cpu":"600m"}}}`)
		fails(t, 40*time.Second, "creates no pod of deployment/web with the agent: .*exceeded quota")
		s.kubectl(t, "-n", "tight", "patch", "resourcequota", "all", "--type=merge", "-p", `{"spec":{"hard":{"limits.cpu":"4"}}}`)
	})
	t.Run("paused", func(t *testing.T) {
		s.kubectl(t, "-n", "tight", "rollout", "pause", s.workload)
		fails(t, soon, "security|ephemeral")
		s.kubectl(t, "-n", "tight", "rollout", "resume", s.workload)
	})
}

// worldInPod checks the commands of kubevpn on a machine that is a pod. It has a service account and no kubeconfig. Its
// namespace is that of the pod.
func worldInPod(t *testing.T, w *world) {
	path, err := filepath.Abs(bin)
	if err != nil {
		t.Fatal(err)
	}
	w.apply(t, strings.NewReplacer("APP_IMAGE", appRef, "BIN", path).Replace(`
apiVersion: v1
kind: ServiceAccount
metadata: {name: developer, namespace: wide}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: developer}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}
subjects: [{kind: ServiceAccount, name: developer, namespace: wide}]
---
apiVersion: v1
kind: Pod
metadata: {name: devcontainer, namespace: wide}
spec:
  serviceAccountName: developer
  terminationGracePeriodSeconds: 1
  volumes: [{name: bin, hostPath: {path: BIN}}, {name: tmp, emptyDir: {}}]
  containers:
  - name: shell
    image: APP_IMAGE
    imagePullPolicy: Never
    securityContext: {privileged: true, runAsUser: 0}
    env: [{name: HOME, value: /tmp}, {name: KUBEVPN_YES, value: "true"}]
    volumeMounts: [{name: bin, mountPath: /kubevpn, readOnly: true}, {name: tmp, mountPath: /tmp}]
`))
	w.kubectl(t, "-n", "wide", "wait", "--for=condition=Ready", "pod/devcontainer", "--timeout=60s")
	run := func(argv ...string) (string, error) {
		return w.tryKubectl(t.Context(), append([]string{"-n", "wide", "exec", "devcontainer", "--"}, argv...)...)
	}
	v, service := w.visitor(t), "http://"+w.clusterIP(t, "wide", "wide")+"/"
	for _, step := range []struct {
		command string
		want    string // in what it prints
		check   func() error
	}{
		{"list", "deployment/wide", nil},
		{"doctor", "in-cluster", nil},
		{"connect", "connected", nil},
		{"status", "in-cluster", nil},
		{"why http://wide/", "200", nil},
		{"proxy deployment/wide --record 9 --headers " + mine + "=" + me, "", func() error {
			return errors.Join(v.want(service, "devcontainer", mine, me), v.of(service, "wide-"))
		}},
		{"requests deployment/wide -o json", "devcontainer", nil},
		{"leave deployment/wide", "", func() error { return v.of(service, "wide-", mine, me) }},
		{"clone deployment/wide --name inpod --headers " + mine + "=" + me, "ready", func() error {
			return v.of(service, "inpod-", mine, me)
		}},
		{"leave deployment/wide", "", nil},
		{"env deployment/wide", "WIDE_SERVICE_HOST", nil},
		{"dev deployment/wide -- /kubevpn/app -get http://wide/", "", nil},
		{"disconnect", "", nil},
		{"run -- /kubevpn/app -get http://wide/", "", nil},
	} {
		out, err := run(append([]string{"/kubevpn/kubevpn"}, strings.Fields(step.command)...)...)
		if err == nil && step.check != nil {
			err = step.check()
		}
		if err != nil || !strings.Contains(out, step.want) {
			t.Errorf("kubevpn %s in a pod: %v\n%s", step.command, err, out)
		}
	}
}
