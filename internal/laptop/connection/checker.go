package connection

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
)

// checker probes the tunnel before the connection is called connected. If the system netstack does not reach
// everything, it tries gvisor.
type checker struct {
	*shared
	routes  *routes
	chooser *chooser
	probe   func(context.Context, probeTargets) []api.Check
}

// check returns nil if the probe reached everything. A pod from which flows leave need not reach everything: its
// NetworkPolicies are what the user wants to see.
func (c *checker) check(ctx context.Context) error {
	done := c.status.step("Checking a name, a pod, a ClusterIP and cluster DNS")
	checks, err := c.try(ctx)
	if err != nil && ctx.Err() == nil && c.status.netstack() == api.NetstackSystem {
		checks, err = c.tryGVisor(ctx, checks)
	}
	if err != nil && c.via != nil && ctx.Err() == nil {
		pod := c.via.Status().Pod
		c.status.warn(fmt.Sprintf("from pod %s, not all of the cluster answers, perhaps because of a NetworkPolicy: %s",
			pod, describe(failed(checks))))
		err = nil
	}
	if err != nil {
		return err
	}
	done("%s", describe(checks))
	return nil
}

// describe returns the results in one line.
func describe(checks []api.Check) string {
	results := api.Texts(checks, func(c api.Check) string { return c.What + " " + c.Target + ": " + c.Seen })
	return strings.Join(results, "; ")
}

// failed returns the checks that failed.
func failed(checks []api.Check) []api.Check {
	return slices.DeleteFunc(slices.Clone(checks), func(c api.Check) bool { return c.OK })
}

// try runs the probe and shows its results.
func (c *checker) try(ctx context.Context) ([]api.Check, error) {
	checks := c.probe(ctx, c.targets(ctx))
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	c.show(checks)
	return checks, probeError(checks, c.routes.applied.ResolverMode, c.view.Load().state.ResolvesVIPs)
}

func (c *checker) show(checks []api.Check) {
	c.status.change(func(r *report) { r.shown.Checks = checks })
}

// tryGVisor tries the gvisor netstack after checks showed that the system netstack does not reach everything. If gvisor
// fails as well, the netstack was not the cause. Otherwise the connection uses gvisor, unless the user asked for the
// system netstack.
func (c *checker) tryGVisor(ctx context.Context, checks []api.Check) ([]api.Check, error) {
	l, err := c.chooser.awaitLook(ctx)
	if err != nil {
		return nil, err
	}
	c.chooser.facts.Proxy, c.chooser.facts.Failed = l.proxy, describe(failed(checks))
	c.log.Info("the system netstack does not reach everything", "failed", c.chooser.facts.Failed)
	c.chooser.adopt(decision{Netstack: api.NetstackGVisor})
	if err := c.routes.apply(ctx, c.routes.planned); err != nil {
		return nil, err
	}
	again, err := c.try(ctx)
	if err != nil {
		return nil, err
	}
	d := choose(c.chooser.facts)
	if d.Err != nil {
		c.show(checks)
		return nil, d.Err
	}
	c.chooser.adopt(d)
	c.log.Warn("using another netstack", "netstack", d.Netstack, "reason", d.Reason)
	c.cfg.Progress(api.Event{Time: time.Now(), Warning: "the netstack is " + d.Netstack + ": " + d.Reason})
	return again, nil
}

// targets returns the targets that the manager proposes. If the manager proposes no pod, it looks for one with the
// user's rights.
func (c *checker) targets(ctx context.Context) probeTargets {
	state := c.view.Load().state
	routed := func(a netip.Addr) bool { return covers(c.routes.planned.Routes, a) }
	t := probeTargets{Name: "kubernetes.default.svc." + state.DNSDomain, VIP: state.ProbeVIP}
	if routed(state.ProbePod.Addr()) { // an answer from outside of the tunnel would prove nothing
		t.Pod = state.ProbePod
	}
	if state.ProbeName != "" && state.ProbeVIP.IsValid() {
		t.Name = state.ProbeName + ".svc." + state.DNSDomain
		t.IP = []netip.Addr{c.mappings.now().ToLocal(state.ProbeVIP.Addr())}
	}
	label := alias(&c.cfg.Request)
	labelTaken := label != "" && c.cfg.Network.DomainTaken(label)
	if c.cfg.Network.DomainTaken(state.DNSDomain) {
		t.Taken = true
		also := ""
		if label != "" && !labelTaken {
			also = "; NAME.NAMESPACE." + label + " is always of this cluster"
		}
		c.status.warn("another connected cluster has the domain " + state.DNSDomain +
			" too: that cluster answers for names that both have; " +
			"the other names of this cluster and all of its addresses work" + also)
	}
	if labelTaken {
		c.status.warn("another connection has the name " + label + ": NAME.NAMESPACE." + label +
			" is of that cluster; `connect --reconnect --name` gives this one another")
	}
	for _, a := range state.DNSServers {
		if routed(a) { // unlike a node-local cache
			t.DNS = netip.AddrPortFrom(a, 53)
			break
		}
	}
	switch { // cluster DNS answers over TCP (RFC 7766)
	case t.VIP.IsValid():
	case state.Limited: // a node-local cache is not reached
		t.VIP = t.DNS
	case len(state.DNSServers) > 0:
		t.VIP = netip.AddrPortFrom(state.DNSServers[0], 53)
	}
	if !t.Pod.IsValid() && !state.Limited {
		if pod := c.somePod(ctx); routed(pod.Addr()) {
			t.Pod = pod
		}
	}
	return t
}

// somePod returns a TCP port of a running pod in the connection's namespace, except of the traffic manager's pod. It
// returns the zero value if there is none.
func (c *checker) somePod(ctx context.Context) netip.AddrPort {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	pods, err := c.cluster.Kube().CoreV1().Pods(c.namespace.Load()).List(ctx, metav1.ListOptions{
		FieldSelector: "status.phase=Running", Limit: 50,
	})
	if err != nil {
		c.log.Info("cannot list pods to probe", "err", err)
		return netip.AddrPort{}
	}
	manager := c.view.Load().pod()
	for _, p := range pods.Items {
		if p.Name == manager || p.Spec.HostNetwork || p.DeletionTimestamp != nil {
			continue
		}
		ip, err := netip.ParseAddr(p.Status.PodIP)
		if err != nil {
			continue
		}
		for _, container := range p.Spec.Containers {
			for _, port := range container.Ports {
				if port.Protocol == corev1.ProtocolTCP || port.Protocol == "" {
					return netip.AddrPortFrom(ip, uint16(port.ContainerPort))
				}
			}
		}
	}
	return netip.AddrPort{}
}
