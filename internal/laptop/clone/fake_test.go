package clone

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"testing"

	"go.uber.org/goleak"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/dynamic"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a cluster in memory. It stores objects, and the test changes them. It implements Cluster.
type world struct {
	kube     *fake.Clientset
	workload *workloads.Workload
	dial     func(pod string, command []string) net.Conn // DialExec
	registry http.RoundTripper                           // to registries; nil: the clone's own

	dynamic *dynamicfake.FakeDynamicClient

	mu      sync.Mutex
	pods    []corev1.Pod
	changed chan struct{} // closed and replaced when pods changes
	uids    int
}

func newWorld(objects ...runtime.Object) *world {
	w := &world{kube: fake.NewClientset(objects...), changed: make(chan struct{})}
	w.dynamic = dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{gateways: "GatewayList"})
	w.kube.PrependReactor("create", "jobs", func(a k8stesting.Action) (bool, runtime.Object, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.uids++
		a.(k8stesting.CreateAction).GetObject().(*batchv1.Job).UID = types.UID(fmt.Sprintf("job-%d", w.uids))
		return false, nil, nil
	})
	w.workload = &workloads.Workload{
		Namespace: "shop", Name: "web", Kind: "Deployment", Selector: labels.SelectorFromSet(labels.Set{"app": "web"}), Object: &unstructured.Unstructured{Object: map[string]any{}},
		Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web"}},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{
				Name: "app", Image: "web:1", Command: []string{"/web"}, Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}, {ContainerPort: 9090}},
			}}},
		},
		Services: []corev1.Service{{
			ObjectMeta: metav1.ObjectMeta{Name: "web"},
			Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80, TargetPort: intstr.FromString("http")}}},
		}},
	}
	return w
}

func (w *world) Workload(context.Context, string, string) (*workloads.Workload, error) {
	return w.workload, nil
}
func (w *world) Kube() kubernetes.Interface { return w.kube }
func (w *world) Dynamic() dynamic.Interface { return w.dynamic }
func (w *world) Explain(err error) *api.Error {
	if said := (*api.Error)(nil); errors.As(err, &said) {
		return said
	}
	return api.Errorf(api.ExitUnexpected, "explained: %w", err)
}
func (w *world) DialExec(_, pod, _ string, command []string) net.Conn { return w.dial(pod, command) }

func (w *world) WatchPods(ctx context.Context, _ *workloads.Workload, f func([]corev1.Pod)) error {
	for {
		w.mu.Lock()
		pods, changed := slices.Clone(w.pods), w.changed
		for n := range pods {
			if pods[n].OwnerReferences == nil {
				pods[n].OwnerReferences = ownedBy(types.UID(fmt.Sprintf("job-%d", w.uids)))
			}
		}
		w.mu.Unlock()
		f(pods)
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func ownedBy(job types.UID) []metav1.OwnerReference {
	return []metav1.OwnerReference{{UID: job, Controller: new(true)}}
}

// have replaces the pods. Those without an owner belong to the latest Job.
func (w *world) have(pods ...corev1.Pod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pods = pods
	close(w.changed)
	w.changed = make(chan struct{})
}

// pod returns a pod of a clone.
func pod(name string, phase corev1.PodPhase, statuses ...corev1.ContainerStatus) corev1.Pod {
	p := corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "shop", UID: types.UID(name)},
		Status:     corev1.PodStatus{Phase: phase, PodIP: "10.244.0.9", ContainerStatuses: statuses},
	}
	if phase == corev1.PodRunning {
		p.Status.ContainerStatuses = append(p.Status.ContainerStatuses, corev1.ContainerStatus{Name: "app", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}})
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	}
	return p
}

func waiting(reason string) corev1.ContainerStatus {
	return corev1.ContainerStatus{Name: "app", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason}}}
}

// running is a clone whose Run has not returned.
type running struct {
	*Clone
	*world
	t     *testing.T
	leave context.CancelFunc
	ended chan error

	mu     sync.Mutex
	events []api.Event
	told   [][]api.ClonePod
}

func (w *world) run(t *testing.T, spec api.CloneSpec, adjust ...func(*Clone)) *running {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r := &running{world: w, t: t, leave: cancel, ended: make(chan error, 1)}
	r.Clone = New(Config{
		Cluster: w, Namespace: "shop", Workload: "deployment/web", Spec: spec, Owner: "ann@laptop", Key: "hash",
		Image: func(context.Context) (string, error) { return "kubevpn:1", nil },
		OnPods: func(pods []api.ClonePod) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.told = append(r.told, pods)
		},
		Progress: func(e api.Event) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.events = append(r.events, e)
		},
		Logger: slog.New(slog.DiscardHandler),
	})
	for _, f := range adjust {
		f(r.Clone)
	}
	go func() { r.ended <- r.Run(ctx) }()
	return r
}

// end ends the clone.
func (r *running) end() {
	r.t.Helper()
	r.leave()
	if err := <-r.ended; err != nil {
		r.t.Errorf("Run: %v", err)
	}
}

// fails waits for the error of Run.
func (r *running) fails(code api.ExitCode, message string) {
	r.t.Helper()
	err := <-r.ended
	checkError(r.t, err, code, message)
	if s := r.Status(); s.State != api.CloneFailed {
		r.t.Errorf("state %s", s.State)
	}
}

func (r *running) has(state api.CloneState, last string) {
	r.t.Helper()
	if s := r.Status(); s.State != state || s.LastError != last {
		r.t.Errorf("%s, %q; want %s, %q", s.State, s.LastError, state, last)
	}
}

func (r *running) warnings() (all []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		if e.Warning != "" {
			all = append(all, e.Warning)
		}
	}
	return all
}

// job returns the Job of that name, or nil.
func (w *world) job(t *testing.T, name string) *batchv1.Job {
	t.Helper()
	list, err := w.kube.BatchV1().Jobs("shop").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for n := range list.Items {
		if list.Items[n].Name == name {
			return &list.Items[n]
		}
	}
	return nil
}

func (w *world) deleteJob(t *testing.T, name string) {
	t.Helper()
	if err := w.kube.Tracker().Delete(batchv1.SchemeGroupVersion.WithResource("jobs"), "shop", name); err != nil {
		t.Fatal(err)
	}
}

var errUnreachable = errors.New("connection refused")

// fail makes requests of a kind fail while err returns an error.
func (w *world) fail(verb, resource string, err func() error) {
	w.kube.PrependReactor(verb, resource, func(k8stesting.Action) (bool, runtime.Object, error) {
		if err := err(); err != nil {
			return true, nil, err
		}
		return false, nil, nil
	})
}
