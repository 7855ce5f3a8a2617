package install

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
)

// world is a fake API server with RBAC: deny lists "verb:resource@namespace" with * as wildcard.
type world struct {
	*fake.Clientset
	deny   []string
	secret []string // denied although the access review says yes, as RBAC does with escalation

	mu      sync.Mutex
	changes []string // what was changed: "patch deployments kubevpn/kubevpn-traffic-manager"
}

func newWorld(deny, secret string, objects ...runtime.Object) *world {
	w := &world{Clientset: fake.NewClientset(objects...), deny: strings.Fields(deny), secret: strings.Fields(secret)}
	w.PrependReactor("*", "*", w.react)
	return w
}

func (w *world) Kube() kubernetes.Interface { return w }

// ExplainContext returns the error as it is.
func (w *world) ExplainContext(_ context.Context, err error) error { return err }

func match(rules []string, verb, resource, namespace string) bool {
	return slices.ContainsFunc(rules, func(rule string) bool {
		head, ns, _ := strings.Cut(rule, "@")
		v, r, _ := strings.Cut(head, ":")
		return (v == "*" || v == verb) && (r == "*" || r == resource) && (ns == "*" || ns == namespace)
	})
}

func (w *world) react(a k8stesting.Action) (bool, runtime.Object, error) {
	resource := a.GetResource().Resource
	if sub := a.GetSubresource(); sub != "" {
		resource += "/" + sub
	}
	switch resource {
	case "selfsubjectaccessreviews":
		review := a.(k8stesting.CreateAction).GetObject().(*authorizationv1.SelfSubjectAccessReview).DeepCopy()
		attr := review.Spec.ResourceAttributes
		name := attr.Resource
		if attr.Subresource != "" {
			name += "/" + attr.Subresource
		}
		review.Status.Allowed = !match(w.deny, attr.Verb, name, attr.Namespace)
		return true, review, nil
	case "selfsubjectreviews":
		return true, &authenticationv1.SelfSubjectReview{Status: authenticationv1.SelfSubjectReviewStatus{UserInfo: authenticationv1.UserInfo{Username: "dev"}}}, nil
	}
	if match(w.deny, a.GetVerb(), resource, a.GetNamespace()) || match(w.secret, a.GetVerb(), resource, a.GetNamespace()) {
		where := fmt.Sprintf("in the namespace %q", a.GetNamespace())
		if a.GetNamespace() == "" {
			where = "at the cluster scope"
		}
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "x",
			fmt.Errorf("User \"dev\" cannot %s resource %q in API group %q %s", a.GetVerb(), resource, a.GetResource().Group, where))
	}
	name := ""
	switch x := a.(type) {
	case k8stesting.PatchAction:
		name = x.GetName()
	case k8stesting.DeleteAction:
		name = x.GetName()
	case k8stesting.CreateAction:
		if m, ok := x.GetObject().(metav1.Object); ok {
			name = m.GetName()
			if m.GetUID() == "" {
				m.SetUID(types.UID(resource))
			}
		}
	default:
		return false, nil, nil
	}
	w.mu.Lock()
	w.changes = append(w.changes, strings.TrimSpace(fmt.Sprintf("%s %s %s/%s", a.GetVerb(), resource, a.GetNamespace(), name)))
	w.mu.Unlock()
	return false, nil, nil
}

const image = "registry.example/kubevpn:1"

func inNamespace(ns string, edit ...func(*corev1.Pod)) *corev1.Pod {
	p := aPod("manager-pod", edit...)
	p.Namespace = ns
	p.Spec.Containers[0].Image = image
	return p
}

// installed is everything that an admin installs, and a ready pod.
func installed(ns, image string) []runtime.Object {
	o := Options{Namespace: ns, Image: image}
	pod := inNamespace(ns, ready)
	pod.Spec.Containers[0].Image = image
	return append(append(rightsObjects(o), baseObjects(o)...), namespaceObject(ns), pod)
}

func without[T runtime.Object](objects []runtime.Object) []runtime.Object {
	return slices.DeleteFunc(objects, func(o runtime.Object) bool { _, is := o.(T); return is })
}

var (
	everything = []string{
		"create namespaces /kubevpn",
		"patch clusterroles /kubevpn-traffic-manager-kubevpn",
		"patch clusterrolebindings /kubevpn-traffic-manager-kubevpn",
		"patch roles kubevpn/kubevpn-traffic-manager-user",
		"patch serviceaccounts kubevpn/kubevpn-traffic-manager",
		"patch deployments kubevpn/kubevpn-traffic-manager",
	}
	leased = append([]string{"create jobs team/kubevpn-traffic-manager"}, inTeam...)
	inTeam = []string{"patch serviceaccounts team/kubevpn-traffic-manager", "patch deployments team/kubevpn-traffic-manager"}
)

const (
	noRights = "the traffic manager gets no rights of its own (you may not create clusterroles in the whole cluster). It dials ClusterIPs directly, which requires kube-proxy, and cannot read the nodes' pod networks or the names of Services. Ask a cluster admin to run\n  kubevpn install --manager-namespace team"
	askAdmin = "\n  kubevpn install\n  kubectl create rolebinding kubevpn-traffic-manager-user-dev --namespace=kubevpn --role=kubevpn-traffic-manager-user --user=dev"
	// A developer: the role edit in the namespace team, nothing elsewhere.
	developer = "*:*@kubevpn *:namespaces@* *:clusterroles@ *:clusterrolebindings@ create:roles@team patch:roles@team list:endpointslices@default"
)

func TestEnsureInstallsWhatTheUserMayInstall(t *testing.T) {
	const otherImage = "the traffic manager in kubevpn runs the image registry.example/kubevpn:0, and this kubevpn would install registry.example/kubevpn:1. " +
		"`kubevpn connect --upgrade` replaces it; this ends the open connections of all its users"
	tests := []struct {
		name         string
		deny, secret string
		objects      []runtime.Object
		options      Options
		want         Result
		changes      []string
		err          string // then the test checks nothing else
		hint         string
	}{
		{
			name: "admin, fresh", objects: []runtime.Object{inNamespace("kubevpn", ready)}, options: Options{FallbackNamespace: "team"},
			want: Result{Namespace: "kubevpn", Pod: "manager-pod", Image: image, Installed: true}, changes: everything,
		},
		{
			name: "there already", objects: installed("kubevpn", image),
			want: Result{Namespace: "kubevpn", Pod: "manager-pod", Image: image},
		},
		{
			name: "other image", objects: installed("kubevpn", "registry.example/kubevpn:0"),
			want: Result{Namespace: "kubevpn", Pod: "manager-pod", Image: "registry.example/kubevpn:0", Warnings: []string{otherImage}, ImageWarning: otherImage},
		},
		{
			name: "upgrade", objects: installed("kubevpn", "registry.example/kubevpn:0"), options: Options{Upgrade: true},
			want:    Result{Namespace: "kubevpn", Pod: "manager-pod", Image: "registry.example/kubevpn:0", Installed: true},
			changes: everything[1:],
		},
		{
			name: "upgrade of the same", objects: installed("kubevpn", image), options: Options{Upgrade: true},
			want: Result{Namespace: "kubevpn", Pod: "manager-pod", Image: image},
		},
		{
			name: "account and binding deleted", objects: without[*corev1.ServiceAccount](installed("kubevpn", image)),
			want:    Result{Namespace: "kubevpn", Pod: "manager-pod", Image: image},
			changes: []string{"patch serviceaccounts kubevpn/kubevpn-traffic-manager"},
		},
		{
			name: "developer with an admin's manager", deny: "*:namespaces@* *:clusterroles@ *:clusterrolebindings@ *:serviceaccounts@* *:roles@* list:deployments@* watch:deployments@* *:replicasets@* create:deployments@* patch:deployments@*",
			objects: installed("kubevpn", image), options: Options{FallbackNamespace: "team"},
			want: Result{Namespace: "kubevpn", Pod: "manager-pod", Image: image},
		},
		{
			name: "developer alone", deny: developer, objects: []runtime.Object{inNamespace("team", ready)}, options: Options{FallbackNamespace: "team"},
			want: Result{Namespace: "team", Pod: "manager-pod", Image: image, Installed: true, Lease: Lease{Namespace: "team", UID: "jobs"}}, changes: leased,
		},
		{
			name: "developer without Jobs", deny: developer + " create:jobs@team", objects: []runtime.Object{inNamespace("team", ready)}, options: Options{FallbackNamespace: "team"},
			want: Result{Namespace: "team", Pod: "manager-pod", Image: image, Installed: true, Warnings: []string{noRights,
				"the traffic manager runs in the namespace team: you may not look for it in kubevpn. To use one for the whole cluster, ask a cluster admin to run" + askAdmin}},
			changes: inTeam,
		},
		{
			name: "developer keeps", deny: developer, objects: []runtime.Object{inNamespace("team", ready)}, options: Options{FallbackNamespace: "team", Keep: true},
			want: Result{Namespace: "team", Pod: "manager-pod", Image: image, Installed: true, Warnings: []string{noRights,
				"the traffic manager runs in the namespace team: you may not look for it in kubevpn. To use one for the whole cluster, ask a cluster admin to run" + askAdmin}},
			changes: inTeam,
		},
		{
			name: "developer, again", deny: developer, objects: installed("team", image), options: Options{FallbackNamespace: "team"},
			want: Result{Namespace: "team", Pod: "manager-pod", Image: image, Warnings: []string{
				"the traffic manager runs in the namespace team: you may not look for it in kubevpn. To use one for the whole cluster, ask a cluster admin to run" + askAdmin}},
		},
		{
			name: "may see it, may not use it", deny: "create:pods/portforward@kubevpn *:clusterroles@ *:clusterrolebindings@ create:roles@team", objects: append(installed("kubevpn", image), inNamespace("team", ready)),
			options: Options{FallbackNamespace: "team"},
			want: Result{Namespace: "team", Pod: "manager-pod", Image: image, Installed: true, Lease: Lease{Namespace: "team", UID: "jobs"}, Warnings: []string{
				"the traffic manager runs in the namespace team: you may not use it in kubevpn. To use one for the whole cluster, ask a cluster admin to run" + askAdmin}},
			changes: append([]string{"create namespaces /team"}, leased...),
		},
		{
			name: "the review said yes", secret: "patch:deployments@kubevpn", objects: []runtime.Object{inNamespace("team", ready), namespaceObject("kubevpn"), namespaceObject("team")}, options: Options{FallbackNamespace: "team"},
			want: Result{Namespace: "team", Pod: "manager-pod", Image: image, Installed: true, Warnings: []string{
				"the traffic manager runs in the namespace team: you may not install it in kubevpn. To use one for the whole cluster, ask a cluster admin to run" + askAdmin}},
			changes: []string{
				"patch clusterroles /kubevpn-traffic-manager-kubevpn", "patch clusterrolebindings /kubevpn-traffic-manager-kubevpn", "patch roles kubevpn/kubevpn-traffic-manager-user", "patch serviceaccounts kubevpn/kubevpn-traffic-manager",
				"patch clusterroles /kubevpn-traffic-manager-team", "patch clusterrolebindings /kubevpn-traffic-manager-team", "patch roles team/kubevpn-traffic-manager-user",
				"patch serviceaccounts team/kubevpn-traffic-manager", "patch deployments team/kubevpn-traffic-manager",
			},
		},
		{
			name: "escalation", secret: "patch:clusterroles@", objects: []runtime.Object{inNamespace("team", ready), namespaceObject("team")}, options: Options{Namespace: "team"},
			want: Result{Namespace: "team", Pod: "manager-pod", Image: image, Installed: true, Warnings: []string{
				`the traffic manager gets no rights of its own (the API server forbids it: applying the ClusterRole kubevpn-traffic-manager-team: clusterroles "x" is forbidden: User "dev" cannot patch resource "clusterroles" in API group "rbac.authorization.k8s.io" at the cluster scope). It dials ClusterIPs directly, which requires kube-proxy, and cannot read the nodes' pod networks or the names of Services. Ask a cluster admin to run` + "\n  kubevpn install --manager-namespace team"}},
			changes: inTeam,
		},
		{
			name: "explicit, not visible", deny: developer, options: Options{Namespace: "kubevpn", FallbackNamespace: "team"},
			err:  "you may not look for the traffic manager in the namespace kubevpn: this requires the right to get deployments in namespace kubevpn",
			hint: "Ask a cluster admin to run" + askAdmin,
		},
		{
			name: "explicit, not allowed", deny: "create:serviceaccounts@tools", objects: []runtime.Object{namespaceObject("tools")}, options: Options{Namespace: "tools", FallbackNamespace: "team"},
			err:  "you may not install the traffic manager in the namespace tools: this requires the right to create serviceaccounts in namespace tools",
			hint: "Ask a cluster admin to run\n  kubevpn install --manager-namespace tools\n  kubectl create rolebinding kubevpn-traffic-manager-user-dev --namespace=tools --role=kubevpn-traffic-manager-user --user=dev",
		},
		{
			name: "nowhere", deny: "*:*@kubevpn *:*@team *:*@", options: Options{FallbackNamespace: "team"},
			err:  "the traffic manager can be installed neither in the namespace kubevpn (you may not look for it) nor in team (you may not look for it)",
			hint: "Ask a cluster admin to run" + askAdmin + "\nor to let you do this in team: get deployments",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			leaks := goleak.IgnoreCurrent()
			defer goleak.VerifyNone(t, leaks)
			w := newWorld(tt.deny, tt.secret, tt.objects...)
			tt.options.Image = image
			e := &ensurer{kube: w, o: tt.options, timeout: 10 * time.Second}
			err := e.run(t.Context())
			if tt.err != "" {
				var apiErr *api.Error
				if !errors.As(err, &apiErr) || apiErr.Code != api.ExitPermission || apiErr.Message != tt.err || apiErr.Hint != tt.hint {
					t.Fatalf("%+v\nwant %s\n%s", err, tt.err, tt.hint)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, e.result, cmpopts.IgnoreFields(Result{}, "Manager", "Node")); d != "" {
				t.Errorf("result (-want +got):\n%s", d)
			}
			if d := cmp.Diff(tt.changes, w.changes); d != "" {
				t.Errorf("changes (-want +got):\n%s", d)
			}
		})
	}
}

func TestWaitTimeoutNamesTheState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // it ends only after wait has stopped its goroutines
		w := newWorld("", "", aPod("a", func(p *corev1.Pod) { p.Spec.NodeName = "" }))
		_, err := (&waiter{kube: w, namespace: "kubevpn", timeout: 100 * time.Millisecond}).wait(t.Context())
		var e *api.Error
		if !errors.As(err, &e) || e.Code != api.ExitNotReady || e.Message != "the traffic manager in kubevpn was not ready within 100ms: waiting for a node" {
			t.Fatal(err)
		}
	})
}

func TestAPIServersAreTheReadyEndpoints(t *testing.T) {
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes", Labels: map[string]string{discoveryv1.LabelServiceName: "kubernetes"}},
		Ports:      []discoveryv1.EndpointPort{{Name: new("https"), Port: new(int32(6443))}},
		Endpoints: []discoveryv1.Endpoint{
			{Addresses: []string{"10.0.0.2"}}, {Addresses: []string{"10.0.0.1"}},
			{Addresses: []string{"10.0.0.3"}, Conditions: discoveryv1.EndpointConditions{Ready: new(false)}},
		},
	}
	other := slice.DeepCopy()
	other.Name, other.Labels = "web", map[string]string{discoveryv1.LabelServiceName: "web"}
	if d := cmp.Diff([]string{"10.0.0.1:6443", "10.0.0.2:6443"}, apiServers(t.Context(), newWorld("", "", slice, other))); d != "" {
		t.Error(d)
	}
	if got := apiServers(t.Context(), newWorld("list:endpointslices@default", "", slice)); got != nil {
		t.Error(got)
	}
}

func TestRemoveDeletesOnlyOwnObjects(t *testing.T) {
	binding := objects(Options{Namespace: "other"}, "ClusterRoleBinding")[0].(*rbacv1.ClusterRoleBinding) // of another manager
	tests := []struct {
		name    string
		deny    string
		objects []runtime.Object
		want    []string
		err     string
	}{
		{name: "nothing", objects: []runtime.Object{binding}},
		{name: "everything", objects: append(installed("kubevpn", image), binding), want: []string{
			"Deployment kubevpn/kubevpn-traffic-manager", "ServiceAccount kubevpn/kubevpn-traffic-manager", "Role kubevpn/kubevpn-traffic-manager-user",
			"ClusterRoleBinding kubevpn-traffic-manager-kubevpn", "ClusterRole kubevpn-traffic-manager-kubevpn", "Namespace kubevpn"}},
		{name: "others live there", objects: append(installed("kubevpn", image), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "kubevpn", Name: "theirs"}}), want: []string{
			"Deployment kubevpn/kubevpn-traffic-manager", "ServiceAccount kubevpn/kubevpn-traffic-manager", "Role kubevpn/kubevpn-traffic-manager-user",
			"ClusterRoleBinding kubevpn-traffic-manager-kubevpn", "ClusterRole kubevpn-traffic-manager-kubevpn", "Namespace kubevpn kept: it contains other objects: Service theirs"}},
		{name: "exposed", objects: append(installed("kubevpn", image), directObjects(Options{Expose: ExposeNodePort})...), want: []string{
			"Deployment kubevpn/kubevpn-traffic-manager", "Service kubevpn/kubevpn-traffic-manager-direct", "ServiceAccount kubevpn/kubevpn-traffic-manager", "Role kubevpn/kubevpn-traffic-manager-user",
			"ClusterRoleBinding kubevpn-traffic-manager-kubevpn", "ClusterRole kubevpn-traffic-manager-kubevpn", "Namespace kubevpn"}},
		{name: "may not list Services", deny: "list:services@*", objects: without[*corev1.Namespace](installed("kubevpn", image)), want: []string{
			"Deployment kubevpn/kubevpn-traffic-manager", "ServiceAccount kubevpn/kubevpn-traffic-manager", "Role kubevpn/kubevpn-traffic-manager-user",
			"ClusterRoleBinding kubevpn-traffic-manager-kubevpn", "ClusterRole kubevpn-traffic-manager-kubevpn"}},
		{name: "not our namespace", objects: without[*corev1.Namespace](installed("kubevpn", image)), want: []string{
			"Deployment kubevpn/kubevpn-traffic-manager", "ServiceAccount kubevpn/kubevpn-traffic-manager", "Role kubevpn/kubevpn-traffic-manager-user",
			"ClusterRoleBinding kubevpn-traffic-manager-kubevpn", "ClusterRole kubevpn-traffic-manager-kubevpn"}},
		{name: "a right is missing", deny: "delete:clusterroles@", objects: installed("kubevpn", image),
			err: "cannot remove the traffic manager from kubevpn: you may not delete clusterroles in the whole cluster"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(tt.deny, "", tt.objects...)
			r := &remover{kube: w, ns: "kubevpn", o: RemoveOptions{}}
			removed, err := r.run(t.Context())
			if tt.err != "" {
				if err == nil || err.Error() != tt.err || len(w.changes) > 0 {
					t.Fatalf("%v, %v", err, w.changes)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, x := range removed {
				text := x.String()
				if x.Kept != "" {
					text += " kept: " + x.Kept
				}
				got = append(got, text)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

func TestRemoveFailsWhileLaptopsAreConnected(t *testing.T) {
	for _, tt := range []struct {
		connected int
		err       error
		want      string
	}{
		{1, nil, "a laptop is connected through this traffic manager"},
		{3, nil, "3 laptops are connected through this traffic manager"},
		{0, nil, ""},
		{0, errors.New("no answer"), ""}, // the manager may be broken: only a warning
	} {
		w := newWorld("", "", installed("kubevpn", image)...)
		warned := false
		r := &remover{kube: w, ns: "kubevpn", o: RemoveOptions{
			Connected: func(_ context.Context, ns, pod string) (int, error) {
				if ns != "kubevpn" || pod != "manager-pod" {
					t.Errorf("asked about %s/%s", ns, pod)
				}
				return tt.connected, tt.err
			},
			Progress: func(e api.Event) { warned = warned || e.Warning != "" },
		}}
		err := r.guard(t.Context())
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || err.Error() != tt.want) || warned != (tt.err != nil) {
			t.Errorf("%d connected, %v: got %v, warning %v", tt.connected, tt.err, err, warned)
		}
		if _, err := r.run(t.Context()); tt.want != "" && (err == nil || len(w.changes) > 0) {
			t.Errorf("%d connected: %v, changes %v", tt.connected, err, w.changes)
		}
	}
}

// A webhook or a proxy answers 403 with a text of its own, which names no missing right.
func TestHintAfterAWebhooks403IsComplete(t *testing.T) {
	w := newWorld("", "")
	w.PrependReactor("get", "deployments", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "deployments"}, "x", errors.New("not during business hours"))
	})
	o := Options{Image: image, FallbackNamespace: "team"}
	e := api.AsError((&ensurer{kube: w, o: o, timeout: 10 * time.Second}).run(t.Context()))
	if e == nil || e.Code != api.ExitPermission || !strings.Contains(e.Hint, "kubevpn install") {
		t.Fatalf("got %+v", e)
	}
	if strings.HasSuffix(strings.TrimSpace(e.Hint), ":") || strings.Contains(e.Hint, "or to let you do this") {
		t.Errorf("the hint ends with nothing: %q", e.Hint)
	}
}
