package watch

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/access"
	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/pkg/datapath/balancer"
)

// A tenant writes EndpointSlices that claim addresses for pods.
func TestOnlyAddressesOfPodsAreRouted(t *testing.T) {
	kube := managertest.NewFakeAPI(nil, append(managertest.Objects(),
		managertest.PodAt("shop", "web", "10.42.1.5", false), managertest.SliceOfPods("shop", "web", "web=10.42.1.5"),
		managertest.PodAt("mallory", "mine", "10.42.2.5", false), managertest.PodAt("mallory", "agent", "10.79.1.5", true), managertest.PodAt("shop", "db", "10.81.1.5", false),
		managertest.SliceOfPods("mallory", "a", "none=10.77.1.5", "mine=10.78.1.5", "agent=10.79.1.5", "mine=192.168.1.7", "../../../api/v1/nodes=10.80.1.5"),
		managertest.SliceOfPods("mallory", "b", "mine=140.82.121.3", "mine=8.8.8.8", "mine=0.0.0.5", "mine=240.1.2.3", "none=10.42.1.6"),
		func() *discoveryv1.EndpointSlice { // the pod is in another namespace
			s := managertest.SliceOfPods("mallory", "c", "db=10.81.1.5")
			s.Endpoints[0].TargetRef.Namespace = "shop"
			return s
		}(),
	)...)
	r := watching(t, Config{Kube: kube, Self: Self{Node: "n1"}})
	<-r.Ready
	c := r.hello(t)
	state := c.Next().Hello.State
	if want := managertest.PrefixesOf("10.42.1.0/24", "10.244.0.0/23"); !slices.Equal(state.PodCIDRs, want) {
		t.Errorf("pods: %v, want %v", state.PodCIDRs, want)
	}
	if want := managertest.PrefixesOf("10.244.0.0/23"); !slices.Equal(state.StatedPodCIDRs, want) {
		t.Errorf("stated: %v, want %v", state.StatedPodCIDRs, want)
	}
	if want := managertest.PrefixesOf("0.0.0.0/24", "8.8.8.0/24", "140.82.121.0/24"); !slices.Equal(state.Ignored, want) {
		t.Errorf("ignored: %v, want %v", state.Ignored, want)
	}
	// Once a pod is there, its block is routed.
	if _, err := kube.CoreV1().Pods("shop").Create(t.Context(), managertest.PodAt("shop", "late", "10.78.1.9", false), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := kube.DiscoveryV1().EndpointSlices("shop").Create(t.Context(), managertest.SliceOfPods("shop", "late", "late=10.78.1.9"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	c.Until("its block", func(s *api.ManagerState) bool {
		return slices.Equal(s.PodCIDRs, managertest.PrefixesOf("10.42.1.0/24", "10.78.1.0/24", "10.244.0.0/23"))
	})
}

// An address that belongs to no pod must not become the probe address of laptops.
func TestPodThatProvesTunnelIsRouted(t *testing.T) {
	slice := managertest.WebSlice("web-1", func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].TargetRef.Name = "none" }, "8.8.8.8", "10.244.0.9")
	kube := managertest.NewFakeAPI(nil, managertest.Node("n1", "10.244.0.0/24", "192.168.0.1", "z1"), managertest.WebService(nil), slice)
	r := watching(t, Config{Kube: kube, Self: Self{Node: "n1"}})
	<-r.Ready
	if state := r.hello(t).Next().Hello.State; state.ProbePod != netip.MustParseAddrPort("10.244.0.9:8080") {
		t.Errorf("the pod is %v", state.ProbePod)
	}
}

// reading is a podReader in a bubble, with the cluster that it reads for.
type reading struct {
	*cluster
	reader *podReader
	kube   *managertest.FakeAPI
	reads  atomic.Int32
}

func startReading(t *testing.T, objects ...runtime.Object) *reading {
	r := &reading{kube: managertest.NewFakeAPI(nil, objects...), cluster: newCluster("")}
	r.synced[scope{resource: nodes}] = true
	r.kube.PrependReactor("get", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
		r.reads.Add(1)
		if r.kube.Denies("get pods") {
			return true, nil, apierrors.NewForbidden(a.GetResource().GroupResource(), "", nil)
		}
		return false, nil, nil
	})
	r.reader = newPodReader(r.kube, r.cluster, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := r.reader.run(ctx); err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return r
}

func (r *reading) set(slices ...*discoveryv1.EndpointSlice) {
	r.mu.Lock()
	for _, s := range slices {
		r.setSlice(balancer.Name{Namespace: s.Namespace, Name: s.Name}, convertSlice(s))
	}
	r.mu.Unlock()
	r.reader.poked.Raise()
	synctest.Wait()
}

func (r *reading) pods() []netip.Prefix {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.recount()
	return r.networks.prefixes(true).pods
}

// bogus returns EndpointSlices with n addresses that belong to no pod, each in a block of its own.
func bogus(namespace string, n int) (out []*discoveryv1.EndpointSlice) {
	for i := range n {
		out = append(out, managertest.SliceOfPods(namespace, fmt.Sprint("s", i), fmt.Sprintf("none=10.%d.%d.1", 100+i>>8, i&255)))
	}
	return out
}

func TestPodsAreReadSparingly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReading(t, managertest.PodAt("shop", "web", "10.42.1.5", false))
		r.set(bogus("mallory", 2000)...)
		time.Sleep(10*time.Second + time.Millisecond)
		if n := r.reads.Load(); n > 11*readBatch || n < 10*readBatch {
			t.Errorf("%d pods were read in 10 s", n)
		}
		// Blocks of other namespaces do not wait for the bogus ones.
		r.set(managertest.SliceOfPods("shop", "web", "web=10.42.1.5"))
		time.Sleep(readInterval)
		synctest.Wait()
		if got, want := r.pods(), managertest.PrefixesOf("10.42.1.0/24"); !slices.Equal(got, want) {
			t.Errorf("pods %v, want %v", got, want)
		}
		time.Sleep(2 * time.Minute) // all were read
		before := r.reads.Load()
		r.set(managertest.SliceOfPods("shop", "db", "web=10.42.1.5"))
		time.Sleep(time.Minute)
		if n := r.reads.Load() - before; n > 0 {
			t.Errorf("the podReader read %d pods again at once", n)
		}
		time.Sleep(2 * disprovedFor)
		if n := r.reads.Load() - before; n < 2000 {
			t.Errorf("the podReader read only %d pods again later", n)
		}
	})
}

// Without the right, as a Role of an earlier version has it, endpoints are routed one by one.
func TestAddressesAreBelievedWhenPodsMayNotBeRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReading(t, managertest.PodAt("shop", "web", "10.42.1.5", false))
		r.kube.Set(func() { r.kube.Denied["get pods"] = true })
		r.set(managertest.SliceOfPods("shop", "web", "web=10.42.1.5", "web=8.8.8.8"), managertest.SliceOfPods("mallory", "x", "none=10.77.1.5"))
		if got, want := r.pods(), managertest.PrefixesOf("10.42.1.5/32", "10.77.1.5/32"); !slices.Equal(got, want) || !r.networks.mayNotRead {
			t.Errorf("pods %v, want %v", got, want)
		}
		r.kube.Set(func() { clear(r.kube.Denied) })
		time.Sleep(rightsInterval + 2*readInterval)
		synctest.Wait()
		if got, want := r.pods(), managertest.PrefixesOf("10.42.1.0/24"); !slices.Equal(got, want) || r.networks.mayNotRead {
			t.Errorf("once pods may be read: %v, want %v", got, want)
		}
	})
}

func TestBlocksWaitForAPIServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReading(t, managertest.PodAt("shop", "web", "10.42.1.5", false))
		var down atomic.Bool
		down.Store(true)
		r.kube.PrependReactor("get", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
			return down.Load(), nil, apierrors.NewInternalError(fmt.Errorf("connection refused"))
		})
		r.set(managertest.SliceOfPods("shop", "web", "web=10.42.1.5"))
		if got := r.pods(); len(got) > 0 || !r.firstRoundDone {
			t.Errorf("pods %v, laptops wait: %v", got, !r.firstRoundDone)
		}
		down.Store(false)
		time.Sleep(retryMost)
		synctest.Wait()
		if got, want := r.pods(), managertest.PrefixesOf("10.42.1.0/24"); !slices.Equal(got, want) {
			t.Errorf("pods %v, want %v", got, want)
		}
	})
}

// For any EndpointSlice, the conversion ends, and laptops learn only private networks: verified ones or single
// addresses.
func FuzzEndpointSlice(f *testing.F) {
	f.Add("IPv4", "10.42.1.5", "Pod", "web", "shop", true)
	f.Add("IPv4", "140.82.121.3", "Pod", "web", "", false)
	f.Add("IPv4", "0.0.0.5", "Pod", "web", "", false)
	f.Add("IPv4", "240.1.2.3", "Pod", "web", "", true)
	f.Add("IPv4", "::ffff:10.0.0.1", "Pod", "../x", "", true)
	f.Add("IPv6", "fd00::1%eth0", "Pod", "web", "", true)
	f.Add("IPv6", "2001:db8::1", "Pod", "web", "", true)
	f.Add("FQDN", "example.com", "Node", "n1", "", false)
	f.Fuzz(func(t *testing.T, addressType, addr, kind, name, namespace string, believe bool) {
		s := managertest.SliceOfPods("shop", "web", "web="+addr)
		s.AddressType = discoveryv1.AddressType(addressType)
		s.Endpoints[0].TargetRef = &corev1.ObjectReference{Kind: kind, Name: name, Namespace: namespace}
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{}, discoveryv1.Endpoint{Addresses: []string{addr, "10.1.1.1"}})
		c := newCluster("")
		c.synced[scope{resource: nodes}] = true
		c.setSlice(balancer.Name{Namespace: "shop", Name: "web"}, convertSlice(s))
		results := map[access.PodRef]bool{}
		for _, ref := range c.unread(time.Now()) {
			if ref.Namespace != "shop" || ref.Name == "" || !ref.Addr.IsValid() || ref.Addr.Zone() != "" {
				t.Errorf("the podReader would read %+v", ref)
			}
			results[ref] = believe
		}
		c.recordRead(results, time.Now(), false)
		c.recount()
		for range 2 {
			for _, p := range c.networks.prefixes(true).pods {
				if !p.Addr().IsPrivate() && !slices.ContainsFunc(managertest.PrefixesOf("100.64.0.0/10", "198.18.0.0/15", "240.0.0.0/4", "34.118.224.0/20"),
					func(n netip.Prefix) bool { return n.Contains(p.Addr()) && n.Bits() < p.Bits() }) {
					t.Errorf("laptops learn %v", p)
				}
				if !believe && !(c.networks.mayNotRead && p.IsSingleIP()) {
					t.Errorf("laptops learn %v, of which no pod was read", p)
				}
			}
			c.recordRead(nil, time.Now(), true)
		}
		if n := len(c.disproved); n > 1 {
			t.Errorf("%d pods disproved", n)
		}
		c.setSlice(balancer.Name{Namespace: "shop", Name: "web"}, nil)
		c.unread(time.Now().Add(disprovedFor))
		if len(c.networks.pods)+len(c.networks.verified)+len(c.disproved) > 0 {
			t.Errorf("kept: %+v", c.networks)
		}
	})
}
