package manager

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/transport"
)

// A user who may write EndpointSlices in an allowed namespace tries to reach pods of another one.
func TestAllowedNamespacesLimitEveryProtocol(t *testing.T) {
	web, db := managertest.ServeAt(t, "127.0.0.2"), managertest.ServeAt(t, "127.0.0.3")
	ended := managertest.PodAt("shop", "ended", "127.0.0.3", false)
	ended.Status.Phase = corev1.PodSucceeded
	elsewhere := managertest.ServiceOf("shop", "elsewhere", "10.96.0.36", db, "db=127.0.0.3")
	elsewhere[0].(*discoveryv1.EndpointSlice).Endpoints[0].TargetRef.Namespace = "pay"
	kube := managertest.NewFakeAPI(nil, slices.Concat(
		[]runtime.Object{managertest.PodAt("shop", "web", "127.0.0.2", false), managertest.PodAt("pay", "db", "127.0.0.3", false),
			managertest.PodAt("shop", "agent", "127.0.0.3", true), ended},
		managertest.ServiceOf("shop", "web", "10.96.0.20", web, "web=127.0.0.2"),
		managertest.ServiceOf("shop", "mixed", "10.96.0.21", web, "none=127.0.0.3", "web=127.0.0.2", "=127.0.0.4"),
		managertest.ServiceOf("pay", "db", "10.96.0.30", db, "db=127.0.0.3"),
		managertest.ServiceOf("pay", "foreign", "10.96.0.31", web, "web=127.0.0.2"),
		managertest.ServiceOf("shop", "stolen", "10.96.0.32", db, "web=127.0.0.3"),
		managertest.ServiceOf("shop", "bare", "10.96.0.33", db, "=127.0.0.3"),
		managertest.ServiceOf("shop", "onhost", "10.96.0.34", db, "agent=127.0.0.3"),
		managertest.ServiceOf("shop", "gone", "10.96.0.35", db, "ended=127.0.0.3"), elsewhere,
	)...)
	r := start(t, Config{Kube: kube, AllowNamespaces: []string{"shop"}})
	<-r.watch.Ready
	c := managertest.Hello(t, r.laptop, api.ClientHello{Protocol: api.Protocol, Client: "laptop",
		ExtraCIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}})
	if state := c.Next().Hello.State; !state.Limited || !slices.Equal(state.Namespaces, []string{"shop"}) {
		t.Errorf("the state is %+v", state)
	}
	names := c.Next().Names
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
				case err == nil && managertest.ReadAll(t, st) != "127.0.0.2":
					t.Error("another pod has answered")
				}
				got, err := managertest.Ask(t, managertest.OpenPackets(t, r.laptop, transport.ProtoUDP, tt.dst), "  x")
				switch {
				case tt.want != (err == nil) || err != nil && !errors.Is(err, syscall.EACCES):
					t.Fatalf("UDP: got %v", err)
				case err == nil && got != "127.0.0.2":
					t.Error("another pod has answered a datagram")
				}
			}
			if _, ok := r.balancer.Service(dst.Addr()); ok {
				return // ClusterIPs do not answer pings
			}
			if err := r.dialer.Policy.Check(netip.AddrPortFrom(dst.Addr(), 0), netip.AddrPortFrom(dst.Addr(), 0), nil); tt.want != (err == nil) {
				t.Errorf("ping: got %v", err)
			}
			if tt.want {
				return // another test pings pods
			}
			if _, err := managertest.Ask(t, managertest.OpenPackets(t, r.laptop, transport.ProtoEcho, netip.AddrPortFrom(dst.Addr(), 0).String()), "  x"); !errors.Is(err, syscall.EACCES) {
				t.Errorf("ping: got %v", err)
			}
		})
	}

	t.Run("a flow of datagrams moves only to a pod of the namespace", func(t *testing.T) {
		flow := managertest.OpenPackets(t, r.laptop, transport.ProtoUDP, "10.96.0.20:80")
		managertest.Expect(t, flow, "x", "127.0.0.2")
		other, err := net.ListenPacket("udp", fmt.Sprintf("127.0.0.3:%d", web))
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		s := managertest.ServiceOf("shop", "web", "10.96.0.20", web, "web=127.0.0.3")[0].(*discoveryv1.EndpointSlice)
		if _, err := kube.DiscoveryV1().EndpointSlices("shop").Update(t.Context(), s, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, managertest.Timeout, func() error {
			if _, err := r.open(t, "10.96.0.20:80"); !errors.Is(err, syscall.EACCES) {
				return fmt.Errorf("a new flow: got %v", err)
			}
			return nil
		})
		managertest.Expect(t, flow, "x", "127.0.0.2") // the manager has noticed that the endpoint does not serve any more
		other.SetReadDeadline(time.Now())
		if _, _, err := other.ReadFrom(make([]byte, 1)); err == nil {
			t.Error("a pod of another namespace has received a datagram")
		}
	})
}

func TestClusterDNSIsReachedFromEveryNamespace(t *testing.T) {
	r := start(t, Config{Kube: managertest.NewFakeAPI(nil, managertest.Objects()...), AllowNamespaces: []string{"shop"}}, func(m *Manager) {
		m.filter.DNS = []netip.Addr{netip.MustParseAddr("10.96.0.53")}
	})
	<-r.watch.Ready
	if state := managertest.Hello(t, r.laptop, helloV1).Next().Hello.State; state.ProbePod.IsValid() || state.ProbeVIP.IsValid() {
		t.Errorf("the laptop is to probe %v and %v, which it may not reach", state.ProbePod, state.ProbeVIP)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second) // nothing answers at the endpoint
	defer cancel()
	if _, err := r.laptop.Open(ctx, transport.Request{Proto: transport.ProtoTCP, Dst: netip.MustParseAddrPort("10.96.0.53:53")}); errors.Is(err, syscall.EACCES) {
		t.Errorf("cluster DNS: got %v", err)
	}
	for _, dst := range []string{"10.96.0.53:9153", "10.244.0.3:53"} {
		if _, err := r.open(t, dst); !errors.Is(err, syscall.EACCES) {
			t.Errorf("%s: got %v", dst, err)
		}
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
		m := managertest.Hello(t, r.laptop, tt.hello).Next()
		switch {
		case tt.refused != (m.Error != nil):
			t.Errorf("%+v: got %+v", tt.hello, m)
		case m.Error != nil && (m.Error.Code != api.ExitNetstack || !strings.Contains(m.Error.Message, "limits what laptops reach, which needs `--netstack gvisor`")):
			t.Errorf("the error is %v", m.Error)
		case m.Hello == nil:
			continue
		}
		if m.Hello.State.GVisorOnly != r.limited {
			t.Errorf("%+v: GVisorOnly is %v", tt.hello, m.Hello.State.GVisorOnly)
		}
	}
}
