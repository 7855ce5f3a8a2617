package clone

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
)

// policies are the NetworkPolicies of namespaces. They are only judged: without the right to list them, the clone is the same.
func policies(ctx context.Context, kube kubernetes.Interface, namespaces ...string) (all []networkingv1.NetworkPolicy, notes []string) {
	slices.Sort(namespaces)
	for _, namespace := range slices.Compact(namespaces) {
		list, err := kube.NetworkingV1().NetworkPolicies(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			notes = append(notes, fmt.Sprintf("NetworkPolicies could not be listed, and might keep requests from the clone: %v", err))
			continue
		}
		all = append(all, list.Items...)
	}
	return all, notes
}

// ruled is a pod as a NetworkPolicy sees it.
type ruled struct {
	namespace string
	labels    labels.Set
}

// judge notes what NetworkPolicies let the workload's pods do, and not the clone's, which lack the labels by which Services and others
// choose pods. Ports are left aside, and so are labels of namespaces but their names: what is noted may be so.
func (p *plan) judge(were labels.Set) {
	workload, clone := ruled{p.namespace, were}, ruled{cmp.Or(p.spec.Namespace, p.namespace), p.template.Labels}
	shut := func(of, to ruled, direction networkingv1.PolicyType) (by []string) {
		for _, policy := range p.policies {
			if !isFor(policy, of, direction) {
				continue
			}
			if slices.ContainsFunc(peersOf(policy, direction), func(peers []networkingv1.NetworkPolicyPeer) bool { return anyIs(peers, policy.Namespace, to) }) {
				return nil
			}
			by = append(by, policy.Name)
		}
		return by
	}
	if !p.spec.NoTraffic { // an agent in the workload's pods connects to the clone's
		by := append(shut(clone, workload, networkingv1.PolicyTypeIngress), shut(workload, clone, networkingv1.PolicyTypeEgress)...)
		if len(by) > 0 {
			p.note("requests may not reach the clone, and be answered with 502: %s lets nothing pass from the workload's pods to the clone's", policyNames(by))
		}
	}
	var opened, lets []string
	for _, policy := range p.policies {
		for _, direction := range []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress} {
			rules := peersOf(policy, direction)
			isolated := slices.ContainsFunc(p.policies, func(o networkingv1.NetworkPolicy) bool { return isFor(o, clone, direction) })
			if len(rules) > 0 && isolated && isFor(policy, workload, direction) && !isFor(policy, clone, direction) {
				opened = append(opened, policy.Name)
			}
			for _, peers := range rules {
				if anyIs(peers, policy.Namespace, workload) && !anyIs(peers, policy.Namespace, clone) {
					lets = append(lets, policy.Name)
				}
			}
		}
	}
	if len(opened) > 0 {
		p.note("what %s allows is for the workload's pods, and not for the clone's", policyNames(opened))
	}
	if len(lets) > 0 {
		p.note("%s allows connections with the workload's pods, and not with the clone's", policyNames(lets))
	}
}

func policyNames(of []string) string {
	slices.Sort(of)
	return "NetworkPolicy " + strings.Join(slices.Compact(of), ", ")
}

// isFor reports whether a policy governs a pod in a direction.
func isFor(policy networkingv1.NetworkPolicy, pod ruled, direction networkingv1.PolicyType) bool {
	return policy.Namespace == pod.namespace && slices.Contains(policy.Spec.PolicyTypes, direction) && matches(&policy.Spec.PodSelector, pod.labels)
}

// peersOf are those of each rule of a policy, in a direction.
func peersOf(policy networkingv1.NetworkPolicy, direction networkingv1.PolicyType) (all [][]networkingv1.NetworkPolicyPeer) {
	if direction == networkingv1.PolicyTypeIngress {
		for _, rule := range policy.Spec.Ingress {
			all = append(all, rule.From)
		}
		return all
	}
	for _, rule := range policy.Spec.Egress {
		all = append(all, rule.To)
	}
	return all
}

// anyIs reports whether one of a rule's peers is the pod. No peers are everybody.
func anyIs(peers []networkingv1.NetworkPolicyPeer, namespace string, pod ruled) bool {
	return len(peers) == 0 || slices.ContainsFunc(peers, func(peer networkingv1.NetworkPolicyPeer) bool {
		switch {
		case peer.IPBlock != nil:
			return strings.HasSuffix(peer.IPBlock.CIDR, "/0")
		case peer.NamespaceSelector == nil && namespace != pod.namespace,
			peer.NamespaceSelector != nil && !matches(peer.NamespaceSelector, labels.Set{corev1.LabelMetadataName: pod.namespace}):
			return false
		}
		return peer.PodSelector == nil || matches(peer.PodSelector, pod.labels)
	})
}

func matches(s *metav1.LabelSelector, of labels.Set) bool {
	parsed, err := metav1.LabelSelectorAsSelector(s)
	return err == nil && parsed.Matches(of) // the API server takes none that cannot be understood
}
