package workloads

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

const (
	listTimeout = 30 * time.Second // of all objects of one resource
	listLimit   = 20000            // objects of one resource
)

// List returns the Deployments, StatefulSets and DaemonSets with matching labels, and the ReplicaSets and Pods that no
// controller of this cluster owns. An empty namespace means all. The list is what one user may see: its warnings name
// what could not be listed. It fails if nothing could be listed. Errors are *api.Error.
func (c Client) List(ctx context.Context, namespace string, selector labels.Selector) (api.WorkloadList, error) {
	l := &lister{kube: c.Kube(), namespace: namespace}
	list, err := l.list(ctx, selector)
	return list, c.ExplainContext(ctx, err)
}

type lister struct {
	kube      kubernetes.Interface
	namespace string
	workloads []*Workload
	services  map[string][]corev1.Service // by namespace
	pods      map[string][]listedPod      // by namespace
	levels    map[string]string           // the enforced level of pod security by namespace
	warnings  []string
}

// listedPod is what the list shows of a pod that has not ended.
type listedPod struct {
	pod     corev1.Pod // without spec
	holders []api.Holder
}

func (l *lister) list(ctx context.Context, selector labels.Selector) (api.WorkloadList, error) {
	list := api.WorkloadList{TypeMeta: api.Type(api.KindWorkloadList), Items: []api.Workload{}}
	l.services, l.pods = map[string][]corev1.Service{}, map[string][]listedPod{}
	l.levels = map[string]string{}
	o := metav1.ListOptions{LabelSelector: selector.String()}
	errs := []error{
		l.listWorkloads(ctx, o),
		l.listPods(ctx, selector),
	}
	if !slices.Contains(errs, nil) || ctx.Err() != nil {
		return list, cmp.Or(errs...)
	}
	l.warn("pods", errs[1])
	l.warn("services", l.listServices(ctx))
	l.readLevels(ctx)
	for _, w := range l.workloads {
		list.Items = append(list.Items, l.item(w))
	}
	slices.SortFunc(list.Items, func(a, b api.Workload) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Workload, b.Workload))
	})
	list.Warnings = l.warnings
	return list, ctx.Err()
}

// warn adds a warning that a resource could not be listed completely.
func (l *lister) warn(resource string, err error) {
	if err == nil {
		return
	}
	reason := api.OneLine(err.Error())
	if _, p, ok := client.Denial(err); ok {
		reason = "this requires the right to " + p.String()
	}
	l.warnings = append(l.warnings, fmt.Sprintf("cannot list all %s: %s", resource, reason))
}

// Each calls f with each object of a list, which it reads in pages. It reads at most 20,000 objects in 30 s, and
// returns an error if there are more.
func Each[T runtime.Object](ctx context.Context, o metav1.ListOptions,
	page func(context.Context, metav1.ListOptions) (T, error), f func(runtime.Object)) error {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	p := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return page(ctx, o) })
	p.FullListIfExpired = false
	n := 0
	return p.EachListItem(ctx, o, func(object runtime.Object) error {
		if n++; n > listLimit {
			return fmt.Errorf("kubevpn reads at most %d", listLimit)
		}
		f(object)
		return nil
	})
}

// listWorkloads lists the workloads with a template. It fails if none of their resources can be listed.
func (l *lister) listWorkloads(ctx context.Context, o metav1.ListOptions) error {
	add := func(object runtime.Object) {
		switch o := object.(type) {
		case *appsv1.Deployment:
			l.add(o, "Deployment", o.Spec.Selector, o.Spec.Template)
		case *appsv1.StatefulSet:
			l.add(o, "StatefulSet", o.Spec.Selector, o.Spec.Template)
		case *appsv1.DaemonSet:
			l.add(o, "DaemonSet", o.Spec.Selector, o.Spec.Template)
		case *appsv1.ReplicaSet:
			if metav1.GetControllerOf(o) == nil {
				l.add(o, "ReplicaSet", o.Spec.Selector, o.Spec.Template)
			}
		}
	}
	var first error
	apps, succeeded := l.kube.AppsV1(), false
	for _, r := range []struct {
		name string
		err  error
	}{
		{"deployments", Each(ctx, o, apps.Deployments(l.namespace).List, add)},
		{"statefulsets", Each(ctx, o, apps.StatefulSets(l.namespace).List, add)},
		{"daemonsets", Each(ctx, o, apps.DaemonSets(l.namespace).List, add)},
		{"replicasets", Each(ctx, o, apps.ReplicaSets(l.namespace).List, add)},
	} {
		l.warn(r.name, r.err)
		first, succeeded = cmp.Or(first, r.err), succeeded || r.err == nil
	}
	if succeeded {
		return nil
	}
	return first
}

// add adds a workload of a built-in kind.
func (l *lister) add(o metav1.Object, kind string, selector *metav1.LabelSelector, template corev1.PodTemplateSpec) {
	s, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		return // the API server would have rejected it
	}
	k, _ := BuiltinKind(kind)
	w := k.workload(o.GetNamespace(), o.GetName())
	w.Selector, w.Template = s, template
	l.workloads = append(l.workloads, w)
}

// listPods lists the pods that have not ended, with any labels: a workload's pods may have other labels than the
// workload. It adds the pods without controller to the workloads.
func (l *lister) listPods(ctx context.Context, selector labels.Selector) error {
	kind, _ := BuiltinKind("Pod")
	return Each(ctx, metav1.ListOptions{}, l.kube.CoreV1().Pods(l.namespace).List, func(object runtime.Object) {
		p := object.(*corev1.Pod)
		if p.DeletionTimestamp != nil || Finished(p) {
			return
		}
		slim := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: p.Name, Namespace: p.Namespace, Labels: p.Labels,
			OwnerReferences: p.OwnerReferences}}
		l.pods[p.Namespace] = append(l.pods[p.Namespace], listedPod{slim, Holders(p)})
		if metav1.GetControllerOf(p) == nil && selector.Matches(labels.Set(p.Labels)) {
			w := kind.workload(p.Namespace, p.Name)
			w.sample(p)
			l.workloads = append(l.workloads, w)
		}
	})
}

func (l *lister) listServices(ctx context.Context) error {
	return Each(ctx, metav1.ListOptions{}, l.kube.CoreV1().Services(l.namespace).List, func(object runtime.Object) {
		s := object.(*corev1.Service)
		l.services[s.Namespace] = append(l.services[s.Namespace], *s)
	})
}

// readLevels reads the pod security of the namespaces. If the user may not read it, List assumes that it admits agents.
func (l *lister) readLevels(ctx context.Context) {
	read := func(n *corev1.Namespace) { l.levels[n.Name] = n.Labels[client.PodSecurityLabel] }
	var err error
	if l.namespace == metav1.NamespaceAll {
		err = Each(ctx, metav1.ListOptions{}, l.kube.CoreV1().Namespaces().List,
			func(object runtime.Object) { read(object.(*corev1.Namespace)) })
	} else {
		var n *corev1.Namespace
		if n, err = l.kube.CoreV1().Namespaces().Get(ctx, l.namespace, metav1.GetOptions{}); err == nil {
			read(n)
		}
	}
	if apierrors.IsForbidden(err) {
		l.warnings = append(l.warnings, "you may not read the pod security of the namespaces, so the mode ephemeral "+
			"may be listed where it is not admitted")
	} else {
		l.warn("namespaces", err)
	}
}

// item describes a workload.
func (l *lister) item(w *Workload) api.Workload {
	w.Services = servicesOf(w, l.services[w.Namespace])
	item := api.Workload{Namespace: w.Namespace, Workload: w.String(), Ports: []api.WorkloadPort{},
		Intercepts: []api.Holder{}, Clones: []api.Holder{}}
	item.Modes, item.Reason = l.modes(w)
	for _, p := range w.Ports() {
		services := api.Texts(p.Services, func(s ServicePort) string { return fmt.Sprintf("%s:%d", s.Service, s.Port) })
		item.Ports = append(item.Ports, api.WorkloadPort{Protocol: p.Protocol, Port: p.Port, Name: p.Name,
			Container: p.Container, Services: services})
	}
	for _, p := range l.pods[w.Namespace] {
		if !w.owns(&p.pod) {
			continue
		}
		item.Pods++
		for _, holder := range p.holders {
			same := func(h api.Holder) bool { return h.Owner == holder.Owner && h.Mode == holder.Mode }
			if n := slices.IndexFunc(item.Intercepts, same); n >= 0 {
				item.Intercepts[n].Pods++
			} else {
				item.Intercepts = append(item.Intercepts, holder)
			}
		}
	}
	slices.SortFunc(item.Intercepts, func(a, b api.Holder) int { return cmp.Compare(a.Owner, b.Owner) })
	return item
}

// modes returns the modes that the workload and its namespace allow for an agent, and why one is missing. An
// intercept also checks the user's rights, webhooks and the kernels of the nodes.
func (l *lister) modes(w *Workload) (modes []string, reason string) {
	modes = []string{}
	if err := Unfit(w.String(), w.Template.Spec); err != nil {
		return modes, api.AsError(err).Message
	}
	switch level := l.levels[w.Namespace]; level {
	case "", "privileged":
		modes = append(modes, api.ModeEphemeral)
	default:
		reason = fmt.Sprintf("pod security %s of the namespace admits no ephemeral agent", level)
	}
	if w.Kind != "ReplicaSet" && w.Kind != "Pod" {
		return append(modes, api.ModeSidecar), reason
	}
	return modes, cmp.Or(reason, "a sidecar requires a workload that replaces its pods")
}

// Holders returns the owners of the agents that run in a pod, each once for each mode.
func Holders(p *corev1.Pod) []api.Holder {
	var all []api.Holder
	add := func(name, mode string, env []corev1.EnvVar) {
		if !api.IsAgent(name) {
			return
		}
		holder := api.Holder{Mode: mode, Pods: 1}
		for _, e := range env {
			if e.Name == api.AgentNameVariable {
				holder.Owner = api.CleanLine(strings.ReplaceAll(e.Value, "$$", "$"))
			}
		}
		if !slices.Contains(all, holder) {
			all = append(all, holder)
		}
	}
	for _, c := range p.Spec.EphemeralContainers {
		if !hasEnded(p, c.Name) {
			add(c.Name, api.ModeEphemeral, c.Env)
		}
	}
	for _, c := range p.Spec.Containers {
		add(c.Name, api.ModeSidecar, c.Env)
	}
	return all
}
