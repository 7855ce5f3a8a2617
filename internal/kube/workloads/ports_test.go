package workloads

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"kubevpn/internal/api"
)

// While a workload has a sidecar, the target port of a Service may be a name that only agents have. Ports returns the
// application's port.
func TestPortsBehindASidecarAreTheApplications(t *testing.T) {
	for _, tt := range []struct {
		name, annotation, target string
		want                     []ServicePort // that send to port 8080
	}{
		{"number", `{"tcp/80":{"from":8080,"to":"kubevpn-t8080"}}`, "kubevpn-t8080", []ServicePort{{"web", 80, "plain", "kubevpn-t8080"}}},
		{"name", `{"tcp/80":{"from":"http","to":"kubevpn-t8080"}}`, "kubevpn-t8080", []ServicePort{{"web", 80, "plain", "kubevpn-t8080"}}},
		{"another_port", `{"tcp/81":{"from":8080,"to":"kubevpn-t8080"}}`, "kubevpn-t8080", nil},
		{"changed_since", `{"tcp/80":{"from":9090,"to":"kubevpn-t9090"}}`, "http", []ServicePort{{"web", 80, "plain", "http"}}},
		{"not_understood", `{"tcp/80":`, "http", []ServicePort{{"web", 80, "plain", "http"}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := &Workload{Services: []corev1.Service{{
				ObjectMeta: metav1.ObjectMeta{Name: "web", Annotations: map[string]string{"kubevpn.dev/target-ports": tt.annotation}},
				Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "plain", Port: 80, TargetPort: intstr.FromString(tt.target)}}},
			}}}
			w.Template.Spec.Containers = []corev1.Container{
				{Name: api.AgentPrefix + "1", Ports: []corev1.ContainerPort{{Name: "kubevpn-t8080", ContainerPort: 18080}}},
				{Name: "app", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}},
			}
			want := []Port{{Protocol: "tcp", Port: 8080, Name: "http", Container: "app", Services: tt.want}}
			if d := cmp.Diff(want, w.Ports()); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
		})
	}
	// The Service had no target port, which means its own port.
	w := &Workload{Services: []corev1.Service{{
		ObjectMeta: metav1.ObjectMeta{Name: "dns", Annotations: map[string]string{"kubevpn.dev/target-ports": `{"udp/53":{"from":null,"to":"kubevpn-u53"}}`}},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolUDP, Port: 53, TargetPort: intstr.FromString("kubevpn-u53")}}},
	}}}
	if d := cmp.Diff([]Port{{Protocol: "udp", Port: 53, Services: []ServicePort{{"dns", 53, "", "kubevpn-u53"}}}}, w.Ports()); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}
