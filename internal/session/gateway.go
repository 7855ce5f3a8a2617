package session

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/internal/install"
)

// gatewayGrace is how long a gateway may be away that is still in its pod: it dials a manager that was restarted again by
// itself.
const gatewayGrace = 5 * time.Second

// gateways is what a session asks of the cluster for the system netstack. Errors say why, in words for a user.
type gateways interface {
	// May asks, changing nothing, whether a gateway could be added to the traffic manager's pod.
	May(ctx context.Context, o install.GatewayOptions) error
	// Add adds it, and returns when o.Ready is closed.
	Add(ctx context.Context, o install.GatewayOptions) error
}

// clusterGateways are those of a real cluster.
type clusterGateways struct{ *cluster.Cluster }

func (g clusterGateways) May(ctx context.Context, o install.GatewayOptions) error {
	return install.MayAddGateway(ctx, g.Cluster, o)
}

func (g clusterGateways) Add(ctx context.Context, o install.GatewayOptions) error {
	return install.AddGateway(ctx, g.Cluster, o)
}

// asked is the netstack of the request.
func (s *Session) asked() string { return cmp.Or(s.cfg.Request.Netstack, api.NetstackAuto) }

// chooseNetstack decides how packets travel, and has what that needs put in place.
func (s *Session) chooseNetstack(ctx context.Context, proxy func(ctx context.Context, node string) cluster.Proxy) error {
	done := s.step("Choosing the netstack")
	s.mu.Lock()
	_, node := s.greeter()
	s.mu.Unlock()
	f := facts{Asked: s.asked(), Proxy: proxy(ctx, node)}
	s.mu.Lock()
	s.status.ProxyMode = string(f.Proxy.Mode)
	s.mu.Unlock()
	if f.asksGateway() {
		f.Gateway = gatewayHad
		if err := s.obtainGateway(ctx); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			f.Gateway, f.Refusal = gatewayRefused, s.cluster.Explain(err)
		}
	}
	s.facts = f
	d := choose(f)
	if d.Err != nil {
		return d.Err
	}
	s.adopt(d)
	done("%s: %s", d.Netstack, d.Reason)
	s.warnOfGateway()
	return nil
}

// warnOfGateway says what the gateway cannot do, if it matters in this cluster.
func (s *Session) warnOfGateway() {
	s.mu.Lock()
	g, system := s.gateway, s.status.Netstack == api.NetstackSystem
	s.mu.Unlock()
	if !system || g == nil {
		return
	}
	says := ""
	if len(g.Warnings) > 0 {
		says = "; the gateway says: " + strings.Join(g.Warnings, "; ")
	}
	switch {
	case !g.IPv4:
		s.warn("IPv4 goes by the gvisor netstack" + says)
	case g.IPv6:
		s.warn(g.Warnings...)
	case s.known().hasIPv6():
		s.warn("IPv6 goes by the gvisor netstack" + says)
	default:
		s.log.Info("the gateway carries no IPv6, which this cluster has not", "says", g.Warnings)
	}
}

// adopt makes a decision the session's. Packets take the way that it says from then on; routes, addresses and the
// device's MTU are for apply.
func (s *Session) adopt(d decision) {
	s.mu.Lock()
	s.status.Netstack, s.status.NetstackReason = d.Netstack, d.Reason
	s.assess()
	s.mu.Unlock()
	s.resteer()
}

// obtainGateway returns when the traffic manager has a gateway. For who asked for the system netstack a namespace of ours
// is relabelled, if it must be; for others a gateway is added only where it is admitted as things are.
func (s *Session) obtainGateway(ctx context.Context) error {
	s.mu.Lock()
	soon := s.state.Gateway != nil // it was told of our network a moment ago
	s.mu.Unlock()
	if s.gatewayThere() || soon && s.awaitGateway(ctx, gatewayGrace) {
		return nil
	}
	s.mu.Lock()
	namespace := s.status.ManagerNamespace
	pod, _ := s.greeter()
	s.mu.Unlock()
	o := install.GatewayOptions{
		Namespace: namespace, Pod: pod,
		Relabel: s.asked() == api.NetstackSystem, Progress: s.cfg.Progress,
	}
	if !o.Relabel {
		if err := s.gateways.May(ctx, o); err != nil {
			return err
		}
	}
	waiting, cancel := context.WithCancel(ctx)
	ready := make(chan struct{})
	o.Ready = ready
	var wg sync.WaitGroup
	wg.Go(func() {
		for !s.gatewayThere() {
			select {
			case <-s.gatewayChanged:
			case <-waiting.Done():
				return
			}
		}
		close(ready)
	})
	err := s.gateways.Add(ctx, o)
	cancel()
	wg.Wait()
	return err
}

// lacksGateway reports whether packets have no way for want of a gateway; s.mu is held.
func (s *Session) lacksGateway() bool {
	return s.status.Netstack == api.NetstackSystem && !s.gatewayServes()
}

// gatewayThere reports whether the traffic manager has a gateway for us now.
func (s *Session) gatewayThere() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gatewayServes()
}

// gatewayServes reports whether the traffic manager has a gateway, which has been told of the networks of our lease. One
// that has not drops what comes from there. s.mu is held.
func (s *Session) gatewayServes() bool {
	g := s.state.Gateway
	return g != nil && !slices.ContainsFunc(s.address.Networks, func(p netip.Prefix) bool {
		forwarded := p.Addr().Is4() && g.IPv4 || p.Addr().Is6() && g.IPv6
		return forwarded && !slices.ContainsFunc(g.Addrs, p.Contains) // it has an address in each
	})
}

// greeter is the pod whose manager has greeted us last, and the node that it is on, if it knows; s.mu is held.
func (s *Session) greeter() (pod, node string) {
	if s.greeting == nil {
		return "", ""
	}
	return s.greeting.Pod, s.greeting.Node
}

// learnGateway takes what the manager says of its gateway; s.mu is held. One that has gone is remembered until there is
// another, or the session does without.
func (s *Session) learnGateway() {
	if g := s.state.Gateway; g != nil {
		s.gateway = g
		s.gatewayPod, _ = s.greeter()
	}
	select {
	case s.gatewayChanged <- struct{}{}:
	default:
	}
}

// watchGateway keeps the system netstack alive until ctx ends: where the manager's pod was replaced, the new one has no
// gateway. Who asked for the system netstack gets one there; for others the session goes on with the other netstack.
func (s *Session) watchGateway(ctx context.Context) error {
	for {
		s.mu.Lock()
		pod, _ := s.greeter()
		system, there, moved := s.status.Netstack == api.NetstackSystem, s.gatewayServes(), pod != s.gatewayPod
		s.mu.Unlock()
		if !system {
			return nil
		}
		if there {
			s.warnOfGateway()
			select {
			case <-s.gatewayChanged:
				continue
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if !moved && s.awaitGateway(ctx, gatewayGrace) {
			continue
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := s.replaceGateway(ctx); err != nil {
			return err
		}
	}
}

// awaitGateway waits until the gateway is there, or its pod is not the one that it was.
func (s *Session) awaitGateway(ctx context.Context, patience time.Duration) bool {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		select {
		case <-s.gatewayChanged:
			if s.gatewayThere() {
				return true
			}
		case <-timer.C:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// replaceGateway gets another gateway, or does without one. The error ends the session.
func (s *Session) replaceGateway(ctx context.Context) error {
	f := s.facts
	f.Gateway = gatewayRefused
	if s.asked() != api.NetstackSystem {
		f.Refusal = api.Errorf(api.ExitNetstack, "the gateway in the traffic manager's pod has gone")
		d := choose(f)
		s.adopt(d)
		s.warn("the netstack is " + d.Netstack + " from here on: " + f.Refusal.Message)
		s.poke()
		return nil
	}
	s.mu.Lock()
	pod, _ := s.greeter()
	s.mu.Unlock()
	s.log.Warn("the gateway has gone; adding another", "pod", pod)
	err := s.obtainGateway(ctx)
	if err == nil || ctx.Err() != nil {
		return ctx.Err()
	}
	if errors.Is(err, install.ErrPodGone) {
		s.log.Info("waiting for the pod that takes its place", "err", err)
		return s.await(ctx, func() bool {
			now, _ := s.greeter()
			return now != pod
		})
	}
	f.Refusal = s.cluster.Explain(err)
	return choose(f).Err
}

// mtu is the device's.
func (s *Session) mtu() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status.Netstack == api.NetstackSystem && s.gateway != nil {
		return s.gateway.MTU
	}
	return mtu
}

// systemFailed is what the checks of the system netstack say that it does not reach.
func systemFailed(checks []api.Check) string {
	var failed []string
	for _, c := range checks {
		if !c.OK {
			failed = append(failed, c.What+" "+c.Target+": "+c.Seen)
		}
	}
	return strings.Join(failed, "; ")
}
