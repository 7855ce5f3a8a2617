package session

import (
	"context"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
)

// prove tries the tunnel before it is called connected, and says what it saw.
func (s *Session) prove(ctx context.Context) error {
	done := s.step("Checking a name, a pod and a ClusterIP")
	checks := runCanary(ctx, s.canaryTargets(ctx))
	if ctx.Err() != nil {
		return ctx.Err()
	}
	s.mu.Lock()
	s.status.Checks = checks
	vips, mode := s.state.ResolvesVIPs, s.applied.ResolverMode
	s.mu.Unlock()
	if err := canaryError(checks, mode, vips); err != nil {
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
