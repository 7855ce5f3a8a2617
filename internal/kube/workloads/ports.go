package workloads

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"kubevpn/internal/api"
)

// defaultContainer is kubectl's annotation for a pod's default container.
const defaultContainer = "kubectl.kubernetes.io/default-container"

// TargetPorts is the annotation of a Service that internal/laptop/intercept redirects to agents. It contains the
// original target ports: {"tcp/80": {"from": 8080, "to": "http"}}.
const TargetPorts = "kubevpn.dev/target-ports"

// Port is a port of a workload's pods: one that a container declares, or a Service sends to.
type Port struct {
	Protocol  string // "tcp" or "udp"
	Port      uint16
	Name      string        // of the container's port, or ""
	Container string        // declares it; "" if none does
	Services  []ServicePort // send to it
}

// ServicePort is a port of a Service.
type ServicePort struct {
	Service string
	Port    int32
	Name    string // of the Service's port, or ""
	Target  string // its targetPort, if that is a name
}

// Ports returns the TCP and UDP ports of the workload's pods, sorted by number. It resolves the names of target ports.
// For a Service that is redirected to agents, it returns the original target ports.
func (w *Workload) Ports() []Port {
	type key struct {
		protocol corev1.Protocol
		port     int32
	}
	found := make(map[key]*Port)
	at := func(protocol corev1.Protocol, port int32) *Port {
		protocol = cmp.Or(protocol, corev1.ProtocolTCP)
		if protocol != corev1.ProtocolTCP && protocol != corev1.ProtocolUDP || port < 1 || port > 65535 {
			return nil
		}
		k := key{protocol, port}
		if found[k] == nil {
			found[k] = &Port{Protocol: strings.ToLower(string(protocol)), Port: uint16(port)}
		}
		return found[k]
	}
	for _, c := range serving(w.Template.Spec) {
		for _, declared := range c.Ports {
			if p := at(declared.Protocol, declared.ContainerPort); p != nil && p.Container == "" {
				p.Container, p.Name = c.Name, declared.Name
			}
		}
	}
	for _, s := range w.Services {
		were := targetsBefore(s)
		for _, sp := range s.Spec.Ports {
			target, ok := targetPort(w.Template.Spec, were(sp))
			if !ok {
				continue
			}
			if p := at(sp.Protocol, target); p != nil {
				p.Services = append(p.Services, ServicePort{s.Name, sp.Port, sp.Name, sp.TargetPort.StrVal})
			}
		}
	}
	var ports []Port
	for _, p := range found {
		ports = append(ports, *p)
	}
	slices.SortFunc(ports, func(a, b Port) int {
		return cmp.Or(cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol))
	})
	return ports
}

// PortsOf returns the Ports that the container declares, and those that no container declares.
func (w *Workload) PortsOf(container string) []Port {
	return slices.DeleteFunc(w.Ports(), func(p Port) bool { return p.Container != "" && p.Container != container })
}

// Shared reports whether more than one container runs as long as the pod.
func Shared(spec corev1.PodSpec) bool { return len(serving(spec)) > 1 }

// serving returns the containers that run as long as their pod, without agents.
func serving(spec corev1.PodSpec) []corev1.Container {
	var all []corev1.Container
	for _, c := range spec.Containers {
		if !api.IsAgent(c.Name) {
			all = append(all, c)
		}
	}
	for _, c := range spec.InitContainers {
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways &&
			!api.IsAgent(c.Name) {
			all = append(all, c)
		}
	}
	return all
}

// targetsBefore returns a function that returns a port of the Service as it was before the redirect to agents. It does
// not change a port that somebody has changed since. It ignores an invalid annotation.
func targetsBefore(s corev1.Service) func(corev1.ServicePort) corev1.ServicePort {
	var moved map[string]struct {
		From *intstr.IntOrString `json:"from"` // nil: there was none
		To   string              `json:"to"`
	}
	if err := json.Unmarshal([]byte(s.Annotations[TargetPorts]), &moved); err != nil {
		moved = nil
	}
	return func(sp corev1.ServicePort) corev1.ServicePort {
		key := fmt.Sprintf("%s/%d", strings.ToLower(string(cmp.Or(sp.Protocol, corev1.ProtocolTCP))), sp.Port)
		if m, found := moved[key]; found && sp.TargetPort.String() == m.To {
			sp.TargetPort = *cmp.Or(m.From, &intstr.IntOrString{})
		}
		return sp
	}
}

// targetPort resolves the target port of a Service as the control plane does: a name stands for the first container
// port with that name and protocol.
func targetPort(spec corev1.PodSpec, sp corev1.ServicePort) (int32, bool) {
	if sp.TargetPort.Type == intstr.Int {
		return cmp.Or(sp.TargetPort.IntVal, sp.Port), true
	}
	for _, c := range serving(spec) {
		for _, p := range c.Ports {
			if p.Name == sp.TargetPort.StrVal &&
				cmp.Or(p.Protocol, corev1.ProtocolTCP) == cmp.Or(sp.Protocol, corev1.ProtocolTCP) {
				return p.ContainerPort, true
			}
		}
	}
	return 0, false
}

// Container returns the container with the name. If name is empty, it returns the one that the pods' annotation for
// kubectl names; else the only one; else the first that declares one of ports or, without ports, the only one that
// declares a port to which a Service sends. The error lists the candidates.
func (w *Workload) Container(name string, ports ...uint16) (*corev1.Container, error) {
	all := serving(w.Template.Spec)
	named := func(name string) *corev1.Container {
		return api.Find(all, func(c corev1.Container) bool { return c.Name == name })
	}
	if len(all) == 0 {
		return nil, api.Errorf(api.ExitWorkload, "cannot find the containers of %s: it has no pod", w).
			WithHint("Try again when it has one, or name the Deployment, StatefulSet or DaemonSet that creates its " +
				"pods.")
	}
	if name != "" {
		if c := named(name); c != nil {
			return c, nil
		}
		return nil, api.Errorf(api.ExitWorkload, "the pods of %s have no container %s that keeps running", w, name).
			WithHint("They have %s.", listed(all))
	}
	if c := named(w.Template.Annotations[defaultContainer]); c != nil {
		return c, nil
	}
	var main []string // without native sidecars, which are init containers
	for _, c := range w.Template.Spec.Containers {
		if named(c.Name) != nil {
			main = append(main, c.Name)
		}
	}
	if len(main) == 1 {
		return named(main[0]), nil
	}
	var declaring []string
	for _, p := range w.Ports() {
		wanted := slices.Contains(ports, p.Port) || len(ports) == 0 && len(p.Services) > 0
		if wanted && slices.Contains(main, p.Container) && !slices.Contains(declaring, p.Container) {
			declaring = append(declaring, p.Container)
		}
	}
	if len(ports) == 0 && len(declaring) > 1 {
		declaring = nil
	}
	slices.SortFunc(declaring, func(a, b string) int { return slices.Index(main, a) - slices.Index(main, b) })
	if len(declaring) > 0 {
		return named(declaring[0]), nil
	}
	return nil, api.Errorf(api.ExitWorkload, "the pods of %s have several containers: %s", w, listed(all)).
		WithHint("Name it: -c %s", all[0].Name)
}

// listed returns for example "app (8080, 9090/udp), proxy".
func listed(containers []corev1.Container) string {
	port := func(p corev1.ContainerPort) string {
		if p.Protocol == "" || p.Protocol == corev1.ProtocolTCP {
			return fmt.Sprint(p.ContainerPort)
		}
		return fmt.Sprintf("%d/%s", p.ContainerPort, strings.ToLower(string(p.Protocol)))
	}
	return strings.Join(api.Texts(containers, func(c corev1.Container) string {
		if len(c.Ports) == 0 {
			return c.Name
		}
		return c.Name + " (" + strings.Join(api.Texts(c.Ports, port), ", ") + ")"
	}), ", ")
}
