package clone

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/kube/netpolicy"
)

// listPolicies returns the NetworkPolicies of namespaces, for warnings, and a note for each namespace in which the user
// may not list them.
func listPolicies(ctx context.Context, kube kubernetes.Interface,
	namespaces ...string) (all []networkingv1.NetworkPolicy, notes []string) {
	slices.Sort(namespaces)
	for _, namespace := range slices.Compact(namespaces) {
		list, err := kube.NetworkingV1().NetworkPolicies(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			notes = append(notes, fmt.Sprintf("cannot list NetworkPolicies, which may block requests to the clone: %v",
				err))
			continue
		}
		all = append(all, list.Items...)
	}
	return all, notes
}

// notePolicies notes which NetworkPolicies treat the pods of the clone differently: they lack the labels by which
// Services and workloads select pods. before are the labels of the workload's pods.
func (p *templateBuilder) notePolicies(before map[string]string) {
	workload := netpolicy.Pod{Namespace: p.namespace, Labels: before}
	clone := netpolicy.Pod{Namespace: cmp.Or(p.spec.Namespace, p.namespace), Labels: p.template.Labels}
	if !p.spec.NoTraffic { // an agent in the workload's pods connects to the clone's
		if names := (netpolicy.Flow{From: workload, To: clone}).Blocking(p.policies); len(names) > 0 {
			p.note("requests to the clone may fail with 502: NetworkPolicy %s blocks connections from the workload's "+
				"pods to the clone's",
				strings.Join(names, ", "))
		}
	}
	if names := netpolicy.OnlyApplying(p.policies, workload, clone); len(names) > 0 {
		p.note("NetworkPolicy %s allows connections of the workload's pods, but not of the clone's",
			strings.Join(names, ", "))
	}
	if names := netpolicy.OnlyAllowing(p.policies, workload, clone); len(names) > 0 {
		p.note("NetworkPolicy %s allows connections to the workload's pods, but not to the clone's",
			strings.Join(names, ", "))
	}
}
