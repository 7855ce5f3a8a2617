package workloads

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

func agentEnv(owner string) []corev1.EnvVar {
	return []corev1.EnvVar{{Name: api.AgentNameVariable, Value: owner}}
}

// listedObjects returns objects of two namespaces.
func listedObjects() []runtime.Object {
	web := map[string]string{"app": "web"}
	meta := func(namespace, name string, l map[string]string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: l}
	}
	template := func(l map[string]string) corev1.PodTemplateSpec {
		return corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: l}, Spec: corev1.PodSpec{Containers: []corev1.Container{
			{Name: "app", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}},
		}}}
	}
	owned := func(name, kind, owner string, l map[string]string, spec corev1.PodSpec) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: meta("ns", name, l), Spec: spec}
		p.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Name: owner, Controller: new(true)}}
		return p
	}
	ended := owned("web-1-old", "ReplicaSet", "web-1", web, corev1.PodSpec{})
	ended.Status.Phase = corev1.PodFailed
	intercepted := owned("web-1-a", "ReplicaSet", "web-1", web, corev1.PodSpec{EphemeralContainers: []corev1.EphemeralContainer{
		{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "kubevpn-agent-1", Env: agentEnv("bob$$1@\x1b[31mdesk")}},
		{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "kubevpn-agent-2", Env: agentEnv("gone@desk")}},
		{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "debugger", Env: agentEnv("no@one")}},
	}})
	intercepted.Status.EphemeralContainerStatuses = []corev1.ContainerStatus{
		{Name: "kubevpn-agent-2", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}}}
	db := map[string]string{"app": "db"}
	node := template(map[string]string{"app": "node"})
	node.Spec.HostNetwork = true
	set := &appsv1.ReplicaSet{ObjectMeta: meta("ns", "web-1", web), Spec: appsv1.ReplicaSetSpec{Selector: &metav1.LabelSelector{MatchLabels: web}}}
	set.OwnerReferences = []metav1.OwnerReference{{Kind: "Deployment", Name: "web", Controller: new(true)}}
	return []runtime.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ns"}},
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "strict", Labels: map[string]string{client.PodSecurityLabel: "restricted"}}},
		&appsv1.Deployment{ObjectMeta: meta("ns", "web", map[string]string{"team": "shop"}),
			Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: web}, Template: template(web)}},
		set, ended, intercepted,
		owned("web-1-b", "ReplicaSet", "web-1", web, corev1.PodSpec{}),
		&appsv1.StatefulSet{ObjectMeta: meta("ns", "db", nil),
			Spec: appsv1.StatefulSetSpec{Selector: &metav1.LabelSelector{MatchLabels: db}, Template: template(db)}},
		owned("db-0", "StatefulSet", "db", db, corev1.PodSpec{Containers: []corev1.Container{
			{Name: "kubevpn-agent-1", Env: agentEnv("ann@laptop")}, {Name: "app"}}}),
		&appsv1.DaemonSet{ObjectMeta: meta("ns", "node", nil),
			Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: node.Labels}, Template: node}},
		&corev1.Pod{ObjectMeta: meta("ns", "alone", nil), Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "app"}}}},
		&appsv1.Deployment{ObjectMeta: meta("strict", "api", nil),
			Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: db}, Template: template(db)}},
		&corev1.Service{ObjectMeta: meta("ns", "web", nil), Spec: corev1.ServiceSpec{Selector: web, Ports: []corev1.ServicePort{{Port: 80}}}},
	}
}

// lines returns a line for each workload.
func lines(list api.WorkloadList) []string {
	var all []string
	for _, w := range list.Items {
		line := w.Namespace + " " + w.Workload + " " + strings.Join(w.Modes, "+")
		for _, p := range w.Ports {
			line += " " + p.Protocol + strings.Join(p.Services, ",")
		}
		for _, h := range w.Intercepts {
			line += " " + h.Owner + ":" + h.Mode
		}
		all = append(all, line)
	}
	return all
}

func TestListShowsModesPortsAndOwners(t *testing.T) {
	kube := fake.NewClientset(listedObjects()...)
	for _, tt := range []struct {
		namespace, selector string
		want                []string
	}{
		{"ns", "", []string{
			"ns daemonset/node  tcp", "ns deployment/web ephemeral+sidecar tcpweb:80 tcp bob$1@[31mdesk:ephemeral", "ns pod/alone ephemeral",
			"ns statefulset/db ephemeral+sidecar tcp ann@laptop:sidecar",
		}},
		{"strict", "", []string{"strict deployment/api sidecar tcp"}},
		{"", "team=shop", []string{"ns deployment/web ephemeral+sidecar tcpweb:80 tcp bob$1@[31mdesk:ephemeral"}},
	} {
		selector, err := labels.Parse(tt.selector)
		if err != nil {
			t.Fatal(err)
		}
		list, err := (&lister{kube: kube, namespace: tt.namespace}).list(t.Context(), selector)
		if err != nil {
			t.Fatal(err)
		}
		got := lines(list)
		if d := cmp.Diff(tt.want, got); d != "" || len(list.Warnings) > 0 {
			t.Errorf("%s %s (-want +got):\n%s\n%q", tt.namespace, tt.selector, d, list.Warnings)
		}
	}
}

// TestHoldersListsEachOwnerOnce has an owner with two agents, and another owner's between them.
func TestHoldersListsEachOwnerOnce(t *testing.T) {
	var p corev1.Pod
	for n, owner := range []string{"ann@laptop", "bob@desk", "ann@laptop"} {
		p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers, corev1.EphemeralContainer{
			EphemeralContainerCommon: corev1.EphemeralContainerCommon{
				Name: fmt.Sprintf("kubevpn-agent-%d", n+1), Env: agentEnv(owner)}})
	}
	want := []api.Holder{{Owner: "ann@laptop", Mode: api.ModeEphemeral, Pods: 1},
		{Owner: "bob@desk", Mode: api.ModeEphemeral, Pods: 1}}
	if d := cmp.Diff(want, Holders(&p)); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestListWarnsOfWhatItMayNotList(t *testing.T) {
	kube := fake.NewClientset(listedObjects()...)
	forbid := func(resource string) {
		kube.PrependReactor("*", resource, func(action k8stesting.Action) (bool, runtime.Object, error) {
			r := action.GetResource()
			return true, nil, apierrors.NewForbidden(r.GroupResource(), "", errorString(`User "dev" cannot `+action.GetVerb()+
				` resource "`+r.Resource+`" in API group "`+r.Group+`" in the namespace "ns"`))
		})
	}
	for _, resource := range []string{"services", "statefulsets", "namespaces"} {
		forbid(resource)
	}
	list, err := (&lister{kube: kube, namespace: "ns"}).list(t.Context(), labels.Everything())
	text := strings.Join(list.Warnings, "\n")
	if err != nil || len(list.Items) != 3 || len(list.Warnings) != 3 ||
		!strings.Contains(text, "cannot list all services: this requires the right to list services in namespace ns") ||
		!strings.Contains(text, "statefulsets") || !strings.Contains(text, "pod security") {
		t.Errorf("%v, %v\n%s", lines(list), err, text)
	}
	for _, resource := range []string{"deployments", "daemonsets", "replicasets", "pods"} {
		forbid(resource)
	}
	if _, err := (&lister{kube: kube, namespace: "ns"}).list(t.Context(), labels.Everything()); !apierrors.IsForbidden(err) {
		t.Errorf("without any right: %v", err)
	}
}

type errorString string

func (e errorString) Error() string { return string(e) }

func TestListReadsPages(t *testing.T) {
	kube := fake.NewClientset()
	pages := 0
	kube.PrependReactor("list", "deployments", func(action k8stesting.Action) (bool, runtime.Object, error) {
		o := action.(k8stesting.ListActionImpl).ListOptions
		pages++
		list := &appsv1.DeploymentList{Items: []appsv1.Deployment{{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "d" + o.Continue},
			Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}}}}}
		if o.Limit == 0 {
			t.Error("a list without limit")
		}
		if pages < 3 {
			list.Continue = string(rune('0' + pages))
		}
		return true, list, nil
	})
	list, err := (&lister{kube: kube, namespace: "ns"}).list(t.Context(), labels.Everything())
	if err != nil || len(list.Items) != 3 {
		t.Errorf("%v, %v", lines(list), err)
	}
}
