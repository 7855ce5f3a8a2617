package intercept

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
)

// way is a port of a Service that sends to a claimed port of the pods.
type way struct {
	service  string
	protocol string // "tcp" or "udp"
	port     int32
	to       uint16 // the claimed port
}

func (w way) String() string { return fmt.Sprintf("port %d of the Service %s", w.port, w.service) }

// ways returns the ways of a workload to claimed ports, each with the target port of the Service if that is a name.
func (i *Intercept) ways(w *workloads.Workload) map[way]string {
	found := make(map[way]string)
	for _, p := range w.Ports() {
		if i.claims(corev1.Protocol(p.Protocol), int32(p.Port)) {
			for _, s := range p.Services {
				found[way{s.Service, p.Protocol, s.Port, p.Port}] = s.Target
			}
		}
	}
	return found
}

// serviceNamed returns the Service with that name, or nil.
func serviceNamed(all []corev1.Service, name string) *corev1.Service {
	return api.Find(all, func(s corev1.Service) bool { return s.Name == name })
}

func isHeadless(s *corev1.Service) bool { return s.Spec.ClusterIP == corev1.ClusterIPNone }

// clusterIPs calls each for the ClusterIPs and ports that lead to claimed ports, with the way.
func (i *Intercept) clusterIPs(each func(way, netip.AddrPort)) {
	for w := range i.ways(i.workload) {
		for _, ip := range serviceNamed(i.workload.Services, w.service).Spec.ClusterIPs {
			if addr, err := netip.ParseAddr(ip); err == nil { // the ClusterIP of a headless Service is "None"
				each(w, netip.AddrPortFrom(addr, uint16(w.port)))
			}
		}
	}
}

// serviceTargets returns the ClusterIPs and ports that lead to claimed ports.
func (i *Intercept) serviceTargets() (targets []target) {
	i.clusterIPs(func(w way, at netip.AddrPort) { targets = append(targets, target{w.protocol, at}) })
	slices.SortFunc(targets, func(a, b target) int { return strings.Compare(a.String(), b.String()) })
	return targets
}

// foreignServices returns the names of the Services whose EndpointSlices, written by another controller, lead to
// claimed ports of the pods. Without the right to list them it returns none.
func (i *Intercept) foreignServices(ctx context.Context) (names []string, err error) {
	if err := i.await(ctx, func() bool { return i.listed }); err != nil {
		return nil, err
	}
	own := make(map[string]bool) // addresses of the pods
	for _, p := range i.latestPods() {
		for _, ip := range p.Status.PodIPs {
			own[ip.IP] = true
		}
	}
	list, err := i.pods.Kube().DiscoveryV1().EndpointSlices(i.workload.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil && !apierrors.IsForbidden(err) {
		return nil, i.pods.ExplainContext(ctx, err)
	}
	for _, s := range list.Items {
		name := s.Labels[discoveryv1.LabelServiceName]
		claimed := slices.ContainsFunc(s.Ports, func(p discoveryv1.EndpointPort) bool {
			return i.claims(ptr.Deref(p.Protocol, ""), ptr.Deref(p.Port, 0))
		})
		if name != "" && claimed && serviceNamed(i.workload.Services, name) == nil &&
			slices.ContainsFunc(s.Endpoints, func(e discoveryv1.Endpoint) bool {
				return slices.ContainsFunc(e.Addresses, func(a string) bool { return own[a] })
			}) {
			names = append(names, name)
		}
	}
	return names, nil
}

// checkShared returns an error if the Service also sends to pods of other workloads, which have no port of the agent's
// name.
func (i *Intercept) checkShared(ctx context.Context, s *corev1.Service) error {
	list, err := i.pods.Kube().CoreV1().Pods(i.workload.Namespace).List(ctx,
		metav1.ListOptions{LabelSelector: labels.Set(s.Spec.Selector).String()})
	mine, _, _ := unstructured.NestedStringMap(i.workload.Object.Object, "spec", "selector", "matchLabels")
	for _, p := range list.Items {
		if p.DeletionTimestamp == nil && !workloads.Finished(&p) && len(otherAgents(&p, "")) == 0 &&
			!labels.SelectorFromSet(mine).Matches(labels.Set(p.Labels)) {
			return api.Errorf(api.ExitIntercept, "with a sidecar, the Service %s would no longer send to the pod %s "+
				"of another workload", s.Name, p.Name).
				WithHint("Give the port a name in both templates. Mode ephemeral needs none.")
		}
	}
	return i.pods.ExplainContext(ctx, err)
}

// checkSidecarWays warns about the ways to the claimed ports that bypass a sidecar: clients that connect to the address
// of a pod, or of its node, use the application's own port. It returns an error if no other way remains. reason is why
// the mode is sidecar.
func (i *Intercept) checkSidecarWays(ctx context.Context, reason string) error {
	var past []string
	remain := false
	for w := range i.ways(i.workload) {
		if isHeadless(serviceNamed(i.workload.Services, w.service)) {
			past = append(past, fmt.Sprintf("the headless Service %s, whose name leads to port %d of the pods",
				w.service, w.to))
		} else {
			remain = true
		}
	}
	for _, c := range slices.Concat(i.workload.Template.Spec.Containers, i.workload.Template.Spec.InitContainers) {
		for _, p := range c.Ports {
			if p.HostPort > 0 && i.claims(p.Protocol, p.ContainerPort) {
				past = append(past, fmt.Sprintf("hostPort %d of the nodes", p.HostPort))
			}
		}
	}
	for _, p := range i.workload.Ports() { // also of other containers, which may pass requests on within the pod
		for _, s := range p.Services {
			if p.Name == "" && i.claims(corev1.Protocol(p.Protocol), int32(p.Port)) { // so the agent's gets a new name
				if err := i.checkShared(ctx, serviceNamed(i.workload.Services, s.Service)); err != nil {
					return err
				}
			}
			if p.Container != i.container && (p.Container != "" || len(i.workload.Template.Spec.Containers) > 1) &&
				!i.claims(corev1.Protocol(p.Protocol), int32(p.Port)) {
				past = append(past, fmt.Sprintf("port %d of the container %s, to which the Service %s sends, if it "+
					"calls %s", p.Port, cmp.Or(p.Container, "(none declares it)"), s.Service, i.container))
			}
		}
	}
	foreign, err := i.foreignServices(ctx)
	if err != nil {
		return err
	}
	for _, s := range foreign {
		past = append(past, "the Service "+s+", whose EndpointSlices another controller writes")
	}
	slices.Sort(past)
	past = slices.Compact(past)
	if !remain {
		e := api.Errorf(api.ExitIntercept, "a sidecar would receive no requests of %s: no Service with a ClusterIP "+
			"sends to %s%s", i.cfg.Workload, portsText(i.ports),
			strings.Join(append([]string{""}, past...), "; not by "))
		return e.WithHint("Use a namespace that admits ephemeral containers, with --mode ephemeral, or let clients "+
			"use a Service with a ClusterIP.\nkubevpn has changed nothing. The mode is sidecar because: %s", reason)
	}
	for _, p := range past {
		i.warn("a sidecar does not receive requests by " + p + ": the application does")
	}
	return nil
}

// claims reports whether the intercept claims a port of the pods.
func (i *Intercept) claims(protocol corev1.Protocol, port int32) bool {
	return slices.ContainsFunc(i.claim.Ports, func(p api.AgentPort) bool {
		return strings.EqualFold(p.Protocol, cmp.Or(string(protocol), "tcp")) && int32(p.Port) == port
	})
}
