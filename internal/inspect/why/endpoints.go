package why

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/podstatus"
)

// endpoint is an address and port behind a Service.
type endpoint struct {
	to      netip.AddrPort
	pod     *corev1.Pod // nil: unknown
	name    string      // of the pod; empty: none
	node    string
	ready   bool
	serving bool // ready, were it not terminating
}

// String is "pod web-1 (10.244.1.7:8080)".
func (e endpoint) String() string {
	if e.name == "" {
		return e.to.String()
	}
	return fmt.Sprintf("pod %s (%v)", e.name, e.to)
}

// servicePort returns the TCP port of the Service with that number, or nil.
func servicePort(s *corev1.Service, number uint16) *corev1.ServicePort {
	return api.Find(s.Spec.Ports, func(p corev1.ServicePort) bool {
		return isTCP(p.Protocol) && p.Port == int32(number)
	})
}

func isTCP(p corev1.Protocol) bool { return p == corev1.ProtocolTCP || p == "" }

func isHeadless(s *corev1.Service) bool { return s.Spec.ClusterIP == corev1.ClusterIPNone }

// describePorts returns text like "80 (http), 53/UDP".
func describePorts(s *corev1.Service) string {
	var ports []corev1.ContainerPort
	for _, p := range s.Spec.Ports {
		ports = append(ports, corev1.ContainerPort{Name: p.Name, ContainerPort: p.Port, Protocol: p.Protocol})
	}
	return listPorts(ports)
}

func listPorts(ports []corev1.ContainerPort) string {
	texts := api.Texts(ports, func(p corev1.ContainerPort) string {
		text := fmt.Sprint(p.ContainerPort)
		if !isTCP(p.Protocol) {
			text += "/" + string(p.Protocol)
		}
		if p.Name != "" {
			text += " (" + p.Name + ")"
		}
		return text
	})
	return cmp.Or(strings.Join(texts, ", "), "none")
}

// endpoints returns the endpoints of the port of the Service, sorted by address. The port of a headless Service is the
// pod's own.
func (f *facts) endpoints() (all []endpoint) {
	if f.Service == nil {
		return f.endpointOfPod()
	}
	port := cmp.Or(servicePort(f.Service, f.Port), new(corev1.ServicePort))
	for _, s := range f.Slices {
		to := api.Find(s.Ports, func(p discoveryv1.EndpointPort) bool {
			return port.Port > 0 && p.Port != nil && ptr.Deref(p.Name, "") == port.Name
		})
		if isHeadless(f.Service) {
			to = &discoveryv1.EndpointPort{Port: ptr.To(int32(f.Port))}
		}
		if to != nil {
			for _, e := range s.Endpoints {
				all = append(all, f.endpoint(e, uint16(*to.Port))...)
			}
		}
	}
	slices.SortFunc(all, func(a, b endpoint) int { return a.to.Compare(b.to) })
	return slices.CompactFunc(all, func(a, b endpoint) bool { return a.to == b.to })
}

// endpoint returns the endpoints of a slice's entry with a port.
func (f *facts) endpoint(from discoveryv1.Endpoint, port uint16) (all []endpoint) {
	c := from.Conditions
	e := endpoint{node: ptr.Deref(from.NodeName, ""), ready: ptr.Deref(c.Ready, true)}
	e.serving = ptr.Deref(c.Serving, e.ready)
	if ref := from.TargetRef; ref != nil && ref.Kind == "Pod" {
		e.name = ref.Name
		e.pod = api.Find(f.Pods, func(p corev1.Pod) bool { return p.Name == ref.Name })
	}
	for _, address := range from.Addresses {
		if ip, err := netip.ParseAddr(address); err == nil {
			e.to = netip.AddrPortFrom(ip.Unmap(), port)
			all = append(all, e)
		}
	}
	return all
}

// endpointOfPod returns the endpoint of a request to the address of a pod.
func (f *facts) endpointOfPod() []endpoint {
	to := f.Trip.To
	for n := range f.Pods {
		p := &f.Pods[n]
		if slices.ContainsFunc(p.Status.PodIPs, func(ip corev1.PodIP) bool { return ip.IP == to.Addr().String() }) {
			ready := isReady(*p)
			return []endpoint{{to: to, pod: p, name: p.Name, node: p.Spec.NodeName, ready: ready, serving: ready}}
		}
	}
	return nil
}

// unready returns why a pod is not ready.
func unready(p *corev1.Pod) string {
	if p.DeletionTimestamp != nil {
		return "it is terminating"
	}
	for _, c := range p.Spec.Containers {
		if s := podstatus.Of(p, c.Name); s.Text != "" {
			return fmt.Sprintf("container %s: %s", c.Name, s.Text)
		}
	}
	for _, c := range p.Status.ContainerStatuses {
		if c.State.Running != nil && !c.Ready {
			return fmt.Sprintf("container %s runs, and its readiness probe fails", c.Name)
		}
	}
	ready := api.Find(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady })
	c := cmp.Or(ready, new(corev1.PodCondition))
	return cmp.Or(c.Message, c.Reason, "it is not Ready")
}

// declared returns the TCP ports that the containers of a pod declare.
func declared(p *corev1.Pod) (ports []corev1.ContainerPort) {
	if p == nil {
		return nil
	}
	for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
		ports = append(ports, c.Ports...)
	}
	return slices.DeleteFunc(ports, func(p corev1.ContainerPort) bool { return !isTCP(p.Protocol) })
}
