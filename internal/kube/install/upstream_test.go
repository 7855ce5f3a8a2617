package install

import (
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

// upstream is what version 2.x of the other kubevpn leaves in a namespace: its objects have our names.
func upstream(ns string) []runtime.Object {
	meta := metav1.ObjectMeta{Namespace: ns, Name: ManagerName}
	account := []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: ns, Name: ManagerName}}
	labels := map[string]string{"app": ManagerName}
	return []runtime.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}},
		&corev1.ServiceAccount{ObjectMeta: meta, AutomountServiceAccountToken: new(true)},
		&corev1.ConfigMap{ObjectMeta: meta},
		&rbacv1.Role{ObjectMeta: meta},
		&rbacv1.RoleBinding{ObjectMeta: meta, Subjects: account},
		&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: ManagerName + "-proxy"}, Subjects: account},
		&appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{
				ServiceAccountName: ManagerName,
				Containers:         []corev1.Container{{Name: "vpn"}, {Name: "xds"}, {Name: "dns"}},
			}},
		}},
	}
}

func TestOtherKubevpnIsRecognizedAndNotChanged(t *testing.T) {
	consent := api.Consent{}
	for _, tt := range []struct {
		name    string
		objects []runtime.Object
		run     func(*world) error
		want    string // a part of the message
		hint    string
	}{
		{"connect", upstream("kubevpn"), func(w *world) error {
			return (&ensurer{kube: w, o: Options{Image: image}, timeout: 10 * time.Second}).run(t.Context())
		}, "belongs to the other kubevpn", "--manager-namespace NAME"},
		{"connect --upgrade", upstream("kubevpn"), func(w *world) error {
			return (&ensurer{kube: w, o: Options{Image: image, Upgrade: true}, timeout: 10 * time.Second}).run(t.Context())
		}, "belongs to the other kubevpn", "kubevpn uninstall"},
		{"in a namespace of the user", upstream("team"), func(w *world) error {
			return (&ensurer{kube: w, o: Options{Image: image, Namespace: "team"}, timeout: 10 * time.Second}).run(t.Context())
		}, "Deployment team/kubevpn-traffic-manager belongs to", "docs/migrating.md"},
		{"reset", upstream("kubevpn"), func(w *world) error {
			_, err := Find(t.Context(), w, "", "", consent)
			return err
		}, "belongs to the other kubevpn", "Nothing was changed"},
		{"uninstall", upstream("kubevpn"), func(w *world) error {
			_, err := (&remover{kube: w, ns: "kubevpn"}).run(t.Context())
			return err
		}, "belongs to the other kubevpn", "Nothing was changed"},
		{"connect after its Deployment was deleted", without[*appsv1.Deployment](upstream("kubevpn")), func(w *world) error {
			return (&ensurer{kube: w, o: Options{Image: image}, timeout: 10 * time.Second}).run(t.Context())
		}, "bindings of the other kubevpn", "  kubectl -n kubevpn delete rolebinding kubevpn-traffic-manager\n" +
			"  kubectl delete clusterrolebinding kubevpn-traffic-manager-proxy"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld("", "", tt.objects...)
			e := api.AsError(tt.run(w))
			if e == nil || e.Code != api.ExitInstall || !strings.Contains(e.Message, tt.want) ||
				!strings.Contains(e.Hint, tt.hint) {
				t.Errorf("got %+v, want exit code %d about %q with a hint about %q", e, api.ExitInstall, tt.want, tt.hint)
			}
			if len(w.changes) > 0 {
				t.Errorf("changed: %q", w.changes)
			}
		})
	}
}

// The bindings of the other kubevpn in another namespace give our ServiceAccount nothing.
func TestOtherKubevpnElsewhereDoesNotMatter(t *testing.T) {
	w := newWorld("", "", append(upstream("other"), installed("kubevpn", image)...)...)
	if err := (&ensurer{kube: w, o: Options{Image: image}, timeout: 10 * time.Second}).run(t.Context()); err != nil {
		t.Error(err)
	}
	if err := (&ensurer{kube: w}).upstreamLeftovers(t.Context(), "kubevpn"); err != nil {
		t.Error(err)
	}
}

// The Helm chart of the other kubevpn gives its pods a label that ours have too.
func TestUninstallKeepsNamespaceWithOtherKubevpn(t *testing.T) {
	theirs := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "kubevpn", Name: "theirs",
		Labels: map[string]string{"app": ManagerName, labelName: "kubevpn"}}}
	w := newWorld("", "", append(installed("kubevpn", image), theirs)...)
	removed, err := (&remover{kube: w, ns: "kubevpn"}).run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if last := removed[len(removed)-1]; last.Kind != "Namespace" || !strings.Contains(last.Kept, "pod theirs") {
		t.Errorf("got %v, want the namespace kept", removed)
	}
}
