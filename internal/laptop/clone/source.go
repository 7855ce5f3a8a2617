package clone

import (
	"context"
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/podenv"
	"kubevpn/internal/kube/workloads"
)

// read collects what a clone in a namespace needs to know about a workload. If the user may not read something that the
// clone can do without, a note says so.
func read(ctx context.Context, kube kubernetes.Interface, w *workloads.Workload, container,
	namespace string) (original, []string, error) {
	s := original{workload: w.String(), namespace: w.Namespace, template: w.Template, container: container,
		claims: map[string]exclusive{}}
	if len(w.Template.Spec.Containers) == 0 {
		return s, nil, api.Errorf(api.ExitWorkload, "cannot clone %s: it has no pod template and no pods", w)
	}
	if namespace != w.Namespace {
		if err := checkReferences(ctx, kube, w.Template.Spec, w.Namespace, namespace); err != nil {
			return s, nil, err
		}
	}
	var notes, more []string
	s.selectors, notes = selectors(ctx, kube, namespace)
	s.policies, more = listPolicies(ctx, kube, w.Namespace, namespace)
	notes = append(notes, more...)
	if w.Selector != nil {
		s.selectors = append(s.selectors, selector{w.String(), w.Selector})
	}
	templates, _, err := unstructured.NestedSlice(w.Object.Object, "spec", "volumeClaimTemplates")
	if err != nil {
		return s, nil, fmt.Errorf("reading the volumes of %s: %w", w, err)
	}
	for _, t := range templates {
		if m, ok := t.(map[string]any); ok {
			name, _, err := unstructured.NestedString(m, "metadata", "name")
			if err != nil {
				return s, nil, fmt.Errorf("reading the volumes of %s: %w", w, err)
			}
			s.claimTemplates = append(s.claimTemplates, name)
		}
	}
	for _, v := range w.Template.Spec.Volumes {
		if v.PersistentVolumeClaim == nil {
			continue
		}
		name := v.PersistentVolumeClaim.ClaimName
		claim, is, err := exclusiveClaim(ctx, kube, name, w.Namespace, namespace)
		if err != nil {
			return s, nil, err
		}
		if is {
			s.claims[name] = claim
		}
	}
	return s, notes, nil
}

// exclusiveClaim returns why a clone in namespace to cannot share a claim of the workload in namespace from; false if
// it can.
func exclusiveClaim(ctx context.Context, kube kubernetes.Interface, name, from, to string) (exclusive, bool, error) {
	claims := kube.CoreV1().PersistentVolumeClaims
	claim, err := claims(to).Get(ctx, name, metav1.GetOptions{})
	absent := from != to && apierrors.IsNotFound(err)
	if absent {
		claim, err = claims(from).Get(ctx, name, metav1.GetOptions{})
	}
	if err != nil {
		return exclusive{}, false, fmt.Errorf("reading PersistentVolumeClaim %s: %w", name, err)
	}
	mode, one := exclusiveMode(claim.Spec.AccessModes)
	if absent || !one {
		return exclusive{mode: mode, absent: absent}, absent, nil
	}
	node, err := holder(ctx, kube, to, name)
	return exclusive{mode: mode, node: node}, true, err
}

// exclusiveMode returns the mode of a claim that only one node can mount; false if several nodes can.
func exclusiveMode(modes []corev1.PersistentVolumeAccessMode) (corev1.PersistentVolumeAccessMode, bool) {
	if slices.Contains(modes, corev1.ReadWriteMany) || slices.Contains(modes, corev1.ReadOnlyMany) || len(modes) == 0 {
		return "", false
	}
	if slices.Contains(modes, corev1.ReadWriteOnce) {
		return corev1.ReadWriteOnce, true
	}
	return modes[0], true
}

// holder returns the node of a running pod that uses a claim, or "".
func holder(ctx context.Context, kube kubernetes.Interface, namespace, claim string) (string, error) {
	pods, err := kube.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", fmt.Errorf("looking for the pod that uses PersistentVolumeClaim %s: %w", claim, err)
	}
	for _, p := range pods.Items {
		uses := slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool {
			return v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == claim
		})
		if uses && p.Spec.NodeName != "" && !workloads.Finished(&p) {
			return p.Spec.NodeName, nil
		}
	}
	return "", nil
}

// selectors returns the selectors of the Services, PodDisruptionBudgets and workloads of a namespace.
func selectors(ctx context.Context, kube kubernetes.Interface, namespace string) (all []selector, notes []string) {
	add := func(kind string) func(runtime.Object, error) {
		return func(list runtime.Object, err error) {
			if err == nil {
				err = meta.EachListItem(list, func(o runtime.Object) error {
					name, chosen := podSelector(o)
					if chosen == nil {
						return nil
					}
					parsed, err := metav1.LabelSelectorAsSelector(chosen)
					if err != nil {
						notes = append(notes, fmt.Sprintf("cannot parse the selector of %s %s: %v", kind, name, err))
						return nil
					}
					all = append(all, selector{kind + " " + name, parsed})
					return nil
				})
			}
			if err != nil {
				notes = append(notes, fmt.Sprintf("cannot list %ss, which may select the clone's pods: %v", kind, err))
			}
		}
	}
	apps, o := kube.AppsV1(), metav1.ListOptions{}
	add("Service")(kube.CoreV1().Services(namespace).List(ctx, o))
	add("PodDisruptionBudget")(kube.PolicyV1().PodDisruptionBudgets(namespace).List(ctx, o))
	add("Deployment")(apps.Deployments(namespace).List(ctx, o))
	add("StatefulSet")(apps.StatefulSets(namespace).List(ctx, o))
	add("DaemonSet")(apps.DaemonSets(namespace).List(ctx, o))
	add("ReplicaSet")(apps.ReplicaSets(namespace).List(ctx, o))
	return all, notes
}

// podSelector returns the selector by which an object selects pods, or nil if it selects none.
func podSelector(o runtime.Object) (name string, s *metav1.LabelSelector) {
	switch o := o.(type) {
	case *corev1.Service:
		if clones := o.Labels[labelManagedBy] == managedBy && o.Labels[labelClone] != ""; len(o.Spec.Selector) > 0 &&
			!clones {
			return o.Name, &metav1.LabelSelector{MatchLabels: o.Spec.Selector}
		}
	case *policyv1.PodDisruptionBudget:
		return o.Name, o.Spec.Selector
	case *appsv1.Deployment:
		return o.Name, o.Spec.Selector
	case *appsv1.StatefulSet:
		return o.Name, o.Spec.Selector
	case *appsv1.DaemonSet:
		return o.Name, o.Spec.Selector
	case *appsv1.ReplicaSet:
		if owner := metav1.GetControllerOf(o); owner == nil || owner.Kind != "Deployment" {
			return o.Name, o.Spec.Selector
		}
	}
	return "", nil
}

// checkReferences returns an error that lists the objects that a pod needs and its new namespace lacks.
func checkReferences(ctx context.Context, kube kubernetes.Interface, spec corev1.PodSpec, from, to string) error {
	var missing []string
	seen := map[string]bool{}
	for _, r := range podenv.References(spec) {
		what := r.Kind + " " + r.Name
		if r.Name == "" || r.Optional || seen[what] {
			continue
		}
		seen[what] = true
		var err error
		switch core, o := kube.CoreV1(), (metav1.GetOptions{}); r.Kind {
		case podenv.KindConfigMap:
			_, err = core.ConfigMaps(to).Get(ctx, r.Name, o)
		case podenv.KindSecret:
			_, err = core.Secrets(to).Get(ctx, r.Name, o)
		case podenv.KindServiceAccount:
			_, err = core.ServiceAccounts(to).Get(ctx, r.Name, o)
		}
		switch {
		case apierrors.IsNotFound(err):
			missing = append(missing, what)
		case err != nil:
			return fmt.Errorf("reading %s of the namespace %s: %w", what, to, err)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return api.Errorf(api.ExitWorkload, "the namespace %s lacks objects that the pods need: %s", to,
		api.Join(missing)).
		WithHint("Copy them from the namespace %s, or clone there.", from)
}
