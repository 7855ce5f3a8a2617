package client

import (
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"kubevpn/pkg/datapath/routable"
)

// CIDRs are the networks of a cluster that the user may see.
type CIDRs struct{ Pods, Services []CIDR }

// CIDR is one network and its source.
type CIDR struct {
	Prefix netip.Prefix // masked
	Source Source
}

// Source describes the origin of a CIDR to the user.
type Source string

const (
	FromNodes       Source = "the nodes' pod CIDRs"
	FromServiceCIDR Source = "ServiceCIDR objects"
	FromAnswer      Source = "the API server's answer to an impossible ClusterIP"
	FromServices    Source = "guessed from Services' ClusterIPs"
	FromPods        Source = "guessed from pods' addresses"
)

// Guessed reports whether the size of the network is a guess: it may be larger.
func (s Source) Guessed() bool { return s == FromServices || s == FromPods }

// listLimit limits the objects from which a guess is made.
const listLimit = 500

// CIDRs finds the cluster's networks without creating anything. It reads, at the same time, the nodes' podCIDRs, the
// ServiceCIDR objects, the API server's answer to dry-run Services with a ClusterIP outside of all ranges, and the
// Services and pods of the namespace. It skips what the user may not read. A guess never widens a network that another
// source states. The error is an *api.Error: the API server cannot be reached, or rejects the user.
func (c *Cluster) CIDRs(ctx context.Context, namespace string) (CIDRs, error) {
	found, err := findCIDRs(ctx, c.kube, namespace)
	if err != nil {
		return CIDRs{}, c.Explain(err)
	}
	return found, nil
}

// question finds the networks of pods, or those of Services, in one source.
type question func(ctx context.Context, kube kubernetes.Interface, namespace string) ([]CIDR, error)

func findCIDRs(ctx context.Context, kube kubernetes.Interface, namespace string) (CIDRs, error) {
	var found CIDRs
	questions := []struct { // the most reliable first, because merge drops a guess inside a known network
		ask question
		of  *[]CIDR
	}{
		{askNodes, &found.Pods}, {askServiceCIDRs, &found.Services},
		{askImpossibleIP(corev1.IPv4Protocol), &found.Services},
		{askImpossibleIP(corev1.IPv6Protocol), &found.Services},
		{askServices, &found.Services}, {askPods, &found.Pods},
	}
	answers, errs := make([][]CIDR, len(questions)), make([]error, len(questions))
	var wg sync.WaitGroup
	for i, q := range questions {
		wg.Go(func() { answers[i], errs[i] = q.ask(ctx, kube, namespace) })
	}
	wg.Wait()
	failed := 0
	for i, err := range errs {
		switch {
		case err == nil, apierrors.IsForbidden(err):
		case apierrors.IsNotFound(err): // no ServiceCIDR objects before 1.33
		case apierrors.IsUnauthorized(err):
			return CIDRs{}, err
		default:
			if failed++; failed == len(questions) || ctx.Err() != nil {
				return CIDRs{}, fmt.Errorf("cannot find the cluster's networks: %w", err)
			}
		}
		*questions[i].of = merge(*questions[i].of, answers[i])
	}
	return found, nil
}

// merge adds networks to known. Of two networks it keeps the one that contains the other.
func merge(known, more []CIDR) []CIDR {
	for _, m := range more {
		inside := func(outer, inner netip.Prefix) bool {
			return outer.Overlaps(inner) && outer.Bits() <= inner.Bits()
		}
		if slices.ContainsFunc(known, func(k CIDR) bool { return inside(k.Prefix, m.Prefix) }) {
			continue
		}
		known = slices.DeleteFunc(known, func(k CIDR) bool { return inside(m.Prefix, k.Prefix) })
		known = append(known, m)
	}
	return known
}

func askNodes(ctx context.Context, kube kubernetes.Interface, _ string) (pods []CIDR, err error) {
	list, err := kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return nil, err
	}
	for _, n := range list.Items {
		pods = append(pods, parseCIDRs(n.Spec.PodCIDRs, FromNodes)...)
	}
	return pods, nil
}

func askServiceCIDRs(ctx context.Context, kube kubernetes.Interface, _ string) (services []CIDR, err error) {
	list, err := kube.NetworkingV1().ServiceCIDRs().List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return nil, err
	}
	for _, s := range list.Items {
		services = append(services, parseCIDRs(s.Spec.CIDRs, FromServiceCIDR)...)
	}
	return services, nil
}

func parseCIDRs(texts []string, source Source) []CIDR {
	var cidrs []CIDR
	for _, text := range texts {
		if p, err := netip.ParsePrefix(text); err == nil {
			cidrs = append(cidrs, CIDR{p.Masked(), source})
		}
	}
	return cidrs
}

// validRange matches the API server's message, since 1.5, about a ClusterIP that is out of range. Since 1.33 the
// message about a dry run contains one of the ServiceCIDRs.
var validRange = regexp.MustCompile(`[Tt]he range of valid IPs is ([0-9a-fA-F.:]+/[0-9]+)`)

// askImpossibleIP returns a question that creates a Service in a dry run, with an address outside of every Service
// range: one of the networks for documentation (RFC 5737, RFC 3849). A cluster without the family has no range.
func askImpossibleIP(family corev1.IPFamily) question {
	return func(ctx context.Context, kube kubernetes.Interface, namespace string) ([]CIDR, error) {
		ip := "192.0.2.1"
		if family == corev1.IPv6Protocol {
			ip = "2001:db8::1"
		}
		_, err := kube.CoreV1().Services(namespace).Create(ctx, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "kubevpn-range-"},
			Spec: corev1.ServiceSpec{
				ClusterIP:  ip,
				ClusterIPs: []string{ip},
				IPFamilies: []corev1.IPFamily{family},
				Ports:      []corev1.ServicePort{{Port: 80}},
			},
		}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil {
			return nil, nil
		}
		if match := validRange.FindStringSubmatch(err.Error()); match != nil {
			return parseCIDRs(match[1:], FromAnswer), nil
		}
		if apierrors.IsInvalid(err) && strings.Contains(err.Error(), "not configured on this cluster") {
			return nil, nil
		}
		return nil, err
	}
}

func askServices(ctx context.Context, kube kubernetes.Interface, namespace string) (services []CIDR, err error) {
	list, err := kube.CoreV1().Services(namespace).List(ctx, metav1.ListOptions{Limit: listLimit})
	if err != nil {
		return nil, err
	}
	for _, s := range list.Items {
		for _, text := range s.Spec.ClusterIPs {
			if ip, err := netip.ParseAddr(text); err == nil { // it may be "None"
				services = merge(services, []CIDR{{routable.ServiceBlock(ip), FromServices}})
			}
		}
	}
	return services, nil
}

func askPods(ctx context.Context, kube kubernetes.Interface, namespace string) (pods []CIDR, err error) {
	list, err := kube.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{Limit: listLimit})
	if err != nil {
		return nil, err
	}
	for _, p := range list.Items {
		if p.Spec.HostNetwork { // it has its node's address
			continue
		}
		for _, text := range p.Status.PodIPs {
			if ip, err := netip.ParseAddr(text.IP); err == nil {
				pods = merge(pods, []CIDR{{routable.PodBlock(ip), FromPods}})
			}
		}
	}
	return pods, nil
}
