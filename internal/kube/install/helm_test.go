package install

import (
	"errors"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"kubevpn/internal/api"
)

// byHelm marks the objects as those of a Helm release.
func byHelm(objects []runtime.Object, release string) []runtime.Object {
	for _, o := range objects {
		m := o.(metav1.Object)
		if labels := m.GetLabels(); labels[labelManagedBy] == "kubevpn" {
			labels[labelManagedBy] = "Helm"
			m.SetAnnotations(map[string]string{"meta.helm.sh/release-name": release})
		}
	}
	return objects
}

func TestHelmReleaseIsNotChanged(t *testing.T) {
	const old = "registry.example/kubevpn@sha256:0123"
	upgrade := "Run:\n  helm upgrade vpn CHART --reset-then-reuse-values --set-string " +
		"image.repository=registry.example/kubevpn,image.tag=1,image.digest= --namespace kubevpn"
	for _, tt := range []struct {
		name    string
		objects []runtime.Object
		options Options
		code    api.ExitCode // ExitOK: Ensure uses the manager
		hint    string
	}{
		{name: "same image", objects: byHelm(installed("kubevpn", image), "vpn"), options: Options{Upgrade: true}},
		{name: "another image", objects: byHelm(installed("kubevpn", old), "vpn")},
		{name: "another image with --upgrade", objects: byHelm(installed("kubevpn", old), "vpn"),
			options: Options{Upgrade: true}, code: api.ExitManaged, hint: upgrade},
		{name: "without its ClusterRole", objects: without[*rbacv1.ClusterRole](byHelm(installed("kubevpn", image), "vpn"))},
		{name: "without its Deployment", objects: without[*appsv1.Deployment](byHelm(installed("kubevpn", image), "vpn")),
			code: api.ExitManaged, hint: upgrade},
		{name: "a name for the shell", objects: byHelm(installed("kubevpn", old), "$(reboot)"),
			options: Options{Upgrade: true}, code: api.ExitManaged, hint: strings.Replace(upgrade, "vpn ", "'$(reboot)' ", 1)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld("", "", tt.objects...)
			tt.options.Image = image
			e := &ensurer{kube: w, o: tt.options, timeout: 10 * time.Second}
			checkRefusal(t, e.run(t.Context()), tt.code, tt.hint)
			if len(w.changes) > 0 {
				t.Errorf("changed %q", w.changes)
			}
			if tt.code == api.ExitOK && e.result.Release != "vpn" {
				t.Errorf("the result is %+v", e.result)
			}
			for _, warning := range e.result.Warnings {
				if !strings.Contains(warning, "helm upgrade vpn") || strings.Contains(warning, "connect --upgrade") {
					t.Errorf("the warning names another command: %s", warning)
				}
			}
		})
	}
}

// checkRefusal checks the code and the hint of an error, or that there is none.
func checkRefusal(t *testing.T, err error, code api.ExitCode, hint string) {
	t.Helper()
	if code == api.ExitOK {
		if err != nil {
			t.Error(err)
		}
		return
	}
	var refusal *api.Error
	if !errors.As(err, &refusal) || refusal.Code != code || refusal.Hint != hint {
		t.Errorf("got %+v, want code %d and the hint\n%s", err, code, hint)
	}
}

func TestBrokenHelmReleaseIsNotReplaced(t *testing.T) {
	objects := byHelm(installed("kubevpn", "registry.example/kubevpn:0"), "vpn")
	for _, o := range objects {
		if pod, is := o.(*corev1.Pod); is {
			pod.Status = corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{Name: containerName,
				State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull"}}}}}
		}
	}
	w := newWorld("delete:pods@*", "", objects...)
	e := &ensurer{kube: w, o: Options{Image: image}, timeout: 10 * time.Second}
	if err := e.run(t.Context()); err == nil || api.AsError(err).Code != api.ExitImagePull {
		t.Errorf("got %v, want code %d", err, api.ExitImagePull)
	}
	if len(w.changes) > 0 {
		t.Errorf("changed %q", w.changes)
	}
}

func TestHelmReleaseIsNotRemoved(t *testing.T) {
	binding := &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: "kubevpn", Name: "team"}, RoleRef: rbacv1.RoleRef{Kind: "Role", Name: userRoleName}}
	all := byHelm(append(installed("kubevpn", image), binding), "vpn")
	for name, objects := range map[string][]runtime.Object{
		"whole": all, "without its Deployment": without[*appsv1.Deployment](append([]runtime.Object{}, all...)),
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld("", "", objects...)
			removed, err := (&remover{kube: w, ns: "kubevpn"}).run(t.Context())
			checkRefusal(t, err, api.ExitManaged, "Run:\n  helm uninstall vpn --namespace kubevpn")
			if len(removed) > 0 || len(w.changes) > 0 {
				t.Errorf("removed %v, changed %q", removed, w.changes)
			}
		})
	}
}
