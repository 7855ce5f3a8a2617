package docker

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/podenv"
	"kubevpn/pkg/host/sandbox"
)

// A user who may exec but not read a Secret gets its variables from the running pod.
func TestReadUsesVariablesOfTheRunningPod(t *testing.T) {
	kube := fake.NewClientset(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes", Namespace: "default"}})
	kube.PrependReactor("get", "secrets", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(corev1.Resource("secrets"), "keys", errors.New("no"))
	})
	read := func(seen error) (env, warned []string) {
		cfg := Config{
			Alone: true, Logger: slog.New(slog.DiscardHandler), Warn: func(s string) { warned = append(warned, s) },
			Source: podenv.Source{Kube: kube, Exec: func(_ context.Context, container string, command []string, stdout io.Writer) error {
				if container != "web" || !slices.Equal(command, []string{"cat", "/proc/self/environ"}) {
					t.Errorf("%s: %q", container, command)
				}
				_, err := io.WriteString(stdout, "PASSWORD=hunter2\x00VERSION=1\x00HOME=/root\x00NAME=pod\x00")
				return errors.Join(seen, err)
			}},
		}
		p := testPlan(t, cfg)
		p.containers[0].imageInfo.Config.Env = []string{"VERSION=1"}
		p.containers[0].spec.EnvFrom = []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "keys"}}}}
		p.containers[0].spec.Env = []corev1.EnvVar{{Name: "NAME", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{
			LocalObjectReference: corev1.LocalObjectReference{Name: "keys"}, Key: "name"}}}}
		r := &run{Config: p.cfg, plan: p}
		got, err := r.read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return got.programs["web"].Env, warned
	}
	env, warned := read(nil)
	for entry, want := range map[string]bool{"PASSWORD=hunter2": true, "NAME=pod": true, "VERSION=1": true, "HOME=/root": false} {
		if slices.Contains(env, entry) != want {
			t.Errorf("%s in %q, want it: %v", entry, env, want)
		}
	}
	if warned != nil {
		t.Errorf("warned of what is there: %q", warned)
	}
	env, warned = read(errors.New("no cat"))
	if said := strings.Join(warned, "\n"); slices.Contains(env, "PASSWORD=hunter2") || !strings.Contains(said, "Secret keys") || !strings.Contains(said, "variable NAME") {
		t.Errorf("not seen: %q, warned %q", env, warned)
	}
}

func TestContainerThatDoesNotStartIsExplained(t *testing.T) {
	fakeDocker(t, `echo "docker: Error response from daemon: no such device." >&2; exit 125`)
	dir, err := os.MkdirTemp("", "docker") // a socket has a short path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	cfg := Config{Engine: &Engine{command: "docker"}, Paths: config.Paths{RuntimeDir: dir}}
	r := &run{Config: cfg, plan: testPlan(t, cfg)}
	_, err = r.startNetwork(t.Context())
	var e *api.Error
	if !errors.As(err, &e) || e.Code != api.ExitEngine || !strings.HasSuffix(e.Message, "-network: Error response from daemon: no such device") {
		t.Error(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("interrupted"))
	fakeDocker(t, `case $1 in run) sleep 1; exit 0;; esac`)
	if _, err = r.startNetwork(ctx); err == nil || err.Error() != "interrupted" {
		t.Error(err)
	}
}

// A `docker run` can return while its container still runs, for example by the detach keys.
func TestReleasedWaitsBrieflyForTheReportOfTheProgramsEnd(t *testing.T) {
	returned := func(script string) *run {
		t.Helper()
		c := &child{cmd: exec.Command("sh", "-c", script), remote: &sandbox.Remote{}, container: "web"}
		if err := c.begin(); err != nil {
			t.Fatal(err)
		}
		<-c.done
		return &run{chosen: c}
	}
	for script, want := range map[string]string{"exit 0": "detach keys", "kill -9 $$": "signal: killed"} {
		r := returned(script)
		synctest.Test(t, func(t *testing.T) {
			r.chosen.ended = make(chan struct{})
			_, err := r.released()
			var e *api.Error
			if !errors.As(err, &e) || e.Code != api.ExitEngine || !strings.Contains(e.Message, want) || !r.chosen.detached {
				t.Errorf("%s: %v, want an error with %q", script, err, want)
			}
		})
	}
	r := returned("exit 3")
	synctest.Test(t, func(t *testing.T) {
		ended := make(chan struct{})
		r.chosen.ended = ended
		time.AfterFunc(endReportTimeout/2, func() { close(ended) })
		if exit, err := r.released(); err != nil || exit != 3 || r.chosen.detached {
			t.Errorf("after a late report: %d, %v", exit, err)
		}
	})
}
