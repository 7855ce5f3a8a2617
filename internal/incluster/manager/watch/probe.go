package watch

import (
	"net/netip"
	"slices"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/access"
	"kubevpn/pkg/datapath/balancer"
)

// probes chooses the addresses with which a laptop checks that the tunnel works: a ClusterIP and a pod that should
// accept a TCP connection. It prefers cluster DNS, which every cluster has and which a connection does not disturb. The
// choice depends only on the cluster's state. With a policy there is none: laptops check cluster DNS. Call with the
// cluster's mutex held.
func (p *Publisher) probes(state *api.ManagerState) {
	if p.cfg.Policy != nil {
		return
	}
	// The pod's environment names this Service, even if the manager may not watch Services.
	if _, known := p.cfg.Balancer.Service(p.Self.APIServer.Addr()); p.Self.APIServer.IsValid() && !known {
		state.ProbeVIP, state.ProbeName = p.Self.APIServer, "kubernetes.default"
	}
	if len(p.resolving) == 0 {
		return
	}
	c := p.cluster
	dns := []balancer.Name{{Namespace: "kube-system", Name: "kube-dns"}}
	for _, server := range p.Self.DNS.Servers {
		if name, ok := p.cfg.Balancer.Service(server); ok {
			dns = append([]balancer.Name{name}, dns...)
		}
	}
	for _, name := range append(slices.Clone(dns), balancer.Name{Namespace: "default", Name: "kubernetes"}) {
		if vip, ok := p.probeVIP(name); ok {
			state.ProbeVIP, state.ProbeName = vip, name.Name+"."+name.Namespace
			break
		}
	}
	for _, name := range dns {
		if state.ProbePod = p.probePod(name); state.ProbePod.IsValid() {
			return
		}
	}
	for name := range c.slices {
		if pod := p.probePod(name); pod.IsValid() && (!state.ProbePod.IsValid() || pod.Compare(state.ProbePod) < 0) {
			state.ProbePod = pod
		}
	}
}

// probeVIP returns a ClusterIP and TCP port of a Service that has a ready endpoint. It prefers port 53, because the
// other ports of a DNS server may be anything.
func (p *Publisher) probeVIP(name balancer.Name) (netip.AddrPort, bool) {
	s := p.cluster.services[name]
	if s == nil || len(s.clusterIPs) == 0 {
		return netip.AddrPort{}, false
	}
	for _, isDNS := range []bool{true, false} {
		for _, port := range s.ports {
			if port.protocol != balancer.TCP || (port.port == access.DNSPort) != isDNS {
				continue
			}
			vip := netip.AddrPortFrom(s.clusterIPs[0], port.port)
			pick, verdict := p.cfg.Balancer.Pick(port.protocol, vip, "", balancer.Random)
			pick.Release()
			if verdict == balancer.Chosen {
				return vip, true
			}
		}
	}
	return netip.AddrPort{}, false
}

// isPod reports whether addr is in a network of pods that laptops receive.
func (p *Publisher) isPod(addr netip.Addr) bool { return p.podSet != nil && p.podSet.Contains(addr) }

// probePod returns the lowest address of a ready pod behind a TCP port of a Service. It skips the manager's own pod and
// pods on the host network.
func (p *Publisher) probePod(name balancer.Name) (lowest netip.AddrPort) {
	for _, s := range p.cluster.slices[name] {
		at := slices.IndexFunc(s.ports, func(port servicePort) bool {
			return port.protocol == balancer.TCP && port.port == access.DNSPort
		})
		if at < 0 {
			at = slices.IndexFunc(s.ports, func(port servicePort) bool { return port.protocol == balancer.TCP })
		}
		if at < 0 {
			continue
		}
		for i := range s.endpoints {
			e := &s.endpoints[i]
			if _, onHost := p.cluster.networks.nodes[e.addr]; e.pod == "" || !e.ready || onHost ||
				slices.Contains(p.Self.Addrs, e.addr) || !p.isPod(e.addr) ||
				!p.cfg.Filter.Allows(netip.AddrPortFrom(e.addr, s.ports[at].port)) {
				continue
			}
			if pod := netip.AddrPortFrom(e.addr, s.ports[at].port); !lowest.IsValid() || pod.Compare(lowest) < 0 {
				lowest = pod
			}
		}
	}
	return lowest
}
