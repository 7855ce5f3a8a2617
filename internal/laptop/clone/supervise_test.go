package clone

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
)

// registryOf returns a registry, which may require a password.
func registryOf(t *testing.T, password bool) (http.Handler, *httptest.Server) {
	t.Helper()
	images := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, given, _ := r.BasicAuth(); password && given != "secret" {
			wantsPassword(w, r)
			return
		}
		images.ServeHTTP(w, r)
	})
	server := httptest.NewTLSServer(handler)
	t.Cleanup(server.Close)
	return handler, server
}

// push uploads an image. Without a client, it uses neither TLS nor a password.
func push(t *testing.T, at string, client *http.Client) {
	t.Helper()
	image, err := mutate.Config(empty.Image, v1.Config{Entrypoint: []string{"/entry", "$(HOME)"}, Cmd: []string{"$$"}})
	if err != nil {
		t.Fatal(err)
	}
	ref, err := name.ParseReference(at)
	if err != nil {
		t.Fatal(err)
	}
	var options []remote.Option
	if client != nil {
		options = append(options, remote.WithAuth(&authn.Basic{Username: "ann", Password: "secret"}), remote.WithTransport(client.Transport))
	}
	if err := remote.Write(ref, image, options...); err != nil {
		t.Fatal(err)
	}
}

func localRef(name string) corev1.LocalObjectReference {
	return corev1.LocalObjectReference{Name: name}
}

// pullSecret returns a Secret with a password for the registry key.
func pullSecret(name, key, password string) *corev1.Secret {
	auth := base64.StdEncoding.EncodeToString([]byte("ann:" + password))
	return &corev1.Secret{
		ObjectMeta: inShop(name), Type: corev1.SecretTypeDockerConfigJson,
		Data: map[string][]byte{corev1.DockerConfigJsonKey: fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`, key, auth)},
	}
}

func TestCommandIsReadWithPullSecrets(t *testing.T) {
	t.Setenv("DOCKER_CONFIG", t.TempDir()) // without credentials
	_, server := registryOf(t, true)
	host := strings.TrimPrefix(server.URL, "https://")
	image := host + "/team/web:1"
	push(t, image, server.Client())
	broken := pullSecret("broken", host, "secret")
	broken.Data[corev1.DockerConfigJsonKey] = []byte("{")
	for _, tt := range []struct {
		name    string
		named   []string
		account []string
		err     string
	}{
		{"host", []string{"host"}, nil, ""},
		{"with_scheme", []string{"scheme"}, nil, ""},
		{"with_path", []string{"path"}, nil, ""},
		{"pattern", []string{"pattern"}, nil, ""},
		{"another_path", []string{"elsewhere"}, nil, "401 Unauthorized"},
		{"of_the_account", nil, []string{"host"}, ""},
		{"not_of_the_account_if_the_pod_names_one", []string{"elsewhere"}, []string{"host"}, "401 Unauthorized"},
		{"beside_some_that_cannot_be_had", []string{"absent", "broken", "forbidden", "host"}, nil, ""},
		{"only_some_that_cannot_be_had", []string{"absent"}, nil, `401 Unauthorized; cannot read the pull secret absent: secrets "absent" not found`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			account := &corev1.ServiceAccount{ObjectMeta: inShop("robot")}
			for _, name := range tt.account {
				account.ImagePullSecrets = append(account.ImagePullSecrets, corev1.LocalObjectReference{Name: name})
			}
			w := newWorld(account, broken, pullSecret("host", host, "secret"), pullSecret("scheme", "https://"+host+"/v1/", "secret"),
				pullSecret("path", host+"/team", "secret"), pullSecret("pattern", "127.*.0.1"+host[strings.Index(host, ":"):], "secret"), pullSecret("elsewhere", host+"/others", "secret"))
			w.registry = server.Client().Transport
			if slices.Contains(tt.named, "forbidden") {
				w.forbidSecret("forbidden")
			}
			spec := &w.workload.Template.Spec
			spec.ServiceAccountName = "robot"
			spec.Containers[0].Image, spec.Containers[0].Command = image, nil
			for _, name := range tt.named {
				spec.ImagePullSecrets = append(spec.ImagePullSecrets, corev1.LocalObjectReference{Name: name})
			}
			job, err := w.supervised(t, api.CloneSpec{Restart: true})
			if tt.err != "" {
				if e := api.AsError(err); e == nil || e.Code != api.ExitImagePull || !strings.Contains(e.Message, tt.err) {
					t.Errorf("%v, want %s", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			// The container engine expands nothing in these words, and the kubelet must not expand them either.
			if diff := cmp.Diff([]string{"supervise", "--restart", "--", "/entry", "$$(HOME)", "$$$$"}, job.Containers[0].Args); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

// supervised is the pod of a supervised clone.
func (w *world) supervised(t *testing.T, spec api.CloneSpec) (corev1.PodSpec, error) {
	t.Helper()
	s, _, err := read(t.Context(), w.kube, w.workload, "app", "shop")
	if err != nil {
		t.Fatal(err)
	}
	job, _, err := s.job(spec, "ann@laptop", "hash")
	if err != nil {
		t.Fatal(err)
	}
	c := New(Config{
		Cluster: w, Namespace: "shop", Workload: "deployment/web", Spec: spec, Progress: func(api.Event) {}, Logger: slog.New(slog.DiscardHandler),
		Image: func(context.Context) (string, error) { return "kubevpn:1", nil },
	})
	if w.registry != nil {
		c.registry = w.registry
	}
	err = c.supervise(t.Context(), job, "app")
	return job.Spec.Template.Spec, err
}

func TestMissingPullSecretPreventsSupervisedClone(t *testing.T) {
	for _, tt := range []struct {
		name string
		spec api.CloneSpec
		code api.ExitCode
	}{
		{"supervised", api.CloneSpec{Restart: true}, api.ExitImagePull},
		{"not supervised", api.CloneSpec{}, api.ExitOK},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld()
			c := New(Config{
				Cluster: w, Namespace: "shop", Workload: "deployment/web", Spec: tt.spec, Progress: func(api.Event) {}, Logger: slog.New(slog.DiscardHandler),
				Image:           func(context.Context) (string, error) { return "registry.example/kubevpn:1", nil },
				NeedsPullSecret: func(context.Context) (bool, error) { return true, nil },
			})
			_, _, err := c.plan(t.Context())
			if tt.code == api.ExitOK && err != nil || tt.code != api.ExitOK && (err == nil || api.AsError(err).Code != tt.code) {
				t.Errorf("got %v, want code %d", err, tt.code)
			}
		})
	}
}

func (w *world) forbidSecret(name string) {
	w.kube.PrependReactor("get", "secrets", func(a k8stesting.Action) (bool, runtime.Object, error) {
		if a.(k8stesting.GetAction).GetName() != name {
			return false, nil, nil
		}
		return true, nil, apierrors.NewForbidden(corev1.Resource("secrets"), name, nil)
	})
}

func TestWordsOfUserAreNotExpanded(t *testing.T) {
	for _, tt := range []struct {
		name string
		spec api.CloneSpec
		want []string
	}{
		{"template", api.CloneSpec{Restart: true}, []string{"supervise", "--restart", "--", "/web", "$(HOME)"}},
		{"user", api.CloneSpec{Command: []string{"sh", "-c", "echo $$ $(HOME)"}, Sync: []api.SyncPair{{Local: ".", Remote: "/$(HOME)"}}},
			[]string{"supervise", "--dir", "/$$(HOME)", "--", "sh", "-c", "echo $$$$ $$(HOME)"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld()
			w.workload.Template.Spec.Containers[0].Args = []string{"$(HOME)"}
			pod, err := w.supervised(t, tt.spec)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, pod.Containers[0].Args); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

func TestInitContainerHasResourcesOfContainer(t *testing.T) {
	list := func(pairs ...string) corev1.ResourceList {
		l := corev1.ResourceList{}
		for _, pair := range pairs {
			name, amount, _ := strings.Cut(pair, "=")
			l[corev1.ResourceName(name)] = resource.MustParse(amount)
		}
		return l
	}
	for _, tt := range []struct {
		name     string
		of, want corev1.ResourceRequirements
	}{
		{name: "none"},
		{"some", corev1.ResourceRequirements{Requests: list("cpu=50m")}, corev1.ResourceRequirements{Requests: list("cpu=50m")}},
		{"all", corev1.ResourceRequirements{
			Requests: list("cpu=1", "memory=1Gi", "ephemeral-storage=1Gi", "nvidia.com/gpu=1"), Limits: list("cpu=1", "memory=1Gi", "ephemeral-storage=1Gi", "nvidia.com/gpu=1"),
			Claims: []corev1.ResourceClaim{{Name: "device"}},
		}, corev1.ResourceRequirements{Requests: list("cpu=1", "memory=1Gi", "ephemeral-storage=1Gi"), Limits: list("cpu=1", "memory=1Gi", "ephemeral-storage=1Gi")}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld()
			w.workload.Template.Spec.Containers[0].Resources = tt.of
			pod, err := w.supervised(t, api.CloneSpec{Restart: true})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, pod.InitContainers[0].Resources); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}
