package install

import (
	"context"
	"fmt"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metalabels "k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
)

// RemoveOptions configures Remove.
type RemoveOptions struct {
	Namespace string // of the manager; empty: DefaultNamespace
	// Connected returns how many laptops are connected through a pod of the manager. Remove calls it before it deletes
	// anything, and fails if there are any. Nil: Remove does not ask.
	Connected func(ctx context.Context, namespace, pod string) (int, error)
	Progress  func(api.Event) // may be nil
}

// Removed is one object that is gone, or was kept.
type Removed struct {
	Kind      string
	Namespace string // empty for cluster-wide objects
	Name      string
	Kept      string // why it was not deleted; empty: it is gone
}

// String is "Deployment kubevpn/kubevpn-traffic-manager".
func (r Removed) String() string {
	name := r.Name
	if r.Namespace != "" {
		name = r.Namespace + "/" + name
	}
	return r.Kind + " " + name
}

// removeTimeout bounds waiting for an object's end. Namespaces are slow.
const removeTimeout = 90 * time.Second

const stepRemove = "Removing the traffic manager"

// Remove deletes all objects that were installed for the manager in one namespace, and waits until they are gone. It
// returns the objects that existed. It deletes the namespace only if kubevpn created it and it contains nothing else.
// If the user lacks a permission, Remove deletes nothing. Errors are *api.Error.
func Remove(ctx context.Context, c *cluster.Cluster, o RemoveOptions) ([]Removed, error) {
	r := &remover{kube: c.Kube(), o: o, ns: Options{Namespace: o.Namespace}.namespace()}
	removed, err := r.run(ctx)
	if err != nil {
		return removed, c.Explain(err)
	}
	return removed, nil
}

type remover struct {
	kube kubernetes.Interface
	o    RemoveOptions
	ns   string
}

// target is one object to delete.
type target struct {
	Removed
	need   cluster.Permission
	delete func(context.Context, metav1.DeleteOptions) error
	get    func(context.Context) error
}

type (
	deleteFunc = func(ctx context.Context, name string, o metav1.DeleteOptions) error
	getFunc    = func(ctx context.Context, name string, o metav1.GetOptions) error
)

func (r *remover) run(ctx context.Context) ([]Removed, error) {
	targets, kept, err := r.find(ctx)
	if err != nil {
		return nil, err
	}
	if len(targets) == 0 {
		return nil, nil
	}
	var needs []cluster.Permission
	for _, t := range targets {
		needs = append(needs, t.need)
	}
	if missing := lacking(ctx, r.kube, needs); len(missing) > 0 {
		return nil, api.Errorf(api.ExitPermission, "cannot remove the traffic manager from %[2]s: you may not %[1]s",
			missing[0], r.ns).
			WithHint("Nothing was deleted. Ask a cluster admin to run `kubevpn uninstall --manager-namespace %s`.",
				r.ns)
	}
	if err := r.guard(ctx); err != nil {
		return nil, err
	}
	var removed []Removed
	for _, t := range targets {
		if r.o.Progress != nil {
			r.o.Progress(event(stepRemove, "%v", t.Removed))
		}
		// Foreground: a Deployment ends after its pods.
		err := t.delete(ctx, metav1.DeleteOptions{PropagationPolicy: ptr(metav1.DeletePropagationForeground)})
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

// guard returns an error if laptops are connected.
func (r *remover) guard(ctx context.Context) error {
	if r.o.Connected == nil {
		return nil
	}
	pods, err := r.kube.CoreV1().Pods(r.ns).List(ctx,
		metav1.ListOptions{LabelSelector: metalabels.SelectorFromSet(selectorLabels()).String()})
	if err != nil {
		return fmt.Errorf("looking for the traffic manager's pod: %w", err)
	}
	for i := range pods.Items {
		if p := &pods.Items[i]; rank(p) > 0 && p.DeletionTimestamp == nil {
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

// find lists what there is to delete, in the order of deletion, and what stays.
func (r *remover) find(ctx context.Context) (targets []target, kept []Removed, err error) {
	ours := metav1.ListOptions{LabelSelector: labelManagedBy + "=kubevpn"}
	add := func(kind, group, resource, namespace, name string, del deleteFunc, get getFunc) {
		targets = append(targets, target{
			Removed: Removed{Kind: kind, Namespace: namespace, Name: name},
			need:    cluster.Permission{Verb: "delete", Group: group, Resource: resource, Namespace: namespace},
			delete:  func(ctx context.Context, o metav1.DeleteOptions) error { return del(ctx, name, o) },
			get:     func(ctx context.Context) error { return get(ctx, name, metav1.GetOptions{}) },
		})
	}
	deployments := r.kube.AppsV1().Deployments(r.ns)
	ds, err := deployments.List(ctx, ours)
	if err != nil {
		return nil, nil, fmt.Errorf("looking for the traffic manager in %s: %w", r.ns, err)
	}
	for _, d := range ds.Items {
		add("Deployment", "apps", "deployments", r.ns, d.Name, deployments.Delete,
			getter[*appsv1.Deployment](deployments.Get))
	}
	accounts := r.kube.CoreV1().ServiceAccounts(r.ns)
	as, err := accounts.List(ctx, ours)
	if err != nil {
		return nil, nil, fmt.Errorf("looking for ServiceAccounts in %s: %w", r.ns, err)
	}
	for _, a := range as.Items {
		add("ServiceAccount", "", "serviceaccounts", r.ns, a.Name, accounts.Delete,
			getter[*corev1.ServiceAccount](accounts.Get))
	}
	if err := r.findRights(ctx, ours, add); err != nil {
		return nil, nil, err
	}
	namespace, err := r.kube.CoreV1().Namespaces().Get(ctx, r.ns, metav1.GetOptions{})
	if err != nil { // those who may not see it cannot have made it
		return targets, nil, ignoreDenied(err)
	}
	if namespace.Annotations[annotationCreated] != "true" {
		return targets, nil, nil
	}
	if others, err := r.others(ctx); err != nil {
		return nil, nil, err
	} else if others != "" {
		return targets, []Removed{{Kind: "Namespace", Name: r.ns, Kept: others}}, nil
	}
	spaces := r.kube.CoreV1().Namespaces()
	add("Namespace", "", "namespaces", "", r.ns, spaces.Delete, getter[*corev1.Namespace](spaces.Get))
	return targets, nil, nil
}

// findRights adds the RBAC objects. A developer who may not list them installed none either.
func (r *remover) findRights(ctx context.Context, ours metav1.ListOptions,
	add func(kind, group, resource, namespace, name string, del deleteFunc, get getFunc)) error {
	const group = rbacv1.GroupName
	rbac := r.kube.RbacV1()
	bindings, err := rbac.RoleBindings(r.ns).List(ctx, metav1.ListOptions{})
	if ignoreDenied(err) != nil {
		return fmt.Errorf("looking for RoleBindings in %s: %w", r.ns, err)
	} else if err == nil {
		for _, b := range bindings.Items { // an admin's, for the users of the role that goes
			if b.RoleRef.Kind == "Role" && b.RoleRef.Name == UserRole {
				add("RoleBinding", group, "rolebindings", r.ns, b.Name, rbac.RoleBindings(r.ns).Delete,
					getter[*rbacv1.RoleBinding](rbac.RoleBindings(r.ns).Get))
			}
		}
	}
	roles, err := rbac.Roles(r.ns).List(ctx, ours)
	if ignoreDenied(err) != nil {
		return fmt.Errorf("looking for Roles in %s: %w", r.ns, err)
	} else if err == nil {
		for _, role := range roles.Items {
			add("Role", group, "roles", r.ns, role.Name, rbac.Roles(r.ns).Delete,
				getter[*rbacv1.Role](rbac.Roles(r.ns).Get))
		}
	}
	ours.LabelSelector += "," + labelNamespace + "=" + r.ns
	crbs, err := rbac.ClusterRoleBindings().List(ctx, ours)
	if ignoreDenied(err) != nil {
		return fmt.Errorf("looking for ClusterRoleBindings: %w", err)
	} else if err == nil {
		for _, b := range crbs.Items {
			add("ClusterRoleBinding", group, "clusterrolebindings", "", b.Name, rbac.ClusterRoleBindings().Delete,
				getter[*rbacv1.ClusterRoleBinding](rbac.ClusterRoleBindings().Get))
		}
	}
	crs, err := rbac.ClusterRoles().List(ctx, ours)
	if ignoreDenied(err) != nil {
		return fmt.Errorf("looking for ClusterRoles: %w", err)
	} else if err == nil {
		for _, cr := range crs.Items {
			add("ClusterRole", group, "clusterroles", "", cr.Name, rbac.ClusterRoles().Delete,
				getter[*rbacv1.ClusterRole](rbac.ClusterRoles().Get))
		}
	}
	return nil
}

// others says what else lives in the namespace, or "".
func (r *remover) others(ctx context.Context) (string, error) {
	o := metav1.ListOptions{LabelSelector: labelName + "!=kubevpn", Limit: 10}
	pods, err := r.kube.CoreV1().Pods(r.ns).List(ctx, o)
	if err != nil {
		return "", fmt.Errorf("looking for what else is in %s: %w", r.ns, err)
	}
	services, err := r.kube.CoreV1().Services(r.ns).List(ctx, o)
	if err != nil {
		return "", fmt.Errorf("looking for what else is in %s: %w", r.ns, err)
	}
	var names []string
	for _, p := range pods.Items {
		names = append(names, "pod "+p.Name)
	}
	for _, s := range services.Items {
		names = append(names, "Service "+s.Name)
	}
	if len(names) == 0 {
		return "", nil
	}
	return "it contains other objects: " + strings.Join(names, ", "), nil
}

// gone waits until an object has ended.
func (r *remover) gone(ctx context.Context, t target) error {
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	for {
		err := t.get(ctx)
		if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) { // one's right to see it may have gone first
			return nil
		}
		if err != nil && ctx.Err() == nil {
			return err
		}
		select {
		case <-ctx.Done():
			return api.Errorf(api.ExitNotReady, "the %v was not deleted within %v", t.Removed, removeTimeout).
				WithHint("`kubectl get %s %s -o yaml` may show a finalizer that blocks the deletion.",
					api.ShellQuote(strings.ToLower(t.Kind)), api.ShellQuote(t.Name))
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func getter[T any](get func(context.Context, string, metav1.GetOptions) (T, error)) getFunc {
	return func(ctx context.Context, name string, o metav1.GetOptions) error {
		_, err := get(ctx, name, o)
		return err
	}
}

// ignoreDenied drops what means "not for you" or "not there".
func ignoreDenied(err error) error {
	if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
