package watch

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/balancer"
)

func TestDirectAddresses(t *testing.T) {
	service := func(kind corev1.ServiceType, nodePort int32, ingress ...corev1.LoadBalancerIngress) corev1.Service {
		s := corev1.Service{Spec: corev1.ServiceSpec{Type: kind, Ports: []corev1.ServicePort{
			{Name: "proxy", Protocol: corev1.ProtocolTCP, Port: 443, NodePort: nodePort},
			{Name: "quic", Protocol: corev1.ProtocolUDP, Port: 444, NodePort: nodePort + 1},
		}}}
		s.Status.LoadBalancer.Ingress = ingress
		return s
	}
	slice := func(port int32, addrs ...string) discoveryv1.EndpointSlice {
		s := discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{
			{Name: new("proxy"), Protocol: new(corev1.ProtocolTCP), Port: &port},
			{Name: new("quic"), Protocol: new(corev1.ProtocolUDP), Port: &port},
		}}
		for _, addr := range addrs {
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{addr}})
		}
		return s
	}
	const own = "10.244.1.5"
	ending := slice(10802, own, "10.244.2.5")
	ending.Endpoints[1].Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(false), Terminating: new(true)}
	for _, tt := range []struct {
		name      string
		namespace string
		service   corev1.Service
		slice     discoveryv1.EndpointSlice
		want      []string // besides the pod's own
	}{
		{"node_port", "kubevpn", service(corev1.ServiceTypeNodePort, 31000), slice(10802, own), []string{"10.0.0.1:31000", "203.0.113.1:31000"}},
		{"load_balancer", "kubevpn", service(corev1.ServiceTypeLoadBalancer, 0, corev1.LoadBalancerIngress{IP: "203.0.113.9"}, corev1.LoadBalancerIngress{Hostname: "lb.example"}),
			slice(10802, own), []string{"203.0.113.9:443", "lb.example:443"}},
		{"load_balancer_that_is_pending", "kubevpn", service(corev1.ServiceTypeLoadBalancer, 0), slice(10802, own), nil},
		{"cluster_ip", "kubevpn", service(corev1.ServiceTypeClusterIP, 0), slice(10802, own), nil},
		{"another_namespace", "team", service(corev1.ServiceTypeNodePort, 31000), slice(10802, own), nil},
		{"another_port", "kubevpn", service(corev1.ServiceTypeNodePort, 31000), slice(10801, own), nil},
		{"no_endpoint", "kubevpn", service(corev1.ServiceTypeNodePort, 31000), slice(10802), nil},
		{"another_pod", "kubevpn", service(corev1.ServiceTypeNodePort, 31000), slice(10802, "10.244.2.5"), nil},
		{"two_pods", "kubevpn", service(corev1.ServiceTypeNodePort, 31000), slice(10802, own, "10.244.2.5"), nil},
		{"another_pod_ends", "kubevpn", service(corev1.ServiceTypeNodePort, 31000), ending, []string{"10.0.0.1:31000", "203.0.113.1:31000"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newCluster("node1")
			c.setNode(balancer.Name{Name: "node1"}, &node{addrs: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("203.0.113.1")}})
			c.setNode(balancer.Name{Name: "node2"}, &node{addrs: []netip.Addr{netip.MustParseAddr("10.0.0.2")}})
			name := balancer.Name{Namespace: tt.namespace, Name: "direct"}
			c.setService(name, convertService(&tt.service))
			tt.slice.ObjectMeta = metav1.ObjectMeta{Namespace: tt.namespace, Labels: map[string]string{discoveryv1.LabelServiceName: "direct"}}
			c.setSlice(balancer.Name{Namespace: tt.namespace, Name: "direct-1"}, convertSlice(&tt.slice))
			me := Self{Namespace: "kubevpn", Node: "node1", Addrs: []netip.Addr{netip.MustParseAddr(own), netip.MustParseAddr("fd00::5")}, ProxyPort: 10802}
			if d := cmp.Diff(append([]string{"10.244.1.5:10802", "[fd00::5]:10802"}, tt.want...), c.direct(me)); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			c.setService(name, nil)
			if got := c.direct(me); len(got) != 2 {
				t.Errorf("without the Service: %q", got)
			}
			me.ProxyPort = 0
			if got := c.direct(me); len(got) != 0 {
				t.Errorf("without a proxy ProxyPort: %q", got)
			}
		})
	}
}

func TestDirectAddressesAreBounded(t *testing.T) {
	c := newCluster("node1")
	me := Self{Namespace: "kubevpn", Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.5")}, ProxyPort: 10802}
	for i := range 100 {
		name := balancer.Name{Namespace: "kubevpn", Name: fmt.Sprint(i)}
		c.setService(name, &service{exposed: &exposure{ports: []exposedPort{{"", 443, 0}}, ingress: []string{fmt.Sprintf("lb%d.example", i)}}})
		c.setSlice(balancer.Name{Namespace: "kubevpn", Name: fmt.Sprint(i, "-1")}, &endpointSlice{service: name, ports: []servicePort{{"", balancer.TCP, 10802}},
			endpoints: []endpoint{{addr: me.Addrs[0], ready: true}}})
	}
	if got := c.direct(me); len(got) != api.MaxDirect || got[0] != "10.244.1.5:10802" {
		t.Errorf("%q", got)
	}
}
