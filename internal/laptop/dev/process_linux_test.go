package dev

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/kube/podenv"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/host/sandbox"
)

// roleInit is the test binary's argument when it is a sandbox's init.
const roleInit = "role-sandbox-init"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == roleInit {
		if err := sandbox.Init(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	// Every init is a copy of this process.
	name, value, _ := strings.Cut(testenv.EndAtOnce(), "=")
	if err := os.Setenv(name, value); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

func TestEnvironmentKeepsWhatDecidesWhatRuns(t *testing.T) {
	local := []string{"PATH=/usr/bin", "HOME=/home/ann", "USER=ann", "TERM=xterm", "PWD=/src", "LANG=de_DE", "EDITOR=vi"}
	const left = "keeping this machine's values of %s: it sets them, or they may decide what programs execute; --env-from-pod NAME takes the pod's"
	tests := []struct {
		name      string
		container []podenv.Variable
		env       []string
		fromPod   []string
		want      string // what is not as it is here
		warned    []string
	}{
		{name: "an empty environment"},
		{
			name:      "what this machine sets wins, and is named",
			container: []podenv.Variable{{Name: "LANG", Value: "C"}, {Name: "TERM", Value: "xterm"}, {Name: "USER", Value: "app", Image: true}, {Name: "A", Value: "a=b"}, {Name: "DATA", Value: "/data"}},
			want:      "A=a=b DATA=/data", warned: []string{fmt.Sprintf(left, "LANG")},
		},
		{
			name: "PATH and PWD stay the laptop's", container: []podenv.Variable{{Name: "PATH", Value: "/app"}, {Name: "PWD", Value: "/src"}},
			warned: []string{fmt.Sprintf(left, "PATH")},
		},
		{
			name: "variables that execute code stay this machine's, or missing",
			container: []podenv.Variable{{Name: "BASH_ENV", Value: "/evil"}, {Name: "BASH_FUNC_ls%%", Value: "() { evil; }"}, {Name: "HOME", Value: "/evil"},
				{Name: "LD_AUDIT", Value: "/evil"}, {Name: "ENV=/evil", Value: ""}, {Name: "Npm_Config_Script-Shell", Value: "/evil"}, {Name: "LDAP", Value: "host"}, {Name: "GIT_CONFIG_COUNT", Value: "1"}, {Name: "GIT_COMMIT", Value: "c0ffee"},
				{Name: "GOMAXPROCS", Value: "2"}, {Name: "env", Value: "prod"}},
			want: "GIT_COMMIT=c0ffee GOMAXPROCS=2 LDAP=host env=prod", warned: []string{fmt.Sprintf(left, "BASH_ENV, BASH_FUNC_ls%%, HOME, LD_AUDIT, ENV=/evil, Npm_Config_Script-Shell, GIT_CONFIG_COUNT")},
		},
		{
			name:      "--env-from-pod takes the pod's value",
			container: []podenv.Variable{{Name: "HOME", Value: "/data"}, {Name: "JAVA_HOME", Value: "/opt/java", Image: true}, {Name: "NODE_OPTIONS", Value: "--inspect"}},
			fromPod:   []string{"HOME", "JAVA_HOME", "MISSING"}, want: "HOME=/data JAVA_HOME=/opt/java",
			warned: []string{fmt.Sprintf(left, "NODE_OPTIONS"), "--env-from-pod MISSING: the container has no such variable"},
		},
		{name: "--env replaces PATH without a warning", container: []podenv.Variable{{Name: "PATH", Value: "/app"}}, env: []string{"PATH=/mine"}, want: "PATH=/mine"},
		{
			name: "the image's variables, except for paths and users",
			container: []podenv.Variable{{Name: "LANG", Value: "C", Image: true}, {Name: "HOME", Value: "/root", Image: true}, {Name: "PATH", Value: "/bin", Image: true},
				{Name: "LC_ALL", Value: "C", Image: true}, {Name: "JAVA_HOME", Value: "/opt/java", Image: true}, {Name: "LD_PRELOAD", Value: "x.so", Image: true}, {Name: "TERM", Value: "dumb", Image: true}, {Name: "VERSION", Value: "3", Image: true}},
			want: "LC_ALL=C VERSION=3", warned: []string{fmt.Sprintf(left, "LD_PRELOAD")},
		},
		{
			name: "--env wins", container: []podenv.Variable{{Name: "A", Value: "1"}, {Name: "B", Value: "2", Secret: true}}, env: []string{"A=3", "EDITOR=", "A=4"},
			want: "A=4 B=2 EDITOR=",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			here := map[string]bool{}
			for _, e := range local {
				here[e] = true
			}
			var changed, warned []string
			got := environment(Config{Options: Options{Environ: local, FromPod: tt.fromPod, Env: tt.env}, Warn: func(s string) { warned = append(warned, s) }}, tt.container)
			for _, e := range got {
				if !here[e] {
					changed = append(changed, e)
				}
			}
			if diff := cmp.Diff(tt.want, strings.Join(changed, " ")); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
			if diff := cmp.Diff(tt.warned, warned); diff != "" {
				t.Errorf("warned: -want +got\n%s", diff)
			}
			if len(got) < len(local) {
				t.Errorf("only %v", got)
			}
		})
	}
}

const podManifest = `
metadata: {name: web-1, namespace: shop, uid: u-1}
spec:
  enableServiceLinks: false
  volumes: [{name: settings, configMap: {name: settings}}, {name: scratch, emptyDir: {}}, {name: disk, persistentVolumeClaim: {claimName: data}}]
  containers:
  - name: app
    env: [{name: COLOR, valueFrom: {configMapKeyRef: {name: settings, key: color}}}]
    volumeMounts: [{name: settings, mountPath: /srv/kubevpn-test/settings}, {name: scratch, mountPath: /srv/kubevpn-test/scratch}, {name: disk, mountPath: /srv/kubevpn-test/disk}]
status: {phase: Running}
`

func podOf(t *testing.T) *corev1.Pod {
	t.Helper()
	var pod corev1.Pod
	if err := yaml.UnmarshalStrict([]byte(podManifest), &pod); err != nil {
		t.Fatal(err)
	}
	return &pod
}

func settings(color string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "settings", Namespace: "shop"}, Data: map[string]string{"color": color}}
}

var kubernetesService = &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes", Namespace: "default"}}

// rig is a program that has been prepared.
type rig struct {
	*Program
	out    string // what it writes
	warned chan string
}

func (r *rig) said(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(r.out)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// prepared is a shell script as a program.
func prepared(t *testing.T, kube kubernetes.Interface, script string, change func(*Config)) *rig {
	t.Helper()
	r := &rig{out: filepath.Join(t.TempDir(), "out"), warned: make(chan string, 16)}
	out, err := os.Create(r.out)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { out.Close() })
	cfg := Config{
		Options: Options{Init: []string{roleInit}, Args: []string{"/bin/sh", "-c", script}, Environ: os.Environ(), Stdout: out, Stderr: out},
		Source:  podenv.Source{Kube: kube, Pod: podOf(t)}, Container: "app", Warn: func(s string) { r.warned <- s }, Logger: slog.New(slog.DiscardHandler),
	}
	if change != nil {
		change(&cfg)
	}
	if r.Program, err = Prepare(t.Context(), cfg); err != nil {
		if errors.Is(err, sandbox.ErrNotAllowed) {
			t.Skipf("SKIPPED: %v", err)
		}
		t.Fatal(err)
	}
	return r
}

// A program has the environment, the files, and only the rights that a container has on them.
func TestProgramGetsEnvironmentFilesAndRightsOfTheContainer(t *testing.T) {
	kube := fake.NewClientset(settings("blue"), kubernetesService)
	r := prepared(t, kube, `cd /srv/kubevpn-test && echo $COLOR $HOSTNAME $LANGUAGE && cat settings/color && echo &&
		{ echo x >settings/color || echo refused; } 2>/dev/null; echo y >scratch/y && cat scratch/y; ls disk 2>/dev/null || echo no disk; exit 9`, func(c *Config) {
		c.Exec = func(_ context.Context, container string, command []string, stdout io.Writer) error {
			_, err := fmt.Fprintf(stdout, "LANGUAGE=%s\x00JAVA_HOME=/opt/java\x00", strings.Join(command, "-"))
			return err
		}
	})
	status, err := r.Run(t.Context())
	if err != nil || status.Code != 9 {
		t.Errorf("%+v, %v", status, err)
	}
	if diff := cmp.Diff("blue web-1 cat-/proc/self/environ\nblue\nrefused\ny\nno disk\n", r.said(t)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if got, want := <-r.warned, "volume disk at /srv/kubevpn-test/disk: PersistentVolumeClaim data: its content is in the cluster only; --volume disk=remote mounts it, and =DIRECTORY uses a directory of this machine"; got != want {
		t.Errorf("warned %q", got)
	}
	if _, err := os.Lstat("/srv/kubevpn-test"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("on the laptop: %v", err)
	}
}

// An image may lack cat, and a user may lack the right to exec.
func TestProgramRunsWhenExecFails(t *testing.T) {
	r := prepared(t, fake.NewClientset(settings("blue"), kubernetesService), "echo $COLOR", func(c *Config) {
		c.Exec = func(context.Context, string, []string, io.Writer) error { return errors.New("there is no cat") }
	})
	if status, err := r.Run(t.Context()); err != nil || status.Code != 0 || r.said(t) != "blue\n" {
		t.Errorf("%+v, %v: %s", status, err, r.said(t))
	}
}

func TestProgramSeesChangesOfVolumes(t *testing.T) {
	kube := fake.NewClientset(settings("blue"), kubernetesService)
	var forbidden atomic.Bool
	kube.PrependReactor("get", "configmaps", func(clienttesting.Action) (bool, runtime.Object, error) {
		return forbidden.Load(), nil, apierrors.NewForbidden(corev1.Resource("configmaps"), "settings", errors.New("no more"))
	})
	if err := kube.Tracker().Add(podOf(t)); err != nil {
		t.Fatal(err)
	}
	tick, now := make(chan time.Time), time.Now()
	minute := func() {
		now = now.Add(time.Minute)
		tick <- now
	}
	r := prepared(t, kube, `echo up; until [ "$(cat /srv/kubevpn-test/settings/color)" = green ]; do sleep 0.01; done; cat /srv/kubevpn-test/settings/color`,
		func(c *Config) { c.tick = tick })
	ran := make(chan error, 1)
	go func() {
		status, err := r.Run(t.Context())
		if status.Code != 0 {
			err = errors.Join(err, fmt.Errorf("%+v", status))
		}
		ran <- err
	}()
	minute()   // nothing has changed
	<-r.warned // of the claim
	forbidden.Store(true)
	for range 2 {
		minute()
	}
	if got := <-r.warned; !strings.Contains(got, "volume settings at /srv/kubevpn-test/settings: ") || !strings.Contains(got, "no more") {
		t.Errorf("warned %q", got)
	}
	forbidden.Store(false)
	if _, err := kube.CoreV1().ConfigMaps("shop").Update(t.Context(), settings("green"), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	minute()
	if err := <-ran; err != nil {
		t.Error(err)
	}
	if got := r.said(t); got != "up\ngreen" {
		t.Errorf("%q", got)
	}
	select {
	case got := <-r.warned:
		t.Errorf("warned again: %q", got)
	default:
	}
}

// hung is an API server that answers for a while, and then takes its time.
func hung(t *testing.T) (kube kubernetes.Interface, hang func(), asked <-chan struct{}) {
	hanging, reached := make(chan struct{}), make(chan struct{}, 16)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-hanging:
			reached <- struct{}{}
			<-r.Context().Done()
			return
		default:
		}
		var answer any = settings("blue")
		if strings.Contains(r.URL.Path, "services") {
			answer = kubernetesService
		}
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(answer); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(server.Close)
	c, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL, ContentConfig: rest.ContentConfig{ContentType: "application/json"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.CoreV1().RESTClient().(*rest.RESTClient).Client.CloseIdleConnections)
	return c, func() { close(hanging) }, reached
}

// An API server that does not answer delays neither signals nor the end of the program.
func TestSignalsArriveWhileAnUpdateHangs(t *testing.T) {
	kube, hang, asked := hung(t)
	tick, now := make(chan time.Time), time.Now()
	minute := func() {
		now = now.Add(time.Minute)
		tick <- now
	}
	r := prepared(t, kube, `trap 'echo told; exit 3' TERM; echo up; while :; do sleep 0.01; done`, func(c *Config) { c.tick = tick })
	type end struct {
		status sandbox.ExitStatus
		err    error
	}
	ran := make(chan end, 1)
	go func() {
		status, err := r.Run(t.Context())
		ran <- end{status, err}
	}()
	testenv.Eventually(t, 10*time.Second, func() error {
		if r.said(t) != "up\n" {
			return errors.New("it is not up")
		}
		return nil
	})
	hang()
	minute()
	<-asked
	if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case e := <-ran:
		if e.err != nil || e.status.Code != 3 || r.said(t) != "up\ntold\n" {
			t.Errorf("%+v, %v: %s", e.status, e.err, r.said(t))
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it waits for the API server")
	}
}

func TestPrepareEndsWithItsContext(t *testing.T) {
	kube, hang, asked := hung(t)
	hang()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	_, err := Prepare(ctx, Config{Options: Options{Init: []string{roleInit}, Args: []string{"true"}}, Source: podenv.Source{Kube: kube, Pod: podOf(t)}, Container: "app",
		Warn: func(string) {}, Logger: slog.New(slog.DiscardHandler)})
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// Without a terminal only this process receives the signals, so it forwards all of them.
func TestRunForwardsSignals(t *testing.T) {
	// The signals of this test must not end this process before Run listens. If this process was started to ignore a
	// signal (nohup), the program would ignore it too, and a shell cannot trap an ignored signal: Notify ends that.
	ignored := make(chan os.Signal, 16)
	signal.Notify(ignored, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	defer signal.Stop(ignored)
	if _, err := os.OpenFile("/dev/tty", os.O_RDONLY, 0); err == nil {
		t.Skip("SKIPPED: there is a terminal")
	}
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGQUIT} {
		r := prepared(t, fake.NewClientset(settings("blue"), kubernetesService), "trap 'exit 0' "+strings.TrimPrefix(sigName(s), "SIG")+"; echo up; while :; do sleep 0.01; done", nil)
		ran := make(chan sandbox.ExitStatus, 1)
		go func() {
			status, err := r.Run(t.Context())
			if err != nil {
				t.Error(err)
			}
			ran <- status
		}()
		testenv.Eventually(t, 10*time.Second, func() error {
			if r.said(t) != "up\n" {
				return errors.New("it is not up")
			}
			return nil
		})
		if err := syscall.Kill(os.Getpid(), s); err != nil {
			t.Fatal(err)
		}
		if status := <-ran; status.Code != 0 {
			t.Errorf("%v: %+v", s, status)
		}
	}
}

// Once the program has ended, a signal ends this process even if the network does not leave.
func TestSignalEndsTheProcessWhileTheNetworkLeaves(t *testing.T) {
	const child = "KUBEVPN_TEST_LEAVES"
	if os.Getenv(child) != "" {
		r := prepared(t, fake.NewClientset(settings("blue"), kubernetesService), "exit 0", func(c *Config) {
			c.Network = func(ctx context.Context, _ sandbox.Place, ready func()) error {
				ready()
				<-ctx.Done()
				fmt.Println("leaving")
				select {}
			}
		})
		_, err := r.Run(t.Context())
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), child+"=1", "TMPDIR="+t.TempDir()) // the signal ends it before it can tidy up
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var said []string
	for in := bufio.NewScanner(out); in.Scan(); {
		if said = append(said, in.Text()); in.Text() != "leaving" {
			continue
		}
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
	}
	err = cmd.Wait()
	if text := strings.Join(said, "\n"); strings.Contains(text, "SKIPPED") || strings.Contains(text, "--- SKIP") {
		t.Skip("SKIPPED: " + text)
	}
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGINT {
		t.Errorf("%v\n%s", err, strings.Join(said, "\n"))
	}
}

func TestMessagesContainNoSecrets(t *testing.T) {
	const secret = "s3cr3t-5b1a"
	kube := fake.NewClientset(settings("blue"), kubernetesService, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "keys", Namespace: "shop"}, Data: map[string][]byte{"PATH": []byte(secret), "NOT/OK": []byte(secret)}})
	var log bytes.Buffer
	var warned []string
	cfg := Config{
		Options: Options{Init: []string{roleInit}, Args: []string{"/bin/true"}, Environ: os.Environ()},
		Source:  podenv.Source{Kube: kube, Pod: podOf(t), Exec: func(context.Context, string, []string, io.Writer) error { return errors.New("no cat") }}, Container: "app",
		Warn: func(s string) { warned = append(warned, s) }, Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug - 9})),
	}
	cfg.Pod.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "keys"}}}}
	cfg.Pod.Spec.Containers[0].VolumeMounts = append(cfg.Pod.Spec.Containers[0].VolumeMounts, corev1.VolumeMount{Name: "keys", MountPath: "/srv/kubevpn-test/keys"},
		corev1.VolumeMount{Name: "keys", MountPath: "/proc/keys", SubPathExpr: "$(PATH)"})
	cfg.Pod.Spec.Volumes = append(cfg.Pod.Spec.Volumes, corev1.Volume{Name: "keys", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "keys"}}})
	p, err := Prepare(t.Context(), cfg)
	if err == nil {
		_, err = p.Run(t.Context())
	}
	if errors.Is(err, sandbox.ErrNotAllowed) {
		t.Skipf("SKIPPED: %v", err)
	}
	if text := strings.Join(warned, "\n") + log.String() + fmt.Sprint(err); strings.Contains(text, secret) || len(warned) == 0 || log.Len() == 0 {
		t.Errorf("%s", text)
	}
}

func sigName(s syscall.Signal) string {
	return map[syscall.Signal]string{syscall.SIGTERM: "TERM", syscall.SIGINT: "INT", syscall.SIGHUP: "HUP", syscall.SIGUSR1: "USR1", syscall.SIGUSR2: "USR2", syscall.SIGQUIT: "QUIT"}[s]
}
