package clone

import (
	"context"
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
)

// read collects what the clone of a workload, in a namespace, has to know. What the user may not read is left out where the
// clone is no worse for it, and named.
func read(ctx context.Context, kube kubernetes.Interface, w *cluster.Workload, container, namespace string) (source, []string, error) {
	s := source{workload: w.String(), namespace: w.Namespace, template: w.Template, container: container, claims: map[string]exclusive{}}
	if len(w.Template.Spec.Containers) == 0 {
		return s, nil, api.Errorf(api.ExitWorkload, "it is not known what the pods of %s are made from: it has no template, and no pod", w)
	}
	if namespace != w.Namespace {
		if err := present(ctx, kube, w.Template.Spec, w.Namespace, namespace); err != nil {
			return s, nil, err
		}
	}
	var notes []string
	s.selectors, notes = selectors(ctx, kube, namespace)
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
		claim, err := kube.CoreV1().PersistentVolumeClaims(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return s, nil, fmt.Errorf("reading PersistentVolumeClaim %s: %w", name, err)
		}
		if mode, ok := alone(claim.Spec.AccessModes); ok {
			node, err := holder(ctx, kube, namespace, name)
			if err != nil {
				return s, nil, err
			}
			s.claims[name] = exclusive{mode, node}
		}
	}
	return s, notes, nil
}

// alone is the mode of a claim that has none for several nodes.
func alone(modes []corev1.PersistentVolumeAccessMode) (corev1.PersistentVolumeAccessMode, bool) {
	if slices.Contains(modes, corev1.ReadWriteMany) || slices.Contains(modes, corev1.ReadOnlyMany) || len(modes) == 0 {
		return "", false
	}
	if slices.Contains(modes, corev1.ReadWriteOnce) {
		return corev1.ReadWriteOnce, true
	}
	return modes[0], true
}

// holder is the node of a pod that has a claim, or "".
func holder(ctx context.Context, kube kubernetes.Interface, namespace, claim string) (string, error) {
	pods, err := kube.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", fmt.Errorf("looking for the pod that has PersistentVolumeClaim %s: %w", claim, err)
	}
	for _, p := range pods.Items {
		if p.Spec.NodeName != "" && slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool {
			return v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == claim
		}) {
			return p.Spec.NodeName, nil
		}
	}
	return "", nil
}

// selectors are those of the namespace that choose pods: of Services, of PodDisruptionBudgets, of workloads.
func selectors(ctx context.Context, kube kubernetes.Interface, namespace string) ([]selector, []string) {
	var all []selector
	var notes []string
	add := func(kind, name string, s *metav1.LabelSelector) {
		parsed, err := metav1.LabelSelectorAsSelector(s)
		if err != nil {
			notes = append(notes, fmt.Sprintf("the selector of %s %s cannot be understood: %v", kind, name, err))
			return
		}
		all = append(all, selector{kind + " " + name, parsed})
	}
	listed := func(kind string, err error) bool {
		if err != nil {
			notes = append(notes, fmt.Sprintf("%s could not be listed, and might select the clone's pods: %v", kind, err))
		}
		return err == nil
	}
	options := metav1.ListOptions{}
	services, err := kube.CoreV1().Services(namespace).List(ctx, options)
	if listed("Services", err) {
		for _, o := range services.Items {
			if clones := o.Labels[labelManagedBy] == managedBy && o.Labels[labelClone] != ""; len(o.Spec.Selector) > 0 && !clones {
				all = append(all, selector{"Service " + o.Name, labels.SelectorFromSet(o.Spec.Selector)})
			}
		}
	}
	budgets, err := kube.PolicyV1().PodDisruptionBudgets(namespace).List(ctx, options)
	if listed("PodDisruptionBudgets", err) {
		for _, o := range budgets.Items {
			add("PodDisruptionBudget", o.Name, o.Spec.Selector)
		}
	}
	deployments, err := kube.AppsV1().Deployments(namespace).List(ctx, options)
	if listed("Deployments", err) {
		for _, o := range deployments.Items {
			add("Deployment", o.Name, o.Spec.Selector)
		}
	}
	sets, err := kube.AppsV1().StatefulSets(namespace).List(ctx, options)
	if listed("StatefulSets", err) {
		for _, o := range sets.Items {
			add("StatefulSet", o.Name, o.Spec.Selector)
		}
	}
	daemons, err := kube.AppsV1().DaemonSets(namespace).List(ctx, options)
	if listed("DaemonSets", err) {
		for _, o := range daemons.Items {
			add("DaemonSet", o.Name, o.Spec.Selector)
		}
	}
	replicas, err := kube.AppsV1().ReplicaSets(namespace).List(ctx, options)
	if listed("ReplicaSets", err) {
		for _, o := range replicas.Items {
			if !ofDeployment(o) { // whose own one is enough
				add("ReplicaSet", o.Name, o.Spec.Selector)
			}
		}
	}
	return all, notes
}

func ofDeployment(r appsv1.ReplicaSet) bool {
	owner := metav1.GetControllerOf(&r)
	return owner != nil && owner.Kind == "Deployment"
}

// present says what a pod needs of its namespace that the other one lacks.
func present(ctx context.Context, kube kubernetes.Interface, spec corev1.PodSpec, from, to string) error {
	var missing []string
	seen := map[string]bool{}
	need := func(kind, name string, optional *bool, get func() error) error {
		what := kind + " " + name
		if name == "" || optional != nil && *optional || seen[what] {
			return nil
		}
		seen[what] = true
		err := get()
		if apierrors.IsNotFound(err) {
			missing = append(missing, what)
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading %s of the namespace %s: %w", what, to, err)
		}
		return nil
	}
	for _, r := range references(spec) {
		if err := need(r.kind, r.name, r.optional, func() error {
			switch core, o := kube.CoreV1(), (metav1.GetOptions{}); r.kind {
			case kindConfigMap:
				_, err := core.ConfigMaps(to).Get(ctx, r.name, o)
				return err
			case kindSecret:
				_, err := core.Secrets(to).Get(ctx, r.name, o)
				return err
			case kindClaim:
				_, err := core.PersistentVolumeClaims(to).Get(ctx, r.name, o)
				return err
			default:
				_, err := core.ServiceAccounts(to).Get(ctx, r.name, o)
				return err
			}
		}); err != nil {
			return err
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return api.Errorf(api.ExitWorkload, "the namespace %s lacks what the pods need: %s", to, joined(missing)).
		WithHint("Copy them from the namespace %s, or clone there.", from)
}

const (
	kindConfigMap = "ConfigMap"
	kindSecret    = "Secret"
	kindClaim     = "PersistentVolumeClaim"
	kindAccount   = "ServiceAccount"
)

// reference is an object of its namespace that a pod names.
type reference struct {
	kind, name string
	optional   *bool
}

// references are those of a pod, in the order in which they stand.
func references(spec corev1.PodSpec) []reference {
	all := []reference{{kindAccount, spec.ServiceAccountName, nil}}
	add := func(kind, name string, optional *bool) { all = append(all, reference{kind, name, optional}) }
	for _, s := range spec.ImagePullSecrets {
		add(kindSecret, s.Name, nil)
	}
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		for _, e := range c.EnvFrom {
			if e.ConfigMapRef != nil {
				add(kindConfigMap, e.ConfigMapRef.Name, e.ConfigMapRef.Optional)
			}
			if e.SecretRef != nil {
				add(kindSecret, e.SecretRef.Name, e.SecretRef.Optional)
			}
		}
		for _, e := range c.Env {
			if e.ValueFrom == nil {
				continue
			}
			if r := e.ValueFrom.ConfigMapKeyRef; r != nil {
				add(kindConfigMap, r.Name, r.Optional)
			}
			if r := e.ValueFrom.SecretKeyRef; r != nil {
				add(kindSecret, r.Name, r.Optional)
			}
		}
	}
	for _, v := range spec.Volumes {
		if v.ConfigMap != nil {
			add(kindConfigMap, v.ConfigMap.Name, v.ConfigMap.Optional)
		}
		if v.Secret != nil {
			add(kindSecret, v.Secret.SecretName, v.Secret.Optional)
		}
		if v.PersistentVolumeClaim != nil {
			add(kindClaim, v.PersistentVolumeClaim.ClaimName, nil)
		}
		if v.Projected == nil {
			continue
		}
		for _, p := range v.Projected.Sources {
			if p.ConfigMap != nil {
				add(kindConfigMap, p.ConfigMap.Name, p.ConfigMap.Optional)
			}
			if p.Secret != nil {
				add(kindSecret, p.Secret.Name, p.Secret.Optional)
			}
		}
	}
	return all
}

// joined is "a, b and c".
func joined(all []string) string {
	if len(all) == 1 {
		return all[0]
	}
	last := len(all) - 1
	text := all[0]
	for _, s := range all[1:last] {
		text += ", " + s
	}
	return text + " and " + all[last]
}
