package install

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metaapi "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/pkg/wakeup"
)

// RemoveOptions configures Remove.
type RemoveOptions struct {
	Namespace string // of the manager; empty: DefaultNamespace
	// Connected returns how many laptops are connected through a pod of the manager. Remove calls it before it deletes
	// anything, and fails if there are any. Nil: Remove does not ask.
	Connected func(ctx context.Context, namespace, pod string) (int, error)
	Progress  func(api.Event) // may be nil
}

// Removed is one object that Remove has deleted or kept.
type Removed struct {
	Kind      string
	Namespace string // empty for cluster-wide objects
	Name      string
	Kept      string // why Remove kept it; empty: it is deleted
}

// String returns for example "Deployment kubevpn/kubevpn-traffic-manager".
func (r Removed) String() string {
	name := r.Name
	if r.Namespace != "" {
		name = r.Namespace + "/" + name
	}
	return r.Kind + " " + name
}

// removeTimeout limits the wait for the end of one object. Namespaces are slow.
const removeTimeout = 90 * time.Second

const stepRemove = "Removing the traffic manager"

// Remove deletes all objects that were installed for the manager in one namespace, and waits until they are gone. It
// returns the objects that existed. It deletes the namespace only if kubevpn created it and it contains nothing else.
// If the user lacks a permission, or a Helm release owns the manager, Remove deletes nothing. Errors are *api.Error, or
// ctx's.
func Remove(ctx context.Context, c apiServer, o RemoveOptions) ([]Removed, error) {
	r := &remover{kube: c.Kube(), o: o, ns: Options{Namespace: o.Namespace}.namespace()}
	removed, err := r.run(ctx)
	return removed, c.ExplainContext(ctx, err)
}

type remover struct {
	kube kubernetes.Interface
	o    RemoveOptions
	ns   string
}

// target is one object to delete.
type target struct {
	Removed
	need   client.Permission
	delete func(context.Context, metav1.DeleteOptions) error
	get    func(context.Context) error
}

// client is a typed client for objects of type T.
type deleter[T any] interface {
	Get(ctx context.Context, name string, o metav1.GetOptions) (T, error)
	Delete(ctx context.Context, name string, o metav1.DeleteOptions) error
}

func newTarget[T any](kind string, need client.Permission, name string, c deleter[T]) target {
	need.Verb = "delete"
	return target{
		Removed: Removed{Kind: kind, Namespace: need.Namespace, Name: name},
		need:    need,
		delete:  func(ctx context.Context, o metav1.DeleteOptions) error { return c.Delete(ctx, name, o) },
		get:     getter(c, name),
	}
}

// getter returns a function that reads an object, and returns the error.
func getter[T any](c deleter[T], name string) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := c.Get(ctx, name, metav1.GetOptions{})
		return err
	}
}

// lister lists targets.
type lister func(context.Context) ([]target, error)

// optional returns a lister of the same objects that finds none if the user may not list them: such a user has not
// created any.
func optional(list lister) lister {
	return func(ctx context.Context) ([]target, error) {
		targets, err := list(ctx)
		return targets, ignoreDenied(err)
	}
}

// targetsOf returns a lister of the objects of one kind that o selects. need is the right to delete them.
func targetsOf[T any, L runtime.Object](kind string, need client.Permission, o metav1.ListOptions, c interface {
	deleter[T]
	client.Objects[L]
}) lister {
	return func(ctx context.Context) (targets []target, err error) {
		list, err := c.List(ctx, o)
		if err != nil {
			return nil, fmt.Errorf("looking for objects of the traffic manager: %w", err)
		}
		return targets, metaapi.EachListItem(list, func(obj runtime.Object) error {
			// of RoleBindings, only those that an admin made for users of the traffic manager
			if b, ok := obj.(*rbacv1.RoleBinding); !ok || b.RoleRef.Kind == "Role" && b.RoleRef.Name == userRoleName {
				targets = append(targets, newTarget[T](kind, need, obj.(metav1.Object).GetName(), c))
			}
			return nil
		})
	}
}

func (r *remover) run(ctx context.Context) ([]Removed, error) {
	if owner, err := helmReleaseIn(ctx, r.kube, r.ns); err != nil {
		return nil, err
	} else if owner != nil {
		return nil, owner.refuse(owner.uninstall())
	}
	targets, kept, err := r.find(ctx)
	if err != nil {
		return nil, err
	}
	if len(targets) == 0 {
		return nil, r.checkUpstream(ctx)
	}
	var needs []client.Permission
	for _, t := range targets {
		needs = append(needs, t.need)
	}
	if missing := lacking(ctx, r.kube, needs); len(missing) > 0 {
		return nil, api.Errorf(api.ExitPermission, "cannot remove the traffic manager from %s: you may not %s", r.ns,
			missing[0]).
			WithHint("Nothing was deleted. Ask a cluster admin to run `kubevpn uninstall --manager-namespace %s`.",
				r.ns)
	}
	if err := r.guard(ctx); err != nil {
		return nil, err
	}
	var removed []Removed
	for _, t := range targets {
		tell(r.o.Progress, stepRemove, "%v", t.Removed)
		// Foreground: a Deployment ends after its pods.
		err := t.delete(ctx, metav1.DeleteOptions{PropagationPolicy: new(metav1.DeletePropagationForeground)})
		if err == nil {
			err = r.gone(ctx, t)
		}
		if err != nil && !apierrors.IsNotFound(err) {
			return removed, fmt.Errorf("deleting the %v: %w", t.Removed, err)
		}
		removed = append(removed, t.Removed)
	}
	return append(removed, kept...), nil
}

// checkUpstream returns an error if the Deployment that the user sees is that of the other kubevpn.
func (r *remover) checkUpstream(ctx context.Context) error {
	d, err := r.kube.AppsV1().Deployments(r.ns).Get(ctx, ManagerName, metav1.GetOptions{})
	if err != nil {
		return ignoreDenied(err)
	}
	if isUpstream(d) {
		return upstreamError(r.ns)
	}
	return nil
}

// guard returns an error if laptops are connected.
func (r *remover) guard(ctx context.Context) error {
	if r.o.Connected == nil {
		return nil
	}
	pods, err := listManagerPods(ctx, r.kube, r.ns)
	if err != nil {
		return fmt.Errorf("looking for the traffic manager's pod: %w", err)
	}
	for _, p := range pods {
		if rank(p) > 0 && p.DeletionTimestamp == nil {
			return r.checkConnected(ctx, p.Name)
		}
	}
	return nil
}

func (r *remover) checkConnected(ctx context.Context, pod string) error {
	n, err := r.o.Connected(ctx, r.ns, pod)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		if r.o.Progress != nil {
			r.o.Progress(api.Event{Time: time.Now(),
				Warning: fmt.Sprintf("cannot check whether laptops are connected: %v", err)})
		}
		return nil
	case n == 0:
		return nil
	}
	who := "a laptop is"
	if n > 1 {
		who = fmt.Sprintf("%d laptops are", n)
	}
	return api.Errorf(api.ExitInstall, "%s connected through this traffic manager", who).
		WithHint("`kubevpn disconnect` ends your own connection; --force also ends the connections of other users")
}

// find lists the objects to delete, in the order of deletion, and those that stay.
func (r *remover) find(ctx context.Context) (targets []target, kept []Removed, err error) {
	in := func(group, resource string) client.Permission {
		return client.Permission{Group: group, Resource: resource, Namespace: r.ns}
	}
	ours := metav1.ListOptions{LabelSelector: labelManagedBy + "=kubevpn"}
	oursHere := metav1.ListOptions{LabelSelector: ours.LabelSelector + "," + labelNamespace + "=" + r.ns}
	oursDirect := metav1.ListOptions{LabelSelector: ours.LabelSelector + "," + labelComponent + "=traffic-manager"}
	const group = rbacv1.GroupName
	rbac, spaces := r.kube.RbacV1(), r.kube.CoreV1().Namespaces()
	for _, list := range []lister{
		optional(targetsOf("Job", in("batch", "jobs"), oursDirect, r.kube.BatchV1().Jobs(r.ns))),
		targetsOf("Deployment", in("apps", "deployments"), ours, r.kube.AppsV1().Deployments(r.ns)),
		optional(targetsOf("Service", in("", "services"), oursDirect, r.kube.CoreV1().Services(r.ns))),
		targetsOf("ServiceAccount", in("", "serviceaccounts"), ours, r.kube.CoreV1().ServiceAccounts(r.ns)),
		optional(targetsOf("RoleBinding", in(group, "rolebindings"), metav1.ListOptions{}, rbac.RoleBindings(r.ns))),
		optional(targetsOf("Role", in(group, "roles"), ours, rbac.Roles(r.ns))),
		optional(targetsOf("ClusterRoleBinding", client.Permission{Group: group, Resource: "clusterrolebindings"},
			oursHere, rbac.ClusterRoleBindings())),
		optional(targetsOf("ClusterRole", client.Permission{Group: group, Resource: "clusterroles"}, oursHere,
			rbac.ClusterRoles())),
	} {
		found, err := list(ctx)
		if err != nil {
			return nil, nil, err
		}
		targets = append(targets, found...)
	}
	namespace, err := spaces.Get(ctx, r.ns, metav1.GetOptions{})
	if err != nil { // a user who may not see it cannot have created it
		return targets, nil, ignoreDenied(err)
	}
	if namespace.Annotations[annotationCreated] != "true" {
		return targets, nil, nil
	}
	others, err := r.others(ctx)
	if err != nil {
		return nil, nil, err
	}
	if others != "" {
		return targets, []Removed{{Kind: "Namespace", Name: r.ns, Kept: others}}, nil
	}
	return append(targets, newTarget("Namespace", client.Permission{Resource: "namespaces"}, r.ns, spaces)), nil, nil
}

// others lists other objects in the namespace; "" if there are none.
func (r *remover) others(ctx context.Context) (string, error) {
	o := metav1.ListOptions{LabelSelector: labelComponent + "!=traffic-manager", Limit: 10}
	pods, err := r.kube.CoreV1().Pods(r.ns).List(ctx, o)
	if err != nil {
		return "", fmt.Errorf("listing the other pods in %s: %w", r.ns, err)
	}
	services, err := r.kube.CoreV1().Services(r.ns).List(ctx, o)
	if err != nil {
		return "", fmt.Errorf("listing the other Services in %s: %w", r.ns, err)
	}
	names := slices.Concat(api.Texts(pods.Items, func(p corev1.Pod) string { return "pod " + p.Name }),
		api.Texts(services.Items, func(s corev1.Service) string { return "Service " + s.Name }))
	if len(names) == 0 {
		return "", nil
	}
	return "it contains other objects: " + strings.Join(names, ", "), nil
}

// gone waits until an object is deleted.
func (r *remover) gone(ctx context.Context, t target) error {
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	for {
		err := t.get(ctx)
		if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) { // the right to read it may end first
			return nil
		}
		if err != nil && ctx.Err() == nil {
			return err
		}
		if !wakeup.Pause(ctx, 200*time.Millisecond) {
			return api.Errorf(api.ExitNotReady, "the %v was not deleted within %v", t.Removed, removeTimeout).
				WithHint("`kubectl get %s %s -o yaml` may show a finalizer that blocks the deletion.",
					api.ShellQuote(strings.ToLower(t.Kind)), api.ShellQuote(t.Name))
		}
	}
}

// ignoreDenied returns nil if the user may not see the objects, or if they do not exist.
func ignoreDenied(err error) error {
	if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
