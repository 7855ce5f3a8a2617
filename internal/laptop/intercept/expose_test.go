package intercept

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
)

// The Service leads to the agent's ports, and the workload's ports are those that an application would have.
func TestExposedServiceLeadsToTheAgent(t *testing.T) {
	ports := []api.PortMap{
		{Protocol: "tcp", Container: 80, Local: 3000}, {Protocol: "tcp", Container: 10080, Local: 3001},
		{Protocol: "udp", Container: 80, Local: 5353}, {Protocol: "tcp", Container: 9999, Local: 3002},
	}
	e, err := Expose(ports, workloads.Agent{Image: "kubevpn:1", Owner: "hash", OwnerName: "ann@laptop"})
	if err != nil {
		t.Fatal(err)
	}
	pod := e.Template.Spec
	if len(pod.Containers) != 1 || !api.IsAgent(pod.Containers[0].Name) || *pod.AutomountServiceAccountToken {
		t.Fatalf("%+v", pod)
	}
	c := pod.Containers[0]
	if !*c.SecurityContext.RunAsNonRoot || len(c.Resources.Limits) == 0 || c.Image != "kubevpn:1" {
		t.Errorf("%+v", c)
	}
	ready := c.ReadinessProbe.HTTPGet.Port.IntVal
	if n := slices.Index(c.Args, "--ready"); n < 0 || c.Args[n+1] != fmt.Sprint(ready) {
		t.Errorf("%q, and the probe asks %d", c.Args, ready)
	}
	used := map[string]bool{fmt.Sprint("tcp/", ready): true}
	for n, p := range e.ports {
		at := fmt.Sprintf("%s/%d", p.Protocol, p.Listen)
		if p.Protocol != ports[n].Protocol || p.Port != ports[n].Container || p.Listen < 1024 || p.Listen == p.Port || used[at] {
			t.Errorf("%+v for %+v", p, ports[n])
		}
		used[at] = true
		if !slices.Contains(c.Args, fmt.Sprintf("%s/%d:%d", p.Protocol, p.Port, p.Listen)) {
			t.Errorf("%q has no %+v", c.Args, p)
		}
		to := e.Ports[n].TargetPort.StrVal
		if !slices.ContainsFunc(c.Ports, func(p2 corev1.ContainerPort) bool {
			return p2.Name == to && p2.ContainerPort == int32(p.Listen) && strings.EqualFold(string(p2.Protocol), p.Protocol)
		}) {
			t.Errorf("%+v has no port %s", c.Ports, to)
		}
	}
	w := workloads.Workload{Template: e.Template, Services: []corev1.Service{{
		ObjectMeta: metav1.ObjectMeta{Name: "hook", Annotations: e.Annotations}, Spec: corev1.ServiceSpec{Ports: e.Ports}}}}
	for _, p := range ports {
		if found := portOf(w.Ports(), p); found == nil || len(found.Services) != 1 || found.Services[0].Port != int32(p.Container) {
			t.Errorf("%+v: %+v", p, found)
		}
	}
}
