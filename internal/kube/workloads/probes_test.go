package workloads

import (
	"net/http"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"kubevpn/pkg/protocol/httpmatch"
)

func TestAgentKnowsThePodsProbes(t *testing.T) {
	get := func(scheme corev1.URIScheme, port intstr.IntOrString, path string, headers ...string) *corev1.Probe {
		a := &corev1.HTTPGetAction{Scheme: scheme, Port: port, Path: path}
		for n := 0; n < len(headers); n += 2 {
			a.HTTPHeaders = append(a.HTTPHeaders, corev1.HTTPHeader{Name: headers[n], Value: headers[n+1]})
		}
		return &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: a}}
	}
	connect := func(port intstr.IntOrString) *corev1.Probe {
		return &corev1.Probe{ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: port}}}
	}
	exec := &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}}
	ports := func(name string, number int32) []corev1.ContainerPort {
		return []corev1.ContainerPort{{Name: name, ContainerPort: number}}
	}
	pod, untold := describe(corev1.PodSpec{
		InitContainers: []corev1.Container{{Name: "setup", ReadinessProbe: exec}, {Name: "native", RestartPolicy: new(corev1.ContainerRestartPolicyAlways), Ports: ports("http", 15000),
			StartupProbe: connect(intstr.FromString("http")), LivenessProbe: exec}},
		Containers: []corev1.Container{{Name: "app", Ports: ports("http", 8080), StartupProbe: exec,
			LivenessProbe:  get("HTTP", intstr.FromString("http"), "healthz?deep=1", "host", "shop", "user-agent", " hc ", "x-a", "1", "X-A", "2"),
			ReadinessProbe: get("HTTPS", intstr.FromInt32(8443), "/")},
			{Name: "other", StartupProbe: get("HTTP", intstr.FromInt32(80), "/", "X-A", "1"), ReadinessProbe: connect(intstr.FromString("nosuch")),
				LivenessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: 9090}}}}},
	}, "app")
	want := []httpmatch.Check{
		{Scheme: "http", Port: 8080, URI: "/healthz?deep=1", Header: http.Header{"User-Agent": {"hc"}, "X-A": {"1", "2"}}},
		{Scheme: "https", Port: 8443, URI: "/", Header: http.Header{}},
		{Scheme: "connect"},
		{Scheme: "connect", Port: 15000},
	}
	if diff := cmp.Diff(want, pod.Checks); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if diff := cmp.Diff([]string{"the startupProbe of container app", "the livenessProbe of container native"}, untold); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

func TestProbesByCommandAreToldByTheirUser(t *testing.T) {
	exec := &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}}
	container := func(name string, user *int64, p *corev1.Probe) corev1.Container {
		return corev1.Container{Name: name, LivenessProbe: p, SecurityContext: &corev1.SecurityContext{RunAsUser: user}}
	}
	const app = "the livenessProbe of container app"
	for _, tt := range []struct {
		name   string
		of     *int64 // of the pod
		all    []corev1.Container
		users  []uint32
		untold []string
	}{
		{"one container", nil, []corev1.Container{container("app", nil, exec)}, nil, nil},
		{"users of their own", nil, []corev1.Container{container("front", new(int64(1337)), nil), container("app", new(int64(0)), exec)}, []uint32{0}, nil},
		{"the pod's user", new(int64(7)), []corev1.Container{container("front", new(int64(1337)), nil), container("app", nil, exec)}, []uint32{7}, nil},
		{"another container", nil, []corev1.Container{container("front", new(int64(1337)), exec), container("app", new(int64(7)), nil)}, nil, []string{"the livenessProbe of container front"}},
		{"one user", new(int64(7)), []corev1.Container{container("front", nil, nil), container("app", nil, exec)}, nil, []string{app}},
		{"a user of the image", nil, []corev1.Container{container("front", new(int64(1337)), nil), container("app", nil, exec)}, nil, []string{app}},
		{"another user of the image", nil, []corev1.Container{container("front", nil, nil), container("app", new(int64(7)), exec)}, nil, []string{app}},
	} {
		pod, untold := describe(corev1.PodSpec{SecurityContext: &corev1.PodSecurityContext{RunAsUser: tt.of}, Containers: tt.all}, "app")
		if diff := cmp.Diff(tt.users, pod.Users) + cmp.Diff(tt.untold, untold); diff != "" || pod.Within != (len(tt.all) > 1) {
			t.Errorf("%s: within %v, -want +got\n%s", tt.name, pod.Within, diff)
		}
	}
}
