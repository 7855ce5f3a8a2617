package session

import (
	"context"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
)

// prove tries the tunnel before it is called connected, and says what it saw. Where it was the session that chose the
// system netstack, and that does not reach everything, the other one is tried.
func (s *Session) prove(ctx context.Context) error {
	done := s.step("Checking a name, a pod, a ClusterIP and cluster DNS")
	checks, err := s.try(ctx)
	if err != nil && ctx.Err() == nil && s.Status().Netstack == api.NetstackSystem {
		checks, err = s.proveOther(ctx, checks)
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.status.Status, s.status.Error, s.status.Since = api.StatusConnected, nil, time.Now()
	s.mu.Unlock()
	var detail string
	for i, c := range checks {
		if i > 0 {
			detail += "; "
		}
		detail += c.What + " " + c.Target + ": " + c.Seen
	}
	done("%s", detail)
	return nil
}

// try runs the checks and keeps what they saw.
func (s *Session) try(ctx context.Context) ([]api.Check, error) {
	checks := s.canary(ctx, s.canaryTargets(ctx))
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status.Checks = checks
	return checks, canaryError(checks, s.applied.ResolverMode, s.state.ResolvesVIPs)
}

// proveOther tries the gvisor netstack after the system netstack has failed with checks. If that fails as well, it was
// not the netstack. Else it is the session's, unless the user wants no other than the system netstack.
func (s *Session) proveOther(ctx context.Context, checks []api.Check) ([]api.Check, error) {
	s.facts.Failed = systemFailed(checks)
	s.log.Info("the system netstack does not reach everything", "failed", s.facts.Failed)
	s.adopt(decision{Netstack: api.NetstackGVisor})
	if err := s.apply(ctx, s.Status().CIDRs); err != nil {
		return nil, err
	}
	again, err := s.try(ctx)
	if err != nil {
		return nil, err
	}
	d := choose(s.facts)
	if d.Err != nil {
		s.mu.Lock()
		s.status.Checks = checks
		s.mu.Unlock()
		return nil, d.Err
	}
	s.adopt(d)
	s.log.Warn("another netstack", "netstack", d.Netstack, "reason", d.Reason)
	s.cfg.Progress(api.Event{Time: time.Now(), Warning: "the netstack is " + d.Netstack + ": " + d.Reason})
	return again, nil
}

// canaryTargets takes what the manager proposes; where it may not look, what the user may see.
func (s *Session) canaryTargets(ctx context.Context) canaryTargets {
	s.mu.Lock()
	state, namespace := s.state, s.status.Namespace
	s.mu.Unlock()
	t := canaryTargets{Name: "kubernetes.default.svc." + state.DNSDomain, Pod: state.CanaryPod, VIP: state.CanaryVIP}
	if state.CanaryName != "" && state.CanaryVIP.IsValid() {
		t.Name, t.IP = state.CanaryName+".svc."+state.DNSDomain, []netip.Addr{state.CanaryVIP.Addr()}
	}
	if s.cfg.Network.DomainTaken(state.DNSDomain) {
		t.Taken = true
		s.warn("another connected cluster has the domain " + state.DNSDomain + " too: names that both have are resolved to the other's, " +
			"the other names of this cluster and all of its addresses are reached")
	}
	if !t.VIP.IsValid() && len(state.DNSServers) > 0 {
		t.VIP = netip.AddrPortFrom(state.DNSServers[0], 53) // cluster DNS answers over TCP (RFC 7766)
	}
	for _, a := range state.DNSServers {
		if !a.IsLinkLocalUnicast() && !a.IsLoopback() { // a node-local cache is not routed
			t.DNS = netip.AddrPortFrom(a, 53)
			break
		}
	}
	if !t.Pod.IsValid() {
		t.Pod = s.somePod(ctx, namespace)
	}
	return t
}

// somePod is a running pod with a TCP port in the namespace that is not the traffic manager's, or nothing.
func (s *Session) somePod(ctx context.Context, namespace string) netip.AddrPort {
	ctx, cancel := context.WithTimeout(ctx, canaryTimeout)
	defer cancel()
	pods, err := s.cluster.Kube().CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{
		FieldSelector: "status.phase=Running", Limit: 50,
	})
	if err != nil {
		s.log.Info("looking for a pod to try", "err", err)
		return netip.AddrPort{}
	}
	for _, p := range pods.Items {
		if p.Name == s.Status().ManagerPod || p.Spec.HostNetwork || p.DeletionTimestamp != nil {
			continue
		}
		ip, err := netip.ParseAddr(p.Status.PodIP)
		if err != nil {
			continue
		}
		for _, c := range p.Spec.Containers {
			for _, port := range c.Ports {
				if port.Protocol == corev1.ProtocolTCP || port.Protocol == "" {
					return netip.AddrPortFrom(ip, uint16(port.ContainerPort))
				}
			}
		}
	}
	return netip.AddrPort{}
}
