package client

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
)

// Answers of API servers to a Service with an impossible ClusterIP.
const (
	answer121  = `Service "x" is invalid: spec.clusterIPs: Invalid value: []string{"192.0.2.1"}: failed to allocated ip:192.0.2.1 with error:provided IP is not in the valid range. The range of valid IPs is 10.96.0.0/12`
	answer134  = `Service "kubevpn-range-f2x7q" is invalid: spec.clusterIPs: Invalid value: ["192.0.2.1"]: failed to allocate IP 192.0.2.1: the provided IP (192.0.2.1) is not in the valid range. The range of valid IPs is 10.96.0.0/16`
	answer134b = `Service "kubevpn-range-7k2jp" is invalid: spec.clusterIPs: Invalid value: ["2001:db8::1"]: failed to allocate IP 2001:db8::1: the provided IP (2001:db8::1) is not in the valid range. The range of valid IPs is fd00:10:96::/112`
	answerNo6  = `Service "kubevpn-range-7k2jp" is invalid: spec.ipFamilies[0]: Invalid value: "IPv6": not configured on this cluster`
)

// fakeCluster answers dry-run Services as an API server does, and rejects the requests in deny.
func fakeCluster(answers map[corev1.IPFamily]string, deny string, objects ...runtime.Object) *fake.Clientset {
	kube := fake.NewClientset(objects...)
	kube.PrependReactor("create", "services", func(a k8stesting.Action) (bool, runtime.Object, error) {
		create := a.(k8stesting.CreateActionImpl)
		if len(create.CreateOptions.DryRun) != 1 {
			return true, nil, errors.New("this would create a Service")
		}
		svc := create.GetObject().(*corev1.Service)
		message := answers[svc.Spec.IPFamilies[0]]
		return true, nil, &apierrors.StatusError{ErrStatus: metav1.Status{Reason: metav1.StatusReasonInvalid, Code: 422, Message: message}}
	})
	for _, what := range strings.Fields(deny) {
		verb, resource, _ := strings.Cut(what, ":")
		kube.PrependReactor(verb, resource, func(k8stesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("no"))
		})
	}
	return kube
}

func node(name string, cidrs ...string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDRs: cidrs}}
}

func pod(name string, host bool, ips ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns"}, Spec: corev1.PodSpec{HostNetwork: host}}
	for _, ip := range ips {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: ip})
	}
	return p
}

func service(name string, ips ...string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns"}, Spec: corev1.ServiceSpec{ClusterIPs: ips}}
}

func TestFindCIDRsReadsEveryPermittedSource(t *testing.T) {
	range4 := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16", "fd00:10:96::/112"}}}
	tests := []struct {
		name    string
		answers map[corev1.IPFamily]string
		deny    string
		objects []runtime.Object
		pods    []string
		service []string
	}{
		{
			name: "admin, dual stack", answers: map[corev1.IPFamily]string{corev1.IPv4Protocol: answer134, corev1.IPv6Protocol: answer134b},
			objects: []runtime.Object{
				node("a", "10.244.1.0/24", "fd00:10:244:1::/64"), node("b", "10.244.2.0/24"), range4,
				pod("in", false, "10.244.1.7", "fd00:10:244:1::7"), pod("host", true, "192.168.0.4"), service("web", "10.96.3.4", "fd00:10:96::5"),
			},
			pods:    []string{"10.244.1.0/24 (the nodes' pod CIDRs)", "fd00:10:244:1::/64 (the nodes' pod CIDRs)", "10.244.2.0/24 (the nodes' pod CIDRs)"},
			service: []string{"10.96.0.0/16 (ServiceCIDR objects)", "fd00:10:96::/112 (ServiceCIDR objects)"},
		},
		{
			name: "developer", answers: map[corev1.IPFamily]string{corev1.IPv4Protocol: answer134, corev1.IPv6Protocol: answerNo6},
			deny:    "list:nodes list:servicecidrs",
			objects: []runtime.Object{pod("web", false, "10.244.1.7"), pod("api", false, "10.244.1.8"), pod("far", false, "10.244.2.1"), service("web", "10.96.3.4"), service("headless", "None")},
			pods:    []string{"10.244.1.0/24 (guessed from pods' addresses)", "10.244.2.0/24 (guessed from pods' addresses)"},
			service: []string{"10.96.0.0/16 (the API server's answer to an impossible ClusterIP)"},
		},
		{
			name: "viewer", deny: "list:nodes list:servicecidrs create:services",
			objects: []runtime.Object{pod("web", false, "10.244.1.7", "fd00:10:244:1::7"), service("web", "10.96.3.4", "fd00:10:96::5")},
			pods:    []string{"10.244.1.0/24 (guessed from pods' addresses)", "fd00:10:244:1::/64 (guessed from pods' addresses)"},
			service: []string{"10.96.3.0/24 (guessed from Services' ClusterIPs)", "fd00:10:96::/120 (guessed from Services' ClusterIPs)"},
		},
		{
			name: "pods outside the nodes' ranges, as some CNIs have them", answers: map[corev1.IPFamily]string{corev1.IPv4Protocol: answer121, corev1.IPv6Protocol: answerNo6},
			objects: []runtime.Object{node("a", "10.244.1.0/24"), pod("web", false, "192.168.77.9")},
			pods:    []string{"10.244.1.0/24 (the nodes' pod CIDRs)", "192.168.77.0/24 (guessed from pods' addresses)"},
			service: []string{"10.96.0.0/12 (the API server's answer to an impossible ClusterIP)"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := findCIDRs(context.Background(), fakeCluster(tt.answers, tt.deny, tt.objects...), "ns")
			if err != nil {
				t.Fatal(err)
			}
			text := func(cidrs []CIDR) (out []string) {
				for _, c := range cidrs {
					out = append(out, fmt.Sprintf("%v (%s)", c.Prefix, c.Source))
				}
				return out
			}
			if d := cmp.Diff(tt.pods, text(got.Pods)); d != "" {
				t.Errorf("pods (-want +got):\n%s", d)
			}
			if d := cmp.Diff(tt.service, text(got.Services)); d != "" {
				t.Errorf("services (-want +got):\n%s", d)
			}
		})
	}
}

func TestFindCIDRsFailsWhenUnauthorized(t *testing.T) {
	kube := fakeCluster(nil, "")
	kube.PrependReactor("*", "*", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewUnauthorized("who are you")
	})
	if _, err := findCIDRs(context.Background(), kube, "ns"); !apierrors.IsUnauthorized(err) {
		t.Fatal(err)
	}
}

func TestMergeKeepsTheWidestNetworks(t *testing.T) {
	cidr := func(s string) CIDR { return CIDR{netip.MustParsePrefix(s), FromPods} }
	got := merge([]CIDR{cidr("10.0.1.0/24"), cidr("10.0.2.0/24"), cidr("fd00::/64")}, []CIDR{cidr("10.0.1.0/25"), cidr("10.0.0.0/22"), cidr("10.0.0.0/22")})
	want := []CIDR{cidr("fd00::/64"), cidr("10.0.0.0/22")}
	if d := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); d != "" {
		t.Fatal(d)
	}
}

func FuzzValidRange(f *testing.F) {
	f.Add(answer121)
	f.Add(answer134)
	f.Add(answer134b)
	f.Fuzz(func(t *testing.T, message string) {
		if m := validRange.FindStringSubmatch(message); m != nil {
			for _, c := range parseCIDRs(m[1:], FromAnswer) {
				if c.Prefix != c.Prefix.Masked() {
					t.Fatal(c)
				}
			}
		}
	})
}
