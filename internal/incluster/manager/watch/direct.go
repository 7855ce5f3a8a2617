package watch

import (
	"cmp"
	"net"
	"net/netip"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/balancer"
)

// This file finds the addresses at which laptops may reach the proxy port without the API server (the transport
// direct): the pod's own, and those of Services that exist.

// exposure describes how clients outside of the cluster reach a Service by TCP.
type exposure struct {
	ports   []exposedPort
	ingress []string // addresses and names of the load balancer
}

type exposedPort struct {
	name       string
	port, node uint16 // of the load balancer, and of every node; 0: none
}

// convertExposure returns nil unless s has node ports or a load balancer.
func convertExposure(s *corev1.Service) *exposure {
	if s.Spec.Type != corev1.ServiceTypeNodePort && s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return nil
	}
	e := new(exposure)
	for _, p := range s.Spec.Ports {
		if protocol, ok := convertProtocol(p.Protocol); ok && protocol == balancer.TCP {
			e.ports = append(e.ports, exposedPort{p.Name, portNumber(p.Port), portNumber(p.NodePort)})
		}
	}
	if s.Spec.Type == corev1.ServiceTypeLoadBalancer {
		e.ingress = api.Texts(s.Status.LoadBalancer.Ingress, func(at corev1.LoadBalancerIngress) string {
			return cmp.Or(at.IP, at.Hostname)
		})
	}
	return e
}

// portNumber returns n, or 0 if it is not a port.
func portNumber(n int32) uint16 {
	if n < 0 || n > 65535 {
		return 0
	}
	return uint16(n)
}

// DNS describes cluster DNS as the kubelet configures it in the pod's resolv.conf.
type DNS struct {
	Servers []netip.Addr
	Domain  string // "cluster.local"; empty when the pod does not use cluster DNS
}

// Self describes the manager's own pod.
type Self struct {
	Namespace, Node string
	Addrs           []netip.Addr
	ProxyPort       uint16         // 0: none
	APIServer       netip.AddrPort // ClusterIP and port of the API server in the pod's environment; it may be invalid
	DNS             DNS
	NoEcho          bool // ICMP echo sockets are not permitted
}

// direct returns the addresses of the proxy port of this pod: the pod's, those of its node with a node port, and those
// of load balancers. It ignores Services of other namespaces, and those that also lead to another pod, which would
// reject this pod's tickets. Call with mu held.
func (c *cluster) direct(me Self) (found []string) {
	if me.ProxyPort == 0 {
		return nil
	}
	add := func(host string, port uint16) {
		at := net.JoinHostPort(host, strconv.Itoa(int(port)))
		if host != "" && port != 0 && len(found) < api.MaxDirect && !slices.Contains(found, at) {
			found = append(found, at)
		}
	}
	for _, addr := range me.Addrs {
		add(addr.String(), me.ProxyPort)
	}
	var names []balancer.Name
	for name, s := range c.services {
		if name.Namespace == me.Namespace && s.exposed != nil {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, func(a, b balancer.Name) int { return cmp.Compare(a.Name, b.Name) })
	for _, name := range names {
		e := c.services[name].exposed
		for _, p := range e.ports {
			if !leadsTo(c.slices[name], p.name, me) {
				continue
			}
			if n := c.nodes[balancer.Name{Name: me.Node}]; n != nil {
				for _, addr := range n.addrs {
					add(addr.String(), p.node)
				}
			}
			for _, host := range e.ingress {
				add(host, p.port)
			}
		}
	}
	return found
}

// leadsTo reports whether the port of a Service leads to the manager's pod and to no other.
func leadsTo(of map[string]*endpointSlice, port string, me Self) bool {
	found := false
	for _, s := range of {
		for _, b := range s.behind(servicePort{name: port, protocol: balancer.TCP}) {
			if b.Addr.Port() != me.ProxyPort || !slices.Contains(me.Addrs, b.Addr.Addr()) {
				if b.Ready || b.Serving {
					return false
				}
				continue
			}
			found = true
		}
	}
	return found
}
