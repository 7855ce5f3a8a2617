package workloads

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
)

func TestCheckPull(t *testing.T) {
	secret := func(name, config string) *corev1.Secret {
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name},
			Type: corev1.SecretTypeDockerConfigJson, Data: map[string][]byte{corev1.DockerConfigJsonKey: []byte(config)}}
	}
	for _, tt := range []struct {
		name    string
		account []string // pull secrets of the service account
		named   []string // pull secrets of the template, or of the pod
		pod     bool
		forbid  bool
		err     string // empty: CheckPull allows
	}{
		{name: "no secret", err: "they have no pull secret"},
		{name: "in the template", named: []string{"ours"}},
		{name: "in the service account", account: []string{"ours"}},
		{name: "in the service account of a running pod", account: []string{"ours"}, pod: true, err: "they have no pull secret"},
		{name: "in a running pod", named: []string{"other", "ours"}, pod: true},
		{name: "of another registry", named: []string{"other"}, err: "no credentials for it: other"},
		{name: "the template's replace the service account's", account: []string{"ours"}, named: []string{"other"}, err: "no credentials for it: other"},
		{name: "absent", named: []string{"absent"}, err: `secrets "absent" not found`},
		{name: "unreadable", named: []string{"ours"}, forbid: true},
		{name: "broken", named: []string{"broken"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			refs := func(names []string) (all []corev1.LocalObjectReference) {
				for _, name := range names {
					all = append(all, corev1.LocalObjectReference{Name: name})
				}
				return all
			}
			kube := fake.NewClientset(
				secret("ours", `{"auths":{"registry.example":{"auth":"YW5uOnB3"}}}`),
				secret("other", `{"auths":{"elsewhere.example":{"auth":"YW5uOnB3"}}}`), secret("broken", "{"),
				&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, ImagePullSecrets: refs(tt.account)})
			if tt.forbid {
				kube.PrependReactor("get", "secrets", func(k8stesting.Action) (bool, runtime.Object, error) {
					return true, nil, apierrors.NewForbidden(corev1.Resource("secrets"), "ours", nil)
				})
			}
			spec := corev1.PodSpec{ServiceAccountName: "web", ImagePullSecrets: refs(tt.named)}
			w := &Workload{Namespace: "shop", Name: "web", shown: "deployment", Template: corev1.PodTemplateSpec{Spec: spec}}
			var pod *corev1.Pod
			if tt.pod {
				pod = &corev1.Pod{Spec: spec}
			}
			err := CheckPull(t.Context(), kube, w, pod, "registry.example/kubevpn:1")
			if tt.err == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			e := api.AsError(err)
			if e == nil || e.Code != api.ExitImagePull || !strings.Contains(e.Message, tt.err) || !strings.Contains(e.Message, "deployment/web") {
				t.Fatalf("got %v, want code %d and %q", err, api.ExitImagePull, tt.err)
			}
			for _, want := range []string{"-n shop", "--docker-server=registry.example", "serviceaccount web", "--image"} {
				if !strings.Contains(e.Hint, want) {
					t.Errorf("the hint lacks %q:\n%s", want, e.Hint)
				}
			}
		})
	}
}
