package manager

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/balancer"
)

// fakeAPI is an API server with RBAC for the manager.
type fakeAPI struct {
	*fake.Clientset
	mu     sync.Mutex
	denied map[string]bool // "list nodes", "list services in namespace shop"
	broken string          // evaluationError of each denial
	down   bool
}

func newFakeAPI(denied []string, objects ...runtime.Object) *fakeAPI {
	f := &fakeAPI{Clientset: fake.NewClientset(objects...), denied: map[string]bool{}}
	for _, d := range denied {
		f.denied[d] = true
	}
	f.PrependReactor("create", "selfsubjectaccessreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if f.isDown() {
			return true, nil, fmt.Errorf("connection refused")
		}
		review := action.(clienttesting.CreateAction).GetObject().(*authorizationv1.SelfSubjectAccessReview).DeepCopy()
		a := review.Spec.ResourceAttributes
		review.Status.Allowed = !f.denies(rightTo(a.Verb, a.Resource, a.Namespace))
		if !review.Status.Allowed {
			f.set(func() { review.Status.EvaluationError = f.broken })
		}
		return true, review, nil
	})
	f.PrependReactor("list", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		what := action.GetResource()
		switch {
		case f.isDown():
			return true, nil, fmt.Errorf("connection refused")
		case f.denies(rightTo("list", what.Resource, action.GetNamespace())):
			return true, nil, apierrors.NewForbidden(what.GroupResource(), "", nil)
		}
		return false, nil, nil
	})
	return f
}

func rightTo(verb, resource, namespace string) string {
	if namespace == metav1.NamespaceAll {
		return verb + " " + resource
	}
	return verb + " " + resource + " in namespace " + namespace
}

func (f *fakeAPI) denies(right string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.denied[right]
}

func (f *fakeAPI) isDown() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.down
}

func (f *fakeAPI) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func testNode(name, podCIDR, addr, zone string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelTopologyZone: zone}},
		Spec:       corev1.NodeSpec{PodCIDR: podCIDR, PodCIDRs: []string{podCIDR}},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: addr}, {Type: corev1.NodeHostName, Address: name}}},
	}
}

// testCluster is two nodes, the API server's Service, cluster DNS and default/web.
func testCluster() []runtime.Object {
	service := func(namespace, name, ip string, port int32) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
			Spec: corev1.ServiceSpec{ClusterIP: ip, ClusterIPs: []string{ip}, Ports: []corev1.ServicePort{
				{Name: "udp", Protocol: corev1.ProtocolUDP, Port: port}, {Name: "metrics", Protocol: corev1.ProtocolTCP, Port: 9153}, {Name: "tcp", Protocol: corev1.ProtocolTCP, Port: port}}}}
	}
	slice := func(namespace, name, addr, kind string, port int32) *discoveryv1.EndpointSlice {
		s := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: namespace, Name: name + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{addr}, NodeName: pointer("n1")}},
			Ports: []discoveryv1.EndpointPort{{Name: pointer("udp"), Protocol: pointer(corev1.ProtocolUDP), Port: pointer(port)},
				{Name: pointer("metrics"), Protocol: pointer(corev1.ProtocolTCP), Port: pointer(int32(9153))}, {Name: pointer("tcp"), Protocol: pointer(corev1.ProtocolTCP), Port: pointer(port)}},
		}
		if kind != "" {
			s.Endpoints[0].TargetRef = &corev1.ObjectReference{Kind: kind, Namespace: namespace, Name: name + "-0"}
		}
		return s
	}
	return []runtime.Object{
		testNode("n1", "10.244.0.0/24", "192.168.0.1", "z1"), testNode("n2", "10.244.1.0/24", "192.168.0.2", "z2"),
		&networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16"}}},
		service("default", "kubernetes", "10.96.0.1", 443), slice("default", "kubernetes", "192.168.0.1", "", 6443),
		service("kube-system", "kube-dns", "10.96.0.53", 53), slice("kube-system", "kube-dns", "10.244.0.3", "Pod", 53),
		webService(nil), webSlice("web-1", nil, "10.244.0.9", "192.168.0.1"),
	}
}

func TestStateDescribesTheCluster(t *testing.T) {
	kube := newFakeAPI(nil, testCluster()...)
	r := start(t, Config{Kube: kube, NodeName: "n1"}, func(m *Manager) {
		m.publisher.dns = dnsConfig{servers: []netip.Addr{netip.MustParseAddr("10.96.0.53")}, domain: "cluster.local"}
	})
	c := hello(t, r.laptop, helloV1)
	state := c.next().Hello.State
	want := api.ManagerState{
		PodCIDRs: prefixesOf("10.244.0.0/23"), ServiceCIDRs: prefixesOf("10.96.0.0/16"),
		StatedPodCIDRs: prefixesOf("10.244.0.0/23"), StatedServiceCIDRs: prefixesOf("10.96.0.0/16"),
		DNSServers: []netip.Addr{netip.MustParseAddr("10.96.0.53")}, DNSDomain: "cluster.local",
		ResolvesVIPs: true, Sessions: 1,
		ProbePod: netip.MustParseAddrPort("10.244.0.3:53"), ProbeVIP: netip.MustParseAddrPort("10.96.0.53:53"), ProbeName: "kube-dns.kube-system",
		InnerNetworks: prefixesOf("198.19.0.0/16", "fd4e:19c6:8b7a::/48"),
	}
	if !reflect.DeepEqual(state, want) {
		t.Errorf("state:\n got %+v\nwant %+v", state, want)
	}
	names := c.next().Names
	wantNames := map[string][]string{"default": {"kubernetes", "web"}, "kube-system": {"kube-dns"}}
	if names == nil || !names.Reset || !reflect.DeepEqual(names.Add, wantNames) {
		t.Errorf("names: %+v", names)
	}
}

// untilNames reads messages until there are names.
func (c *control) untilNames() *api.NameDelta {
	c.t.Helper()
	for {
		if m := c.next(); m.Names != nil {
			return m.Names
		}
	}
}

// addsNames checks the names that the manager adds next.
func (c *control) addsNames(want map[string][]string) {
	c.t.Helper()
	if d := c.untilNames(); !reflect.DeepEqual(d.Add, want) {
		c.t.Errorf("names %+v, want %v", d, want)
	}
}

func TestChangesReachLaptops(t *testing.T) {
	kube := newFakeAPI(nil, testCluster()...)
	r := start(t, Config{Kube: kube, NodeName: "n1"})
	c := hello(t, r.laptop, helloV1)
	c.next()
	c.untilNames()
	ctx := t.Context()
	check := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}

	headless := webService(func(s *corev1.Service) { s.Name, s.Spec.ClusterIP, s.Spec.ClusterIPs = "db", "None", []string{"None"} })
	_, err := kube.CoreV1().Services("default").Create(ctx, headless, metav1.CreateOptions{})
	check("creating a headless Service", err)
	if d := c.untilNames(); d.Reset || !reflect.DeepEqual(d.Add, map[string][]string{"default": {"db"}}) || d.Remove != nil {
		t.Errorf("after a Service was added: %+v", d)
	}

	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "db-1", Labels: map[string]string{discoveryv1.LabelServiceName: "db"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.244.0.77"}}},
	}
	_, err = kube.DiscoveryV1().EndpointSlices("default").Create(ctx, slice, metav1.CreateOptions{})
	check("adding an endpoint of a headless Service", err)
	if d := c.untilNames(); !reflect.DeepEqual(d, &api.NameDelta{Changed: map[string][]string{"default": {"db"}}}) {
		t.Errorf("after an endpoint was added to a headless Service: %+v", d)
	}

	check("deleting a Service", kube.CoreV1().Services("default").Delete(ctx, "web", metav1.DeleteOptions{}))
	if d := c.untilNames(); d.Reset || d.Add != nil || !reflect.DeepEqual(d.Remove, map[string][]string{"default": {"web"}}) {
		t.Errorf("after a Service was deleted: %+v", d)
	}
	if _, verdict := r.dialer.balancer.Pick(balancer.TCP, netip.MustParseAddrPort("10.96.0.10:80"), "", balancer.Random); verdict != balancer.NotService {
		t.Errorf("a deleted Service is %v", verdict)
	}

	_, err = kube.CoreV1().Nodes().Create(ctx, testNode("n3", "10.245.0.0/24", "192.168.0.3", "z1"), metav1.CreateOptions{})
	check("adding a node", err)
	c.until("its CIDR", func(s *api.ManagerState) bool {
		return slices.Equal(s.PodCIDRs, prefixesOf("10.244.0.0/23", "10.245.0.0/24"))
	})

	dns := testCluster()[6].(*discoveryv1.EndpointSlice)
	dns.Endpoints[0].Conditions.Ready, dns.Endpoints[0].Conditions.Serving = pointer(false), pointer(false)
	_, err = kube.DiscoveryV1().EndpointSlices("kube-system").Update(ctx, dns, metav1.UpdateOptions{})
	check("making DNS unready", err)
	s := c.until("another probe", func(s *api.ManagerState) bool { return s.ProbeName == "kubernetes.default" })
	if s.ProbeVIP != netip.MustParseAddrPort("10.96.0.1:9153") && s.ProbeVIP != netip.MustParseAddrPort("10.96.0.1:443") {
		t.Errorf("probe %v", s.ProbeVIP)
	}
	if s.ProbePod != netip.MustParseAddrPort("10.244.0.9:8080") {
		t.Errorf("pod probe %v", s.ProbePod)
	}
}

func TestWatchesFollowPermissions(t *testing.T) {
	t.Run("granted-later", func(t *testing.T) {
		kube := newFakeAPI([]string{"list endpointslices", "watch endpointslices", "list nodes"}, testCluster()...)
		r := start(t, Config{Kube: kube, NodeName: "n1", APIServer: netip.MustParseAddrPort("10.96.0.1:443")})
		c := hello(t, r.laptop, helloV1)
		state := c.next().Hello.State
		if want := []string{"list endpointslices", "watch endpointslices", "list nodes"}; !slices.Equal(state.Missing, want) {
			t.Errorf("missing: %v, want %v", state.Missing, want)
		}
		if state.ResolvesVIPs || state.ProbeVIP != netip.MustParseAddrPort("10.96.0.1:443") || state.ProbeName != "kubernetes.default" || state.PodCIDRs != nil {
			t.Errorf("state: %+v", state)
		}
		vip := netip.MustParseAddrPort("10.96.0.10:80")
		if _, verdict := r.dialer.balancer.Pick(balancer.TCP, vip, "", balancer.Random); verdict != balancer.NotService {
			t.Errorf("without EndpointSlices a VIP is %v", verdict)
		}
		if d := c.untilNames(); len(d.Add["default"]) != 2 {
			t.Errorf("names: %+v", d)
		}
		kube.set(func() { clear(kube.denied) })
		r.watcher.poked.Raise() // as a new session does
		state = c.until("VIPs being resolved", func(s *api.ManagerState) bool { return s.ResolvesVIPs && s.PodCIDRs != nil })
		if state.Missing != nil {
			t.Errorf("missing: %v", state.Missing)
		}
		if _, verdict := r.dialer.balancer.Pick(balancer.TCP, vip, "", balancer.Random); verdict != balancer.Chosen {
			t.Errorf("with EndpointSlices a VIP is %v", verdict)
		}
	})
	t.Run("withdrawn", func(t *testing.T) {
		kube := newFakeAPI(nil, testCluster()...)
		r := start(t, Config{Kube: kube, NodeName: "n1"})
		c := hello(t, r.laptop, helloV1)
		c.next()
		kube.set(func() { kube.denied["watch services"] = true })
		r.watcher.poked.Raise() // as a watch does that gets 403
		state := c.until("VIPs being dialled as they are", func(s *api.ManagerState) bool { return !s.ResolvesVIPs })
		if want := []string{"watch services"}; !slices.Equal(state.Missing, want) {
			t.Errorf("missing: %v, want %v", state.Missing, want)
		}
		if _, verdict := r.dialer.balancer.Pick(balancer.TCP, netip.MustParseAddrPort("10.96.0.10:80"), "", balancer.Random); verdict != balancer.NotService {
			t.Errorf("a VIP is %v", verdict)
		}
		for {
			if d := c.untilNames(); d.Reset && d.Add == nil {
				break
			}
		}
	})
	t.Run("denied by an authorizer that fails", func(t *testing.T) { uncertainDenial(t, "webhook: no answer") })
	t.Run("denied once", func(t *testing.T) { uncertainDenial(t, "") })
	t.Run("forbidden-although-reviewed", func(t *testing.T) {
		kube := newFakeAPI(nil, testCluster()...)
		kube.PrependReactor("list", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
			kube.set(func() { kube.denied["list nodes"] = true })
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "", nil)
		})
		r := start(t, Config{Kube: kube, NodeName: "n1"})
		testenv.Until(t, "asking again", func() bool {
			missing, _ := r.watcher.state()
			return slices.Equal(missing, []string{"list nodes"})
		})
	})
	t.Run("server-without-service-cidrs", func(t *testing.T) {
		kube := newFakeAPI(nil, testCluster()...)
		kube.PrependReactor("*", "servicecidrs", func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewNotFound(schema.GroupResource{Group: "networking.k8s.io", Resource: "servicecidrs"}, "")
		})
		r := start(t, Config{Kube: kube, NodeName: "n1"})
		state := hello(t, r.laptop, helloV1).next().Hello.State
		if want := prefixesOf("10.96.0.0/24"); !slices.Equal(state.ServiceCIDRs, want) || state.Missing != nil {
			t.Errorf("state: %+v", state)
		}
	})
}

// uncertainDenial denies everything for a moment, as an API server does that restarts. The manager keeps what it knows:
// names and ClusterIPs for laptops, and the addresses of nodes for its filter.
func uncertainDenial(t *testing.T, evaluationError string) {
	kube := newFakeAPI(nil, testCluster()...)
	r := start(t, Config{Kube: kube, NodeName: "n1"})
	c := hello(t, r.laptop, helloV1)
	c.next()
	asked := make(chan struct{}, 100)
	kube.set(func() {
		kube.broken = evaluationError
		for _, s := range scopesOf([]string{metav1.NamespaceAll}) {
			for _, verb := range verbs {
				kube.denied[verb+" "+s.String()] = true
			}
		}
	})
	kube.PrependReactor("create", "selfsubjectaccessreviews", func(clienttesting.Action) (bool, runtime.Object, error) {
		asked <- struct{}{}
		return false, nil, nil
	})
	before := r.notices.Load()
	r.watcher.poked.Raise() // as a watch does that gets 403
	for range len(verbs) * int(resources) {
		<-asked
	}
	kube.set(func() { clear(kube.denied) })
	r.watcher.poked.Raise()
	for range len(verbs) * int(resources) {
		<-asked
	}
	if got := r.notices.Load(); !got.equal(before) {
		t.Errorf("laptops were told %+v, before %+v", got.state, before.state)
	}
	if got := r.verdict(vipOfWeb); got != balancer.Chosen {
		t.Errorf("a ClusterIP is %v", got)
	}
}

// everywhere are the permissions that a manager of some namespaces lacks, and does not use.
var everywhere = []string{"list services", "watch services", "list endpointslices", "watch endpointslices"}

// verdict is the balancer's for a TCP flow to the ClusterIP.
func (r *running) verdict(vip string) balancer.Verdict {
	pick, verdict := r.dialer.balancer.Pick(balancer.TCP, netip.MustParseAddrPort(vip), "", balancer.Random)
	pick.Release()
	return verdict
}

const (
	vipOfWeb = "10.96.0.10:80" // default/web
	vipOfDNS = "10.96.0.53:53" // kube-system/kube-dns
)

func TestOnlyTheGivenNamespacesAreWatched(t *testing.T) {
	kube := newFakeAPI(everywhere, testCluster()...)
	r := start(t, Config{Kube: kube, NodeName: "n1", WatchNamespaces: []string{"shop", "default", "shop"}},
		func(m *Manager) {
			m.publisher.dns = dnsConfig{servers: []netip.Addr{netip.MustParseAddr("10.96.0.53")}, domain: "cluster.local"}
		})
	c := hello(t, r.laptop, helloV1)
	want := api.ManagerState{
		PodCIDRs: prefixesOf("10.244.0.0/23"), ServiceCIDRs: prefixesOf("10.96.0.0/16"),
		StatedPodCIDRs: prefixesOf("10.244.0.0/23"), StatedServiceCIDRs: prefixesOf("10.96.0.0/16"),
		DNSServers: []netip.Addr{netip.MustParseAddr("10.96.0.53")}, DNSDomain: "cluster.local",
		ResolvesVIPs: true, Namespaces: []string{"default", "shop"}, Sessions: 1,
		ProbePod: netip.MustParseAddrPort("10.244.0.9:8080"), ProbeVIP: netip.MustParseAddrPort("10.96.0.1:9153"),
		ProbeName: "kubernetes.default", InnerNetworks: prefixesOf("198.19.0.0/16", "fd4e:19c6:8b7a::/48"),
	}
	if state := c.next().Hello.State; !reflect.DeepEqual(state, want) {
		t.Errorf("state:\n got %+v\nwant %+v", state, want)
	}
	c.addsNames(map[string][]string{"default": {"kubernetes", "web"}})
	for vip, want := range map[string]balancer.Verdict{vipOfWeb: balancer.Chosen, vipOfDNS: balancer.NotService} {
		if got := r.verdict(vip); got != want {
			t.Errorf("%s is %v, want %v", vip, got, want)
		}
	}
	for _, namespace := range []string{"hidden", "shop"} { // the first one must not arrive
		added := webService(func(s *corev1.Service) {
			s.Namespace, s.Spec.ClusterIP, s.Spec.ClusterIPs = namespace, "None", []string{"None"}
		})
		if _, err := kube.CoreV1().Services(namespace).Create(t.Context(), added, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	c.addsNames(map[string][]string{"shop": {"web"}})
	for _, a := range kube.Actions() {
		if a.GetNamespace() == metav1.NamespaceAll && (a.Matches("list", "services") || a.Matches("watch", "services") ||
			a.Matches("list", "endpointslices") || a.Matches("watch", "endpointslices")) {
			t.Errorf("it uses the right to %s %s everywhere", a.GetVerb(), a.GetResource().Resource)
		}
	}
}

// A Service without endpoints is refused only if the manager watches its namespace. Else kube-proxy may know more.
func TestServicesOfOtherNamespacesAreDialledAsTheyAre(t *testing.T) {
	vip := netip.MustParseAddrPort(pod(t, func(c *net.TCPConn) { io.Copy(c, c) }))
	hidden := webService(func(s *corev1.Service) {
		s.Namespace, s.Spec.ClusterIP, s.Spec.ClusterIPs = "hidden", vip.Addr().String(), []string{vip.Addr().String()}
	})
	for namespace, want := range map[string]bool{"default": true, "hidden": false} {
		t.Run("watches "+namespace, func(t *testing.T) {
			r := start(t, Config{Kube: newFakeAPI(everywhere, append(testCluster(), hidden)...), NodeName: "n1",
				WatchNamespaces: []string{namespace}})
			hello(t, r.laptop, helloV1).untilNames()
			if _, err := r.open(t, vip.String()); (err == nil) != want {
				t.Errorf("dialling the ClusterIP of hidden/web: %v", err)
			}
		})
	}
}

func TestForbiddenNamespaceDoesNotAffectOthers(t *testing.T) {
	kube := newFakeAPI(append([]string{"list services in namespace kube-system"}, everywhere...), testCluster()...)
	r := start(t, Config{Kube: kube, NodeName: "n1", WatchNamespaces: []string{"kube-system", "default"}})
	c := hello(t, r.laptop, helloV1)
	check := func(state api.ManagerState, missing []string, web, dns balancer.Verdict) {
		t.Helper()
		if !state.ResolvesVIPs || !slices.Equal(state.Missing, missing) {
			t.Errorf("missing %q, want %q; resolves: %v", state.Missing, missing, state.ResolvesVIPs)
		}
		if gotWeb, gotDNS := r.verdict(vipOfWeb), r.verdict(vipOfDNS); gotWeb != web || gotDNS != dns {
			t.Errorf("web is %v and kube-dns %v, want %v and %v", gotWeb, gotDNS, web, dns)
		}
	}
	check(c.next().Hello.State, []string{"list services in namespace kube-system"}, balancer.Chosen, balancer.NotService)
	c.addsNames(map[string][]string{"default": {"kubernetes", "web"}})

	kube.set(func() { delete(kube.denied, "list services in namespace kube-system") })
	r.watcher.poked.Raise()
	c.addsNames(map[string][]string{"kube-system": {"kube-dns"}})
	testenv.Until(t, "all namespaces are known", func() bool {
		latest := r.notices.Load()
		return latest.state.Missing == nil && r.verdict(vipOfDNS) == balancer.Chosen
	})
	if got := r.verdict(vipOfWeb); got != balancer.Chosen {
		t.Errorf("web is %v", got)
	}

	withdrawn := "watch endpointslices in namespace default"
	kube.set(func() { kube.denied[withdrawn] = true })
	r.watcher.poked.Raise()
	state := c.until("the right's end", func(s *api.ManagerState) bool { return s.Missing != nil })
	testenv.Until(t, "default is dialled as it is", func() bool { return r.verdict(vipOfWeb) == balancer.NotService })
	check(state, []string{withdrawn}, balancer.NotService, balancer.Chosen)
}

func TestStateSurvivesAPIServerFailure(t *testing.T) {
	t.Run("at-start", func(t *testing.T) {
		kube := newFakeAPI(nil, testCluster()...)
		kube.down = true
		r := start(t, Config{Kube: kube, NodeName: "n1"})
		c := hello(t, r.laptop, helloV1)
		state := c.next().Hello.State
		if state.Missing == nil { // the first attempt had not failed yet
			state = c.until("the failure", func(s *api.ManagerState) bool { return s.Missing != nil })
		}
		if !slices.Equal(state.Missing, []string{"reach the API server"}) || state.ResolvesVIPs {
			t.Errorf("state: %+v", state)
		}
		kube.set(func() { kube.down = false })
		c.until("VIPs being resolved", func(s *api.ManagerState) bool { return s.ResolvesVIPs && s.Missing == nil })
	})
	t.Run("later", func(t *testing.T) {
		kube := newFakeAPI(nil, testCluster()...)
		r := start(t, Config{Kube: kube, NodeName: "n1"})
		c := hello(t, r.laptop, helloV1)
		c.next()
		kube.set(func() { kube.down = true })
		r.watcher.poked.Raise()
		time.Sleep(50 * time.Millisecond) // nothing to wait for: nothing must happen
		if now := r.notices.Load(); !now.state.ResolvesVIPs || now.names == nil {
			t.Errorf("state: %+v", now.state)
		}
	})
}

func TestReadyzFollowsTheAPIServer(t *testing.T) {
	get := func(url string) (int, string) {
		resp, err := http.Get(url)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b)
	}
	defer http.DefaultClient.CloseIdleConnections()
	kube := newFakeAPI(nil)
	kube.down = true
	r := start(t, Config{Kube: kube})
	if code, _ := get(r.health + "/livez"); code != 200 {
		t.Errorf("livez: %d", code)
	}
	if code, body := get(r.health + "/readyz"); code != 503 {
		t.Errorf("readyz before anything is known: %d %s", code, body)
	}
	kube.set(func() { kube.down = false })
	testenv.Until(t, "ready", func() bool {
		code, _ := get(r.health + "/readyz")
		return code == 200
	})
	if code, _ := get(r.health + "/"); code != 404 {
		t.Errorf("anything else: %d", code)
	}
}

func TestManagerWithoutAPIAccessIsReady(t *testing.T) {
	r := start(t, Config{})
	select {
	case <-r.publisher.ready:
	case <-time.After(testTimeout):
		t.Error("not ready")
	}
}

func TestStateIsJSON(t *testing.T) {
	b, err := json.Marshal(api.ControlMessage{State: &api.ManagerState{PodCIDRs: prefixesOf("10.0.0.0/8")}})
	if err != nil || string(b) != `{"state":{"podCIDRs":["10.0.0.0/8"],"resolvesVIPs":false,"sessions":0}}` {
		t.Errorf("got %s, %v", b, err)
	}
}
