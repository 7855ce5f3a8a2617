//go:build e2e && linux

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

const shellRef = "docker.io/kubevpn/shell:e2e"

var dockedManifest = devObjects("docked", devSettings, "password: "+dockedSecret) + `
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

// dockedSecret is a Secret's value that must not appear on a disk or a command line.
const dockedSecret = "hunter2-of-the-docked"

// freshRef is an image in a registry that only the engine can reach.
const freshRef = "127.0.0.1:5000/fresh:1"

// engine is a Docker Engine in its own network namespace, connected to the laptop by a veth pair.
type engine struct {
	root, dir string // the unpacked Debian package; the files of this engine
	namespace string
	address   string // of the namespace, as the laptop reaches it
	cmd       *exec.Cmd
	log       *os.File
}

// newEngine starts an engine and loads the images of the test.
func (w *world) newEngine(t *testing.T) *engine {
	t.Helper()
	e := &engine{root: testenv.Unpacked(t, "docker.io", "usr/sbin/dockerd"), namespace: w.Config().Name + "-docker",
		address: "10.213.0.2"}
	testenv.NeedPrograms(t, "containerd", "runc", "iptables")
	var err error
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
	t.Cleanup(func() { ip("netns", "delete", e.namespace) }) // which also removes the veth pair
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
	// `ip netns exec` is no alternative, because its /sys has no cgroups.
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

// forEverybody lets ordinary users access the engine. It returns the directory of a docker command that they can run.
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

// registry starts a registry that only the engine can reach. The returned function stops it.
func (e *engine) registry(t *testing.T, address string) (end func()) {
	t.Helper()
	var listener net.Listener
	if err := inside("/run/netns/"+e.namespace, func() (err error) {
		listener, err = net.Listen("tcp", address)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return serveHTTP(t, listener, registryHandler())
}

// docked is a laptop and its engine.
type docked struct {
	*laptop
	*engine
	shop *shop
	bin  string // a directory with a docker command; "": that of the engine
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

// script runs a shell script in the container web, without the other containers.
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
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		r.code = exit.ExitCode()
	} else if err != nil {
		t.Fatal(err)
	}
	return r
}

// shell starts a shell script in the container web, without other containers and without a terminal. The buffer
// receives its output.
func (d *docked) shell(ctx context.Context, t *testing.T, script string) (*exec.Cmd, *testenv.Buffer) {
	t.Helper()
	out := &testenv.Buffer{}
	cmd := d.dev(ctx, t, "-c", "web", "-i", "--", "--entrypoint", "sh")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(script), out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, out
}

// says waits until the output contains a text.
func says(t *testing.T, out *testenv.Buffer, text string) {
	t.Helper()
	testenv.Eventually(t, 90*time.Second, func() error {
		if said := out.String(); !strings.Contains(said, text) {
			return fmt.Errorf("no %q in %q", text, said)
		}
		return nil
	})
}

// dockerRun returns the process `docker run` of the container web that a kubevpn process started.
func dockerRun(t *testing.T, kubevpn int) int {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range all {
		var pid, parent int
		var name, state string
		if b, err := os.ReadFile(file); err != nil { // the process has ended
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

// gone returns an error if containers, volumes or directories of sockets of a run are left.
func (d *docked) gone(ctx context.Context) error {
	for _, list := range [][]string{{"ps", "--all", "--format", "{{.Names}} {{.Status}}"}, {"volume", "ls", "--quiet"}} {
		if out, err := d.docker(ctx, list...); err != nil || out != "" {
			return fmt.Errorf("docker %s: left: %s %w", list[0], out, err)
		}
	}
	if mounts, err := os.ReadFile("/proc/self/mounts"); err != nil || strings.Contains(string(mounts), filepath.Join(d.dir, "data/volumes")) {
		return fmt.Errorf("files are left in memory: %s %w", mounts, err)
	}
	left, err := filepath.Glob(filepath.Join(d.home, "run/kubevpn/docker*"))
	if err != nil || len(left) > 0 {
		return fmt.Errorf("directories are left: %q %w", left, err)
	}
	return nil
}

// dockerSuite checks that the pod's containers run on the laptop as they do in the cluster.
func dockerSuite(t *testing.T, w *world) {
	w.loadShell(t)
	w.apply(t, strings.NewReplacer("SHELL_IMAGE", shellRef, "FRESH_IMAGE", freshRef).Replace(dockedManifest))
	s := &shop{world: w, namespace: "docked", workload: "deployment/web"}
	s.rolledOut(t)
	d := &docked{laptop: w.newUser(t, lab.Admin), engine: w.newEngine(t), shop: s}
	before := d.snapshot(t)
	// Cluster names must bypass the HTTP proxies of the user's Docker configuration.
	if err := errors.Join(os.Mkdir(filepath.Join(d.home, ".docker"), 0o700), os.WriteFile(filepath.Join(d.home, ".docker/config.json"),
		[]byte(`{"proxies": {"default": {"httpProxy": "http://192.0.2.1:3128", "httpsProxy": "http://192.0.2.1:3128"}}}`), 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		run  func(*testing.T, *docked)
	}{
		{"other_containers_of_the_pod_answer_on_localhost", dockedLocalhost},
		{"environment_and_files_match_the_pod", dockedFiles}, {"local_directory_replaces_a_volume", dockedVolume}, {"service_account_token_works", dockedAccount}, {"exit_code_is_the_program_s", dockedExit}, {"terminal_has_job_control", dockedTerminal}, {"detach_leaves_nothing", dockedDetached},
		{"signals_reach_the_program_once", dockedSignals}, {"containers_share_network_and_volumes", dockedTogether}, {"newer_image_is_pulled", dockedNewer}, {"nothing_is_left_after_a_kill", dockedKilled}, {"nothing_is_left_after_both_are_killed", dockedBothKilled},
		{"run_works_inside_a_container", dockedRun},
		{"missing_engine_is_reported", dockedNoEngine},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.run(t, d)
			testenv.Eventually(t, time.Minute, func() error { return d.gone(t.Context()) })
		})
	}
	d.sameAs(t, before)
}

// dockedRun checks that `kubevpn run` works in a container without privileges, a device or a terminal, as on CI runners.
func dockedRun(t *testing.T, d *docked) {
	root := d.shop.newLaptop(t, lab.Admin)
	root.must(t, "sysctl", "-qw", "net.ipv4.ip_forward=1") // the engine reaches the API server by way of the laptop
	root.finally(t, "sysctl", "-qw", "net.ipv4.ip_forward=0")
	root.must(t, "nft", "add table ip engine; add chain ip engine out { type nat hook postrouting priority 100; }; "+
		"add rule ip engine out ip saddr "+d.address+" masquerade")
	root.finally(t, "nft", "delete table ip engine")
	if out, err := exec.Command("ip", "-n", d.namespace, "route", "add", "default", "via", "10.213.0.1").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	config, err := os.ReadFile(d.kubeconfig)
	if err == nil {
		err = os.WriteFile(filepath.Join(d.dir, "kubeconfig"), config, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	out, err := d.docker(ctx, "run", "--rm", "--user", "1000:1000", "--read-only", "--tmpfs", "/tmp:mode=1777",
		"--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--env", "HOME=/tmp", "--env", "KUBECONFIG=/kubeconfig", "--env", "KUBEVPN_YES=true",
		"--volume", filepath.Join(d.dir, "kubeconfig")+":/kubeconfig:ro", "--volume", filepath.Join(bin, "kubevpn")+":/kubevpn:ro",
		"--entrypoint", "/kubevpn", shellRef, "run", "-n", d.shop.namespace, "--", "curl", "-sS", "--max-time", "20", "http://web/")
	if err != nil || !strings.Contains(out, "programs that ignore HTTP_PROXY") || !strings.Contains(out, `"name":"web-`) {
		t.Errorf("%v\n%s", err, out)
	}
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

// dockedVolume replaces a volume with a directory of the laptop.
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

// dockedTerminal checks that -it gives the program a terminal: Ctrl-C reaches the program, and its shell has job
// control.
func dockedTerminal(t *testing.T, d *docked) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := d.dev(ctx, t, "-c", "web", "-it", "--", "--entrypoint", "sh")
	master, err := pty.Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	var seen testenv.Buffer
	go func() {
		_, _ = master.WriteTo(&seen) // fails when the last user closes the terminal
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

// dockedDetached checks that the keys that detach from a container leave nothing running.
func dockedDetached(t *testing.T, d *docked) {
	cmd := d.dev(t.Context(), t, "-c", "web", "-it", "--", "--entrypoint", "sh")
	master, err := pty.Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	var seen testenv.Buffer
	read := make(chan struct{})
	go func() {
		defer close(read)
		_, _ = master.WriteTo(&seen) // fails when the last user closes the terminal
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
		_ = cmd.Wait() // the test checks the exit code
		<-read         // what it wrote last
	}()
	select {
	case <-ended:
		if code := cmd.ProcessState.ExitCode(); code != 70 || !strings.Contains(seen.String(), "detach keys") {
			t.Errorf("exit code %d\n%s", code, seen.String())
		}
	case <-time.After(time.Minute):
		kill(t, cmd.Process.Pid)
		t.Fatalf("the command hangs:\n%s", seen.String())
	}
	// The containers must be gone at once, not only when the test ends.
	if out, err := d.docker(t.Context(), "ps", "--all", "--quiet"); err != nil || out != "" {
		t.Errorf("containers are left: %s, %v", out, err)
	}
}

// dockedSignals checks that a signal reaches the program once, whether kubevpn or its process group receives it.
func dockedSignals(t *testing.T, d *docked) {
	cmd, out := d.shell(t.Context(), t, `n=0
		trap 'n=$((n+1)); echo "INT $n"' INT; trap 'echo "HUP after $n"' HUP; trap 'echo "USR1 after $n"' USR1; trap 'exit 3' TERM
		sleep 1000 & echo ready; while :; do wait $!; done`) // wait returns at once, so that two signals are counted as two
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
	send(kubevpn, syscall.SIGUSR1, "USR1 after 2")
	if err := syscall.Kill(-kubevpn, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 3 {
		t.Errorf("%v\n%s", err, out.String())
	}
}

// dockedNewer checks that an image with pull policy Always comes from the registry, or from this machine if the
// registry does not answer.
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
		docker("tag", shellRef, freshRef) // an old image on this machine
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

// dockedTogether runs both containers. They share localhost, memory and files, publish a port, and receive intercepted
// requests. Their Secret is not on any disk.
func dockedTogether(t *testing.T, d *docked) {
	v := d.visitor(t)
	service := "http://" + d.shop.clusterIP(t, "docked", "web") + "/"
	var out testenv.Buffer
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
			err = fmt.Errorf("%s answers a request from %s", local.Name, local.Remote)
		}
		return err
	})
	if r := d.run(t, "curl", "-sS", "--max-time", "10", "http://"+d.address+":18080/published"); r.code != 0 || !strings.Contains(r.stdout, "/published") {
		t.Errorf("the published port: %v", r)
	}
	testenv.Eventually(t, time.Minute, func() error {
		if text := out.String(); !strings.Contains(text, "[helper] {") {
			return fmt.Errorf("the helper has not reached 127.0.0.1:8080:\n%s", text)
		}
		return nil
	})
	names, err := d.docker(t.Context(), "ps", "--format", "{{.Names}}")
	if err != nil || len(strings.Fields(names)) != 3 {
		t.Errorf("containers: %q, %v", names, err)
	}
	// grep exits with 1 if it finds nothing.
	for _, where := range []string{filepath.Join(d.dir, "data/containers"), d.dir + "/exec", d.home} {
		if r := d.run(t, "grep", "-rlaF", "--exclude-dir=netns", "-e", dockedSecret, where); r.code != 1 || r.stdout != "" {
			t.Errorf("the secret is on disk: %v", r)
		}
	}
	if r := d.run(t, "sh", "-c", `for p in /proc/[0-9]*/cmdline; do tr '\0' ' ' <$p; echo; done 2>/dev/null`); strings.Contains(r.stdout, dockedSecret) {
		t.Error("the secret is on a command line")
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil { // kubevpn forwards it to the program
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("after SIGTERM: %v\n%s", err, out.String())
		}
	case <-time.After(60 * time.Second):
		t.Fatalf("the command does not end:\n%s", out.String())
	}
	testenv.Eventually(t, time.Minute, func() error {
		a, err := v.ask(http.MethodGet, service, nil, mine, me)
		if err == nil && strings.HasPrefix(a.Remote, "127.0.0.1") {
			err = fmt.Errorf("%s still answers from the laptop", a.Name)
		}
		return err
	})
}

// dockedKilled checks that nothing is left after any of the processes is killed.
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
		}, []int{0, 70}}, // it first asks the programs to end, and one of them does
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out testenv.Buffer
			cmd := d.dev(t.Context(), t)
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, 90*time.Second, func() error {
				if text := out.String(); !strings.Contains(text, "[helper] {") {
					return fmt.Errorf("the program does not run:\n%s", text)
				}
				return nil
			})
			tt.kill(t, cmd)
			err := cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); !slices.Contains(tt.codes, code) {
				t.Errorf("%v, want an exit code of %d\n%s", err, tt.codes, out.String())
			}
			if tt.name == "engine" { // it may leave the volume until the next run removes it
				if r := d.script(t, "exit 0"); r.code != 0 {
					t.Error(r)
				}
			}
			testenv.Eventually(t, 60*time.Second, func() error { return d.gone(t.Context()) })
		})
	}
}

// dockedBothKilled checks that the engine removes the rest when kubevpn and the network container are killed together.
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
	testenv.Eventually(t, time.Minute, func() error { return e.gone(t.Context()) })
	if r := e.script(t, "cat /keys/password"); r.code != 0 || r.stdout != dockedSecret {
		t.Error(r)
	}
}

// dockedNoEngine checks that a missing engine is reported before anything else happens, with an alternative.
func dockedNoEngine(t *testing.T, d *docked) {
	for _, tt := range []struct{ name, host, path, want string }{
		{"no_command", "", "/nonexistent", "not in PATH"},
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

// dockedLocalhost checks that the container web, alone on this machine, reaches what the pod's other containers serve on
// localhost, and through the pod what the pod reaches.
func dockedLocalhost(t *testing.T, d *docked) {
	pod := d.world.within(t, d.shop.namespace, "app=shop")
	server := pod.command(t.Context(), t, "python3", "-m", "http.server", "7777", "--bind", "127.0.0.1")
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Process.Kill(); server.Wait() })
	testenv.Eventually(t, soon, func() error {
		if r := pod.run(t, "curl", "-sS", "http://127.0.0.1:7777/"); r.code != 0 {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
	_, ip := first(d.shop.ready(t))
	echo := d.world.pods(t, "default", "app=web")[0].String()
	const asks = "curl -sS --max-time 9 -o /dev/null -w '%{http_code}\\n' http://127.0.0.1:7777/; "
	for name, flags := range map[string][]string{"container": nil, "via_pod": {"--via-pod"}} {
		r := d.script(t, asks+"curl -s --max-time 9 http://127.0.0.1:8080/ || echo $?; curl -sS --max-time 9 http://"+echo+":8080/", flags...)
		if !strings.HasPrefix(r.stdout, "200\n7\n") || strings.Contains(r.stdout, `"remote":"`+ip+":") != (name == "via_pod") {
			t.Errorf("%s: %v\nwant 200, 7 and the address %s with --via-pod only", name, r, ip)
		}
	}
}
