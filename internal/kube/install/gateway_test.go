package install

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	k8stesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

var (
	runs     = corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	noDevice = ends(31, "traffic: opening /dev/net/tun: operation not permitted")
)

func ends(code int32, message string) corev1.ContainerState {
	return corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Reason: "Error", Message: message}}
}

func waits(reason, message string) corev1.ContainerState {
	return corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}
}

// gateway is a pod's ephemeral container in some state.
func gateway(name, image string, state corev1.ContainerState) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers, gatewayContainer(name, image, false))
		p.Status.EphemeralContainerStatuses = append(p.Status.EphemeralContainerStatuses, corev1.ContainerStatus{Name: name, Image: image, State: state})
	}
}

// kubelet adds what the fake API server lacks: pod security for ephemeral containers, dry runs, and a node on which
// each container that is added gets the next of states.
type kubelet struct {
	*world
	t      *testing.T
	states []corev1.ContainerState
	stolen bool // another laptop has taken the first name
	late   int  // how often pod security uses the previous label of the namespace
	added  []string
}

func newKubelet(t *testing.T, deny string, states []corev1.ContainerState, objects ...runtime.Object) *kubelet {
	k := &kubelet{world: newWorld(deny, "", objects...), t: t, states: states}
	k.PrependReactor("patch", "pods", k.patch)
	return k
}

func (k *kubelet) patch(a k8stesting.Action) (bool, runtime.Object, error) {
	patch := a.(k8stesting.PatchActionImpl)
	if patch.GetSubresource() != "ephemeralcontainers" || match(k.deny, "patch", "pods/ephemeralcontainers", patch.Namespace) {
		return false, nil, nil
	}
	obj, err := k.Tracker().Get(patch.GetResource(), patch.Namespace, patch.Name)
	if err != nil {
		return true, nil, err
	}
	p := obj.(*corev1.Pod).DeepCopy()
	obj, err = k.Tracker().Get(corev1.SchemeGroupVersion.WithResource("namespaces"), "", patch.Namespace)
	if err != nil {
		return true, nil, err
	}
	group := schema.GroupResource{Resource: "pods"}
	level := obj.(*corev1.Namespace).Labels[client.PodSecurityLabel]
	if level == "privileged" && k.late > 0 {
		k.late--
		level = "restricted"
	}
	if level != "privileged" && level != "" {
		return true, nil, apierrors.NewForbidden(group, p.Name, fmt.Errorf("violates PodSecurity %q: runAsUser=0", level+":latest"))
	}
	var want corev1.Pod
	if err := json.Unmarshal(patch.Patch, &want); err != nil {
		return true, nil, err
	}
	c := want.Spec.EphemeralContainers[0]
	if k.stolen {
		k.stolen = false
		gateway(c.Name, "registry.example/other:1", ends(1, "theirs"))(p)
		if err := k.Tracker().Update(patch.GetResource(), p, p.Namespace); err != nil {
			return true, nil, err
		}
	}
	if slices.ContainsFunc(p.Spec.EphemeralContainers, func(o corev1.EphemeralContainer) bool { return o.Name == c.Name }) {
		return true, nil, apierrors.NewInvalid(schema.GroupKind{Kind: "Pod"}, p.Name, nil)
	}
	if len(patch.PatchOptions.DryRun) > 0 {
		p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers, c)
		return true, p, nil
	}
	what := c.Name + " " + c.Image
	if c.SecurityContext.Privileged != nil {
		what += " privileged"
	}
	k.added = append(k.added, what)
	p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers, c)
	answer := p.DeepCopy() // the kubelet has not seen it yet
	p.Status.EphemeralContainerStatuses = append(p.Status.EphemeralContainerStatuses, corev1.ContainerStatus{Name: c.Name, Image: c.Image, State: k.states[0]})
	k.states = k.states[1:]
	return true, answer, k.Tracker().Update(patch.GetResource(), p, p.Namespace)
}

func aNamespace(level string, ours bool) *corev1.Namespace {
	n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "kubevpn", Labels: map[string]string{}}}
	if level != "" {
		n.Labels[client.PodSecurityLabel] = level
	}
	if ours {
		n.Annotations = map[string]string{annotationCreated: "true"}
	}
	return n
}

func TestGatewayIsAddedOnlyWhereItIsAdmitted(t *testing.T) {
	const label = "kubectl label namespace kubevpn pod-security.kubernetes.io/enforce=privileged --overwrite"
	states := func(s ...corev1.ContainerState) []corev1.ContainerState { return s }
	open, ours, theirs := aNamespace("", false), aNamespace("restricted", true), aNamespace("baseline", false)
	tests := []struct {
		name      string
		deny      string
		namespace *corev1.Namespace
		pod       []func(*corev1.Pod)
		states    []corev1.ContainerState
		stolen    bool
		relabel   bool
		may       string // the error of MayAddGateway; "": none
		added     []string
		level     string // the label of the namespace afterwards
		code      api.ExitCode
		err       string
		hint      string
		gone      bool // the error is ErrPodGone
	}{
		{name: "first", namespace: open, states: states(runs), added: []string{"gateway-1 " + image}},
		{name: "there", namespace: open, pod: []func(*corev1.Pod){gateway("gateway-1", image, runs)}},
		{name: "there_of_another_image", namespace: open, pod: []func(*corev1.Pod){gateway("gateway-1", "registry.example/kubevpn:0", runs)}},
		{name: "one_ended", namespace: open, pod: []func(*corev1.Pod){gateway("gateway-1", image, ends(137, "")), gateway("gateway-7", image, ends(0, "")), gateway("debugger", "busybox", runs)},
			states: states(runs), added: []string{"gateway-8 " + image}},
		{name: "one_cannot_be_pulled", namespace: open, pod: []func(*corev1.Pod){gateway("gateway-1", "registry.example/none", waits("ImagePullBackOff", "x"))},
			states: states(runs), added: []string{"gateway-2 " + image}},
		{name: "the pod's image is another", namespace: open, pod: []func(*corev1.Pod){func(p *corev1.Pod) { p.Spec.Containers[0].Image = "evil.example/kubevpn:1" }},
			states: states(runs), added: []string{"gateway-1 " + image}},
		{name: "name_taken_meanwhile", namespace: open, stolen: true, states: states(runs), added: []string{"gateway-2 " + image}},
		{name: "no_device", namespace: open, states: states(noDevice, runs), added: []string{"gateway-1 " + image, "gateway-2 " + image + " privileged"}},
		{name: "no_device_at_all", namespace: open, states: states(noDevice, noDevice), added: []string{"gateway-1 " + image, "gateway-2 " + image + " privileged"},
			code: api.ExitNetstack, err: "the gateway has ended with exit code 31: traffic: opening /dev/net/tun: operation not permitted", hint: "logs manager-pod -c gateway-2"},
		{name: "no_rules", namespace: open, states: states(ends(33, "traffic: no iptables backend can masquerade")), added: []string{"gateway-1 " + image},
			code: api.ExitNetstack, err: "with exit code 33: traffic: no iptables backend", hint: "logs manager-pod -c gateway-1"},
		{name: "no_such_image", namespace: open, states: states(waits("ErrImagePull", "not found")), added: []string{"gateway-1 " + image},
			code: api.ExitImagePull, err: "cannot pull the image " + image, hint: "make push-image"},
		{name: "cannot_start", namespace: open, states: states(waits("CreateContainerError", "seccomp")), added: []string{"gateway-1 " + image},
			code: api.ExitNetstack, err: "the node node1 cannot start the gateway: CreateContainerError: seccomp", hint: "describe pod manager-pod"},
		{name: "slow", namespace: open, states: states(waits("ContainerCreating", "")), added: []string{"gateway-1 " + image},
			code: api.ExitNotReady, err: "the gateway did not start within 1s: the node node1 is pulling the image and starting the container", hint: "-c gateway-1"},
		{name: "going", namespace: open, pod: []func(*corev1.Pod){going, func(p *corev1.Pod) { p.Finalizers = []string{"x"} }}, may: "is being deleted",
			code: api.ExitNotReady, err: "is being deleted", hint: "connect again", gone: true},
		{name: "host_network", namespace: open, pod: []func(*corev1.Pod){func(p *corev1.Pod) { p.Spec.HostNetwork = true }}, may: "node's network",
			code: api.ExitNetstack, err: "the traffic manager's pod manager-pod uses its node's network", hint: "without hostNetwork"},
		{name: "denied", deny: "patch:pods/ephemeralcontainers@kubevpn", namespace: open, may: "patch pods/ephemeralcontainers in namespace kubevpn",
			code: api.ExitPermission, err: "you may not add the gateway to the traffic manager's pod: this requires the right to patch pods/ephemeralcontainers in namespace kubevpn",
			hint: "kubectl create role kubevpn-patch-pods-ephemeralcontainers --namespace=kubevpn --verb=patch --resource=pods/ephemeralcontainers"},
		{name: "restricted", namespace: ours, may: `violates PodSecurity "restricted:latest"`, level: "restricted",
			code: api.ExitNetstack, err: `pod security does not admit the gateway in the namespace kubevpn: violates PodSecurity "restricted:latest": runAsUser=0`,
			hint: "Ask a cluster admin to run\n  " + label},
		{name: "relabeled", namespace: ours, relabel: true, level: "privileged", states: states(runs), added: []string{"gateway-1 " + image}},
		{name: "restricted_and_may_not_label", deny: "patch:namespaces@", namespace: ours, relabel: true, level: "restricted", may: "violates PodSecurity",
			code: api.ExitNetstack, err: "violates PodSecurity", hint: "Ask a cluster admin to run\n  " + label},
		{name: "restricted_and_may_not_see", deny: "get:namespaces@", namespace: ours, relabel: true, level: "restricted", may: "violates PodSecurity",
			code: api.ExitNetstack, err: "violates PodSecurity", hint: "Ask a cluster admin to run\n  " + label},
		{name: "not_our_namespace", namespace: theirs, relabel: true, level: "baseline", may: `violates PodSecurity "baseline`,
			code: api.ExitNetstack, err: "violates PodSecurity", hint: "Ask a cluster admin to run\n  " + label},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			k := newKubelet(t, tt.deny, tt.states, tt.namespace.DeepCopy(), inNamespace("kubevpn", append([]func(*corev1.Pod){ready}, tt.pod...)...))
			k.stolen = tt.stolen
			g := &adder{kube: k, timeout: time.Second, handover: time.Second, o: GatewayOptions{Namespace: "kubevpn", Pod: "manager-pod", Image: image, Relabel: tt.relabel}}
			if err := g.may(t.Context()); tt.may == "" && err != nil || tt.may != "" && (err == nil || !strings.Contains(err.Error(), tt.may)) {
				t.Errorf("may: %v, want %q", err, tt.may)
			}
			if len(k.added) > 0 || slices.ContainsFunc(k.changes, func(c string) bool { return strings.Contains(c, "namespaces") }) {
				t.Fatalf("asking whether one may has changed %q %q", k.added, k.changes)
			}
			k.stolen = tt.stolen
			if tt.stolen {
				// The dry run above has let the other one in.
				if err := k.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "kubevpn", "manager-pod"); err != nil {
					t.Fatal(err)
				}
				if err := k.Tracker().Add(inNamespace("kubevpn", ready)); err != nil {
					t.Fatal(err)
				}
			}
			err := g.run(t.Context())
			if d := cmp.Diff(tt.added, k.added); d != "" {
				t.Errorf("added (-want +got):\n%s", d)
			}
			n, nerr := k.Tracker().Get(corev1.SchemeGroupVersion.WithResource("namespaces"), "", "kubevpn")
			if nerr != nil {
				t.Fatal(nerr)
			}
			if level := n.(*corev1.Namespace).Labels[client.PodSecurityLabel]; level != tt.level {
				t.Errorf("pod security is %q, want %q", level, tt.level)
			}
			if tt.err == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if errors.Is(err, ErrPodGone) != tt.gone {
				t.Errorf("the pod has gone: want %v, by %v", tt.gone, err)
			}
			e := explain(t, err)
			if e == nil || e.Code != tt.code || !strings.Contains(e.Message, tt.err) || !strings.Contains(e.Hint, tt.hint) {
				t.Errorf("%+v, want code %d, %q, hint %q", e, tt.code, tt.err, tt.hint)
			}
		})
	}
}

func TestAddGatewayFailsWithoutAPod(t *testing.T) {
	k := newKubelet(t, "", nil, aNamespace("privileged", true))
	g := &adder{kube: k, timeout: time.Second, o: GatewayOptions{Namespace: "kubevpn", Pod: "manager-pod", Image: image}}
	if err := g.run(t.Context()); !errors.Is(err, ErrPodGone) || !strings.Contains(err.Error(), "manager-pod no longer exists") {
		t.Errorf("got %v", err)
	}
}

// The API server's admission plugin sees a new label with a delay.
func TestAddGatewayRetriesUntilTheLabelTakesEffect(t *testing.T) {
	for _, before := range []string{"restricted", "privileged"} { // another laptop has just set "privileged"
		t.Run(before, func(t *testing.T) {
			k := newKubelet(t, "", []corev1.ContainerState{runs}, aNamespace(before, true), inNamespace("kubevpn", ready))
			k.late = 3
			g := &adder{kube: k, timeout: time.Second, o: GatewayOptions{Namespace: "kubevpn", Pod: "manager-pod", Image: image, Relabel: true}}
			if err := g.run(t.Context()); err != nil || len(k.added) != 1 {
				t.Errorf("%v, added %q", err, k.added)
			}
		})
	}
}

func TestRejectedGatewayRestoresTheLabel(t *testing.T) {
	k := newKubelet(t, "", nil, aNamespace("restricted", true), inNamespace("kubevpn", ready))
	k.PrependReactor("patch", "pods", func(k8stesting.Action) (bool, runtime.Object, error) {
		n, err := k.Tracker().Get(corev1.SchemeGroupVersion.WithResource("namespaces"), "", "kubevpn")
		if err != nil {
			return true, nil, err
		}
		if n.(*corev1.Namespace).Labels[client.PodSecurityLabel] == "restricted" {
			return false, nil, nil
		}
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "manager-pod", errors.New(`admission webhook "policy" denied the request: no root`))
	})
	g := &adder{kube: k, timeout: time.Second, o: GatewayOptions{Namespace: "kubevpn", Pod: "manager-pod", Image: image, Relabel: true}}
	if e := explain(t, g.run(t.Context())); e == nil || !strings.Contains(e.Message, "denied the request: no root") {
		t.Errorf("%+v", e)
	}
	n, err := k.CoreV1().Namespaces().Get(t.Context(), "kubevpn", metav1.GetOptions{})
	if err != nil || n.Labels[client.PodSecurityLabel] != "restricted" {
		t.Errorf("%v, %v", n.Labels, err)
	}
}

// The caller gets an error if the manager does not confirm the device in time, or the gateway ends first.
func TestAddGatewayWaitsForTheManager(t *testing.T) {
	said, unsaid := make(chan struct{}), make(chan struct{})
	close(said)
	for _, tt := range []struct {
		name  string
		state corev1.ContainerState
		ready chan struct{}
		want  string
	}{
		{"said", runs, said, ""},
		{"not_said", runs, unsaid, "the gateway runs, but the traffic manager did not receive its device within 100ms"},
		{"ended", ends(33, "x"), unsaid, "the gateway has ended with exit code 33: x"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			k := newKubelet(t, "", []corev1.ContainerState{tt.state}, aNamespace("", false), inNamespace("kubevpn", ready))
			g := &adder{kube: k, timeout: time.Minute, handover: 100 * time.Millisecond, o: GatewayOptions{Namespace: "kubevpn", Pod: "manager-pod", Image: image, Ready: tt.ready}}
			err := g.run(t.Context())
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || err.Error() != tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
}

// The gateway has ended, and the API server learns of it only while run waits.
func TestAddGatewayReplacesOneThatEndsUnnoticed(t *testing.T) {
	k := newKubelet(t, "", []corev1.ContainerState{runs}, aNamespace("", false), inNamespace("kubevpn", ready, gateway("gateway-1", image, runs)))
	done := make(chan struct{})
	k.PrependWatchReactor("pods", func(a k8stesting.Action) (bool, watch.Interface, error) {
		// The API server learns of the end when the watch begins.
		obj, err := k.Tracker().Get(a.GetResource(), "kubevpn", "manager-pod")
		if err != nil {
			return true, nil, err
		}
		p := obj.(*corev1.Pod).DeepCopy()
		if len(p.Spec.EphemeralContainers) > 1 {
			close(done) // the manager has the device of the second gateway
			return false, nil, nil
		}
		p.Status.EphemeralContainerStatuses[0].State = ends(137, "")
		return false, nil, k.Tracker().Update(a.GetResource(), p, "kubevpn")
	})
	g := &adder{kube: k, timeout: time.Minute, handover: time.Minute, o: GatewayOptions{Namespace: "kubevpn", Pod: "manager-pod", Image: image, Ready: done}}
	if err := g.run(t.Context()); err != nil {
		t.Error(err)
	}
	if d := cmp.Diff([]string{"gateway-2 " + image}, k.added); d != "" {
		t.Errorf("added (-want +got):\n%s", d)
	}
}

func TestGatewayContainerHasFewCapabilities(t *testing.T) {
	s := gatewayContainer("gateway-1", image, false).SecurityContext
	if d := cmp.Diff([]corev1.Capability{"MKNOD", "NET_ADMIN", "NET_RAW"}, s.Capabilities.Add); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]corev1.Capability{"ALL"}, s.Capabilities.Drop); d != "" {
		t.Error(d)
	}
	if s.Privileged != nil || *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem || *s.RunAsUser != 0 || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("%+v", s)
	}
	if s := gatewayContainer("gateway-1", image, true).SecurityContext; !*s.Privileged || s.AllowPrivilegeEscalation != nil || s.Capabilities != nil {
		t.Errorf("the last resort is %+v", s)
	}
}

// explain is what a user is shown of err.
func explain(t *testing.T, err error) *api.Error {
	t.Helper()
	c, loadErr := client.Load([]byte(`
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:6443"}}]
contexts: [{name: c, context: {cluster: c}}]
current-context: c
`), client.Options{})
	if loadErr != nil {
		t.Fatal(loadErr)
	}
	return c.Explain(err)
}
