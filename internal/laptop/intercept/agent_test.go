package intercept

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
)

func TestParseInfoRejectsOtherLines(t *testing.T) {
	for line, want := range map[string]bool{
		`{"protocol":2,"version":"1","port":40001,"key":"abc"}`:       true,
		`{"protocol":0,"error":{"code":61,"message":"no nf_tables"}}`: true,
		`{"time":"2026-01-01","level":"INFO","msg":"key"}`:            false, // a log line of the agent
		`{"protocol":2,"port":40001}`:                                 false,
		`level=INFO msg="{"`:                                          false,
		`{"protocol":2,"key":"abc","port":70000}`:                     false,
		``: false,
	} {
		if _, ok := parseInfo(line); ok != want {
			t.Errorf("%s: %v", line, ok)
		}
	}
}

func TestSidecarOfFindsTheOwnersAgent(t *testing.T) {
	container := func(name, hash string) corev1.Container {
		return corev1.Container{Name: name, Env: []corev1.EnvVar{{Name: api.AgentOwnerVariable, Value: hash}}}
	}
	p := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{container("app", "me"), container("kubevpn-agent-2", "you"), container("kubevpn-agent-1", "me")}}}
	if got := sidecarOf(p, "me"); got != "kubevpn-agent-1" {
		t.Errorf("got %q", got)
	}
	if got := sidecarOf(p, "nobody"); got != "" {
		t.Errorf("got %q", got)
	}
}

func TestChoosePortsFollowsPortmap(t *testing.T) {
	w := &workloads.Workload{
		Name: "web",
		Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{
			{Name: "app", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}, {Name: "metrics", ContainerPort: 9090}}},
			{Name: "db", Ports: []corev1.ContainerPort{{ContainerPort: 5432}}},
			{Name: "silent"},
		}}},
		Services: []corev1.Service{{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromString("http")}}}}},
	}
	alone := &workloads.Workload{Name: "job", Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "silent"}}}}}
	for _, tt := range []struct {
		name      string
		w         *workloads.Workload
		container string
		asked     []api.PortMap
		want      string // or the error
	}{
		{"all", w, "app", nil, "app: tcp 8080, tcp 9090"},
		{"container_of_a_service", w, "", nil, "app: tcp 8080, tcp 9090"},
		{"by_port", w, "", []api.PortMap{{Container: 5432, Local: 15432}}, "db: tcp 5432 to 15432"},
		{"by_name", w, "", []api.PortMap{{Name: "metrics"}}, "app: tcp 9090"},
		{"undeclared", w, "silent", []api.PortMap{{Protocol: "udp", Container: 53}}, "silent: udp 53"},
		{"unknown_name", w, "", []api.PortMap{{Name: "grpc"}}, `the pods of /web declare no TCP port "grpc"; They declare http, metrics.`},
		{"none", alone, "", nil, "the container silent of /job declares no port, and no Service sends to one; Name the port that it listens on: --port 8080"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ports, container, err := choosePorts(tt.w, api.InterceptSpec{Container: tt.container, Ports: tt.asked})
			got := container + ": " + portsText(ports)
			if e := api.AsError(err); e != nil {
				got = e.Message + "; " + e.Hint
			}
			if got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}
