package intercept

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
)

// A pod without an application has the agent alone, as a sidecar: it receives the requests of a Service for this
// laptop, and its readiness is that of the laptop's program.
//
//	Service hook 80 ── targetPort kubevpn-t80 ──▶ kubevpn-agent-1  --listen tcp/80:10080  --ready 9999
//	                                                  └═▶ the laptop, port 3000
const exposingAgent = api.AgentPrefix + "1"

// Exposed is a pod without an application, and how a Service leads to it.
type Exposed struct {
	Template corev1.PodTemplateSpec
	Ports    []corev1.ServicePort
	// Annotations of the Service name the ports that the application would have, as those of a Service that leads to
	// the sidecars of a workload do.
	Annotations map[string]string

	ports []api.AgentPort
}

// silentPort returns a port on which no program of this machine accepts connections, or nil.
func (i *Intercept) silentPort(ctx context.Context) *api.PortMap {
	for n := range i.ports {
		p := &i.ports[n]
		if p.Protocol != "tcp" {
			continue
		}
		conn, err := i.server.dialTCP(ctx, nil, addressesOf(*p))
		if err != nil {
			return p
		}
		conn.Close()
	}
	return nil
}

// Expose returns the pod for ports, which the Service has as well. Each port has a number.
func Expose(ports []api.PortMap, a workloads.Agent) (Exposed, error) {
	c := sidecarContainer(a, exposingAgent, sidecarUser(corev1.PodSpec{}, a.Owner))
	c.Resources.Limits = sidecarLimits(corev1.PodSpec{})
	delete(c.Resources.Limits, corev1.ResourceEphemeralStorage) // which nodes may not have
	workloads.SetResources(&c, a.Objects)
	taken := map[uint16]bool{}
	for _, p := range ports {
		taken[p.Container] = true
	}
	var e Exposed
	before := map[string]map[string]any{}
	for _, p := range ports {
		protocol := corev1.Protocol(strings.ToUpper(p.Protocol))
		name, listen := sidecarPort(corev1.PodSpec{}, c, workloads.Port{Protocol: p.Protocol, Port: p.Container}, taken)
		taken[listen] = true
		c.Ports = append(c.Ports, corev1.ContainerPort{Name: name, ContainerPort: int32(listen), Protocol: protocol})
		c.Args = append(c.Args, "--listen", fmt.Sprintf("%s/%d:%d", p.Protocol, p.Container, listen))
		e.ports = append(e.ports, api.AgentPort{Protocol: p.Protocol, Port: p.Container, Listen: listen})
		e.Ports = append(e.Ports, corev1.ServicePort{ // the name must not tell meshes a protocol: they find it out
			Name: fmt.Sprintf("port-%d-%s", p.Container, p.Protocol), Protocol: protocol, Port: int32(p.Container),
			TargetPort: intstr.FromString(name)})
		before[fmt.Sprintf("%s/%d", p.Protocol, p.Container)] = map[string]any{"from": p.Container, "to": name}
	}
	ready := uint16(9999)
	for taken[ready] {
		ready--
	}
	c.Args = append(c.Args, "--ready", fmt.Sprint(ready))
	c.ReadinessProbe = &corev1.Probe{PeriodSeconds: 1, FailureThreshold: 2, TimeoutSeconds: 2}
	c.ReadinessProbe.HTTPGet = &corev1.HTTPGetAction{Path: "/", Port: intstr.FromInt32(int32(ready))}
	text, err := json.Marshal(before)
	if err != nil {
		return e, fmt.Errorf("writing the ports of the Service: %w", err)
	}
	e.Annotations = map[string]string{workloads.TargetPorts: string(text)}
	e.Template.Spec = corev1.PodSpec{
		Containers: []corev1.Container{c}, RestartPolicy: corev1.RestartPolicyOnFailure,
		AutomountServiceAccountToken: new(false), EnableServiceLinks: new(false),
		TerminationGracePeriodSeconds: new(int64(10)),
	}
	return e, nil
}
