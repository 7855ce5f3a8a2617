package intercept

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/workloads"
	"kubevpn/pkg/protocol/httpmatch"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
	"kubevpn/pkg/wire/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// world is a cluster in memory: a workload with pods, their agents, and a Service. It implements pods and Session.
type world struct {
	t      testing.TB
	kube   kubernetes.Interface
	logger *slog.Logger // of the intercepts

	mu       sync.Mutex
	workload *workloads.Workload
	list     []*corev1.Pod
	agents   map[types.UID]*fakeAgent
	watchers map[chan struct{}]bool
	injected []string // pods, in order

	objects   map[string]*unstructured.Unstructured   // by resource and name: "services/web"
	watches   map[string][]*watch.RaceFreeFakeWatcher // of objects, by resource
	conflicts int                                     // the number of writes that fail with a conflict
	refuses   error                                   // the answer to writes of the workload
	admit     func(*corev1.Pod)                       // changes new pods of a rollout, which the old ones outlive; nil: each becomes ready
	obstacle  string                                  // why no new pod is created; empty: it is

	shortcuts   wakeup.Value[map[netip.AddrPort]shortcut]
	private     bool                                                               // NeedsPullSecret
	denied      error                                                              // MayPatch
	refused     func(*corev1.Pod) error                                            // Inject
	dials       bool                                                               // refused admits restricted agents
	mute        chan struct{}                                                      // logs are empty until it is closed; nil: not
	infoPorts   []uint16                                                           // the InfoPorts of the agents
	stale       bool                                                               // Inject does not notice that an agent has ended
	bypass      bool                                                               // packets bypass the agents
	noRoute     bool                                                               // the traffic manager does not reach the pods
	infoLine    func(ctx context.Context, pod string, port uint16) ([]byte, error) // FirstLine; nil: forbidden
	protocols   [2]int                                                             // the newest and oldest of agents; zero: ours
	says        func(container string, info *api.AgentInfo)                        // changes what a log says
	ahead       time.Duration                                                      // of the API server's clock
	place       string                                                             // the node of new pods
	annotations map[string]string                                                  // of new pods
	adding      func()                                                             // called by Inject
	claims      map[types.UID][]api.Claim                                          // the initial claims of a pod's agent
	logged      map[types.UID]chan struct{}                                        // closed and replaced when an agent's log changes
}

const clusterIP = "10.96.0.80"

func newWorld(t testing.TB, pods ...string) *world {
	w := &world{
		place: "node1", logger: quiet(), t: t, watches: make(map[string][]*watch.RaceFreeFakeWatcher), agents: make(map[types.UID]*fakeAgent), watchers: make(map[chan struct{}]bool),
		claims: make(map[types.UID][]api.Claim), logged: make(map[types.UID]chan struct{}), objects: make(map[string]*unstructured.Unstructured),
	}
	kube := fake.NewClientset()
	kube.PrependReactor("list", "services", func(k8stesting.Action) (bool, runtime.Object, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		list := &corev1.ServiceList{}
		for key, o := range w.objects {
			if strings.HasPrefix(key, "services/") {
				list.Items = append(list.Items, *typed(t, o))
			}
		}
		return true, list, nil
	})
	kube.PrependWatchReactor("services", w.watch)
	kube.PrependReactor("create", "events", func(a k8stesting.Action) (bool, runtime.Object, error) {
		a.(k8stesting.CreateAction).GetObject().(*corev1.Event).CreationTimestamp = metav1.NewTime(time.Now().Add(w.ahead))
		return false, nil, nil
	})
	w.kube = kube
	w.workload = &workloads.Workload{
		Namespace: "default", Name: "web", Kind: "Deployment",
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web"}}, Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "app", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}, {Name: "dns", ContainerPort: 53, Protocol: corev1.ProtocolUDP}},
		}}}},
		Services: []corev1.Service{{
			ObjectMeta: metav1.ObjectMeta{Name: "web"},
			Spec: corev1.ServiceSpec{Selector: map[string]string{"app": "web"}, ClusterIPs: []string{clusterIP}, Ports: []corev1.ServicePort{
				{Port: 80, TargetPort: intstr.FromString("http")},
			}},
		}},
	}
	deployment := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default"}, Spec: appsv1.DeploymentSpec{Template: w.workload.Template}}
	for key, o := range map[string]any{"deployments/web": deployment, "services/web": &w.workload.Services[0]} {
		raw, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
		if err != nil {
			t.Fatal(err)
		}
		w.objects[key] = &unstructured.Unstructured{Object: raw}
	}
	w.workload.Object, w.workload.Resource = w.objects["deployments/web"], appsv1.SchemeGroupVersion.WithResource("deployments")
	for _, name := range pods {
		w.addPod(name)
	}
	t.Cleanup(func() {
		for _, a := range w.agents {
			a.end()
		}
	})
	return w
}

// agent returns the agent of a pod, or nil.
func (w *world) agent(pod string) *fakeAgent {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.list {
		if p.Name == pod {
			return w.agents[p.UID]
		}
	}
	return nil
}

// addPod adds a running pod.
func (w *world) addPod(name string) *corev1.Pod { return w.addPodWithSpec(name, corev1.PodSpec{}) }

// addPodWithSpec adds a running pod. The changes happen before anybody sees the pod, while w.mu is held.
func (w *world) addPodWithSpec(name string, spec corev1.PodSpec, changes ...func(*corev1.Pod)) *corev1.Pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := len(w.logged) + 1
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID(fmt.Sprintf("uid-%d", n)), Labels: map[string]string{"app": "web"}},
		Spec:       spec,
		Status:     corev1.PodStatus{Phase: corev1.PodRunning, PodIP: fmt.Sprintf("10.244.0.%d", n)},
	}
	p.Spec.NodeName, p.Annotations, p.Status.PodIPs = w.place, w.annotations, []corev1.PodIP{{IP: p.Status.PodIP}}
	w.list = append(w.list, p)
	w.logged[p.UID] = make(chan struct{})
	for _, change := range changes {
		change(p)
	}
	w.notify()
	return p
}

func (w *world) removePod(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.list = slices.DeleteFunc(w.list, func(p *corev1.Pod) bool { return p.Name == name })
	w.notify()
}

// change changes a pod.
func (w *world) change(name string, change func(*corev1.Pod)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change(w.pod(name))
	w.notify()
}

// notify wakes the watchers. The caller holds w.mu.
func (w *world) notify() {
	for c := range w.watchers {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

func (w *world) Workload(context.Context, string, string) (*workloads.Workload, error) {
	return w.workload, nil
}
func (w *world) MayPatch(context.Context, *workloads.Workload) error { return w.denied }
func (w *world) ExplainContext(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	return cmp.Or(ctx.Err(), error(api.AsError(err)))
}
func (w *world) Kube() kubernetes.Interface                    { return w.kube }
func (w *world) Status() api.Connection                        { return api.Connection{ID: "c0ffee"} }
func (w *world) Image(context.Context) (string, error)         { return "kubevpn:test", nil }
func (w *world) NeedsPullSecret(context.Context) (bool, error) { return w.private, nil }

func (w *world) SetShortcuts(_ string, to map[netip.AddrPort]shortcut) {
	w.shortcuts.Update(func(now *map[netip.AddrPort]shortcut) { *now = to })
}

func (w *world) WatchPods(ctx context.Context, _ *workloads.Workload, f func([]corev1.Pod)) error {
	changed := make(chan struct{}, 1)
	changed <- struct{}{}
	w.mu.Lock()
	w.watchers[changed] = true
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.watchers, changed)
	}()
	for {
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
		w.mu.Lock()
		var pods []corev1.Pod
		for _, p := range w.list {
			pods = append(pods, *p.DeepCopy())
		}
		w.mu.Unlock()
		slices.SortFunc(pods, func(a, b corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
		f(pods)
	}
}

func (w *world) pod(name string) *corev1.Pod {
	for _, p := range w.list {
		if p.Name == name {
			return p
		}
	}
	return nil
}

func (w *world) MayInject(_ context.Context, p *corev1.Pod, _ workloads.Agent) error {
	if w.refused != nil {
		return w.refused(p)
	}
	return workloads.Unfit("pod/"+p.Name, p.Spec)
}

// dynamic returns a client of the objects.
func (w *world) dynamic() dynamic.Interface {
	client := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{
		w.workload.Resource: w.workload.Kind + "List",
	})
	client.PrependReactor("get", "*", func(a k8stesting.Action) (bool, runtime.Object, error) {
		o, err := w.read(a.GetResource(), a.(k8stesting.GetAction).GetName())
		return true, o, err
	})
	client.PrependReactor("list", "*", func(a k8stesting.Action) (bool, runtime.Object, error) {
		list := new(unstructured.UnstructuredList)
		if o, err := w.read(a.GetResource(), "web"); err == nil {
			list.Items = append(list.Items, *o)
		}
		return true, list, nil
	})
	client.PrependWatchReactor("*", w.watch)
	client.PrependReactor("update", "*", func(a k8stesting.Action) (bool, runtime.Object, error) {
		o := a.(k8stesting.UpdateAction).GetObject().(*unstructured.Unstructured)
		if w.refuses != nil && a.GetResource().Resource == w.workload.Resource.Resource {
			return true, nil, w.refuses
		}
		err := w.write(a.GetResource(), o)
		at := metav1.NewTime(time.Now().Add(w.ahead))
		o.SetManagedFields([]metav1.ManagedFieldsEntry{{Manager: fieldManager, Time: &at}})
		return true, o, err
	})
	return client
}

// watch is a reactor: write sends to what it returns.
func (w *world) watch(a k8stesting.Action) (bool, watch.Interface, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := a.GetResource().Resource
	// Fake watchers have room for so many events.
	f := watch.NewRaceFreeFake()
	w.watches[r] = append(w.watches[r], f)
	return true, f, nil
}

func typed(t testing.TB, o *unstructured.Unstructured) *corev1.Service {
	s := new(corev1.Service)
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, s); err != nil {
		t.Error(err)
	}
	return s
}

// set writes an object as another client does, whom managedFields name with the field; nil deletes it.
func (w *world) set(resource, manager, fields string, change func(o map[string]any) map[string]any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.objects[resource+"/web"].DeepCopy()
	if o.Object = change(o.Object); o.Object == nil {
		delete(w.objects, resource+"/web")
		w.tell(resource, nil)
		return
	}
	at := metav1.Now()
	o.SetManagedFields([]metav1.ManagedFieldsEntry{{Manager: manager, Operation: metav1.ManagedFieldsOperationApply, Time: &at,
		FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(fields)}})
	w.objects[resource+"/web"] = o
	w.tell(resource, o)
}

// tell sends an object to the watches, and the deletion of the latest one if it is nil. The caller holds w.mu.
func (w *world) tell(resource string, o *unstructured.Unstructured) {
	for _, f := range w.watches[resource] {
		var sent runtime.Object = o
		switch {
		case o == nil:
			var gone runtime.Object = &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}}
			if resource != "services" {
				gone = &unstructured.Unstructured{Object: map[string]any{"metadata": map[string]any{"name": "web", "namespace": "default"}}}
			}
			f.Delete(gone)
			continue
		case resource == "services":
			sent = typed(w.t, o)
		}
		f.Modify(sent.DeepCopyObject())
	}
}

func (w *world) read(r schema.GroupVersionResource, name string) (*unstructured.Unstructured, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if o := w.objects[r.Resource+"/"+name]; o != nil {
		return o.DeepCopy(), nil
	}
	return nil, apierrors.NewNotFound(r.GroupResource(), name)
}

// write also replaces a Deployment's pods, one after the other, as a rollout does.
func (w *world) write(r schema.GroupVersionResource, o *unstructured.Unstructured) error {
	w.mu.Lock()
	if w.conflicts > 0 {
		w.conflicts--
		w.mu.Unlock()
		return apierrors.NewConflict(r.GroupResource(), o.GetName(), errors.New("it has changed"))
	}
	o = o.DeepCopy()
	w.objects[r.Resource+"/"+o.GetName()] = o
	w.tell(r.Resource, o)
	if w.obstacle != "" && r.Resource == "deployments" {
		defer w.mu.Unlock()
		return unstructured.SetNestedSlice(o.Object, []any{map[string]any{"type": "ReplicaFailure", "status": "True",
			"message": w.obstacle}}, "status", "conditions")
	}
	generation := len(w.logged)
	var old []string
	for _, p := range w.list {
		old = append(old, p.Name)
	}
	w.mu.Unlock()
	if r.Resource != "deployments" {
		return nil
	}
	var template corev1.PodTemplateSpec
	raw, _, err := unstructured.NestedMap(o.Object, "spec", "template")
	if err != nil {
		return err
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(raw, &template); err != nil {
		return err
	}
	for n, name := range old {
		added := fmt.Sprintf("new-%d-%d", generation, n)
		if w.admit != nil {
			w.addPodWithSpec(added, template.Spec, func(p *corev1.Pod) {
				p.CreationTimestamp = metav1.NewTime(time.Now().Add(w.ahead))
				w.admit(p)
			})
			continue
		}
		p := w.addPodWithSpec(added, template.Spec)
		for _, c := range template.Spec.Containers {
			if api.IsAgent(c.Name) {
				w.mu.Lock()
				if w.agents[p.UID] == nil { // the others are standbys
					w.agents[p.UID] = startAgent(w.t, nil)
				}
				w.agents[p.UID].admit(c.Env[0].Value, c.Env[1].Value)
				close(w.logged[p.UID])
				w.logged[p.UID] = make(chan struct{})
				w.mu.Unlock()
			}
		}
		w.removePod(name)
	}
	return nil
}

func (w *world) Inject(_ context.Context, pod *corev1.Pod, a workloads.Agent) (name string, added bool, err error) {
	if w.adding != nil {
		w.adding()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.pod(pod.Name)
	if p == nil {
		return "", false, api.Errorf(api.ExitInject, "the pod %s %w", pod.Name, client.ErrPodGone)
	}
	if err := workloads.Unfit("pod/"+p.Name, p.Spec); err != nil {
		return "", false, err
	}
	for n, c := range p.Spec.EphemeralContainers {
		if c.Env[0].Value == a.Owner && (p.Status.EphemeralContainerStatuses[n].State.Running != nil || w.stale) && !slices.Contains(a.Replaced, c.Name) {
			return c.Name, false, nil
		}
	}
	w.injected = append(w.injected, pod.Name)
	if w.refused != nil && !(w.dials && a.Dials) {
		if err := w.refused(pod); err != nil {
			return "", false, err
		}
	}
	name = fmt.Sprintf("%s%d", api.AgentPrefix, len(p.Spec.EphemeralContainers)+1)
	p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers, corev1.EphemeralContainer{EphemeralContainerCommon: corev1.EphemeralContainerCommon{
		Name: name, Image: a.Image, Env: []corev1.EnvVar{{Name: api.AgentOwnerVariable, Value: a.Owner}, {Name: api.AgentNameVariable, Value: a.OwnerName}},
	}})
	p.Status.EphemeralContainerStatuses = append(p.Status.EphemeralContainerStatuses,
		corev1.ContainerStatus{Name: name, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}})
	if a.InfoPort != 0 {
		w.infoPorts = append(w.infoPorts, a.InfoPort)
	}
	agent := w.agents[p.UID]
	if agent == nil || agent.ends() { // no agent is the leader
		agent = startAgent(w.t, w.claims[p.UID])
		if w.protocols[0] != 0 {
			agent.info.Protocol, agent.info.Oldest = w.protocols[0], w.protocols[1]
		}
		w.agents[p.UID] = agent
	}
	agent.admit(a.Owner, a.OwnerName)
	close(w.logged[p.UID])
	w.logged[p.UID] = make(chan struct{})
	w.notify()
	return name, true, nil
}

// FirstLine calls infoLine.
func (w *world) FirstLine(ctx context.Context, _, pod string, port uint16) ([]byte, error) {
	w.mu.Lock()
	say := w.infoLine
	w.mu.Unlock()
	if say == nil {
		return nil, api.Errorf(api.ExitPermission, "you may not forward ports")
	}
	return say(ctx, pod, port)
}

// endAgent kills the pod's agent.
func (w *world) endAgent(pod string) {
	w.mu.Lock()
	p := w.pod(pod)
	agent := w.agents[p.UID]
	delete(w.agents, p.UID)
	for n := range p.Status.EphemeralContainerStatuses {
		p.Status.EphemeralContainerStatuses[n].State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 137, Message: "killed"}}
	}
	close(w.logged[p.UID])
	w.logged[p.UID] = make(chan struct{})
	w.notify()
	w.mu.Unlock()
	agent.end()
}

func (w *world) FollowLog(ctx context.Context, log workloads.Log, line func(string)) error {
	pod, container := log.Pod, log.Container
	if w.mute != nil {
		select {
		case <-w.mute:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	line("level=INFO msg=starting")
	var before *fakeAgent
	for {
		w.mu.Lock()
		p := w.pod(pod)
		if p == nil {
			w.mu.Unlock()
			<-ctx.Done()
			return ctx.Err()
		}
		agent, logged := w.agents[p.UID], w.logged[p.UID]
		over := slices.ContainsFunc(p.Status.EphemeralContainerStatuses, func(s corev1.ContainerStatus) bool { return s.Name == container && s.State.Terminated != nil })
		w.mu.Unlock()
		if over {
			return api.Errorf(api.ExitInject, "%w", &workloads.ContainerEnded{Pod: pod, Container: container, ExitCode: 137})
		}
		if agent != nil && agent != before {
			info := agent.info
			if w.says != nil {
				w.says(container, &info)
			}
			text, err := json.Marshal(info)
			if err != nil {
				return err
			}
			line(string(text))
			before = agent
		}
		select {
		case <-logged:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (w *world) at(addr netip.Addr) *fakeAgent {
	w.mu.Lock()
	defer w.mu.Unlock()
	vip := strings.HasPrefix(addr.String(), "10.96.")
	for _, p := range w.list {
		if vip || slices.ContainsFunc(p.Status.PodIPs, func(ip corev1.PodIP) bool { return ip.IP == addr.String() }) {
			if a := w.agents[p.UID]; a != nil || !vip {
				return a
			}
		}
	}
	return nil
}

// Dial implements Session.
func (w *world) Dial(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error) {
	agent := w.at(addr.Addr())
	w.mu.Lock()
	bypass, noRoute := w.bypass, w.noRoute
	w.mu.Unlock()
	switch {
	case noRoute:
		<-ctx.Done()
		return nil, ctx.Err()
	case agent == nil:
		return nil, syscall.ECONNREFUSED
	case addr.Port() == agent.info.Port:
		return agent.listener.Dial(ctx)
	}
	near, far := net.Pipe()
	go agent.client(far, bypass)
	return near, nil
}

func (w *world) DialPod(ctx context.Context, _, pod string, port uint16) (net.Conn, error) {
	w.mu.Lock()
	agent := w.agents[w.pod(pod).UID]
	w.mu.Unlock()
	if agent == nil || port != agent.info.Port {
		return nil, syscall.ECONNREFUSED
	}
	return agent.listener.Dial(ctx)
}

// fakeAgent is the leader of a pod's agents: the control protocol of internal/api, without a data plane.
type fakeAgent struct {
	t        testing.TB
	listener *transporttest.Listener
	info     api.AgentInfo
	end      func()

	mu            sync.Mutex
	owners        map[string]string // names by the hashes of the owners' keys
	last          string            // the hash of the owner who connected last
	ending        bool              // it rejects orders
	claims        []heldClaim
	listens       []netip.AddrPort
	probes        [][]byte
	rejected      int                           // number of rejected claims
	sessions      map[*transport.Session]string // hashes
	conversations map[*json.Encoder]string      // hashes

	records chan api.Record      // for the laptop that records
	ordered chan api.RecordOrder // by the laptop
}

type heldClaim struct {
	api.Claim
	owner string // hash
	match *httpmatch.Match
}

func startAgent(t testing.TB, others []api.Claim) *fakeAgent {
	t.Helper()
	id, err := newIdentity(newKey(t))
	if err != nil {
		t.Fatal(err)
	}
	l := transporttest.NewListener()
	a := &fakeAgent{
		t: t, listener: l, owners: make(map[string]string), sessions: make(map[*transport.Session]string), conversations: make(map[*json.Encoder]string),
		info:    api.AgentInfo{Protocol: api.Protocol, Version: "t", Port: 40001, Key: id.hash, Leader: api.LeaderSelf},
		records: make(chan api.Record), ordered: make(chan api.RecordOrder, 64),
	}
	for _, c := range others {
		a.claims = append(a.claims, heldClaim{Claim: c, owner: "another owner", match: new(httpmatch.Match)})
	}
	config := &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{id.certificate}, ClientAuth: tls.RequireAnyClientCert, SessionTicketsDisabled: true,
	}
	server := transport.NewServer(transport.ServerConfig{
		OnSession: a.onSession, Tuning: tuning(),
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.Serve(ctx, &authListener{Listener: l, config: config, agent: a}); err != nil {
			t.Error("the agent's server:", err)
		}
	}()
	a.end = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	return a
}

// authListener accepts owners.
type authListener struct {
	net.Listener
	config *tls.Config
	agent  *fakeAgent
}

func (d *authListener) Accept() (net.Conn, error) {
	for {
		conn, err := d.Listener.Accept()
		if err != nil {
			return nil, err
		}
		inside := tls.Server(conn, d.config)
		if err := inside.Handshake(); err != nil {
			conn.Close()
			continue
		}
		hash := api.KeyHash(inside.ConnectionState().PeerCertificates[0].RawSubjectPublicKeyInfo)
		if d.agent.isOwner(hash) {
			return inside, nil
		}
		inside.Close()
	}
}

func (a *fakeAgent) admit(hash, name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.owners[hash] = name
}

func (a *fakeAgent) isOwner(hash string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, ok := a.owners[hash]
	if ok {
		a.last = hash
	}
	return ok
}

// onSession serves the owner who connected last: in these tests owners connect one after the other.
func (a *fakeAgent) onSession(ctx context.Context, s *transport.Session) {
	in, err := s.Accept(ctx)
	if err != nil {
		return
	}
	control, err := in.Accept()
	if err != nil {
		return
	}
	a.mu.Lock()
	hash := a.last
	a.sessions[s] = hash
	a.mu.Unlock()
	defer a.forget(s)
	defer control.Close()
	var recording sync.WaitGroup
	defer recording.Wait()
	recording.Go(func() { a.serveRecords(ctx, s) })
	dec, enc := json.NewDecoder(control), json.NewEncoder(control)
	var hello api.AgentHello
	if err := dec.Decode(&hello); err != nil || hello.Protocol != api.Protocol {
		a.t.Errorf("hello %+v, %v", hello, err)
		return
	}
	a.mu.Lock()
	a.conversations[enc] = hash
	a.report(enc)
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		delete(a.conversations, enc)
		a.mu.Unlock()
	}()
	for {
		var o api.AgentOrder
		if err := dec.Decode(&o); err != nil {
			return
		}
		a.mu.Lock()
		answer := api.AgentReport{ID: o.ID, Error: a.handleOrder(hash, o)}
		if o.Names {
			answer.Names = &api.PodNames{Search: []string{a.info.Key}}
		}
		enc.Encode(answer)
		for e := range a.conversations {
			a.report(e)
		}
		a.mu.Unlock()
	}
}

// serveRecords answers record streams with what the test puts into records.
func (a *fakeAgent) serveRecords(ctx context.Context, s *transport.Session) {
	for {
		in, err := s.Accept(ctx)
		if err != nil {
			return
		}
		stream, err := in.Accept()
		if err != nil {
			continue
		}
		dec, enc := json.NewDecoder(stream), json.NewEncoder(stream)
		var o api.RecordOrder
		if dec.Decode(&o) == nil && enc.Encode(api.Record{}) == nil {
			a.ordered <- o
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				for dec.Decode(&o) == nil {
					a.ordered <- o
				}
			}()
			for open := true; open; {
				select {
				case r := <-a.records:
					enc.Encode(r)
				case <-ended:
					open = false
				}
			}
			a.ordered <- api.RecordOrder{Claim: "ended"}
		}
		stream.Close()
	}
}

func (a *fakeAgent) handleOrder(hash string, o api.AgentOrder) *api.Error {
	switch {
	case a.ending:
		return api.Errorf(api.ExitLost, "this agent is ending")
	case o.Claim != nil:
		m, err := httpmatch.New(o.Claim.Match)
		if err != nil {
			return api.AsError(err)
		}
		for _, c := range a.claims {
			if c.owner != hash && !httpmatch.Disjoint(m, c.match) {
				a.rejected++
				return api.Errorf(api.ExitConflict, "%s has %s since 14:02", c.Owner, c.match)
			}
		}
		a.release(hash, o.Claim.ID)
		a.claims = append(a.claims, heldClaim{api.Claim{ID: o.Claim.ID, Owner: a.owners[hash], Ports: o.Claim.Ports, Match: m.String()}, hash, m})
	case o.Release != "":
		a.release(hash, o.Release)
	case o.Reset:
		for e := range a.conversations {
			if a.conversations[e] != hash {
				e.Encode(api.AgentReport{Error: api.Errorf(api.ExitIntercept, "%s has removed all intercepts of this pod", a.owners[hash])})
			}
		}
		a.claims = nil
	case o.Probe != nil:
		a.probes = append(a.probes, o.Probe.Preface)
	}
	return nil
}

func (a *fakeAgent) release(hash, id string) {
	a.claims = slices.DeleteFunc(a.claims, func(c heldClaim) bool { return c.owner == hash && c.ID == id })
}

func (a *fakeAgent) report(enc *json.Encoder) {
	state := &api.AgentState{Claims: []api.Claim{}, Listens: a.listens}
	for _, c := range a.claims {
		c.Mine = c.Mine || c.owner == a.conversations[enc]
		state.Claims = append(state.Claims, c.Claim)
	}
	enc.Encode(api.AgentReport{State: state})
}

// change calls f with mu held, and reports the new state.
func (a *fakeAgent) change(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
	for e := range a.conversations {
		a.report(e)
	}
}

func (a *fakeAgent) forget(s *transport.Session) {
	a.mu.Lock()
	defer a.mu.Unlock()
	hash := a.sessions[s]
	delete(a.sessions, s)
	a.claims = slices.DeleteFunc(a.claims, func(c heldClaim) bool { return c.owner == hash })
}

func (a *fakeAgent) held() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.claims)
}

// client serves a connection to a port of the pod.
func (a *fakeAgent) client(conn net.Conn, bypass bool) {
	defer conn.Close()
	b := make([]byte, api.ProbeLength)
	if _, err := io.ReadFull(conn, b); err != nil {
		return
	}
	a.mu.Lock()
	known := slices.ContainsFunc(a.probes, func(c []byte) bool { return bytes.Equal(c, b) })
	a.mu.Unlock()
	if known && !bypass {
		conn.Write(b)
	} else {
		io.WriteString(conn, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
	}
}

func (a *fakeAgent) ends() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.ending
}

func (a *fakeAgent) rejections() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.rejected
}

func (w *world) config(key *ecdsa.PrivateKey, spec api.InterceptSpec) Config {
	return Config{
		Session: w, Namespace: "default", Workload: "deployment/web", Spec: spec, Owner: "ann@laptop", Key: key,
		Progress: func(api.Event) {}, Logger: w.logger,
	}
}

// begin runs an intercept until the test ends or stop is called. It returns once the intercept has begun, or with Run's
// error.
func begin(t *testing.T, w *world, spec api.InterceptSpec) (i *Intercept, stop func() error, err error) {
	t.Helper()
	return beginAs(t, w, newKey(t), spec)
}

func beginAs(t *testing.T, w *world, key *ecdsa.PrivateKey, spec api.InterceptSpec) (i *Intercept, stop func() error, err error) {
	t.Helper()
	i, err = newIntercept(w.config(key, spec), w, w.dynamic())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	var ended error
	go func() {
		ended = i.Run(ctx)
		close(done)
	}()
	stop = func() error {
		cancel()
		<-done
		return ended
	}
	t.Cleanup(func() { stop() })
	select {
	case <-i.Begun():
		return i, stop, nil
	case <-done:
		return i, stop, cmp.Or(ended, errors.New("Run returned"))
	case <-time.After(rolloutTimeout + time.Minute):
		t.Fatalf("the intercept does not begin: %+v", i.Status())
		return nil, nil, nil
	}
}
