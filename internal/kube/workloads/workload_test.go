package workloads

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	k8stesting "k8s.io/client-go/testing"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/testenv"
)

// manifest reads YAML documents.
func manifest(t testing.TB, text string) []*unstructured.Unstructured {
	t.Helper()
	var all []*unstructured.Unstructured
	for document := range strings.SplitSeq(text, "\n---\n") {
		o := new(unstructured.Unstructured)
		if err := yaml.Unmarshal([]byte(document), &o.Object); err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		o.SetNamespace("ns")
		all = append(all, o)
	}
	return all
}

// resourceTypes is what discovery gives, the foremost group first.
var resourceTypes = []*metav1.APIResourceList{
	{GroupVersion: "v1", APIResources: []metav1.APIResource{
		{Name: "pods", SingularName: "pod", ShortNames: []string{"po"}, Kind: "Pod", Namespaced: true},
		{Name: "services", SingularName: "service", ShortNames: []string{"svc"}, Kind: "Service", Namespaced: true},
		{Name: "replicationcontrollers", SingularName: "replicationcontroller", ShortNames: []string{"rc"}, Kind: "ReplicationController", Namespaced: true},
		{Name: "nodes", SingularName: "node", ShortNames: []string{"no"}, Kind: "Node"},
	}},
	{GroupVersion: "apps/v1", APIResources: []metav1.APIResource{
		{Name: "deployments", SingularName: "deployment", ShortNames: []string{"deploy"}, Kind: "Deployment", Namespaced: true},
	}},
	{GroupVersion: "argoproj.io/v1alpha1", APIResources: []metav1.APIResource{
		{Name: "rollouts", SingularName: "rollout", ShortNames: []string{"ro"}, Kind: "Rollout", Namespaced: true},
	}},
	{GroupVersion: "example.com/v1", APIResources: []metav1.APIResource{
		{Name: "engines", SingularName: "engine", ShortNames: []string{"deploy"}, Kind: "Engine", Namespaced: true},
	}},
}

// fakeCluster returns a client without the rights in deny: "list:pods watch:services".
func fakeCluster(deny string, objects ...runtime.Object) *fake.Clientset {
	kube := fake.NewClientset(objects...)
	for what := range strings.FieldsSeq(deny) {
		verb, resource, _ := strings.Cut(what, ":")
		kube.PrependReactor(verb, resource, func(k8stesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("no"))
		})
	}
	return kube
}

// explain returns the error that the user sees.
func explain(t *testing.T, err error) *api.Error {
	t.Helper()
	c, loading := client.Load([]byte(`{clusters: [{name: c, cluster: {server: "https://cluster"}}], contexts: [{name: c, context: {cluster: c}}], current-context: c}`), client.Options{})
	if loading != nil {
		t.Fatal(loading)
	}
	return c.Explain(err)
}

func noLeaks(t *testing.T) {
	t.Helper()
	ignore := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, ignore) })
}

// fakeAPI is a cluster whose errors stay as they are.
type fakeAPI struct {
	cluster
	kube    kubernetes.Interface
	dynamic dynamic.Interface
}

func (f fakeAPI) Kube() kubernetes.Interface                      { return f.kube }
func (f fakeAPI) Dynamic() dynamic.Interface                      { return f.dynamic }
func (fakeAPI) ExplainContext(_ context.Context, err error) error { return err }

// worldOf returns clients for a cluster with objects; deny is that of fakeCluster.
func worldOf(t testing.TB, deny, objects string) (Client, *fake.Clientset) {
	t.Helper()
	var typed, all []runtime.Object
	for _, o := range manifest(t, objects) {
		all = append(all, o)
		if obj, err := scheme.Scheme.New(o.GroupVersionKind()); err == nil {
			if err := decode(o.Object, obj); err != nil {
				t.Fatal(err)
			}
			typed = append(typed, obj)
		}
	}
	kube := fakeCluster(deny, typed...)
	kube.Resources = resourceTypes
	d := dynamicfake.NewSimpleDynamicClient(scheme.Scheme, all...)
	d.PrependReactor("get", "*", func(a k8stesting.Action) (bool, runtime.Object, error) {
		if a.GetSubresource() != "scale" {
			return false, nil, nil
		}
		name := a.(k8stesting.GetAction).GetName()
		selector := map[string]string{"turbo": "app=web", "silent": ""}
		if _, found := selector[name]; !found {
			return true, nil, apierrors.NewNotFound(schema.GroupResource{}, "")
		}
		return true, &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "autoscaling/v1", "kind": "Scale", "status": map[string]any{"selector": selector[name]},
		}}, nil
	})
	return Client{fakeAPI{kube: kube, dynamic: d}}, kube
}

const aWorld = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web, tier: front}}
    spec:
      containers:
      - name: app
        image: i
        ports: [{name: http, containerPort: 8080, protocol: TCP}, {name: dns, containerPort: 53, protocol: UDP}, {name: dns, containerPort: 53, protocol: TCP}]
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: db}
spec:
  selector: {matchExpressions: [{key: app, operator: In, values: [db]}]}
  template:
    metadata: {labels: {app: db}}
    spec: {containers: [{name: postgres, image: i}]}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: host}
spec:
  selector: {matchLabels: {app: host}}
  template:
    metadata: {labels: {app: host}}
    spec: {hostNetwork: true, containers: [{name: c, image: i}]}
---
apiVersion: apps/v1
kind: ReplicaSet
metadata: {name: win}
spec:
  selector: {matchLabels: {app: win}}
  template:
    metadata: {labels: {app: win}}
    spec: {os: {name: windows}, containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: ReplicationController
metadata: {name: old}
spec:
  selector: {app: old}
  template:
    metadata: {labels: {app: old}}
    spec: {containers: [{name: c, image: i}]}
---
apiVersion: argoproj.io/v1alpha1
kind: Rollout
metadata: {name: own}
spec:
  selector: {matchLabels: {app: own}}
  template:
    metadata: {labels: {app: own}}
    spec: {containers: [{name: c, image: i}]}
---
apiVersion: argoproj.io/v1alpha1
kind: Rollout
metadata: {name: refers}
spec:
  workloadRef: {apiVersion: apps/v1, kind: Deployment, name: web}
---
apiVersion: argoproj.io/v1alpha1
kind: Rollout
metadata: {name: dangling}
spec:
  workloadRef: {apiVersion: apps/v1, kind: Deployment, name: gone}
---
apiVersion: example.com/v1
kind: Engine
metadata: {name: turbo}
spec: {fuel: gas}
---
apiVersion: example.com/v1
kind: Engine
metadata: {name: silent}
spec: {template: text}
---
apiVersion: example.com/v1
kind: Engine
metadata: {name: odd}
spec: {selector: 5}
---
apiVersion: example.com/v1
kind: Engine
metadata: {name: bare}
---
apiVersion: batch/v1
kind: CronJob
metadata: {name: nightly}
spec:
  schedule: "0 3 * * *"
  jobTemplate:
    spec:
      template:
        metadata: {labels: {app: web, tier: front}}
        spec: {restartPolicy: Never, containers: [{name: report, image: i}]}
---
apiVersion: batch/v1
kind: CronJob
metadata: {name: busy}
spec:
  schedule: "* * * * *"
  jobTemplate:
    spec:
      template:
        spec: {restartPolicy: Never, containers: [{name: report, image: i}]}
status: {active: [{kind: Job, name: busy-1}, {kind: Job, name: busy-2}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web-1, labels: {app: web, tier: front}, creationTimestamp: "2026-01-01T00:00:00Z"}
spec: {containers: [{name: older, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web-2, labels: {app: web, tier: front}, creationTimestamp: "2026-01-02T00:00:00Z"}
spec: {containers: [{name: newer, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web-3, labels: {app: web, tier: front}, creationTimestamp: "2026-01-03T00:00:00Z"}
spec: {containers: [{name: done, image: i}]}
status: {phase: Succeeded}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  selector: {app: web}
  ports: [{name: web, port: 80, targetPort: http, protocol: TCP}, {name: plain, port: 9090, targetPort: 0}, {name: none, port: 81, targetPort: nowhere}]
---
apiVersion: v1
kind: Service
metadata: {name: names}
spec:
  clusterIP: None
  selector: {app: web, tier: front}
  ports: [{name: dns, port: 53, targetPort: dns, protocol: UDP}, {name: sctp, port: 99, targetPort: 99, protocol: SCTP}]
---
apiVersion: v1
kind: Service
metadata: {name: manual}
spec: {ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: elsewhere}
spec: {type: ExternalName, externalName: example.com, selector: {app: web}}
---
apiVersion: v1
kind: Service
metadata: {name: empty}
spec: {selector: {app: nobody}, ports: [{port: 80, targetPort: 8080}]}`

func TestWorkloadIsFoundByKubectlsNames(t *testing.T) {
	for _, tt := range []struct {
		name       string // TYPE/NAME; its subtest has dots for slashes
		want       string // canonical
		selector   string
		containers string
		services   string
	}{
		{name: "deployment/web", want: "deployment/web", selector: "app=web", containers: "app", services: "names web"},
		{name: "deploy/web", want: "deployment/web", selector: "app=web", containers: "app", services: "names web"},
		{name: "Deployments/web", want: "deployment/web", selector: "app=web", containers: "app", services: "names web"},
		{name: "deployments.apps/web", want: "deployment/web", selector: "app=web", containers: "app", services: "names web"},
		{name: "deploy.v1.apps/web", want: "deployment/web", selector: "app=web", containers: "app", services: "names web"},
		{name: "sts/db", want: "statefulset/db", selector: "app in (db)", containers: "postgres"},
		{name: "rc/old", want: "replicationcontroller/old", selector: "app=old", containers: "c"},
		{name: "rollout/own", want: "rollout.argoproj.io/own", selector: "app=own", containers: "c"},
		{name: "ro/own", want: "rollout.argoproj.io/own", selector: "app=own", containers: "c"},
		{name: "rollouts.v1alpha1.argoproj.io/own", want: "rollout.argoproj.io/own", selector: "app=own", containers: "c"},
		{name: "Rollout.argoproj.io/refers", want: "rollout.argoproj.io/refers", selector: "app=web", containers: "app", services: "names web"},
		{name: "deploy.example.com/turbo", want: "engine.example.com/turbo", selector: "app=web", containers: "newer", services: "names web"},
		{name: "po/web-1", want: "pod/web-1", containers: "older", services: "names web"},
		{name: "svc/web", want: "service/web", selector: "app=web", containers: "newer", services: "names web"},
		{name: "service/names", want: "service/names", selector: "app=web,tier=front", containers: "newer", services: "names web"},
		{name: "cj/nightly", want: "cronjob/nightly", selector: "batch.kubernetes.io/job-name,!batch.kubernetes.io/job-name", containers: "report", services: "names web"},
		{name: "CronJobs.batch/busy", want: "cronjob/busy", selector: "batch.kubernetes.io/job-name in (busy-1,busy-2)", containers: "report"},
		{name: "service/empty", want: "service/empty", selector: "app=nobody", services: "empty"},
	} {
		t.Run(strings.ReplaceAll(tt.name, "/", "."), func(t *testing.T) {
			r, _ := worldOf(t, "", aWorld)
			w, err := r.read(t.Context(), "ns", tt.name)
			if err != nil {
				t.Fatal(err)
			}
			selector := ""
			if w.Selector != nil {
				selector = w.Selector.String()
			}
			var containers, services []string
			for _, c := range w.Template.Spec.Containers {
				containers = append(containers, c.Name)
			}
			for _, s := range w.Services {
				services = append(services, s.Name)
			}
			got := []string{w.String(), selector, strings.Join(containers, " "), strings.Join(services, " ")}
			if d := cmp.Diff([]string{tt.want, tt.selector, tt.containers, tt.services}, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			if len(w.Notes) > 0 || w.IsScheduled() != strings.HasPrefix(tt.want, "cronjob/") {
				t.Errorf("notes %q, scheduled %v", w.Notes, w.IsScheduled())
			}
		})
	}
}

func TestWorkloadErrorNamesTheProblem(t *testing.T) {
	for _, tt := range []struct {
		name, deny string
		code       api.ExitCode
		err, hint  string
	}{
		{name: "web", code: api.ExitUsage, err: `"web" is not TYPE/NAME`, hint: "deployment/web"},
		{name: "deployment/", code: api.ExitUsage, err: "is not TYPE/NAME"},
		{name: "deployment/a/b", code: api.ExitUsage, err: "is not TYPE/NAME"},
		{name: "deploy/none", code: api.ExitWorkload, err: "there is no deployment/none in the namespace ns", hint: "kubectl -n ns get deployment"},
		{name: "gizmo/web", code: api.ExitWorkload, err: `no resource type "gizmo"`, hint: "kubectl api-resources"},
		{name: "node/one", code: api.ExitWorkload, err: "belongs to no namespace", hint: "a Deployment"},
		{name: "ds/host", code: api.ExitWorkload, err: "the pods of daemonset/host use their nodes' network (hostNetwork)", hint: "a network of their own"},
		{name: "rs/win", code: api.ExitWorkload, err: "run on Windows", hint: "Linux"},
		{name: "svc/manual", code: api.ExitWorkload, err: "service/manual has no selector", hint: "kubectl -n ns get"},
		{name: "svc/elsewhere", code: api.ExitWorkload, err: "service/elsewhere has no selector", hint: "kubectl -n ns get"},
		{name: "rollout/dangling", code: api.ExitWorkload, err: "refers to deployment/gone, which does not exist", hint: "describe rollout.argoproj.io dangling"},
		{name: "engine/silent", code: api.ExitWorkload, err: "neither a selector of pods nor a scale", hint: "kubectl -n ns get"},
		{name: "engine/bare", code: api.ExitWorkload, err: "neither a selector of pods nor a scale", hint: "kubectl -n ns get"},
		{name: "engine/odd", code: api.ExitUnexpected, err: "reading engine.example.com/odd: spec.selector is a "},
		{name: "svc/web", deny: "list:pods", code: api.ExitPermission, err: "", hint: "admin"},
	} {
		t.Run(strings.ReplaceAll(tt.name, "/", "."), func(t *testing.T) {
			r, _ := worldOf(t, tt.deny, aWorld)
			_, err := r.read(t.Context(), "ns", tt.name)
			e := explain(t, err)
			if e == nil || e.Code != tt.code || !strings.Contains(e.Message, tt.err) || !strings.Contains(e.Hint, tt.hint) {
				t.Errorf("got %+v, want code %d, %q, hint %q", e, tt.code, tt.err, tt.hint)
			}
		})
	}
}

// Many clusters do not let a developer list Services.
func TestWorkloadDoesNotRequireServices(t *testing.T) {
	r, _ := worldOf(t, "list:services", aWorld)
	w, err := r.read(t.Context(), "ns", "deploy/web")
	if err != nil {
		t.Fatal(err)
	}
	if len(w.Notes) != 1 || !strings.Contains(w.Notes[0], "may not list Services") || len(w.Ports()) != 3 {
		t.Errorf("notes %q, ports %v", w.Notes, w.Ports())
	}
}

func TestWorkloadPortsJoinContainersAndServices(t *testing.T) {
	r, _ := worldOf(t, "", aWorld)
	for _, tt := range []struct {
		name string
		want []Port
	}{
		{"deploy/web", []Port{
			{Protocol: "tcp", Port: 53, Name: "dns", Container: "app"},
			{Protocol: "udp", Port: 53, Name: "dns", Container: "app", Services: []ServicePort{{"names", 53, "dns", "dns"}}},
			{Protocol: "tcp", Port: 8080, Name: "http", Container: "app", Services: []ServicePort{{"web", 80, "web", "http"}}},
			{Protocol: "tcp", Port: 9090, Services: []ServicePort{{"web", 9090, "plain", ""}}},
		}},
		{"svc/empty", []Port{{Protocol: "tcp", Port: 8080, Services: []ServicePort{{"empty", 80, "", ""}}}}},
		{"sts/db", nil},
	} {
		t.Run(strings.ReplaceAll(tt.name, "/", "."), func(t *testing.T) {
			w, err := r.read(t.Context(), "ns", tt.name)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, w.Ports()); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

func TestContainerIsChosenOrNamed(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	ports := func(numbers ...int32) (all []corev1.ContainerPort) {
		for _, n := range numbers {
			all = append(all, corev1.ContainerPort{ContainerPort: n})
		}
		return all
	}
	service := func(target int32) corev1.Service {
		return corev1.Service{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: target}}}}
	}
	one := []corev1.Container{{Name: "app", Ports: ports(8080)}}
	agent := corev1.Container{Name: api.AgentPrefix + "sidecar", Ports: ports(8080)}
	several := []corev1.Container{{Name: "metrics", Ports: ports(9090)}, {Name: "app", Ports: ports(8080, 9090)}, {Name: "log"}}
	native := []corev1.Container{{Name: "setup"}, {Name: "mesh", RestartPolicy: &always, Ports: ports(15001)}}
	for _, tt := range []struct {
		name       string
		containers []corev1.Container
		init       []corev1.Container
		annotation string
		services   []corev1.Service
		asked      string
		ports      []uint16
		want       string
		err        string
	}{
		{name: "only_one", containers: one, want: "app"},
		{name: "only_one_but_the_agent", containers: append([]corev1.Container{agent}, one...), want: "app"},
		{name: "only_one_beside_a_native_sidecar", containers: one, init: native, want: "app"},
		{name: "named", containers: several, asked: "log", ports: []uint16{8080}, want: "log"},
		{name: "named_native_sidecar", containers: one, init: native, asked: "mesh", want: "mesh"},
		{name: "named_init_container", containers: one, init: native, asked: "setup", err: "have no container setup that keeps running"},
		{name: "named_none", containers: several, asked: "db", err: "have no container db"},
		{name: "annotated", containers: several, annotation: "log", ports: []uint16{8080}, want: "log"},
		{name: "annotated_wrongly", containers: one, annotation: "db", want: "app"},
		{name: "first_with_the_port", containers: several, ports: []uint16{9090}, want: "metrics"},
		{name: "only_one_with_the_port", containers: several, ports: []uint16{1, 8080}, want: "app"},
		{name: "where_the_Service_sends", containers: several, services: []corev1.Service{service(8080)}, want: "app"},
		{name: "where_Services_send", containers: several, services: []corev1.Service{service(8080), service(9090)}, err: "metrics (9090), app (8080, 9090), log"},
		{name: "unclear", containers: several, err: "metrics (9090), app (8080, 9090), log"},
		{name: "unclear_port", containers: several, ports: []uint16{1}, err: "several containers"},
		{name: "no_pod", err: "has no pod"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := &Workload{Name: "web", shown: "deployment", Services: tt.services}
			w.Template.Spec.Containers, w.Template.Spec.InitContainers = tt.containers, tt.init
			w.Template.Annotations = map[string]string{defaultContainer: tt.annotation}
			c, err := w.Container(tt.asked, tt.ports...)
			if tt.err != "" {
				e := explain(t, err)
				if e == nil || e.Code != api.ExitWorkload || e.Hint == "" || !strings.Contains(e.Message, tt.err) {
					t.Errorf("got %+v, want %q", e, tt.err)
				}
				return
			}
			if err != nil || c.Name != tt.want {
				t.Errorf("got %v, %v, want %s", c, err, tt.want)
			}
		})
	}
}

func TestPortsOfContainerIncludeServicePorts(t *testing.T) {
	w := &Workload{}
	w.Template.Spec.Containers = []corev1.Container{
		{Name: "app"}, {Name: "metrics", Ports: []corev1.ContainerPort{{ContainerPort: 9090}}},
	}
	for _, port := range []int32{8080, 9090} {
		w.Services = append(w.Services, corev1.Service{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: port}}}})
	}
	for container, want := range map[string]string{"app": "[8080]", "metrics": "[8080 9090]"} {
		var got []uint16
		for _, p := range w.PortsOf(container) {
			got = append(got, p.Port)
		}
		if fmt.Sprint(got) != want {
			t.Errorf("%s has %v, want %s", container, got, want)
		}
	}
}

func TestOwnsFollowsControllers(t *testing.T) {
	deployments := schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}
	rollouts := schema.GroupVersionResource{Group: "argoproj.io", Version: "v1alpha1", Resource: "rollouts"}
	for _, tt := range []struct {
		name       string
		kind       string
		resource   schema.GroupVersionResource
		labels     labels.Set
		owner      string // KIND/NAME
		controller bool
		want       bool
	}{
		{"its", "Deployment", deployments, labels.Set{"app": "web", "pod-template-hash": "5f"}, "ReplicaSet/web-5f", true, true},
		{"other_label", "Deployment", deployments, labels.Set{"app": "db"}, "ReplicaSet/web-5f", true, false},
		{"preview", "Deployment", deployments, labels.Set{"app": "web", "pod-template-hash": "5f"}, "ReplicaSet/web-preview-5f", true, false},
		{"adopted", "Deployment", deployments, labels.Set{"app": "web", "pod-template-hash": "5f"}, "ReplicaSet/before", true, true},
		{"without_hash", "Deployment", deployments, labels.Set{"app": "web"}, "ReplicaSet/web-", true, true},
		{"of_a_StatefulSet", "Deployment", deployments, labels.Set{"app": "web"}, "StatefulSet/web", true, false},
		{"nobodys", "Deployment", deployments, labels.Set{"app": "web"}, "", true, true},
		{"no_controller", "Deployment", deployments, labels.Set{"app": "web"}, "StatefulSet/web", false, true},
		{"set", "StatefulSet", deployments, labels.Set{"app": "web"}, "StatefulSet/web", true, true},
		{"other_set", "StatefulSet", deployments, labels.Set{"app": "web"}, "StatefulSet/web2", true, false},
		{"custom", "Rollout", rollouts, labels.Set{"app": "web", "pod-template-hash": "5f"}, "ReplicaSet/other-5f", true, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := &Workload{Name: "web", Kind: tt.kind, Resource: tt.resource, Selector: labels.SelectorFromSet(labels.Set{"app": "web"})}
			p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Labels: tt.labels}}
			if kind, name, found := strings.Cut(tt.owner, "/"); found {
				p.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Name: name, Controller: &tt.controller}}
			}
			if got := w.owns(p); got != tt.want {
				t.Errorf("owns = %v", got)
			}
		})
	}
}

func TestWatchPodsReportsChanges(t *testing.T) {
	noLeaks(t)
	r, kube := worldOf(t, "", aWorld)
	w, err := r.read(t.Context(), "ns", "svc/web")
	if err != nil {
		t.Fatal(err)
	}
	lists, done := make(chan string, 10), make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	lost := watch.NewFake() // the first
	first := true
	kube.PrependWatchReactor("pods", func(k8stesting.Action) (bool, watch.Interface, error) {
		defer func() { first = false }()
		return first, lost, nil
	})
	go func() {
		done <- watchPods(ctx, kube, w, func(pods []corev1.Pod) {
			var names []string
			for _, p := range pods {
				names = append(names, p.Name)
			}
			lists <- strings.Join(names, " ")
		})
	}()
	want := func(want string) {
		t.Helper()
		select {
		case got := <-lists:
			if got != want {
				t.Fatalf("told %q, want %q", got, want)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("nothing was told; want %q", want)
		}
	}
	want("web-1 web-2 web-3")
	remove := func(name string) {
		t.Helper()
		if err := kube.CoreV1().Pods("ns").Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	remove("web-2") // unseen
	lost.Error(&metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonExpired, Code: 410})
	want("web-1 web-3")
	// The fake clientset does not replay what happens between its list and its watch.
	testenv.Until(t, "it watches again", func() bool { return watches(kube.Actions()) == 2 })
	remove("web-1")
	want("web-3")
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// watches counts the watches of pods.
func watches(actions []k8stesting.Action) (n int) {
	for _, a := range actions {
		if a.Matches("watch", "pods") {
			n++
		}
	}
	return n
}

func TestWatchPodsFollowsTheSelector(t *testing.T) {
	noLeaks(t)
	r, kube := worldOf(t, "", aWorld)
	w, err := r.read(t.Context(), "ns", "svc/web")
	if err != nil {
		t.Fatal(err)
	}
	web, err := kube.CoreV1().Services("ns").Get(t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	changes := watch.NewFake()
	kube.PrependWatchReactor("services", func(k8stesting.Action) (bool, watch.Interface, error) { return true, changes, nil })
	lists, done := make(chan int, 10), make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { done <- watchPods(ctx, kube, w, func(pods []corev1.Pod) { lists <- len(pods) }) }()
	if n := <-lists; n != 3 {
		t.Fatalf("%d pods at first", n)
	}
	for _, tt := range []struct {
		selector map[string]string
		want     int
	}{{map[string]string{"app": "green"}, 1}, {nil, 0}, {web.Spec.Selector, 3}} {
		service := web.DeepCopy()
		service.Spec.Selector = tt.selector
		if tt.want == 1 {
			p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "green-1", Namespace: "ns", Labels: tt.selector}}
			if _, err := kube.CoreV1().Pods("ns").Create(ctx, &p, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		timeout := time.After(10 * time.Second)
		changes.Modify(service)
		for told := -1; told != tt.want; {
			select {
			case told = <-lists: // the fake clientset tells of changes of all pods
			case <-timeout:
				t.Fatalf("%v: %d pods, want %d", tt.selector, told, tt.want)
			}
		}
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}
}

// Without the right to watch Services, the pods stay those that the Service selected at first.
func TestWatchPodsKeepsTheSelectorWithoutPermission(t *testing.T) {
	noLeaks(t)
	r, kube := worldOf(t, "", aWorld)
	w, err := r.read(t.Context(), "ns", "svc/web")
	if err != nil {
		t.Fatal(err)
	}
	denied := make(chan struct{}, 1)
	kube.PrependReactor("list", "services", func(k8stesting.Action) (bool, runtime.Object, error) {
		denied <- struct{}{}
		return true, nil, apierrors.NewForbidden(corev1.Resource("services"), "", errors.New("no"))
	})
	kube.PrependWatchReactor("services", func(k8stesting.Action) (bool, watch.Interface, error) {
		return true, nil, apierrors.NewForbidden(corev1.Resource("services"), "", errors.New("no"))
	})
	lists, done := make(chan int, 10), make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { done <- watchPods(ctx, kube, w, func(pods []corev1.Pod) { lists <- len(pods) }) }()
	<-denied
	if n := <-lists; n != 3 {
		t.Fatalf("%d pods", n)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}
}

func TestWatchPodsFailsWithoutPermission(t *testing.T) {
	for _, verb := range []string{"list", "watch"} {
		t.Run(verb, func(t *testing.T) {
			noLeaks(t)
			r, kube := worldOf(t, "", aWorld)
			w, err := r.read(t.Context(), "ns", "deploy/web")
			if err != nil {
				t.Fatal(err)
			}
			forbidden := apierrors.NewForbidden(corev1.Resource("pods"), "", errors.New("no"))
			kube.PrependReactor("list", "pods", func(k8stesting.Action) (bool, runtime.Object, error) {
				return verb == "list", nil, forbidden
			})
			kube.PrependWatchReactor("pods", func(k8stesting.Action) (bool, watch.Interface, error) {
				return verb == "watch", nil, forbidden
			})
			if err := watchPods(t.Context(), kube, w, func([]corev1.Pod) {}); !apierrors.IsForbidden(err) {
				t.Errorf("got %v", err)
			}
		})
	}
}
