package managertest

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"kubevpn/pkg/datapath/balancer"
)

// ServiceOf is a Service with a ClusterIP, whose port 80 leads to the port of pods, given as NAME=ADDRESS. A pod
// without a name has no targetRef.
func ServiceOf(namespace, name, clusterIP string, port int32, pods ...string) []runtime.Object {
	s := SliceOfPods(namespace, name, pods...)
	for i := range s.Endpoints {
		if s.Endpoints[i].TargetRef.Name == "" {
			s.Endpoints[i].TargetRef = nil
		}
	}
	spec := corev1.ServiceSpec{ClusterIP: clusterIP, ClusterIPs: []string{clusterIP}}
	for _, p := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: Pointer(string(p)),
			Protocol: Pointer(p), Port: Pointer(port)})
		spec.Ports = append(spec.Ports, corev1.ServicePort{Name: string(p), Protocol: p, Port: 80})
	}
	return []runtime.Object{s,
		&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: spec}}
}

func PrefixesOf(texts ...string) []netip.Prefix {
	var p []netip.Prefix
	for _, text := range texts {
		p = append(p, netip.MustParsePrefix(text))
	}
	return p
}

// WebService is default/web at 10.96.0.10: http 80/TCP to the named port "web", dns 53/UDP.
func WebService(change func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
			Ports: []corev1.ServicePort{
				{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromString("web")},
				{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53, TargetPort: intstr.FromInt(5353)},
			},
		},
	}
	if change != nil {
		change(s)
	}
	return s
}

// WebSlice is a slice of default/web with one ready pod per address, at http 8080/TCP and dns 5353/UDP.
func WebSlice(name string, change func(*discoveryv1.EndpointSlice), addrs ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
			Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{
			{Name: Pointer("http"), Protocol: Pointer(corev1.ProtocolTCP), Port: Pointer(int32(8080))},
			{Name: Pointer("dns"), Protocol: Pointer(corev1.ProtocolUDP), Port: Pointer(int32(5353))},
		},
	}
	for _, addr := range addrs {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{addr}, NodeName: Pointer("n1"), Zone: Pointer("z1"),
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: "pod-" + addr},
		})
	}
	if change != nil {
		change(s)
	}
	return s
}

func Pointer[T any](v T) *T { return &v }

// SliceOf is an EndpointSlice of one Service, whose endpoints all have the port.
func SliceOf(namespace, service string, port int32, addrs ...string) *discoveryv1.EndpointSlice {
	name := ""
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: service + "-1",
			Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &port}},
	}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return s
}

func NodeAt(name string, addrs ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for _, a := range addrs {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	return n
}

func Addrs(texts ...string) []netip.Addr {
	var as []netip.Addr
	for _, t := range texts {
		as = append(as, netip.MustParseAddr(t))
	}
	return as
}

func PodAt(namespace, name, addr string, onHost bool) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec:   corev1.PodSpec{HostNetwork: onHost},
		Status: corev1.PodStatus{PodIP: addr, PodIPs: []corev1.PodIP{{IP: addr}}}}
}

// SliceOfPods returns an EndpointSlice whose endpoints are pods, given as NAME=ADDRESS.
func SliceOfPods(namespace, name string, pods ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name,
		Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4}
	for _, p := range pods {
		name, addr, _ := strings.Cut(p, "=")
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{addr},
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: namespace, Name: name}})
	}
	return s
}

// FakeAPI is an API server with RBAC for the manager.
type FakeAPI struct {
	*fake.Clientset
	mu     sync.Mutex
	Denied map[string]bool // "list nodes", "list services in namespace shop"
	Broken string          // evaluationError of each denial
	Down   bool

	watches []watch.Interface
}

// EndWatches ends all watches, as the API server does from time to time. The manager then asks for its permissions.
func (f *FakeAPI) EndWatches() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range f.watches {
		w.Stop()
	}
	f.watches = nil
}

func (f *FakeAPI) Denies(right string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.Denied[right]
}

func (f *FakeAPI) isDown() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.Down
}

func (f *FakeAPI) Set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func NewFakeAPI(denied []string, objects ...runtime.Object) *FakeAPI {
	f := &FakeAPI{Clientset: fake.NewClientset(objects...), Denied: map[string]bool{}}
	for _, d := range denied {
		f.Denied[d] = true
	}
	f.PrependReactor("create", "selfsubjectaccessreviews", func(action clienttesting.Action) (bool, runtime.Object,
		error) {
		if f.isDown() {
			return true, nil, fmt.Errorf("connection refused")
		}
		review := action.(clienttesting.CreateAction).GetObject().(*authorizationv1.SelfSubjectAccessReview).DeepCopy()
		a := review.Spec.ResourceAttributes
		review.Status.Allowed = !f.Denies(rightTo(a.Verb, a.Resource, a.Namespace))
		if !review.Status.Allowed {
			f.Set(func() { review.Status.EvaluationError = f.Broken })
		}
		return true, review, nil
	})
	f.PrependReactor("list", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		what := action.GetResource()
		switch {
		case f.isDown():
			return true, nil, fmt.Errorf("connection refused")
		case f.Denies(rightTo("list", what.Resource, action.GetNamespace())):
			return true, nil, apierrors.NewForbidden(what.GroupResource(), "", nil)
		}
		return false, nil, nil
	})
	f.PrependWatchReactor("*", func(action clienttesting.Action) (bool, watch.Interface, error) {
		what := action.GetResource()
		if f.Denies(rightTo("watch", what.Resource, action.GetNamespace())) {
			return true, nil, apierrors.NewForbidden(what.GroupResource(), "", nil)
		}
		w, err := f.Tracker().Watch(what, action.GetNamespace())
		if err == nil {
			f.Set(func() { f.watches = append(f.watches, w) })
		}
		return true, w, err
	})
	return f
}

func rightTo(verb, resource, namespace string) string {
	if namespace == metav1.NamespaceAll {
		return verb + " " + resource
	}
	return verb + " " + resource + " in namespace " + namespace
}

func Node(name, podCIDR, addr, zone string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelTopologyZone: zone}},
		Spec:       corev1.NodeSpec{PodCIDR: podCIDR, PodCIDRs: []string{podCIDR}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: addr},
			{Type: corev1.NodeHostName, Address: name}}},
	}
}

// Objects is two nodes, the API server's Service, cluster DNS and default/web.
func Objects() []runtime.Object {
	service := func(namespace, name, ip string, port int32) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
			Spec: corev1.ServiceSpec{ClusterIP: ip, ClusterIPs: []string{ip}, Ports: []corev1.ServicePort{
				{Name: "udp", Protocol: corev1.ProtocolUDP, Port: port},
				{Name: "metrics", Protocol: corev1.ProtocolTCP, Port: 9153},
				{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: port}}}}
	}
	slice := func(namespace, name, addr, kind string, port int32) *discoveryv1.EndpointSlice {
		s := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name + "-1",
				Labels: map[string]string{discoveryv1.LabelServiceName: name}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{addr}, NodeName: Pointer("n1")}},
			Ports: []discoveryv1.EndpointPort{
				{Name: Pointer("udp"), Protocol: Pointer(corev1.ProtocolUDP), Port: Pointer(port)},
				{Name: Pointer("metrics"), Protocol: Pointer(corev1.ProtocolTCP), Port: Pointer(int32(9153))},
				{Name: Pointer("tcp"), Protocol: Pointer(corev1.ProtocolTCP), Port: Pointer(port)}},
		}
		if kind != "" {
			s.Endpoints[0].TargetRef = &corev1.ObjectReference{Kind: kind, Namespace: namespace, Name: name + "-0"}
		}
		return s
	}
	return []runtime.Object{
		Node("n1", "10.244.0.0/24", "192.168.0.1", "z1"), Node("n2", "10.244.1.0/24", "192.168.0.2", "z2"),
		&networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"},
			Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16"}}},
		service("default", "kubernetes", "10.96.0.1", 443), slice("default", "kubernetes", "192.168.0.1", "", 6443),
		service("kube-system", "kube-dns", "10.96.0.53", 53), slice("kube-system", "kube-dns", "10.244.0.3", "Pod", 53),
		WebService(nil), WebSlice("web-1", nil, "10.244.0.9", "192.168.0.1"),
	}
}

// VIP returns the Service 10.96.0.1:80, of both protocols, with these endpoints.
func VIP(endpoints ...string) balancer.Service {
	s := balancer.Service{Name: balancer.Name{Namespace: "default", Name: "web"}, ClusterIPs: Addrs("10.96.0.1"),
		Ports: []balancer.Port{{Protocol: balancer.TCP, Port: 80}, {Protocol: balancer.UDP, Port: 80}}}
	for i := range s.Ports {
		for _, e := range endpoints {
			s.Ports[i].Endpoints = append(s.Ports[i].Endpoints,
				balancer.Endpoint{Addr: netip.MustParseAddrPort(e), Ready: true, Serving: true})
		}
	}
	return s
}
