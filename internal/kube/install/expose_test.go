package install

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"kubevpn/internal/api"
)

const patchDirect = "patch services kubevpn/kubevpn-traffic-manager-direct"

func TestExposeChangesOnlyOnRequest(t *testing.T) {
	exposed := func() []runtime.Object {
		return append(installed("kubevpn", image), directObjects(Options{Expose: ExposeLoadBalancer})...)
	}
	for _, tt := range []struct {
		name, expose, deny string
		objects            []runtime.Object
		changes            []string
		says, err          string
	}{
		{name: "not asked", objects: exposed()},
		{name: "node port", expose: ExposeNodePort, objects: installed("kubevpn", image), changes: []string{patchDirect},
			says: "The Service kubevpn/kubevpn-traffic-manager-direct exposes it: "},
		{name: "load balancer", expose: ExposeLoadBalancer, objects: installed("kubevpn", image), changes: []string{patchDirect},
			says: "exposes it: a load balancer that has no address yet."},
		{name: "change", expose: ExposeNodePort, objects: exposed(), changes: []string{patchDirect}, says: "exposes it"},
		{name: "none", expose: ExposeNone, objects: exposed(), changes: []string{"delete services kubevpn/kubevpn-traffic-manager-direct"},
			says: "The Service kubevpn/kubevpn-traffic-manager-direct has been removed."},
		{name: "none, and there is none", expose: ExposeNone, objects: installed("kubevpn", image), changes: []string{"delete services kubevpn/kubevpn-traffic-manager-direct"}},
		{name: "new manager", expose: ExposeNodePort, objects: []runtime.Object{inNamespace("kubevpn", ready)}, changes: append(everything[:len(everything):len(everything)], patchDirect), says: "exposes it"},
		{name: "not allowed", expose: ExposeNodePort, deny: "create:services@kubevpn", objects: installed("kubevpn", image),
			err: "you may not expose the traffic manager in the namespace kubevpn: this requires the right to create services in namespace kubevpn"},
		{name: "unknown", expose: "ingress", err: `--expose: "ingress" is invalid: must be one of nodeport, loadbalancer, none`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(tt.deny, "", tt.objects...)
			e := &ensurer{kube: w, o: Options{Image: image, Expose: tt.expose}, timeout: 10 * time.Second}
			err := e.run(t.Context())
			if tt.err != "" {
				if err == nil || err.Error() != tt.err {
					t.Errorf("got %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.changes, w.changes); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			if says := e.result.Exposed; !strings.Contains(says, tt.says) || tt.says == "" && says != "" {
				t.Errorf("says %q, want %q", says, tt.says)
			}
		})
	}
}

func TestExposeIsUpToHelmInARelease(t *testing.T) {
	objects := installed("kubevpn", image)
	for _, o := range objects {
		m := o.(metav1.Object)
		m.SetLabels(map[string]string{labelManagedBy: "Helm", labelName: "kubevpn", labelComponent: "traffic-manager"})
		m.SetAnnotations(map[string]string{"meta.helm.sh/release-name": "vpn"})
	}
	w := newWorld("", "", objects...)
	e := &ensurer{kube: w, o: Options{Image: image, Expose: ExposeNodePort}, timeout: 10 * time.Second}
	err := e.run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "belongs to the Helm release vpn") || len(w.changes) > 0 {
		t.Errorf("%v, %v", err, w.changes)
	}
}

func TestDescribeExposed(t *testing.T) {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "kubevpn", Name: directName}}
	s.Spec.Type = corev1.ServiceTypeLoadBalancer
	s.Spec.Ports = []corev1.ServicePort{{NodePort: 31000}}
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.9"}, {Hostname: "lb.example"}}
	want := "The Service kubevpn/kubevpn-traffic-manager-direct exposes it: node port 31000, load balancer 203.0.113.9, load balancer lb.example."
	if got := describeExposed(s); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestManifestHasTheServiceOnRequest(t *testing.T) {
	for expose, want := range map[string]string{"": "", ExposeNone: "", ExposeNodePort: "type: NodePort", ExposeLoadBalancer: "type: LoadBalancer"} {
		text, err := Manifest(Options{Image: image, Expose: expose})
		if err != nil {
			t.Fatal(err)
		}
		if has := strings.Contains(string(text), "kind: Service\n"); has != (want != "") || !strings.Contains(string(text), want) {
			t.Errorf("%q: %s", expose, text)
		}
	}
}

func TestExposeRangesAreThoseOfTheLoadBalancer(t *testing.T) {
	text, err := Manifest(Options{Image: "x", Expose: ExposeLoadBalancer, ExposeRanges: []string{"203.0.113.0/24", "2001:db8::/32"}})
	if err != nil || !strings.Contains(string(text), "loadBalancerSourceRanges:\n  - 203.0.113.0/24\n  - 2001:db8::/32\n") {
		t.Errorf("%v\n%s", err, text)
	}
	for expose, ranges := range map[string]string{
		ExposeLoadBalancer: "203.0.113.7/24", ExposeNodePort: "203.0.113.0/24", ExposeNone: "203.0.113.0/24", "": "203.0.113.0/24",
	} {
		if _, err := Manifest(Options{Image: "x", Expose: expose, ExposeRanges: []string{ranges}}); api.AsError(err).Code != api.ExitUsage {
			t.Errorf("%q with %s: %v", expose, ranges, err)
		}
	}
}
