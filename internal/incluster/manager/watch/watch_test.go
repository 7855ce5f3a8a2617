package watch

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clienttesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/balancer"
)

func TestStateDescribesTheCluster(t *testing.T) {
	kube := managertest.NewFakeAPI(nil, managertest.Objects()...)
	r := watching(t, Config{Kube: kube, Self: Self{Node: "n1"}}, func(m *Publisher) {
		m.Self.DNS = DNS{Servers: []netip.Addr{netip.MustParseAddr("10.96.0.53")}, Domain: "cluster.local"}
	})
	c := r.hello(t)
	state := c.Next().Hello.State
	want := api.ManagerState{
		PodCIDRs: managertest.PrefixesOf("10.244.0.0/23"), ServiceCIDRs: managertest.PrefixesOf("10.96.0.0/16"),
		StatedPodCIDRs: managertest.PrefixesOf("10.244.0.0/23"), StatedServiceCIDRs: managertest.PrefixesOf("10.96.0.0/16"),
		DNSServers: []netip.Addr{netip.MustParseAddr("10.96.0.53")}, DNSDomain: "cluster.local",
		ResolvesVIPs: true, Sessions: 1,
		ProbePod: netip.MustParseAddrPort("10.244.0.3:53"), ProbeVIP: netip.MustParseAddrPort("10.96.0.53:53"), ProbeName: "kube-dns.kube-system",
		InnerNetworks: managertest.PrefixesOf("198.19.0.0/16", "fd4e:19c6:8b7a::/48"),
	}
	if !reflect.DeepEqual(state, want) {
		t.Errorf("state:\n got %+v\nwant %+v", state, want)
	}
	names := c.Next().Names
	wantNames := map[string][]string{"default": {"kubernetes", "web"}, "kube-system": {"kube-dns"}}
	if names == nil || !names.Reset || !reflect.DeepEqual(names.Add, wantNames) {
		t.Errorf("names: %+v", names)
	}
}

func TestChangesReachLaptops(t *testing.T) {
	kube := managertest.NewFakeAPI(nil, managertest.Objects()...)
	r := watching(t, Config{Kube: kube, Self: Self{Node: "n1"}})
	c := r.hello(t)
	c.Next()
	c.UntilNames()
	ctx := t.Context()
	check := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}

	headless := managertest.WebService(func(s *corev1.Service) { s.Name, s.Spec.ClusterIP, s.Spec.ClusterIPs = "db", "None", []string{"None"} })
	_, err := kube.CoreV1().Services("default").Create(ctx, headless, metav1.CreateOptions{})
	check("creating a headless Service", err)
	if d := c.UntilNames(); d.Reset || !reflect.DeepEqual(d.Add, map[string][]string{"default": {"db"}}) || d.Remove != nil {
		t.Errorf("after a Service was added: %+v", d)
	}

	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "db-1", Labels: map[string]string{discoveryv1.LabelServiceName: "db"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.244.0.77"}}},
	}
	_, err = kube.DiscoveryV1().EndpointSlices("default").Create(ctx, slice, metav1.CreateOptions{})
	check("adding an endpoint of a headless Service", err)
	if d := c.UntilNames(); !reflect.DeepEqual(d, &api.NameDelta{Changed: map[string][]string{"default": {"db"}}}) {
		t.Errorf("after an endpoint was added to a headless Service: %+v", d)
	}

	check("deleting a Service", kube.CoreV1().Services("default").Delete(ctx, "web", metav1.DeleteOptions{}))
	if d := c.UntilNames(); d.Reset || d.Add != nil || !reflect.DeepEqual(d.Remove, map[string][]string{"default": {"web"}}) {
		t.Errorf("after a Service was deleted: %+v", d)
	}
	if _, verdict := r.balancer.Pick(balancer.TCP, netip.MustParseAddrPort("10.96.0.10:80"), "", balancer.Random); verdict != balancer.NotService {
		t.Errorf("a deleted Service is %v", verdict)
	}

	_, err = kube.CoreV1().Nodes().Create(ctx, managertest.Node("n3", "10.245.0.0/24", "192.168.0.3", "z1"), metav1.CreateOptions{})
	check("adding a node", err)
	c.Until("its CIDR", func(s *api.ManagerState) bool {
		return slices.Equal(s.PodCIDRs, managertest.PrefixesOf("10.244.0.0/23", "10.245.0.0/24"))
	})

	dns := managertest.Objects()[6].(*discoveryv1.EndpointSlice)
	dns.Endpoints[0].Conditions.Ready, dns.Endpoints[0].Conditions.Serving = managertest.Pointer(false), managertest.Pointer(false)
	_, err = kube.DiscoveryV1().EndpointSlices("kube-system").Update(ctx, dns, metav1.UpdateOptions{})
	check("making DNS unready", err)
	s := c.Until("another probe", func(s *api.ManagerState) bool { return s.ProbeName == "kubernetes.default" })
	if s.ProbeVIP != netip.MustParseAddrPort("10.96.0.1:9153") && s.ProbeVIP != netip.MustParseAddrPort("10.96.0.1:443") {
		t.Errorf("probe %v", s.ProbeVIP)
	}
	if s.ProbePod != netip.MustParseAddrPort("10.244.0.9:8080") {
		t.Errorf("pod probe %v", s.ProbePod)
	}
}

func TestWatchesFollowPermissions(t *testing.T) {
	t.Run("granted-later", func(t *testing.T) {
		kube := managertest.NewFakeAPI([]string{"list endpointslices", "watch endpointslices", "list nodes"}, managertest.Objects()...)
		r := watching(t, Config{Kube: kube, Self: Self{Node: "n1", APIServer: netip.MustParseAddrPort("10.96.0.1:443")}})
		c := r.hello(t)
		state := c.Next().Hello.State
		if want := []string{"list endpointslices", "watch endpointslices", "list nodes"}; !slices.Equal(state.Missing, want) {
			t.Errorf("missing: %v, want %v", state.Missing, want)
		}
		if state.ResolvesVIPs || state.ProbeVIP != netip.MustParseAddrPort("10.96.0.1:443") || state.ProbeName != "kubernetes.default" || state.PodCIDRs != nil {
			t.Errorf("state: %+v", state)
		}
		vip := netip.MustParseAddrPort("10.96.0.10:80")
		if _, verdict := r.balancer.Pick(balancer.TCP, vip, "", balancer.Random); verdict != balancer.NotService {
			t.Errorf("without EndpointSlices a VIP is %v", verdict)
		}
		if d := c.UntilNames(); len(d.Add["default"]) != 2 {
			t.Errorf("names: %+v", d)
		}
		kube.Set(func() { clear(kube.Denied) })
		r.watcher.poked.Send() // as a new session does
		state = c.Until("VIPs being resolved", func(s *api.ManagerState) bool { return s.ResolvesVIPs && s.PodCIDRs != nil })
		if state.Missing != nil {
			t.Errorf("missing: %v", state.Missing)
		}
		if _, verdict := r.balancer.Pick(balancer.TCP, vip, "", balancer.Random); verdict != balancer.Chosen {
			t.Errorf("with EndpointSlices a VIP is %v", verdict)
		}
	})
	t.Run("withdrawn", func(t *testing.T) {
		kube := managertest.NewFakeAPI(nil, managertest.Objects()...)
		r := watching(t, Config{Kube: kube, Self: Self{Node: "n1"}})
		c := r.hello(t)
		c.Next()
		kube.Set(func() { kube.Denied["watch services"] = true })
		kube.EndWatches()
		state := c.Until("VIPs being dialed as they are", func(s *api.ManagerState) bool { return !s.ResolvesVIPs })
		if want := []string{"watch services"}; !slices.Equal(state.Missing, want) {
			t.Errorf("missing: %v, want %v", state.Missing, want)
		}
		if _, verdict := r.balancer.Pick(balancer.TCP, netip.MustParseAddrPort("10.96.0.10:80"), "", balancer.Random); verdict != balancer.NotService {
			t.Errorf("a VIP is %v", verdict)
		}
		for {
			if d := c.UntilNames(); d.Reset && d.Add == nil {
				break
			}
		}
	})
	t.Run("denied by an authorizer that fails", func(t *testing.T) { uncertainDenial(t, "webhook: no answer") })
	t.Run("denied once", func(t *testing.T) { uncertainDenial(t, "") })
	t.Run("forbidden-although-reviewed", func(t *testing.T) {
		kube := managertest.NewFakeAPI(nil, managertest.Objects()...)
		kube.PrependReactor("list", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
			kube.Set(func() { kube.Denied["list nodes"] = true })
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "", nil)
		})
		r := watching(t, Config{Kube: kube, Self: Self{Node: "n1"}})
		testenv.Until(t, "asking again", func() bool {
			missing, _ := r.watcher.state()
			return slices.Equal(missing, []string{"list nodes"})
		})
	})
	t.Run("server-without-service-cidrs", func(t *testing.T) {
		kube := managertest.NewFakeAPI(nil, managertest.Objects()...)
		kube.PrependReactor("*", "servicecidrs", func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewNotFound(schema.GroupResource{Group: "networking.k8s.io", Resource: "servicecidrs"}, "")
		})
		r := watching(t, Config{Kube: kube, Self: Self{Node: "n1"}})
		state := r.hello(t).Next().Hello.State
		if want := managertest.PrefixesOf("10.96.0.0/24"); !slices.Equal(state.ServiceCIDRs, want) || state.Missing != nil {
			t.Errorf("state: %+v", state)
		}
	})
}

// uncertainDenial denies everything for a moment, as an API server does that restarts. The manager keeps what it knows:
// names and ClusterIPs for laptops, and the addresses of nodes for its filter.
func uncertainDenial(t *testing.T, evaluationError string) {
	kube := managertest.NewFakeAPI(nil, managertest.Objects()...)
	r := watching(t, Config{Kube: kube, Self: Self{Node: "n1"}})
	c := r.hello(t)
	c.Next()
	asked := make(chan struct{}, 100)
	kube.Set(func() {
		kube.Broken = evaluationError
		for _, s := range scopesOf([]string{metav1.NamespaceAll}) {
			for _, verb := range verbs {
				kube.Denied[verb+" "+s.String()] = true
			}
		}
	})
	kube.PrependReactor("create", "selfsubjectaccessreviews", func(clienttesting.Action) (bool, runtime.Object, error) {
		asked <- struct{}{}
		return false, nil, nil
	})
	before := r.Notices.Load()
	kube.EndWatches()
	for range len(verbs) * int(resources) {
		<-asked
	}
	kube.Set(func() { clear(kube.Denied) })
	r.watcher.poked.Send()
	for range len(verbs) * int(resources) {
		<-asked
	}
	if got := r.Notices.Load(); !got.equal(before) {
		t.Errorf("laptops were told %+v, before %+v", got.State, before.State)
	}
	if got := r.verdict(vipOfWeb); got != balancer.Chosen {
		t.Errorf("a ClusterIP is %v", got)
	}
}

// everywhere are the permissions that a manager of some namespaces lacks, and does not use.
var everywhere = []string{"list services", "watch services", "list endpointslices", "watch endpointslices"}

// verdict is the balancer's for a TCP flow to the ClusterIP.
func (r *watched) verdict(vip string) balancer.Verdict {
	pick, verdict := r.balancer.Pick(balancer.TCP, netip.MustParseAddrPort(vip), "", balancer.Random)
	pick.Release()
	return verdict
}

const (
	vipOfWeb = "10.96.0.10:80" // default/web
	vipOfDNS = "10.96.0.53:53" // kube-system/kube-dns
)

func TestOnlyTheGivenNamespacesAreWatched(t *testing.T) {
	kube := managertest.NewFakeAPI(everywhere, managertest.Objects()...)
	r := watching(t, Config{Kube: kube, Self: Self{Node: "n1"}, Namespaces: []string{"shop", "default", "shop"}},
		func(m *Publisher) {
			m.Self.DNS = DNS{Servers: []netip.Addr{netip.MustParseAddr("10.96.0.53")}, Domain: "cluster.local"}
		})
	c := r.hello(t)
	want := api.ManagerState{
		PodCIDRs: managertest.PrefixesOf("10.244.0.0/23"), ServiceCIDRs: managertest.PrefixesOf("10.96.0.0/16"),
		StatedPodCIDRs: managertest.PrefixesOf("10.244.0.0/23"), StatedServiceCIDRs: managertest.PrefixesOf("10.96.0.0/16"),
		DNSServers: []netip.Addr{netip.MustParseAddr("10.96.0.53")}, DNSDomain: "cluster.local",
		ResolvesVIPs: true, Namespaces: []string{"default", "shop"}, Sessions: 1,
		ProbePod: netip.MustParseAddrPort("10.244.0.9:8080"), ProbeVIP: netip.MustParseAddrPort("10.96.0.1:9153"),
		ProbeName: "kubernetes.default", InnerNetworks: managertest.PrefixesOf("198.19.0.0/16", "fd4e:19c6:8b7a::/48"),
	}
	if state := c.Next().Hello.State; !reflect.DeepEqual(state, want) {
		t.Errorf("state:\n got %+v\nwant %+v", state, want)
	}
	c.AddsNames(map[string][]string{"default": {"kubernetes", "web"}})
	for vip, want := range map[string]balancer.Verdict{vipOfWeb: balancer.Chosen, vipOfDNS: balancer.NotService} {
		if got := r.verdict(vip); got != want {
			t.Errorf("%s is %v, want %v", vip, got, want)
		}
	}
	for _, namespace := range []string{"hidden", "shop"} { // the first one must not arrive
		added := managertest.WebService(func(s *corev1.Service) {
			s.Namespace, s.Spec.ClusterIP, s.Spec.ClusterIPs = namespace, "None", []string{"None"}
		})
		if _, err := kube.CoreV1().Services(namespace).Create(t.Context(), added, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	c.AddsNames(map[string][]string{"shop": {"web"}})
	for _, a := range kube.Actions() {
		if a.GetNamespace() == metav1.NamespaceAll && (a.Matches("list", "services") || a.Matches("watch", "services") ||
			a.Matches("list", "endpointslices") || a.Matches("watch", "endpointslices")) {
			t.Errorf("it uses the right to %s %s everywhere", a.GetVerb(), a.GetResource().Resource)
		}
	}
}

func TestForbiddenNamespaceDoesNotAffectOthers(t *testing.T) {
	kube := managertest.NewFakeAPI(append([]string{"list services in namespace kube-system"}, everywhere...), managertest.Objects()...)
	r := watching(t, Config{Kube: kube, Self: Self{Node: "n1"}, Namespaces: []string{"kube-system", "default"}})
	c := r.hello(t)
	check := func(state api.ManagerState, missing []string, web, dns balancer.Verdict) {
		t.Helper()
		if !state.ResolvesVIPs || !slices.Equal(state.Missing, missing) {
			t.Errorf("missing %q, want %q; resolves: %v", state.Missing, missing, state.ResolvesVIPs)
		}
		if gotWeb, gotDNS := r.verdict(vipOfWeb), r.verdict(vipOfDNS); gotWeb != web || gotDNS != dns {
			t.Errorf("web is %v and kube-dns %v, want %v and %v", gotWeb, gotDNS, web, dns)
		}
	}
	check(c.Next().Hello.State, []string{"list services in namespace kube-system"}, balancer.Chosen, balancer.NotService)
	c.AddsNames(map[string][]string{"default": {"kubernetes", "web"}})

	kube.Set(func() { delete(kube.Denied, "list services in namespace kube-system") })
	r.watcher.poked.Send()
	c.AddsNames(map[string][]string{"kube-system": {"kube-dns"}})
	testenv.Until(t, "all namespaces are known", func() bool {
		latest := r.Notices.Load()
		return latest.State.Missing == nil && r.verdict(vipOfDNS) == balancer.Chosen
	})
	if got := r.verdict(vipOfWeb); got != balancer.Chosen {
		t.Errorf("web is %v", got)
	}

	withdrawn := "watch endpointslices in namespace default"
	kube.Set(func() { kube.Denied[withdrawn] = true })
	kube.EndWatches()
	state := c.Until("the right's end", func(s *api.ManagerState) bool { return s.Missing != nil })
	testenv.Until(t, "default is dialed as it is", func() bool { return r.verdict(vipOfWeb) == balancer.NotService })
	check(state, []string{withdrawn}, balancer.NotService, balancer.Chosen)
}

func TestStateSurvivesAPIServerFailure(t *testing.T) {
	t.Run("at-start", func(t *testing.T) {
		kube := managertest.NewFakeAPI(nil, managertest.Objects()...)
		kube.Down = true
		r := watching(t, Config{Kube: kube, Self: Self{Node: "n1"}})
		c := r.hello(t)
		state := c.Next().Hello.State
		if state.Missing == nil { // the first attempt had not failed yet
			state = c.Until("the failure", func(s *api.ManagerState) bool { return s.Missing != nil })
		}
		if !slices.Equal(state.Missing, []string{"reach the API server"}) || state.ResolvesVIPs {
			t.Errorf("state: %+v", state)
		}
		kube.Set(func() { kube.Down = false })
		c.Until("VIPs being resolved", func(s *api.ManagerState) bool { return s.ResolvesVIPs && s.Missing == nil })
	})
	t.Run("later", func(t *testing.T) {
		kube := managertest.NewFakeAPI(nil, managertest.Objects()...)
		r := watching(t, Config{Kube: kube, Self: Self{Node: "n1"}})
		c := r.hello(t)
		c.Next()
		kube.Set(func() { kube.Down = true })
		kube.EndWatches()
		time.Sleep(50 * time.Millisecond) // nothing to wait for: nothing must happen
		if now := r.Notices.Load(); !now.State.ResolvesVIPs || now.names == nil {
			t.Errorf("state: %+v", now.State)
		}
	})
}

func TestStateIsJSON(t *testing.T) {
	b, err := json.Marshal(api.ControlMessage{State: &api.ManagerState{PodCIDRs: managertest.PrefixesOf("10.0.0.0/8")}})
	if err != nil || string(b) != `{"state":{"podCIDRs":["10.0.0.0/8"],"resolvesVIPs":false,"sessions":0}}` {
		t.Errorf("got %s, %v", b, err)
	}
}
