// Package netpolicy evaluates NetworkPolicies (networking.k8s.io/v1) for pods. Its functions are pure: the caller lists
// the policies, and needs no cluster for a test.
//
//	traffic from A to B passes if  A has no egress policy, or one of them allows B,
//	                          and  B has no ingress policy, or one of them allows A
//
// The evaluation leaves out labels of namespaces other than the name, and the policies of CNI plugins. It leaves out
// ports and address blocks other than "all addresses", too, unless a Flow has them. So a policy that it reports may in
// fact allow the traffic, and the reverse.
package netpolicy

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Pod contains what policies know of a pod.
type Pod struct {
	Namespace string
	Labels    map[string]string
}

// PodOf returns what policies know of a pod, or nothing for nil.
func PodOf(p *corev1.Pod) Pod {
	if p == nil {
		return Pod{}
	}
	return Pod{p.Namespace, p.Labels}
}

// Flow is a connection from one pod to another. The zero values of the addresses and of the port mean any, the zero
// Protocol means TCP.
type Flow struct {
	From, To     Pod
	FromIP, ToIP netip.Addr
	Protocol     corev1.Protocol
	Port         uint16 // of To
	PortName     string // of the container that declares Port
}

// Blocking returns the names of the policies that block the flow, sorted, or nil if it passes. policies are those of
// both namespaces.
func (f Flow) Blocking(policies []networkingv1.NetworkPolicy) []string {
	names := slices.Concat(
		f.blocking(policies, f.To, networkingv1.PolicyTypeIngress),
		f.blocking(policies, f.From, networkingv1.PolicyTypeEgress))
	return sorted(names)
}

// blocking returns the policies of a pod in one direction if none of them allows the flow.
func (f Flow) blocking(policies []networkingv1.NetworkPolicy, pod Pod,
	direction networkingv1.PolicyType) (names []string) {
	peer, ip := f.From, f.FromIP
	if direction == networkingv1.PolicyTypeEgress {
		peer, ip = f.To, f.ToIP
	}
	for _, policy := range policies {
		if !appliesTo(policy, pod, direction) {
			continue
		}
		for _, r := range rules(policy, direction) {
			if allows(r.peers, policy.Namespace, peer, ip) && f.allowsPort(r.ports) {
				return nil
			}
		}
		names = append(names, policy.Name)
	}
	return names
}

// allowsPort reports whether the ports of a rule contain the flow's port. A rule without ports names all.
func (f Flow) allowsPort(ports []networkingv1.NetworkPolicyPort) bool {
	tcp := corev1.ProtocolTCP
	return len(ports) == 0 || f.Port == 0 ||
		slices.ContainsFunc(ports, func(p networkingv1.NetworkPolicyPort) bool {
			switch {
			case *cmp.Or(p.Protocol, &tcp) != cmp.Or(f.Protocol, tcp):
				return false
			case p.Port == nil:
				return true
			case p.Port.Type == intstr.String:
				return p.Port.StrVal == f.PortName
			case p.EndPort != nil:
				return p.Port.IntVal <= int32(f.Port) && int32(f.Port) <= *p.EndPort
			}
			return p.Port.IntVal == int32(f.Port)
		})
}

// OnlyApplying returns the names of the policies that allow traffic of pod a and do not apply to pod b, although
// another policy restricts b. The names are sorted.
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
			for _, r := range rules(policy, direction) {
				if allows(r.peers, policy.Namespace, a, netip.Addr{}) &&
					!allows(r.peers, policy.Namespace, b, netip.Addr{}) {
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

// rule is a rule of a policy, of either direction.
type rule struct {
	peers []networkingv1.NetworkPolicyPeer
	ports []networkingv1.NetworkPolicyPort
}

// rules returns the rules of a policy in a direction.
func rules(policy networkingv1.NetworkPolicy, direction networkingv1.PolicyType) (all []rule) {
	if direction == networkingv1.PolicyTypeIngress {
		for _, r := range policy.Spec.Ingress {
			all = append(all, rule{r.From, r.Ports})
		}
		return all
	}
	for _, r := range policy.Spec.Egress {
		all = append(all, rule{r.To, r.Ports})
	}
	return all
}

// allows reports whether a rule of a policy in a namespace names a pod, or its address. A rule without peers names
// everybody.
func allows(peers []networkingv1.NetworkPolicyPeer, namespace string, pod Pod, ip netip.Addr) bool {
	return len(peers) == 0 || slices.ContainsFunc(peers, func(peer networkingv1.NetworkPolicyPeer) bool {
		switch {
		case peer.IPBlock != nil && ip.IsValid():
			return contains(peer.IPBlock.CIDR, ip) &&
				!slices.ContainsFunc(peer.IPBlock.Except, func(cidr string) bool { return contains(cidr, ip) })
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

func contains(cidr string, ip netip.Addr) bool {
	network, err := netip.ParsePrefix(cidr)
	return err == nil && network.Contains(ip)
}

// matches reports whether a selector selects labels. The API server accepts only selectors that are valid.
func matches(s *metav1.LabelSelector, of map[string]string) bool {
	parsed, err := metav1.LabelSelectorAsSelector(s)
	return err == nil && parsed.Matches(labels.Set(of))
}
