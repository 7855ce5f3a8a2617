package intercept

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"kubevpn/internal/api"
)

// foreign adds a Service without a selector whose EndpointSlice, written by another controller, leads to a pod.
func (w *world) foreign(t *testing.T, name, ip string, port int32) {
	t.Helper()
	meta := metav1.ObjectMeta{Name: name, Namespace: "default", Labels: map[string]string{discoveryv1.LabelServiceName: name}}
	protocol, portName := corev1.ProtocolTCP, "x"
	if _, err := w.kube.DiscoveryV1().EndpointSlices("default").Create(t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta: meta, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{ip}}},
		Ports: []discoveryv1.EndpointPort{{Port: &port, Protocol: &protocol, Name: &portName}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// neighbour adds a pod of another workload, to which the Service sends as well.
func (w *world) neighbour(t *testing.T) {
	t.Helper()
	w.workload.Object.Object["spec"].(map[string]any)["selector"] = map[string]any{"matchLabels": map[string]any{"track": "stable"}}
	w.workload.Services[0].Spec.Selector = map[string]string{"app": "web"}
	if _, err := w.kube.CoreV1().Pods("default").Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "other-1", Namespace: "default", Labels: map[string]string{"app": "web"}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// A sidecar receives only what comes by the ClusterIP of a Service. The plan shows what bypasses it.
func TestSidecarNamesTheWaysThatBypassIt(t *testing.T) {
	headless := func(name string, target intstr.IntOrString) corev1.Service {
		return corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{
			ClusterIP: "None", ClusterIPs: []string{"None"}, Ports: []corev1.ServicePort{{Port: 8080, TargetPort: target}}}}
	}
	front := func(w *world) {
		w.workload.Template.Spec.Containers = append(w.workload.Template.Spec.Containers, corev1.Container{Name: "front", Ports: []corev1.ContainerPort{{Name: "web", ContainerPort: 8000}}})
	}
	for _, tt := range []struct {
		name     string
		plant    func(w *world)
		warnings string // of a success
		fails    string // else the error
	}{
		{name: "cluster_ip", plant: func(*world) {}},
		{name: "headless_beside_it", plant: func(w *world) {
			w.workload.Services = append(w.workload.Services, headless("store", intstr.FromString("http")))
		}, warnings: "^a sidecar does not receive requests by the headless Service store, whose name leads to port 8080 of the pods"},
		{name: "headless_alone", plant: func(w *world) { w.workload.Services = []corev1.Service{headless("store", intstr.FromInt32(8080))} },
			fails: "would receive no requests of deployment/web: no Service with a ClusterIP sends to tcp 8080; not by the headless Service store"},
		{name: "no_service", plant: func(w *world) { w.workload.Services = nil }, fails: "no Service with a ClusterIP sends to tcp 8080$"},
		{name: "service_of_another_container", plant: func(w *world) {
			front(w)
			w.workload.Services[0].Spec.Ports[0].TargetPort = intstr.FromString("web")
		}, fails: "no Service with a ClusterIP sends to tcp 8080; not by port 8000 of the container front, to which the Service web sends, if it calls app"},
		{name: "service_of_another_container_too", plant: func(w *world) {
			front(w)
			other := w.workload.Services[0].DeepCopy()
			other.Name, other.Spec.Ports[0].TargetPort = "front", intstr.FromInt32(8000)
			w.workload.Services = append(w.workload.Services, *other)
		}, warnings: "^a sidecar does not receive requests by port 8000 of the container front, to which the Service front sends"},
		{name: "service_of_a_native_sidecar", plant: func(w *world) {
			front(w)
			spec := &w.workload.Template.Spec
			spec.Containers[1].RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
			spec.Containers, spec.InitContainers = spec.Containers[:1], spec.Containers[1:]
			w.workload.Services[0].Spec.Ports[0].TargetPort = intstr.FromString("web")
		}, fails: "not by port 8000 of the container front, to which the Service web sends, if it calls app"},
		{name: "shared_with_a_port_of_the_name", plant: func(w *world) { w.neighbour(t) }},
		{name: "shared", plant: func(w *world) {
			w.neighbour(t)
			w.workload.Template.Spec.Containers[0].Ports[0].Name = ""
			w.workload.Services[0].Spec.Ports[0].TargetPort = intstr.FromInt32(8080)
		}, fails: "the Service web would no longer send to the pod other-1 of another workload"},
		{name: "host_port", plant: func(w *world) { w.workload.Template.Spec.Containers[0].Ports[0].HostPort = 30080 }, warnings: "hostPort 30080 of the nodes"},
		{name: "no_selector", plant: func(w *world) { w.foreign(t, "patroni", "10.244.0.1", 8080) }, warnings: "the Service patroni, whose EndpointSlices another controller writes"},
		{name: "no_selector_other_pod", plant: func(w *world) { w.foreign(t, "patroni", "10.244.9.9", 8080) }},
		{name: "no_selector_other_port", plant: func(w *world) { w.foreign(t, "patroni", "10.244.0.1", 9090) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "web-a")
				tt.plant(w)
				template := w.objects["deployments/web"].DeepCopy()
				i, _, err := begin(t, w, api.InterceptSpec{Mode: api.ModeSidecar, Container: "app", Ports: []api.PortMap{{Container: 8080}}})
				if tt.fails != "" {
					e := api.AsError(err)
					if e == nil || e.Code != api.ExitIntercept || !regexp.MustCompile(tt.fails).MatchString(e.Message) && !regexp.MustCompile(tt.fails).MatchString(e.Message+e.Hint) {
						t.Errorf("got %+v", e)
					}
					if d := cmp.Diff(template, w.objects["deployments/web"]); d != "" || len(w.list) != 1 || w.list[0].Name != "web-a" {
						t.Errorf("something has started:\n%s", d)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				s := i.Status()
				if got := strings.Join(s.Warnings, "\n"); (got != "") != (tt.warnings != "") || !regexp.MustCompile(tt.warnings).MatchString(got) {
					t.Errorf("warnings: %q", got)
				}
				if slices.ContainsFunc(s.Checks, func(c api.Check) bool { return c.What == "pod" }) {
					t.Errorf("the agent's own port is not a way of clients: %+v", s.Checks)
				}
			})
		})
	}
}

// In mode ephemeral each port and address of a pod is checked, as clients of headless Services use them.
func TestChecksCoverEachWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.addPod("web-a").Status.PodIPs = []corev1.PodIP{{IP: "10.244.0.1"}, {IP: "fd00::1"}}
		w.workload.Template.Spec.Containers[0].Ports = append(w.workload.Template.Spec.Containers[0].Ports, corev1.ContainerPort{ContainerPort: 9090})
		i, _, err := begin(t, w, api.InterceptSpec{Ports: []api.PortMap{{Container: 8080}, {Container: 9090}}})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, c := range i.Status().Checks {
			got = append(got, c.What+" "+c.Target)
		}
		slices.Sort(got)
		want := []string{"clusterIP 10.96.0.80:80", "pod 10.244.0.1:8080", "pod 10.244.0.1:9090", "pod [fd00::1]:8080", "pod [fd00::1]:9090"}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	})
}
