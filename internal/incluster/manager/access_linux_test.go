package manager

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/balancer"
)

// serveAt accepts TCP connections at an address of loopback, and answers with the address. It returns the port.
func serveAt(t *testing.T, addr string) int32 {
	t.Helper()
	l, err := net.Listen("tcp", addr+":0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	t.Cleanup(func() { l.Close() })
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			io.WriteString(c, addr)
			c.Close()
		}
	})
	return int32(l.Addr().(*net.TCPAddr).Port)
}

// serviceOf is a Service with a ClusterIP, whose port 80 leads to the port of pods, given as NAME=ADDRESS. A pod
// without a name has no targetRef.
func serviceOf(namespace, name, clusterIP string, port int32, pods ...string) []runtime.Object {
	s := sliceOfPods(namespace, name, pods...)
	for i := range s.Endpoints {
		if s.Endpoints[i].TargetRef.Name == "" {
			s.Endpoints[i].TargetRef = nil
		}
	}
	spec := corev1.ServiceSpec{ClusterIP: clusterIP, ClusterIPs: []string{clusterIP}}
	for _, p := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: pointer(string(p)), Protocol: pointer(p), Port: pointer(port)})
		spec.Ports = append(spec.Ports, corev1.ServicePort{Name: string(p), Protocol: p, Port: 80})
	}
	return []runtime.Object{s, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: spec}}
}

// A user who may write EndpointSlices in an allowed namespace tries to reach pods of another one.
func TestAllowedNamespacesLimitEveryProtocol(t *testing.T) {
	web, db := serveAt(t, "127.0.0.2"), serveAt(t, "127.0.0.3")
	ended := podAt("shop", "ended", "127.0.0.3", false)
	ended.Status.Phase = corev1.PodSucceeded
	elsewhere := serviceOf("shop", "elsewhere", "10.96.0.36", db, "db=127.0.0.3")
	elsewhere[0].(*discoveryv1.EndpointSlice).Endpoints[0].TargetRef.Namespace = "pay"
	kube := newFakeAPI(nil, slices.Concat(
		[]runtime.Object{podAt("shop", "web", "127.0.0.2", false), podAt("pay", "db", "127.0.0.3", false),
			podAt("shop", "agent", "127.0.0.3", true), ended},
		serviceOf("shop", "web", "10.96.0.20", web, "web=127.0.0.2"),
		serviceOf("shop", "mixed", "10.96.0.21", web, "none=127.0.0.3", "web=127.0.0.2", "=127.0.0.4"),
		serviceOf("pay", "db", "10.96.0.30", db, "db=127.0.0.3"),
		serviceOf("pay", "foreign", "10.96.0.31", web, "web=127.0.0.2"),
		serviceOf("shop", "stolen", "10.96.0.32", db, "web=127.0.0.3"),
		serviceOf("shop", "bare", "10.96.0.33", db, "=127.0.0.3"),
		serviceOf("shop", "onhost", "10.96.0.34", db, "agent=127.0.0.3"),
		serviceOf("shop", "gone", "10.96.0.35", db, "ended=127.0.0.3"), elsewhere,
	)...)
	r := start(t, Config{Kube: kube, AllowNamespaces: []string{"shop"}})
	<-r.publisher.ready
	c := hello(t, r.laptop, api.ClientHello{Protocol: api.Protocol, Client: "laptop",
		ExtraCIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}})
	if state := c.next().Hello.State; !state.Limited || !slices.Equal(state.Namespaces, []string{"shop"}) {
		t.Errorf("the state is %+v", state)
	}
	names := c.next().Names
	if names == nil || len(names.Add) != 1 || !slices.Contains(names.Add["shop"], "web") {
		t.Errorf("the names are %+v", names)
	}
	for _, tt := range []struct {
		about, dst string
		want       bool
	}{
		{"a Service", "10.96.0.20:80", true},
		{"a pod", fmt.Sprintf("127.0.0.2:%d", web), true},
		{"a Service of which one endpoint is proven", "10.96.0.21:80", true},
		{"a Service of another namespace", "10.96.0.30:80", false},
		{"its pod", fmt.Sprintf("127.0.0.3:%d", db), false},
		{"a Service of another namespace with our pod", "10.96.0.31:80", false},
		{"a Service with the address of another namespace's pod", "10.96.0.32:80", false},
		{"without a pod", "10.96.0.33:80", false},
		{"with a pod on the host network", "10.96.0.34:80", false},
		{"with a pod that has ended", "10.96.0.35:80", false},
		{"with a pod in another namespace", "10.96.0.36:80", false},
		{"an endpoint without a pod", fmt.Sprintf("127.0.0.4:%d", web), false},
		{"an unknown ClusterIP", "10.96.0.99:80", false},
		{"an unknown address", fmt.Sprintf("127.0.0.9:%d", web), false},
		{"a pod's address within an IPv6 address", fmt.Sprintf("[64:ff9b::7f00:2]:%d", web), false},
	} {
		t.Run(tt.about, func(t *testing.T) {
			dst := netip.MustParseAddrPort(tt.dst)
			for range 4 { // the balancer takes turns
				st, err := r.open(t, tt.dst)
				switch {
				case tt.want != (err == nil) || err != nil && !errors.Is(err, syscall.EACCES):
					t.Fatalf("TCP: got %v", err)
				case err == nil && readAll(t, st) != "127.0.0.2":
					t.Error("another pod has answered")
				}
				flow, err := r.dialer.openUDP(dst, caller{})
				switch {
				case tt.want != (err == nil) || err != nil && !errors.Is(err, syscall.EACCES):
					t.Fatalf("UDP: got %v", err)
				case err == nil:
					flow.close()
				}
			}
			if _, ok := r.dialer.balancer.Service(dst.Addr()); ok {
				return // ClusterIPs do not answer pings
			}
			if err := r.dialer.access.check(netip.AddrPortFrom(dst.Addr(), 0), netip.AddrPortFrom(dst.Addr(), 0), caller{}); tt.want != (err == nil) {
				t.Errorf("ping: got %v", err)
			}
			if _, err := r.dialer.openEcho(dst.Addr(), caller{}); !tt.want && !errors.Is(err, syscall.EACCES) {
				t.Errorf("ping: got %v", err)
			}
		})
	}

	t.Run("a flow of datagrams moves only to a pod of the namespace", func(t *testing.T) {
		flow, err := r.dialer.openUDP(netip.MustParseAddrPort("10.96.0.20:80"), caller{})
		if err != nil {
			t.Fatal(err)
		}
		defer flow.close()
		replace := func(pods ...string) {
			s := serviceOf("shop", "web", "10.96.0.20", web, pods...)[0].(*discoveryv1.EndpointSlice)
			if _, err := kube.DiscoveryV1().EndpointSlices("shop").Update(t.Context(), s, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, testTimeout, func() error {
				if !flow.pick.Stale() {
					return errors.New("the flow has not noticed")
				}
				return nil
			})
		}
		replace("web=127.0.0.3")
		flow.move()
		if got := flow.pick.Endpoint().Addr().String(); got != "127.0.0.2" {
			t.Errorf("it goes to %s", got)
		}
		if _, err := r.open(t, "10.96.0.20:80"); !errors.Is(err, syscall.EACCES) {
			t.Errorf("a new flow: got %v", err)
		}
	})
}

func TestClusterDNSIsReachedFromEveryNamespace(t *testing.T) {
	r := start(t, Config{Kube: newFakeAPI(nil, testCluster()...), AllowNamespaces: []string{"shop"}}, func(m *Manager) {
		m.filter.dns = []netip.Addr{netip.MustParseAddr("10.96.0.53")}
	})
	<-r.publisher.ready
	for dst, want := range map[string]bool{"10.96.0.53:53": true, "10.96.0.53:9153": false, "10.244.0.3:53": false} {
		pick, err := r.dialer.pick(balancer.TCP, netip.MustParseAddrPort(dst), caller{})
		pick.Release()
		if want != (err == nil) {
			t.Errorf("%s: got %v", dst, err)
		}
	}
	if state := hello(t, r.laptop, helloV1).next().Hello.State; state.ProbePod.IsValid() || state.ProbeVIP.IsValid() {
		t.Errorf("the laptop is to probe %v and %v, which it may not reach", state.ProbePod, state.ProbeVIP)
	}
}

func TestLimitRefusesTheSystemNetstack(t *testing.T) {
	namespaces := Config{AllowNamespaces: []string{"tools", "shop"}}
	networks := Config{DenyCIDRs: []netip.Prefix{netip.MustParsePrefix("192.168.0.0/16")}}
	for _, tt := range []struct {
		limit   Config
		hello   api.ClientHello
		refused bool
	}{
		{namespaces, api.ClientHello{Netstack: api.NetstackSystem}, true},
		{networks, api.ClientHello{Netstack: api.NetstackSystem}, true},
		{namespaces, api.ClientHello{Netstack: api.NetstackSystem, MayUseGVisor: true}, false},
		{namespaces, api.ClientHello{Netstack: api.NetstackGVisor}, false},
		{namespaces, api.ClientHello{}, false},
		{Config{}, api.ClientHello{Netstack: api.NetstackSystem}, false},
	} {
		tt.hello.Protocol, tt.hello.Client = api.Protocol, "laptop"
		r := start(t, tt.limit)
		m := hello(t, r.laptop, tt.hello).next()
		switch {
		case tt.refused != (m.Error != nil):
			t.Errorf("%+v: got %+v", tt.hello, m)
		case m.Error != nil && (m.Error.Code != api.ExitNetstack || !strings.Contains(m.Error.Message, "limits what laptops reach, which needs `--netstack gvisor`")):
			t.Errorf("the error is %v", m.Error)
		case m.Hello == nil:
			continue
		}
		if m.Hello.State.GVisorOnly != r.dialer.limited() {
			t.Errorf("%+v: GVisorOnly is %v", tt.hello, m.Hello.State.GVisorOnly)
		}
		for p := range r.router.routes.Load().distinct() {
			if p.system.Load() && r.dialer.limited() {
				t.Errorf("%+v: packets of the laptop may leave by a gateway", tt.hello)
			}
		}
	}
}

// A proof counts for a while if the API server is away. Otherwise the manager reads each pod once a minute.
func TestProofsOfPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reads atomic.Int32
		var down, moved atomic.Bool
		addr := netip.MustParseAddr("10.244.0.7")
		m := New(Config{AllowNamespaces: []string{"shop"}, Logger: slog.New(slog.DiscardHandler)})
		a := m.dialer.access
		a.proofs.ask = func(context.Context, podRef) (bool, error) {
			reads.Add(1)
			time.Sleep(time.Millisecond) // so that flows meet
			if down.Load() {
				return false, errors.New("connection refused")
			}
			return !moved.Load(), nil
		}
		fill(t, m, nil, []any{sliceOfPods("shop", "web", "web=10.244.0.7"), sliceOfPods("pay", "db", "db=10.244.0.8")})
		has := func(want bool, wantReads int32) {
			t.Helper()
			reads.Store(0)
			var wg sync.WaitGroup
			for range 20 {
				wg.Go(func() {
					if _, has := a.pod(addr); has != want {
						t.Errorf("the address has a pod: %v", !want)
					}
				})
			}
			wg.Wait()
			if n := reads.Load(); n != wantReads {
				t.Errorf("%d reads, want %d", n, wantReads)
			}
		}
		has(true, 1)
		time.Sleep(yesTime - time.Second)
		has(true, 0)
		time.Sleep(2 * time.Second)
		has(true, 1)
		down.Store(true)
		time.Sleep(yesTime + time.Second)
		has(true, 1)
		has(true, 0)
		time.Sleep(yesKept - yesTime)
		has(false, 1)
		down.Store(false)
		time.Sleep(noTime + time.Second)
		has(true, 1)
		moved.Store(true)
		time.Sleep(yesTime + time.Second)
		has(false, 1)
		if _, has := a.pod(netip.MustParseAddr("10.244.0.8")); has {
			t.Error("a pod of another namespace counts")
		}
	})
}

// Whoever may write EndpointSlices cannot make a flow read many pods, nor fill the manager's memory.
func TestProofsAreBounded(t *testing.T) {
	m := New(Config{AllowNamespaces: []string{"shop"}, Logger: slog.New(slog.DiscardHandler)})
	a := m.dialer.access
	reads := 0
	a.proofs.ask = func(context.Context, podRef) (bool, error) { reads++; return false, nil }
	var pods []string
	for i := range 100 {
		pods = append(pods, fmt.Sprintf("p%d=10.244.0.7", i))
	}
	fill(t, m, nil, []any{sliceOfPods("shop", "web", pods...)})
	if _, has := a.pod(netip.MustParseAddr("10.244.0.7")); has || reads != maxClaims {
		t.Errorf("%d reads", reads)
	}
	for i := range 2 * maxAnswers {
		a.proofs.record(podRef{name: fmt.Sprint(i)}, true, nil, time.Now())
	}
	if n := len(a.proofs.kept); n > maxAnswers {
		t.Errorf("%d proofs", n)
	}
	fill(t, m, nil, nil)
	m.publisher.cluster.table(scope{resource: endpointSlices}).clear()
	m.publisher.apply()
	if len(a.claims)+len(a.addrs) != 0 {
		t.Errorf("%d claims remain of deleted EndpointSlices", len(a.claims))
	}
}
