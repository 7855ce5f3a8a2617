//go:build e2e && linux

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// devObjects returns the objects that the workloads of the dev suites use: a namespace, a service account, a ConfigMap
// with settings as its fields, and a Secret with keys.
func devObjects(namespace, settings, keys string) string {
	return strings.NewReplacer("NAMESPACE", namespace, "SETTINGS", settings, "KEYS", keys).Replace(`
apiVersion: v1
kind: Namespace
metadata: {name: NAMESPACE}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: robot, namespace: NAMESPACE}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: settings, namespace: NAMESPACE}
SETTINGS
---
apiVersion: v1
kind: Secret
metadata: {name: keys, namespace: NAMESPACE}
stringData: {KEYS}
---
`)
}

const devSettings = `data: {color: blue, page: "welcome\n"}`

var devManifest = devObjects("deved", devSettings, "password: hunter2") + `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: deved, labels: {app: shop}}
spec:
  selector: {matchLabels: {app: shop}}
  template:
    metadata: {labels: {app: shop}}
    spec:
      serviceAccountName: robot
      terminationGracePeriodSeconds: 1
      volumes:
      - {name: settings, configMap: {name: settings}}
      - {name: keys, secret: {secretName: keys, defaultMode: 0400}}
      - {name: scratch, emptyDir: {}}
      - {name: down, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        ports: [{containerPort: 8080, name: http}]
        env:
        - {name: GREETING, value: "hello from $(NODE)"}
        - {name: PASSWORD, valueFrom: {secretKeyRef: {name: keys, key: password}}}
        - {name: COLOR, valueFrom: {configMapKeyRef: {name: settings, key: color}}}
        - {name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        volumeMounts:
        - {name: settings, mountPath: /settings}
        - {name: settings, mountPath: /etc/settings}
        - {name: settings, mountPath: /srv/pages/page, subPath: page}
        - {name: settings, mountPath: /srv/pages/none, subPath: none}
        - {name: keys, mountPath: /keys, readOnly: true}
        - {name: scratch, mountPath: /scratch}
        - {name: down, mountPath: /podinfo}
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: deved}
spec:
  selector: {app: shop}
  ports: [{name: http, port: 80, targetPort: http}]
`

// devSuite checks that a program on the laptop gets what a container of the workload gets.
func devSuite(t *testing.T, w *world) {
	w.loadApp(t)
	w.apply(t, strings.ReplaceAll(devManifest, "APP_IMAGE", appRef))
	s := &shop{world: w, namespace: "deved", workload: "deployment/web"}
	s.rolledOut(t)
	l := w.newLaptop(t, lab.Admin)
	before := l.snapshot(t)
	t.Run("environment_and_files_match_the_pod", func(t *testing.T) { devFiles(t, l, s) })
	t.Run("environment_is_printed", func(t *testing.T) { devEnv(t, l, s) })
	t.Run("local_directory_replaces_a_volume", func(t *testing.T) { devVolume(t, l, s) })
	t.Run("service_account_token_works", func(t *testing.T) { devAccount(t, l, s) })
	t.Run("exit_code_is_the_program_s", func(t *testing.T) { devExit(t, l, s) })
	t.Run("program_receives_requests", func(t *testing.T) { devRequests(t, l, s, w.visitor(t)) })
	t.Run("signals_reach_the_program_once", func(t *testing.T) { devSignals(t, l, s) })
	t.Run("kill_9_ends_the_program", func(t *testing.T) { devKilled(t, l, s) })
	t.Run("continues_as_another_pod", func(t *testing.T) { devAnotherPod(t, l, s) })
	t.Run("program_outlives_the_daemon", func(t *testing.T) { devDaemonKilled(t, l, s) })
	t.Run("kubelet", func(t *testing.T) { devKubelet(t, l) })
	l.must(t, "kubevpn", "quit")
	l.sameAs(t, before)
}

func (l *laptop) dev(t *testing.T, s *shop, args ...string) result {
	t.Helper()
	return l.run(t, append([]string{"kubevpn", "dev", s.workload, "-n", s.namespace}, args...)...)
}

func devFiles(t *testing.T, l *laptop, s *shop) {
	pod := ""
	for name := range s.ready(t) {
		pod = name
	}
	// The program must see what the application in the pod sees.
	r := l.dev(t, s, "--env", "COLOR=mine", "--", "sh", "-c", `
		echo "$GREETING|$PASSWORD|$COLOR|$POD|$WEB_SERVICE_HOST|$HOME"
		cat /settings/page /srv/pages/page /keys/password; echo
		stat -L -c %a /keys/password; stat -f -c %T /keys; cat /podinfo/labels; echo
		echo kept >/scratch/file && cat /scratch/file
		curl -s --retry 9 --retry-connrefused -o /dev/null -w '%{http_code}\n' http://web.deved`)
	if r.code != 0 {
		t.Fatal(r)
	}
	want := fmt.Sprintf("hello from $(NODE)|hunter2|mine|%s|%s|%s\nwelcome\nwelcome\nhunter2\n400\ntmpfs\napp=\"shop\"\npod-template-hash=%q\nkept\n200\n",
		pod, s.clusterIP(t, s.namespace, "web"), l.home, s.kubectl(t, "-n", s.namespace, "get", "pod", pod, "-o", "jsonpath={.metadata.labels.pod-template-hash}"))
	if r.stdout != want {
		t.Errorf("got\n%s\nwant\n%s", r.stdout, want)
	}
	if !strings.Contains(r.stderr, "! volume settings at /srv/pages/none: the volume has nothing at none\n") {
		t.Error(r)
	}
	if !strings.Contains(r.stderr, "omitting volume settings at /etc/settings: ") || !strings.Contains(r.stderr, "; --mount-over /etc/settings mounts it\n") {
		t.Error(r)
	}
	for _, path := range []string{"/settings", "/etc/settings", "/keys", "/scratch", "/srv/pages"} {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s exists on the laptop", path)
		}
	}
}

// devEnv prints the variables in each format, and reads them as a shell does.
func devEnv(t *testing.T, l *laptop, s *shop) {
	want := "hello from $(NODE)|hunter2|blue|" + s.clusterIP(t, s.namespace, "web")
	var all map[string]string
	if err := json.Unmarshal([]byte(l.must(t, "kubevpn", "env", s.workload, "-n", s.namespace, "-o", "json")), &all); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join([]string{all["GREETING"], all["PASSWORD"], all["COLOR"], all["WEB_SERVICE_HOST"]}, "|"); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	r := l.sh(t, `eval "$('%s' env %s -n %s -o shell)" && echo "$GREETING|$PASSWORD|$COLOR|$WEB_SERVICE_HOST" && ls /`, filepath.Join(bin, "kubevpn"), s.workload, s.namespace)
	if got, _, _ := strings.Cut(r.stdout, "\n"); r.code != 0 || got != want {
		t.Error(r)
	}
	file := filepath.Join(l.home, "web.env")
	l.must(t, "kubevpn", "env", s.workload, "-n", s.namespace, "-q", "-o", "docker", "--file", file)
	text, err := os.ReadFile(file)
	if err != nil || !strings.Contains("\n"+string(text), "\nGREETING=hello from $(NODE)\n") {
		t.Errorf("%s, %v", text, err)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

// devVolume replaces a volume of any kind with a directory of the laptop.
func devVolume(t *testing.T, l *laptop, s *shop) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "page"), []byte("mine\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	r := l.dev(t, s, "--volume", "settings="+dir, "--mount-over", "/etc/settings", "--", "sh", "-c", "cat /etc/settings/page /srv/pages/page /keys/password; echo >/settings/made")
	if r.code != 0 || r.stdout != "mine\nmine\nhunter2" {
		t.Error(r)
	}
	if _, err := os.Stat(filepath.Join(dir, "made")); err != nil {
		t.Error(err)
	}
	failure{code: api.ExitUsage, message: `the pod has no volume "setings"`, hint: "it has settings, keys, scratch, down", within: time.Minute}.
		checkProgress(t, l.dev(t, s, "--volume", "setings="+dir, "--", "true"))
	failure{code: api.ExitUsage, message: "--volume: stat /nosuch: no such file or directory", within: 10 * time.Second}.
		check(t, l.dev(t, s, "--volume", "settings=/nosuch", "--", "true"))
}

// devAccount calls the API server with the service account's token, as in-cluster programs do.
func devAccount(t *testing.T, l *laptop, s *shop) {
	r := l.dev(t, s, "--", "sh", "-c", `cd /var/run/secrets/kubernetes.io/serviceaccount && cat namespace && echo &&
		curl -sS --cacert ca.crt -H "Authorization: Bearer $(cat token)" -H 'Content-Type: application/json' \
		-d '{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}' https://kubernetes.default/apis/authentication.k8s.io/v1/selfsubjectreviews`)
	if r.code != 0 {
		t.Fatal(r)
	}
	namespace, review, _ := strings.Cut(r.stdout, "\n")
	var who struct {
		Status struct {
			UserInfo struct{ Username string }
		}
	}
	if err := json.Unmarshal([]byte(review), &who); err != nil {
		t.Fatalf("%v\n%s", err, r.stdout)
	}
	if namespace != "deved" || who.Status.UserInfo.Username != "system:serviceaccount:deved:robot" {
		t.Errorf("namespace %q, user %q", namespace, who.Status.UserInfo.Username)
	}
}

func devExit(t *testing.T, l *laptop, s *shop) {
	for _, tt := range []struct {
		script string
		code   int
	}{{"exit 0", 0}, {"exit 7", 7}, {"kill -TERM $$", 128 + 15}, {"kill -KILL $$", 128 + 9}} {
		if r := l.dev(t, s, "--", "sh", "-c", tt.script); r.code != tt.code {
			t.Errorf("%s: %v", tt.script, r)
		}
	}
	if r := l.dev(t, s, "--", "no-such-program"); r.code != 2 || !strings.Contains(r.stderr, "no-such-program") {
		t.Error(r)
	}
	if s := l.run(t, "kubevpn", "status", "-o", "json"); strings.Contains(s.stdout, `"connected"`) {
		t.Errorf("a connection is left: %v", s)
	}
}

// devSignals checks that signals to the command, and Ctrl-C in its terminal, reach the program exactly once.
func devSignals(t *testing.T, l *laptop, s *shop) {
	const script = `n=; trap 'n=x$n; echo $n >FILE' INT; trap 'exit 5' TERM; echo up >FILE; while :; do sleep 0.05; done`
	for _, tt := range []struct {
		name      string
		start     func(*exec.Cmd) (io.ReadWriteCloser, error) // returns the terminal, or nil
		interrupt func(*exec.Cmd, io.Writer) error
	}{
		{"sent", func(cmd *exec.Cmd) (io.ReadWriteCloser, error) {
			cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
			return nil, cmd.Start()
		}, func(cmd *exec.Cmd, _ io.Writer) error { return cmd.Process.Signal(syscall.SIGINT) }},
		{"typed", func(cmd *exec.Cmd) (io.ReadWriteCloser, error) { return pty.Start(cmd) }, func(_ *exec.Cmd, terminal io.Writer) error {
			_, err := terminal.Write([]byte{3})
			return err
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "seen")
			seen := func(want string) error {
				got, err := os.ReadFile(file)
				if err == nil && string(got) != want {
					err = fmt.Errorf("%q, want %q", got, want)
				}
				return err
			}
			cmd := l.command(t.Context(), t, "kubevpn", "dev", s.workload, "-n", s.namespace, "--", "sh", "-c", strings.ReplaceAll(script, "FILE", file))
			terminal, err := tt.start(cmd)
			if err != nil {
				t.Fatal(err)
			}
			if terminal != nil {
				defer terminal.Close()
				go func() { _, _ = io.Copy(io.Discard, terminal) }() // the end of a terminal is an error
			}
			testenv.Eventually(t, 60*time.Second, func() error { return seen("up\n") })
			if err := tt.interrupt(cmd, terminal); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, time.Minute, func() error { return seen("x\n") })
			if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			var exit *exec.ExitError
			if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 5 {
				t.Errorf("the program ended with %v", err)
			}
			if err := seen("x\n"); err != nil {
				t.Error(err)
			}
		})
	}
}

// devRequests checks that the program answers requests while it runs.
func devRequests(t *testing.T, l *laptop, s *shop, v *visitor) {
	service := "http://" + s.clusterIP(t, s.namespace, "web") + "/"
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd := l.command(ctx, t, "kubevpn", "dev", s.workload, "-n", s.namespace, "--headers", mine+"="+me, "--", filepath.Join(bin, "app"), "-name", "developer", "-host", "127.0.0.1")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, func() error { return v.want(service, "developer", mine, me) })
	if err := v.of(service, "web-"); err != nil {
		t.Error(err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil { // kubevpn forwards it to the program
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
	if _, err := v.ask(http.MethodGet, service, nil, mine, me); err != nil {
		t.Error(err)
	}
	if err := v.of(service, "web-", mine, me); err != nil {
		t.Errorf("after the program ended: %v", err)
	}
}

// devKilled checks that kill -9 of the command ends the program and releases its connection and intercept.
func devKilled(t *testing.T, l *laptop, s *shop) {
	file := filepath.Join(t.TempDir(), "pid")
	cmd := l.command(t.Context(), t, "kubevpn", "dev", s.workload, "-n", s.namespace, "--", "sh", "-c", "echo up >"+file+"; exec sleep 1234567")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, func() error {
		_, err := os.Stat(file)
		return err
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	testenv.Eventually(t, time.Minute, func() error {
		if r := l.run(t, "pgrep", "-f", "sleep 1234567"); r.code == 0 {
			return fmt.Errorf("the program is left: %s", r.stdout)
		}
		if r := l.run(t, "kubevpn", "status", "-o", "json"); strings.Contains(r.stdout, `"connected"`) {
			return fmt.Errorf("the connection is left")
		}
		return nil
	})
}

// devAnotherPod checks that the token and files come from another pod after the first pod is deleted, and follow its
// changes.
func devAnotherPod(t *testing.T, l *laptop, s *shop) {
	dir := t.TempDir()
	cmd := l.command(t.Context(), t, "kubevpn", "dev", s.workload, "-n", s.namespace, "--", "sh", "-c",
		`while :; do for f in /var/run/secrets/kubernetes.io/serviceaccount/token /podinfo/labels /settings/color; do cat $f >`+dir+`/next && mv `+dir+`/next `+dir+`/${f##*/}; done; sleep 0.2; done`)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait() // the signal makes it fail
	}()
	has := func(file string) string {
		text, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			return ""
		}
		return string(text)
	}
	// review returns the pod to which the API server says that the token is bound.
	review := func(token string) string {
		file := filepath.Join(t.TempDir(), "review.json")
		if err := os.WriteFile(file, fmt.Appendf(nil, `{"apiVersion":"authentication.k8s.io/v1","kind":"TokenReview","spec":{"token":%q}}`, token), 0o600); err != nil {
			t.Fatal(err)
		}
		return s.kubectl(t, "create", "-f", file, "-o", `jsonpath={.status.authenticated} {.status.user.username} {.status.user.extra.authentication\.kubernetes\.io/pod-name[0]}`)
	}
	ofPod := func(want string) error {
		if has("token") == "" {
			return errors.New("there is no token")
		}
		if got := review(has("token")); got != "true system:serviceaccount:deved:robot "+want {
			return fmt.Errorf("the token is bound to %q, want %s", got, want)
		}
		return nil
	}
	one := func() (name string) {
		testenv.Eventually(t, 60*time.Second, func() error {
			pods := strings.Fields(s.kubectl(t, "-n", s.namespace, "get", "pods", "-l", "app=shop", "-o", "name"))
			if len(pods) != 1 {
				return fmt.Errorf("pods %q", pods)
			}
			name = strings.TrimPrefix(pods[0], "pod/")
			return nil
		})
		return name
	}
	first := one()
	testenv.Eventually(t, 60*time.Second, func() error { return ofPod(first) })
	before := has("token")

	s.kubectl(t, "-n", s.namespace, "rollout", "restart", s.workload)
	s.rolledOut(t)
	second := one()
	testenv.Eventually(t, 60*time.Second, func() error { return ofPod(second) })
	if second == first {
		t.Errorf("both pods have the name %s", first)
	}
	// The API server caches a token review for 10 s (kube-apiserver: TokenSuccessCacheTTL), and the test has just used
	// this token.
	testenv.Eventually(t, time.Minute, func() error {
		if got := review(before); strings.HasPrefix(got, "true") {
			return fmt.Errorf("the first token, of pod %s, is still valid: %s", first, got)
		}
		return nil
	})

	s.kubectl(t, "-n", s.namespace, "patch", "configmap", "settings", "-p", `{"data":{"color":"green"}}`)
	s.kubectl(t, "-n", s.namespace, "label", "pod", second, "tier=back")
	testenv.Eventually(t, 60*time.Second, func() error {
		if labels := has("labels"); !strings.Contains(labels, "tier=\"back\"") || !strings.Contains(labels, "app=\"shop\"") || has("color") != "green" {
			return fmt.Errorf("labels %q, color %q", labels, has("color"))
		}
		return nil
	})
	if err := ofPod(second); err != nil {
		t.Error(err)
	}
	s.kubectl(t, "-n", s.namespace, "patch", "configmap", "settings", "-p", `{"data":{"color":"blue"}}`)
}

// devDaemonKilled checks that a program outlives the daemon that gave it the network, and that kubevpn tells the user.
func devDaemonKilled(t *testing.T, l *laptop, s *shop) {
	dir := t.TempDir()
	up, end := filepath.Join(dir, "up"), filepath.Join(dir, "end")
	said, err := os.Create(filepath.Join(dir, "said"))
	if err != nil {
		t.Fatal(err)
	}
	defer said.Close()
	cmd := l.command(t.Context(), t, "kubevpn", "dev", s.workload, "-n", s.namespace, "--", "sh", "-c", "echo >"+up+"; until [ -e "+end+" ]; do sleep 0.05; done; exit 4")
	cmd.Stderr = said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 60*time.Second, func() error {
		_, err := os.Stat(up)
		return err
	})
	kill(t, l.daemonPID(t))
	testenv.Eventually(t, time.Minute, func() error {
		text, err := os.ReadFile(said.Name())
		if err == nil && !strings.Contains(string(text), "; the program continues without the cluster") {
			err = fmt.Errorf("the output does not mention the daemon:\n%s", text)
		}
		return err
	})
	if err := os.WriteFile(end, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 4 {
		t.Errorf("the program ended with %v", err)
	}
}
