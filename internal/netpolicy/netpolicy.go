// Package netpolicy evaluates NetworkPolicies (networking.k8s.io/v1) for pods. Its functions are pure: the caller lists
// the policies, and needs no cluster for a test.
//
//	traffic from A to B passes if  A has no egress policy, or one of them allows B,
//	                          and  B has no ingress policy, or one of them allows A
//
// The evaluation leaves out ports, labels of namespaces other than the name, address blocks other than "all addresses",
// and the policies of CNI plugins. So a policy that it reports may in fact allow the traffic, and the reverse.
package netpolicy

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Pod is what policies know of a pod.
type Pod struct {
	Namespace string
	Labels    map[string]string
}

// Blocking returns the names of the policies because of which nothing passes from one pod to another, sorted. It
// returns nil if traffic passes. The policies are those of both namespaces.
func Blocking(policies []networkingv1.NetworkPolicy, from, to Pod) []string {
	names := slices.Concat(
		blocking(policies, to, networkingv1.PolicyTypeIngress, from),
		blocking(policies, from, networkingv1.PolicyTypeEgress, to))
	return sorted(names)
}

// blocking returns the policies of a pod in one direction if none of them allows the peer.
func blocking(policies []networkingv1.NetworkPolicy, pod Pod, direction networkingv1.PolicyType,
	peer Pod) (names []string) {
	for _, policy := range policies {
		if !appliesTo(policy, pod, direction) {
			continue
		}
		for _, peers := range rules(policy, direction) {
			if allows(peers, policy.Namespace, peer) {
				return nil
			}
		}
		names = append(names, policy.Name)
	}
	return names
}

// OnlyApplying returns the names of the policies that allow traffic of pod a, do not apply to pod b, and whose absence
// restricts b since another policy applies to it. The names are sorted.
func OnlyApplying(policies []networkingv1.NetworkPolicy, a, b Pod) (names []string) {
	for _, direction := range directions {
		isolated := slices.ContainsFunc(policies, func(p networkingv1.NetworkPolicy) bool {
			return appliesTo(p, b, direction)
		})
		if !isolated {
			continue
		}
		for _, policy := range policies {
			if len(rules(policy, direction)) > 0 && appliesTo(policy, a, direction) &&
				!appliesTo(policy, b, direction) {
				names = append(names, policy.Name)
			}
		}
	}
	return sorted(names)
}

// OnlyAllowing returns the names of the policies with a rule that allows connections with pod a but not with pod b,
// sorted.
func OnlyAllowing(policies []networkingv1.NetworkPolicy, a, b Pod) (names []string) {
	for _, policy := range policies {
		for _, direction := range directions {
			for _, peers := range rules(policy, direction) {
				if allows(peers, policy.Namespace, a) && !allows(peers, policy.Namespace, b) {
					names = append(names, policy.Name)
				}
			}
		}
	}
	return sorted(names)
}

var directions = [...]networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress}

// sorted returns the names in order, each once.
func sorted(names []string) []string {
	slices.Sort(names)
	return slices.Compact(names)
}

// appliesTo reports whether a policy governs a pod in a direction.
func appliesTo(policy networkingv1.NetworkPolicy, pod Pod, direction networkingv1.PolicyType) bool {
	return policy.Namespace == pod.Namespace && slices.Contains(policy.Spec.PolicyTypes, direction) &&
		matches(&policy.Spec.PodSelector, pod.Labels)
}

// rules returns the peers of each rule of a policy in a direction.
func rules(policy networkingv1.NetworkPolicy,
	direction networkingv1.PolicyType) (all [][]networkingv1.NetworkPolicyPeer) {
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

// allows reports whether a rule of a policy in a namespace names a pod. A rule without peers names everybody.
func allows(peers []networkingv1.NetworkPolicyPeer, namespace string, pod Pod) bool {
	return len(peers) == 0 || slices.ContainsFunc(peers, func(peer networkingv1.NetworkPolicyPeer) bool {
		switch {
		case peer.IPBlock != nil:
			return strings.HasSuffix(peer.IPBlock.CIDR, "/0")
		case peer.NamespaceSelector == nil && namespace != pod.Namespace,
			peer.NamespaceSelector != nil &&
				!matches(peer.NamespaceSelector, map[string]string{corev1.LabelMetadataName: pod.Namespace}):
			return false
		}
		return peer.PodSelector == nil || matches(peer.PodSelector, pod.Labels)
	})
}

// matches reports whether a selector selects labels. The API server accepts only selectors that are valid.
func matches(s *metav1.LabelSelector, of map[string]string) bool {
	parsed, err := metav1.LabelSelectorAsSelector(s)
	return err == nil && parsed.Matches(labels.Set(of))
}
