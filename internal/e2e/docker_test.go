//go:build e2e && linux

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/google/go-containerregistry/pkg/registry"

	"kubevpn/internal/e2e/build"
	"kubevpn/internal/lab"
	"kubevpn/internal/testenv"
)

const shellRef = "docker.io/kubevpn/shell:e2e"

const dockedManifest = `
apiVersion: v1
kind: Namespace
metadata: {name: docked}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: robot, namespace: docked}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: settings, namespace: docked}
data: {color: blue, page: "welcome\n"}
---
apiVersion: v1
kind: Secret
metadata: {name: keys, namespace: docked}
stringData: {password: SECRET}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: docked, labels: {app: shop}}
spec:
  selector: {matchLabels: {app: shop}}
  template:
    metadata: {labels: {app: shop}}
    spec:
      serviceAccountName: robot
      terminationGracePeriodSeconds: 1
      securityContext: {fsGroup: 3000}
      volumes:
      - {name: settings, configMap: {name: settings}}
      - {name: keys, secret: {secretName: keys, defaultMode: 0400}}
      - {name: scratch, emptyDir: {}}
      - {name: down, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}
      containers:
      - name: web
        image: SHELL_IMAGE
        imagePullPolicy: Never
        args: [-name, "$(POD)"]
        ports: [{containerPort: 8080, name: http}]
        securityContext: {runAsUser: 1234, runAsGroup: 2345, readOnlyRootFilesystem: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
        env:
        - {name: GREETING, value: "hello from $(NODE)"}
        - {name: PASSWORD, valueFrom: {secretKeyRef: {name: keys, key: password}}}
        - {name: COLOR, valueFrom: {configMapKeyRef: {name: settings, key: color}}}
        - {name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        volumeMounts:
        - {name: settings, mountPath: /etc/settings}
        - {name: keys, mountPath: /etc/settings/more/keys, readOnly: true}
        - {name: settings, mountPath: /pages/page, subPath: page}
        - {name: keys, mountPath: /keys, readOnly: true}
        - {name: scratch, mountPath: /scratch}
        - {name: down, mountPath: /etc/podinfo}
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
      - name: helper
        image: SHELL_IMAGE
        imagePullPolicy: Never
        command: [sh, -c]
        args:
        - |
          trap 'exit 0' TERM
          echo ready >/shared/helper
          until curl -s http://127.0.0.1:8080/; do sleep 0.2; done; echo
          sleep 1000000 & wait
        volumeMounts: [{name: scratch, mountPath: /shared}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: fresh, namespace: docked}
spec:
  replicas: 0
  selector: {matchLabels: {app: fresh}}
  template:
    metadata: {labels: {app: fresh}}
    spec:
      containers: [{name: app, image: FRESH_IMAGE, imagePullPolicy: Always}]
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: docked}
spec:
  selector: {app: shop}
  ports: [{name: http, port: 80, targetPort: http}]
`

// dockedSecret is looked for where it must not be.
const dockedSecret = "hunter2-of-the-docked"

// freshRef is an image of a registry that the engine alone reaches.
const freshRef = "127.0.0.1:5000/fresh:1"

// engine is a Docker Engine in a network namespace of its own, beside the laptop and joined to it by a cable.
type engine struct {
	root, dir string // Debian's package; this engine's files
	namespace string
	address   string // of the namespace, from the laptop
	cmd       *exec.Cmd
	log       *os.File
}

// newEngine starts one, with the images that the test has.
func (w *world) newEngine(t *testing.T) *engine {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	e := &engine{root: filepath.Join(cache, "kubevpn/docker.io"), namespace: w.Config().Name + "-docker", address: "10.213.0.2"}
	if _, err := os.Stat(filepath.Join(e.root, "usr/sbin/dockerd")); err != nil {
		t.Log("Docker Engine is not here; internal/e2e/testdata/fetch-docker.sh fetches it without installing it")
	}
	testenv.NeedPrograms(t, filepath.Join(e.root, "usr/sbin/dockerd"), "containerd", "runc", "iptables")
	if e.dir, err = os.MkdirTemp("", "kubevpn-docker-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(e.dir); err != nil {
			t.Error(err)
		}
	})
	laptop := w.Config().Name + "-laptop"
	ip := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	ip("netns", "add", e.namespace)
	t.Cleanup(func() { ip("netns", "delete", e.namespace) }) // and with it the cable
	ip("link", "add", "docker", "netns", laptop, "type", "veth", "peer", "name", "laptop", "netns", e.namespace)
	ip("-n", laptop, "addr", "add", "10.213.0.1/30", "dev", "docker")
	ip("-n", laptop, "link", "set", "docker", "up")
	ip("-n", e.namespace, "addr", "add", e.address+"/30", "dev", "laptop")
	ip("-n", e.namespace, "link", "set", "laptop", "up")
	ip("-n", e.namespace, "link", "set", "lo", "up")
	if e.log, err = os.Create(filepath.Join(e.dir, "log")); err != nil {
		t.Fatal(err)
	}
	e.start(t)
	t.Cleanup(func() { e.stop(t) })
	if out, err := e.docker(t.Context(), "load", "--input", filepath.Join(bin, "shell.tar")); err != nil {
		t.Fatalf("docker load: %v\n%s", err, out)
	}
	return e
}

func (e *engine) start(t *testing.T) {
	t.Helper()
	// Not `ip netns exec`: its /sys has no cgroups.
	e.cmd = exec.Command("nsenter", "--net=/run/netns/"+e.namespace, "--", "dockerd", "--data-root", filepath.Join(e.dir, "data"), "--exec-root", filepath.Join(e.dir, "exec"),
		"--pidfile", filepath.Join(e.dir, "pid"), "--host", e.host(), "--bip", "10.214.0.1/24")
	e.cmd.Env = append(os.Environ(), "PATH="+e.path(), "LD_LIBRARY_PATH="+filepath.Join(e.root, "lib/x86_64-linux-gnu"))
	e.cmd.Stdout, e.cmd.Stderr = e.log, e.log
	if err := e.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 60*time.Second, func() error {
		out, err := e.docker(t.Context(), "version")
		if err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
		return nil
	})
}

func (e *engine) stop(t *testing.T) {
	t.Helper()
	if err := e.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = e.cmd.Wait()
	if t.Failed() {
		if log, err := os.ReadFile(e.log.Name()); err == nil {
			t.Logf("the engine's log:\n%s", tail(string(log), 40))
		}
	}
}

func (e *engine) host() string { return "unix://" + filepath.Join(e.dir, "socket") }

func (e *engine) path() string {
	return filepath.Join(e.root, "usr/bin") + ":" + filepath.Join(e.root, "usr/sbin") + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
}

func (e *engine) docker(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(e.root, "usr/bin/docker"), args...)
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+e.host())
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// forEverybody lets users speak to the engine who are not root, with a docker command that they can reach, and gives its directory.
func (e *engine) forEverybody(t *testing.T) string {
	t.Helper()
	command, err := os.ReadFile(filepath.Join(e.root, "usr/bin/docker"))
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(e.dir, "bin")
	err = errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(filepath.Join(dir, "docker"), command, 0o755), os.Chmod(e.dir, 0o711),
		os.Chmod(strings.TrimPrefix(e.host(), "unix://"), 0o666))
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// registry starts one where only the engine reaches it, and gives what ends it.
func (e *engine) registry(t *testing.T, address string) (end func()) {
	t.Helper()
	var listener net.Listener
	if err := inside("/run/netns/"+e.namespace, func() (err error) {
		listener, err = net.Listen("tcp", address)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: registry.New(registry.Logger(log.New(io.Discard, "", 0)))}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener) // until it is closed
	}()
	end = sync.OnceFunc(func() { server.Close(); <-served })
	t.Cleanup(end)
	return end
}

// docked are a laptop and its engine.
type docked struct {
	*laptop
	*engine
	shop *shop
	bin  string // a directory with a docker command; "": the engine's
}

// dev prepares `kubevpn dev --docker`.
func (d *docked) dev(ctx context.Context, t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(d.home, "run"), 0o700); err != nil {
		t.Fatal(err)
	}
	path := d.path()
	if d.bin != "" {
		path = d.bin + ":" + path
	}
	return d.command(ctx, t, append([]string{"env", "DOCKER_HOST=" + d.host(), "PATH=" + path, filepath.Join(bin, "kubevpn"),
		"dev", d.shop.workload, "-n", d.shop.namespace, "--docker"}, args...)...)
}

// script runs a shell script in the container web, alone.
func (d *docked) script(t *testing.T, script string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := d.dev(ctx, t, append(append([]string{"-c", "web", "-i"}, args...), "--", "--entrypoint", "sh")...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(script), &stdout, &stderr
	r := result{command: script}
	began := time.Now()
	err := cmd.Run()
	r.stdout, r.stderr, r.took = stdout.String(), stderr.String(), time.Since(began)
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		r.code = exit.ExitCode()
	} else if err != nil {
		t.Fatal(err)
	}
	return r
}

// shell is a script that runs in the container web, alone, without a terminal, and what it says.
func (d *docked) shell(ctx context.Context, t *testing.T, script string) (*exec.Cmd, *syncBuffer) {
	t.Helper()
	out := &syncBuffer{}
	cmd := d.dev(ctx, t, "-c", "web", "-i", "--", "--entrypoint", "sh")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(script), out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, out
}

// says waits until a program has said something.
func says(t *testing.T, out *syncBuffer, text string) {
	t.Helper()
	testenv.Eventually(t, 90*time.Second, func() error {
		if said := out.String(); !strings.Contains(said, text) {
			return fmt.Errorf("no %q in %q", text, said)
		}
		return nil
	})
}

// dockerRun is the `docker run` of the container web that a kubevpn has started.
func dockerRun(t *testing.T, kubevpn int) int {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range all {
		var pid, parent int
		var name, state string
		if b, err := os.ReadFile(file); err != nil { // it has ended
			continue
		} else if _, err := fmt.Sscan(string(b), &pid, &name, &state, &parent); err != nil || parent != kubevpn {
			continue
		}
		if command, err := os.ReadFile(filepath.Join(filepath.Dir(file), "cmdline")); err == nil && strings.Contains(string(command), "-web\x00") {
			return pid
		}
	}
	t.Fatal("there is no docker run")
	return 0
}

// nothing reports what the last run has left, be it an empty directory.
func (d *docked) nothing(ctx context.Context) error {
	if err := d.gone(ctx); err != nil {
		return err
	}
	for _, dir := range []string{fmt.Sprintf("/dev/shm/kubevpn-%d", d.uid), filepath.Join(d.home, "run/kubevpn/docker")} {
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%s is left: %w", dir, err)
		}
	}
	return nil
}

// gone reports what is left of a run.
func (d *docked) gone(ctx context.Context) error {
	out, err := d.docker(ctx, "ps", "--all", "--format", "{{.Names}} {{.Status}}")
	if err != nil || out != "" {
		return fmt.Errorf("containers are left: %s %w", out, err)
	}
	for _, pattern := range []string{"/dev/shm/kubevpn-*/docker/*", filepath.Join(d.home, "run/kubevpn/docker/*")} {
		left, err := filepath.Glob(pattern)
		if err != nil || len(left) > 0 {
			return fmt.Errorf("files are left: %q %w", left, err)
		}
	}
	return nil
}

// syncBuffer is written by a program while the test reads it.
type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// dockerSuite: the pod's containers run on the laptop as they do in the cluster.
func dockerSuite(t *testing.T, w *world) {
	if err := buildApp(); err != nil {
		t.Fatal(err)
	}
	if err := build.Shell(t.Context(), bin, shellRef); err != nil {
		t.Fatal(err)
	}
	if err := w.Load(t.Context(), filepath.Join(bin, "shell.tar")); err != nil {
		t.Fatal(err)
	}
	w.apply(t, strings.NewReplacer("SHELL_IMAGE", shellRef, "FRESH_IMAGE", freshRef, "SECRET", dockedSecret).Replace(dockedManifest))
	s := &shop{world: w, namespace: "docked", workload: "deployment/web"}
	s.rolledOut(t)
	d := &docked{laptop: w.newUser(t, lab.Admin), engine: w.newEngine(t), shop: s}
	before := d.snapshot(t)
	// The proxies of this user's network are not the way to what has names in the cluster.
	if err := errors.Join(os.Mkdir(filepath.Join(d.home, ".docker"), 0o700), os.WriteFile(filepath.Join(d.home, ".docker/config.json"),
		[]byte(`{"proxies": {"default": {"httpProxy": "http://192.0.2.1:3128", "httpsProxy": "http://192.0.2.1:3128"}}}`), 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		run  func(*testing.T, *docked)
	}{
		{"environment_and_files", dockedFiles}, {"volume", dockedVolume}, {"service_account", dockedAccount}, {"exit", dockedExit}, {"terminal", dockedTerminal}, {"detached", dockedDetached},
		{"signals", dockedSignals}, {"together", dockedTogether}, {"newer_image", dockedNewer}, {"killed", dockedKilled}, {"both_killed", dockedBothKilled},
		{"no_engine", dockedNoEngine},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.run(t, d)
			testenv.Eventually(t, 30*time.Second, func() error { return d.nothing(t.Context()) })
		})
	}
	d.sameAs(t, before)
}

func dockedFiles(t *testing.T, d *docked) {
	pod := ""
	for name := range d.shop.ready(t) {
		pod = name
	}
	r := d.script(t, `
		echo "$GREETING|$PASSWORD|$COLOR|$IMAGE|$POD|$WEB_SERVICE_HOST|$(uname -n)"
		id -u; id -g; id -G
		cat /etc/settings/page /pages/page /keys/password /etc/settings/more/keys/password; echo
		echo "$HTTP_PROXY$http_proxy$HTTPS_PROXY$https_proxy|$HOME"
		stat -L -c '%a %u:%g' /keys/password; stat -f -c %T /keys; cat /etc/podinfo/labels; echo
		echo kept >/scratch/file && cat /scratch/file
		touch /file 2>/dev/null || echo read-only
		touch /etc/settings/x 2>/dev/null || echo read-only
		curl -s -o /dev/null -w '%{http_code}\n' http://web.docked
		curl -s -o /dev/null -w '%{http_code}\n' http://web`, "--env", "COLOR=mine")
	if r.code != 0 {
		t.Fatal(r)
	}
	want := fmt.Sprintf("hello from $(NODE)|%s|mine|shell|%s|%s|%[2]s\n1234\n2345\n2345 3000\nwelcome\nwelcome\n%[1]s%[1]s\n|/\n440 0:3000\ntmpfs\napp=\"shop\"\npod-template-hash=%[4]q\nkept\nread-only\nread-only\n200\n200\n",
		dockedSecret, pod, d.shop.clusterIP(t, "docked", "web"), d.shop.kubectl(t, "-n", "docked", "get", "pod", pod, "-o", "jsonpath={.metadata.labels.pod-template-hash}"))
	if r.stdout != want {
		t.Errorf("got\n%s\nwant\n%s", r.stdout, want)
	}
}

// dockedVolume: a directory of the laptop stands for a volume.
func dockedVolume(t *testing.T, d *docked) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "page"), []byte("mine\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if r := d.script(t, "cat /etc/settings/page /pages/page /keys/password", "--volume", "settings="+dir); r.code != 0 || r.stdout != "mine\nmine\n"+dockedSecret {
		t.Error(r)
	}
}

func dockedAccount(t *testing.T, d *docked) {
	r := d.script(t, `cd /var/run/secrets/kubernetes.io/serviceaccount && cat namespace && echo &&
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
		t.Fatalf("%v\n%s", err, r)
	}
	if namespace != "docked" || who.Status.UserInfo.Username != "system:serviceaccount:docked:robot" {
		t.Errorf("namespace %q, user %q", namespace, who.Status.UserInfo.Username)
	}
}

func dockedExit(t *testing.T, d *docked) {
	for _, tt := range []struct {
		script string
		code   int
	}{{"exit 0", 0}, {"exit 7", 7}, {"kill -TERM $$", 128 + 15}} {
		if r := d.script(t, tt.script); r.code != tt.code {
			t.Errorf("%s: %v", tt.script, r)
		}
	}
}

// dockedTerminal: -it is a terminal, whose Ctrl-C is the program's, and whose shell has job control.
func dockedTerminal(t *testing.T, d *docked) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := d.dev(ctx, t, "-c", "web", "-it", "--", "--entrypoint", "sh")
	master, err := pty.Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	var seen syncBuffer
	go func() {
		_, _ = master.WriteTo(&seen) // ends with an error, that of a terminal without users
	}()
	says := func(text string) {
		t.Helper()
		testenv.Eventually(t, time.Minute, func() error {
			if !strings.Contains(seen.String(), text) {
				return fmt.Errorf("no %q in %q", text, seen.String())
			}
			return nil
		})
	}
	write := func(text string) {
		t.Helper()
		if _, err := master.WriteString(text); err != nil {
			t.Fatal(err)
		}
	}
	write("tty; echo be''gun; sleep 1000\n")
	says("begun")
	says("/dev/pts/0")
	write("\x03")
	write("echo in''terrupted; exit 5\n")
	says("interrupted")
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 5 {
		t.Errorf("%v, want exit code 5\n%s", err, seen.String())
	}
}

// dockedDetached: the keys that leave a container running leave nothing.
func dockedDetached(t *testing.T, d *docked) {
	cmd := d.dev(t.Context(), t, "-c", "web", "-it", "--", "--entrypoint", "sh")
	master, err := pty.Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	var seen syncBuffer
	go func() {
		_, _ = master.WriteTo(&seen) // ends with an error, that of a terminal without users
	}()
	if _, err := master.WriteString("echo be''gun\n"); err != nil {
		t.Fatal(err)
	}
	says(t, &seen, "begun")
	if _, err := master.WriteString("\x10\x11"); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait() // the exit code tells
	}()
	select {
	case <-ended:
		if code := cmd.ProcessState.ExitCode(); code != 70 || !strings.Contains(seen.String(), "detach keys") {
			t.Errorf("exit code %d\n%s", code, seen.String())
		}
	case <-time.After(time.Minute):
		kill(t, cmd.Process.Pid)
		t.Fatalf("it hangs:\n%s", seen.String())
	}
	// At once, not only in the end.
	if out, err := d.docker(t.Context(), "ps", "--all", "--quiet"); err != nil || out != "" {
		t.Errorf("containers are left: %s, %v", out, err)
	}
}

// dockedSignals: a signal reaches the program whether kubevpn alone gets it, or the process group with docker in it; and once.
func dockedSignals(t *testing.T, d *docked) {
	cmd, out := d.shell(t.Context(), t, `n=0
		trap 'n=$((n+1)); echo "INT $n"' INT; trap 'echo "HUP after $n"' HUP; trap 'echo "USR1 after $n"' USR1; trap 'exit 3' TERM
		sleep 1000 & echo ready; while :; do wait $!; done`) // wait ends at once, so that no two are seen as one
	send := func(pid int, s syscall.Signal, want string) {
		t.Helper()
		if err := syscall.Kill(pid, s); err != nil {
			t.Fatal(err)
		}
		says(t, out, want)
	}
	says(t, out, "ready")
	kubevpn := cmd.Process.Pid
	send(kubevpn, syscall.SIGINT, "INT 1")
	send(kubevpn, syscall.SIGHUP, "HUP after 1")
	send(-kubevpn, syscall.SIGINT, "INT 2")
	// Docker passes signals on one by one: those of before have come when this has.
	send(dockerRun(t, kubevpn), syscall.SIGUSR1, "USR1 after 2")
	if err := syscall.Kill(-kubevpn, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 3 {
		t.Errorf("%v\n%s", err, out.String())
	}
}

// dockedNewer: an image that the kubelet pulls each time is the registry's of now, and this machine's if there is no registry.
func dockedNewer(t *testing.T, d *docked) {
	end := d.registry(t, strings.SplitN(freshRef, "/", 2)[0])
	docker := func(args ...string) string {
		t.Helper()
		out, err := d.docker(t.Context(), args...)
		if err != nil {
			t.Fatalf("docker %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return out
	}
	id := docker("create", shellRef)
	docker("commit", "--change", "ENV IMAGE=newer", id, freshRef)
	docker("rm", id)
	docker("push", freshRef)
	fresh := *d
	fresh.shop = &shop{world: d.shop.world, namespace: d.shop.namespace, workload: "deployment/fresh"}
	runs := func(image, want string, warns bool, args ...string) {
		t.Helper()
		docker("tag", shellRef, freshRef) // what is here is old
		cmd := fresh.dev(t.Context(), t, append(append([]string{"-i"}, args...), "--", "--entrypoint", "sh")...)
		var stdout, stderr bytes.Buffer
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader("echo $IMAGE"), &stdout, &stderr
		if err := cmd.Run(); err != nil || stdout.String() != want+"\n" || strings.Contains(stderr.String(), "may have a newer") != warns {
			t.Errorf("%s: %v\n%s%s", image, err, stdout.String(), stderr.String())
		}
	}
	runs("the registry's", "newer", false)
	runs("one that is named", "shell", false, "--image", freshRef)
	end()
	runs("without the registry", "shell", true)
}

// dockedTogether: both containers run; they share localhost, memory and files, are reached at a published port, and answer
// requests that are intercepted. No secret of theirs is on a disk.
func dockedTogether(t *testing.T, d *docked) {
	v := d.visitor(t)
	service := "http://" + d.shop.clusterIP(t, "docked", "web") + "/"
	var out syncBuffer
	cmd := d.dev(t.Context(), t, "-p", "18080:8080", "--headers", mine+"="+me)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	var local answer
	testenv.Eventually(t, 90*time.Second, func() (err error) {
		select {
		case err := <-ended:
			t.Fatalf("%v\n%s", err, out.String())
		default:
		}
		local, err = v.ask(http.MethodGet, service, nil, mine, me)
		if err == nil && !strings.HasPrefix(local.Remote, "127.0.0.1") && !strings.HasPrefix(local.Remote, "[::1]") {
			err = fmt.Errorf("%s answers who has asked from %s", local.Name, local.Remote)
		}
		return err
	})
	if r := d.run(t, "curl", "-sS", "--max-time", "10", "http://"+d.address+":18080/published"); r.code != 0 || !strings.Contains(r.stdout, "/published") {
		t.Errorf("the published port: %v", r)
	}
	testenv.Eventually(t, 20*time.Second, func() error {
		if text := out.String(); !strings.Contains(text, "[helper] {") {
			return fmt.Errorf("the helper has not reached 127.0.0.1:8080:\n%s", text)
		}
		return nil
	})
	names, err := d.docker(t.Context(), "ps", "--format", "{{.Names}}")
	if err != nil || len(strings.Fields(names)) != 3 {
		t.Errorf("containers: %q, %v", names, err)
	}
	// grep ends with 1 where it has found nothing.
	for _, where := range []string{filepath.Join(d.dir, "data/containers"), d.dir + "/exec", d.home} {
		if r := d.run(t, "grep", "-rlaF", "--exclude-dir=netns", "-e", dockedSecret, where); r.code != 1 || r.stdout != "" {
			t.Errorf("the secret is on disk: %v", r)
		}
	}
	if r := d.run(t, "sh", "-c", `for p in /proc/[0-9]*/cmdline; do tr '\0' ' ' <$p; echo; done 2>/dev/null`); strings.Contains(r.stdout, dockedSecret) {
		t.Error("the secret is on a command line")
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil { // which is the program's
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("after SIGTERM: %v\n%s", err, out.String())
		}
	case <-time.After(60 * time.Second):
		t.Fatalf("it does not end:\n%s", out.String())
	}
	testenv.Eventually(t, 30*time.Second, func() error {
		a, err := v.ask(http.MethodGet, service, nil, mine, me)
		if err == nil && strings.HasPrefix(a.Remote, "127.0.0.1") {
			err = fmt.Errorf("%s still answers from the laptop", a.Name)
		}
		return err
	})
}

// dockedKilled: whoever is killed, nothing is left.
func dockedKilled(t *testing.T, d *docked) {
	killContainer := func(name string) func(*testing.T, *exec.Cmd) {
		return func(t *testing.T, _ *exec.Cmd) {
			id, err := d.docker(t.Context(), "ps", "--quiet", "--filter", "name=-"+name+"$")
			if err != nil || id == "" {
				t.Fatalf("no container %s: %v", name, err)
			}
			if out, err := d.docker(t.Context(), "kill", "--signal", "KILL", id); err != nil {
				t.Fatalf("docker kill: %v\n%s", err, out)
			}
		}
	}
	for _, tt := range []struct {
		name  string
		kill  func(*testing.T, *exec.Cmd)
		codes []int
	}{
		{"kubevpn", func(t *testing.T, cmd *exec.Cmd) { kill(t, cmd.Process.Pid) }, []int{-1}},
		{"docker", func(t *testing.T, cmd *exec.Cmd) { kill(t, dockerRun(t, cmd.Process.Pid)) }, []int{70}},
		{"web", killContainer("web"), []int{128 + 9}},
		{"network", killContainer("network"), []int{70}},
		{"engine", func(t *testing.T, _ *exec.Cmd) {
			d.stop(t)
			d.engine.start(t)
		}, []int{0, 70}}, // it asks the programs to end first, and one does
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out syncBuffer
			cmd := d.dev(t.Context(), t)
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, 90*time.Second, func() error {
				if text := out.String(); !strings.Contains(text, "[helper] {") {
					return fmt.Errorf("it does not run:\n%s", text)
				}
				return nil
			})
			tt.kill(t, cmd)
			err := cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); !slices.Contains(tt.codes, code) {
				t.Errorf("%v, want an exit code of %d\n%s", err, tt.codes, out.String())
			}
			testenv.Eventually(t, 60*time.Second, func() error { return d.gone(t.Context()) })
		})
	}
}

// dockedBothKilled: what nobody was left to remove, although it is root's, the next run of a user who is not root removes.
func dockedBothKilled(t *testing.T, d *docked) {
	e := &docked{laptop: d.laptopOf(t, eve), engine: d.engine, shop: d.shop, bin: d.forEverybody(t)}
	cmd, out := e.shell(t.Context(), t, "echo ready; sleep 1000")
	says(t, out, "ready")
	id, err := d.docker(t.Context(), "ps", "--quiet", "--filter", "name=-network$")
	if err != nil || id == "" {
		t.Fatalf("no network container: %v", err)
	}
	first, err := d.docker(t.Context(), "inspect", "--format", "{{.State.Pid}}", id)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(first)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(syscall.Kill(pid, syscall.SIGSTOP), syscall.Kill(cmd.Process.Pid, syscall.SIGKILL), syscall.Kill(pid, syscall.SIGKILL)); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	testenv.Eventually(t, 30*time.Second, func() error {
		if left, err := d.docker(t.Context(), "ps", "--all", "--quiet"); err != nil || left != "" {
			return fmt.Errorf("containers are left: %s %w", left, err)
		}
		return nil
	})
	left, err := filepath.Glob(fmt.Sprintf("/dev/shm/kubevpn-%d/docker/*/volumes/keys/password", eve.uid))
	if err != nil || len(left) != 1 {
		t.Fatalf("what is to be removed: %q, %v", left, err)
	}
	if r := e.script(t, "cat /keys/password"); r.code != 0 || r.stdout != dockedSecret {
		t.Error(r)
	}
	testenv.Eventually(t, 30*time.Second, func() error { return e.nothing(t.Context()) })
}

// dockedNoEngine: what is missing is said before anything else is done, and what does without it.
func dockedNoEngine(t *testing.T, d *docked) {
	for _, tt := range []struct{ name, host, path, want string }{
		{"no_command", "", "/nonexistent", "none in PATH"},
		{"not_running", "unix:///nonexistent/docker.sock", d.path(), "does not run"},
		{"remote", "tcp://192.0.2.1:2375", d.path(), "another machine"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := d.run(t, "/usr/bin/env", "DOCKER_HOST="+tt.host, "PATH="+tt.path, filepath.Join(bin, "kubevpn"), "dev", "deployment/web", "-n", "docked", "--docker")
			if r.code != 70 || !strings.Contains(r.stderr, tt.want) || !strings.Contains(r.stderr, "--isolate") {
				t.Errorf("%v, want exit code 70 and %q", r, tt.want)
			}
		})
	}
}
