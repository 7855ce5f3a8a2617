package workloads

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

// Workload is an object with pods: a Deployment, a Service, or any other with a pod template or a scale subresource. It
// is a snapshot and does not follow changes.
type Workload struct {
	Namespace string
	Name      string
	Kind      string // "Deployment"
	Resource  schema.GroupVersionResource
	Object    *unstructured.Unstructured // must not be changed
	// Selector selects its pods. Nil for a Pod. For a CronJob it selects the pods of the Jobs that were active.
	Selector labels.Selector
	// Template is the template of its pods. For a workload without one, such as a Service, it is copied from its newest
	// pod; without any pod it is empty.
	Template corev1.PodTemplateSpec
	// Services send to its pods, by their selectors; sorted by name.
	Services []corev1.Service
	// Notes tell the user what Client.Workload could not read.
	Notes []string

	shown string // TYPE of TYPE/NAME
}

// String returns TYPE/NAME, as kubectl and Client.Workload accept it: "deployment/web", "rollout.argoproj.io/web".
func (w *Workload) String() string { return w.shown + "/" + w.Name }

// IsScheduled reports whether w is a CronJob: a schedule starts its pods, they end, and they receive no requests.
func (w *Workload) IsScheduled() bool { return w.Resource.GroupResource() == resourceCronJobs }

// Client reads and changes the workloads of a cluster, with the user's own rights. It is safe for concurrent use.
type Client struct{ cluster }

// cluster is a *client.Cluster.
type cluster interface {
	Kube() kubernetes.Interface
	Dynamic() dynamic.Interface
	DialExec(namespace, pod, container string, command []string) net.Conn
	Explain(err error) *api.Error
	ExplainContext(ctx context.Context, err error) error
}

// New returns a Client of the cluster.
func New(c *client.Cluster) Client { return Client{c} }

// Workload reads the workload TYPE/NAME. It resolves TYPE as kubectl does: short names, "deployments.apps",
// "deploy.v1.apps". It fails for a workload in whose pods no agent can run. Errors are *api.Error.
func (c Client) Workload(ctx context.Context, namespace, typeAndName string) (*Workload, error) {
	w, err := c.read(ctx, namespace, typeAndName)
	return w, c.ExplainContext(ctx, err)
}

func (c Client) read(ctx context.Context, namespace, typeAndName string) (*Workload, error) {
	kind, name, found := strings.Cut(typeAndName, "/")
	if !found || kind == "" || name == "" || strings.Contains(name, "/") {
		return nil, api.Errorf(api.ExitUsage, "%q is not TYPE/NAME", typeAndName).
			WithHint("For example deployment/web, sts/db or service/web.")
	}
	k, err := c.kind(ctx, kind)
	if err != nil {
		return nil, err
	}
	w := k.workload(namespace, name)
	var services []corev1.Service
	g, gctx := errgroup.WithContext(ctx) // in parallel, because each takes a round trip
	g.Go(func() error { return c.object(gctx, w) })
	g.Go(func() (err error) {
		services, w.Notes, err = c.listServices(gctx, namespace)
		return err
	})
	if err := g.Wait(); err != nil {
		return nil, err
	}
	w.Services = servicesOf(w, services)
	return w, nil
}

// object reads the workload's object, and finds the selector and the template of its pods.
func (c Client) object(ctx context.Context, w *Workload) (err error) {
	w.Object, err = c.Dynamic().Resource(w.Resource).Namespace(w.Namespace).Get(ctx, w.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return api.Errorf(api.ExitWorkload, "there is no %s in the namespace %s", w, w.Namespace).
			WithHint("`kubectl -n %s get %s` lists what there is.", w.Namespace, w.shown)
	}
	if err != nil {
		return fmt.Errorf("reading %s: %w", w, err)
	}
	if err := c.shape(ctx, w); err != nil {
		return err
	}
	return Unfit(w.String(), w.Template.Spec)
}

// Unfit returns an *api.Error if kubevpn adds no container to pods with this spec, or nil. Workload checks the template
// with it; MayInject, Inject and AddSender check the pod, whose spec may differ.
func Unfit(what string, spec corev1.PodSpec) error {
	switch {
	case spec.HostNetwork:
		return api.Errorf(api.ExitWorkload,
			"the pods of %s use their nodes' network (hostNetwork), where kubevpn adds no container", what).
			WithHint("Name a workload whose pods have a network of their own.")
	case spec.OS != nil && spec.OS.Name == corev1.Windows:
		return api.Errorf(api.ExitWorkload, "the pods of %s run on Windows, but kubevpn's containers need Linux", what).
			WithHint("Name a workload whose pods run on Linux.")
	}
	return nil
}

// shape finds the selector and the template of the workload's pods.
func (c Client) shape(ctx context.Context, w *Workload) error {
	switch w.Resource.GroupResource() {
	case resourcePods:
		var p corev1.Pod
		if err := decode(w.Object.Object, &p); err != nil {
			return fmt.Errorf("reading %s: %w", w, err)
		}
		w.sample(&p)
		return nil
	case resourceServices:
		selector, _, err := unstructured.NestedStringMap(w.Object.Object, "spec", "selector")
		if err != nil {
			return fmt.Errorf("reading %s: %w", w, err)
		}
		if kind, _, _ := unstructured.NestedString(w.Object.Object, "spec", "type"); len(selector) == 0 ||
			kind == string(corev1.ServiceTypeExternalName) {
			return api.Errorf(api.ExitWorkload, "%s has no selector and therefore no pods", w).
				WithHint("Name what runs its pods: `kubectl -n %s get deployments,statefulsets` lists some.",
					w.Namespace)
		}
		w.Selector = labels.SelectorFromSet(selector)
		return c.takeSample(ctx, w)
	}
	if err := c.template(ctx, w); err != nil {
		return err
	}
	if w.IsScheduled() {
		return w.selectActive()
	}
	own, err := selectorOf(w.Object, "spec", "selector")
	if err != nil {
		return fmt.Errorf("reading %s: %w", w, err)
	}
	if own != nil {
		w.Selector = own
	}
	if w.Selector == nil {
		if w.Selector, err = c.scaleSelector(ctx, w); err != nil {
			return err
		}
	}
	if len(w.Template.Spec.Containers) == 0 {
		return c.takeSample(ctx, w)
	}
	return nil
}

// template reads the workload's pod template. Without one, it reads the template and the selector of the workload that
// spec.workloadRef names, as in an Argo Rollout. The template may stay empty.
func (c Client) template(ctx context.Context, w *Workload) error {
	found, err := templateOf(w.Object, &w.Template)
	if found || err != nil {
		return err
	}
	ref, found, err := unstructured.NestedStringMap(w.Object.Object, "spec", "workloadRef")
	if err != nil || !found {
		return nil // the field has another meaning in this kind
	}
	gv, err := schema.ParseGroupVersion(ref["apiVersion"])
	if err != nil {
		return fmt.Errorf("reading %s: its workloadRef: %w", w, err)
	}
	other := ref["kind"]
	if gv.Group != "" {
		other += "." + gv.Version + "." + gv.Group
	}
	k, err := c.kind(ctx, other)
	if err != nil {
		return err
	}
	o, err := c.Dynamic().Resource(k.Resource).Namespace(w.Namespace).Get(ctx, ref["name"], metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return api.Errorf(api.ExitWorkload, "%s refers to %s/%s, which does not exist", w, k.Type, ref["name"]).
			WithHint("Its controller cannot create pods: `kubectl -n %s describe %s %s` may show the cause.",
				api.ShellQuote(w.Namespace), api.ShellQuote(w.shown), api.ShellQuote(w.Name))
	}
	if err != nil {
		return fmt.Errorf("reading %s/%s, to which %s refers: %w", k.Type, ref["name"], w, err)
	}
	if _, err = templateOf(o, &w.Template); err != nil {
		return err
	}
	if w.Selector, err = selectorOf(o, "spec", "selector"); err != nil {
		return fmt.Errorf("reading %s/%s: %w", k.Type, ref["name"], err)
	}
	return nil
}

// templateOf reads the pod template of an object: spec.template, or the one inside a CronJob's template of Jobs.
func templateOf(o *unstructured.Unstructured, to *corev1.PodTemplateSpec) (found bool, err error) {
	for _, path := range [][]string{{"spec", "template"}, {"spec", "jobTemplate", "spec", "template"}} {
		if containers, _, _ := unstructured.NestedSlice(o.Object,
			append(slices.Clone(path), "spec", "containers")...); len(containers) == 0 {
			continue
		}
		template, _, err := unstructured.NestedMap(o.Object, path...)
		if err == nil {
			err = decode(template, to)
		}
		if err != nil {
			return false, fmt.Errorf("reading the pod template of %s %s: %w", o.GetKind(), o.GetName(), err)
		}
		return true, nil
	}
	return false, nil
}

// selectActive sets a CronJob's selector to the pods of its active Jobs. Without any, it selects nothing. It does not
// use labels.Nothing, whose String selects everything.
func (w *Workload) selectActive() error {
	var c batchv1.CronJob
	if err := decode(w.Object.Object, &c); err != nil {
		return fmt.Errorf("reading %s: %w", w, err)
	}
	jobs := api.Texts(c.Status.Active, func(active corev1.ObjectReference) string { return active.Name })
	text := batchv1.JobNameLabel + ",!" + batchv1.JobNameLabel
	if len(jobs) > 0 {
		text = fmt.Sprintf("%s in (%s)", batchv1.JobNameLabel, strings.Join(jobs, ","))
	}
	var err error
	if w.Selector, err = labels.Parse(text); err != nil {
		return fmt.Errorf("reading the Jobs of %s: %w", w, err)
	}
	return nil
}

// selectorOf reads a selector of any form: a LabelSelector, the map of a ReplicationController, or the text of a scale
// subresource. It returns nil if there is none.
func selectorOf(o *unstructured.Unstructured, path ...string) (labels.Selector, error) {
	field, found, err := unstructured.NestedFieldNoCopy(o.Object, path...)
	if err != nil || !found {
		return nil, err
	}
	switch field := field.(type) {
	case string:
		if field == "" {
			return nil, nil
		}
		return labels.Parse(field)
	case map[string]any:
		if len(field) == 0 {
			return nil, nil // in a LabelSelector, "everything", which no controller of pods accepts
		}
		if field["matchLabels"] == nil && field["matchExpressions"] == nil {
			set, _, err := unstructured.NestedStringMap(o.Object, path...)
			return labels.SelectorFromSet(set), err
		}
		var s metav1.LabelSelector
		if err := decode(field, &s); err != nil {
			return nil, err
		}
		return metav1.LabelSelectorAsSelector(&s)
	}
	return nil, fmt.Errorf("%s is a %T", strings.Join(path, "."), field)
}

// scaleSelector reads the selector from the workload's scale subresource.
func (c Client) scaleSelector(ctx context.Context, w *Workload) (labels.Selector, error) {
	scale, err := c.Dynamic().Resource(w.Resource).Namespace(w.Namespace).Get(ctx, w.Name, metav1.GetOptions{}, "scale")
	var selector labels.Selector
	if err == nil {
		selector, err = selectorOf(scale, "status", "selector")
	}
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsMethodNotSupported(err) {
		return nil, fmt.Errorf("reading the scale of %s: %w", w, err)
	}
	if selector == nil {
		return nil, api.Errorf(api.ExitWorkload,
			"%s has neither a selector of pods nor a scale subresource that has one", w).
			WithHint("Name what runs its pods instead: `kubectl -n %s get deployments,statefulsets,daemonsets,pods`.",
				w.Namespace)
	}
	return selector, nil
}

// takeSample copies the template from the workload's newest pod that is not being deleted.
func (c Client) takeSample(ctx context.Context, w *Workload) error {
	list, err := c.Kube().CoreV1().Pods(w.Namespace).List(ctx, w.choose(metav1.ListOptions{}))
	if err != nil {
		return fmt.Errorf("listing the pods of %s: %w", w, err)
	}
	pods := slices.DeleteFunc(list.Items, func(p corev1.Pod) bool {
		return p.DeletionTimestamp != nil || Finished(&p) || !w.owns(&p)
	})
	if len(pods) == 0 {
		return nil
	}
	newest := slices.MaxFunc(pods, func(a, b corev1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	w.sample(&newest)
	return nil
}

func (w *Workload) sample(p *corev1.Pod) {
	w.Template = corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: p.Labels, Annotations: p.Annotations},
		Spec: p.Spec}
}

// choose adds the selectors of the workload's pods to o.
func (w *Workload) choose(o metav1.ListOptions) metav1.ListOptions {
	if w.Selector != nil {
		o.LabelSelector = w.Selector.String()
	} else {
		o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, w.Name).String()
	}
	return o
}

// listServices returns the namespace's Services, or a note that the user may not list them.
func (c Client) listServices(ctx context.Context, namespace string) (all []corev1.Service, notes []string,
	err error) {
	list, err := c.Kube().CoreV1().Services(namespace).List(ctx, metav1.ListOptions{})
	switch {
	case apierrors.IsForbidden(err):
		return nil, []string{"you may not list Services, so only the ports that its containers declare are known"}, nil
	case err != nil:
		return nil, nil, fmt.Errorf("listing the Services in the namespace %s: %w", namespace, err)
	}
	return list.Items, nil, nil
}

// Now returns w as it is in o, a later version of its object, and with those of all that now send to its pods. Without
// pods, the labels of the template decide. It does not change w.
func (w *Workload) Now(o *unstructured.Unstructured, all []corev1.Service, pods []*corev1.Pod) (*Workload, error) {
	now := *w
	now.Object = o
	if _, found, _ := unstructured.NestedMap(o.Object, "spec", "template"); found { // else it is a pod's
		now.Template = corev1.PodTemplateSpec{}
		if _, err := templateOf(o, &now.Template); err != nil {
			return nil, err
		}
	}
	var sets []labels.Set
	for _, p := range pods {
		sets = append(sets, p.Labels)
	}
	now.Services = servicesOf(&now, all, sets...)
	return &now, nil
}

// servicesOf returns the Services that send to the workload's pods, sorted by name. Without the labels of pods, those
// of the template decide.
func servicesOf(w *Workload, all []corev1.Service, pods ...labels.Set) []corev1.Service {
	if len(pods) == 0 {
		pods = []labels.Set{w.Template.Labels}
	}
	var services []corev1.Service
	for _, s := range all {
		named := w.Resource.GroupResource() == resourceServices && s.Name == w.Name
		if named || len(s.Spec.Selector) > 0 && s.Spec.Type != corev1.ServiceTypeExternalName &&
			slices.ContainsFunc(pods, func(l labels.Set) bool {
				return labels.SelectorFromSet(s.Spec.Selector).Matches(l)
			}) {
			services = append(services, s)
		}
	}
	slices.SortFunc(services, func(a, b corev1.Service) int { return cmp.Compare(a.Name, b.Name) })
	return services
}

// Finished reports whether none of the pod's containers will ever run again.
func Finished(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

func decode(from map[string]any, to any) error {
	return runtime.DefaultUnstructuredConverter.FromUnstructured(from, to)
}
