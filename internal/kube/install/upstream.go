package install

import (
	"context"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
)

// Another program is also named kubevpn, and gives its objects the name ManagerName too. This file recognizes version
// 2.x of it. This program never changes those objects.
const otherName = "the other kubevpn (github.com/kubenetworks/kubevpn)"

const migrating = "docs/migrating.md compares the two programs."

// isUpstream reports whether the Deployment is the traffic manager of the other kubevpn. All its versions, and its Helm
// chart, give the pods this label and this container.
func isUpstream(d *appsv1.Deployment) bool {
	return d.Spec.Template.Labels["app"] == ManagerName &&
		slices.ContainsFunc(d.Spec.Template.Spec.Containers, func(c corev1.Container) bool { return c.Name == "vpn" })
}

func upstreamError(namespace string) *api.Error {
	return api.Errorf(api.ExitInstall, "the Deployment %s/%s belongs to %s", namespace, ManagerName, otherName).
		WithHint("Nothing was changed. Both can run in one cluster, in different namespaces:\n"+
			"  kubevpn connect --manager-namespace NAME\n"+
			"To replace it, run `kubevpn uninstall` of that program first. %s", migrating)
}

// upstreamLeftovers returns an error if bindings of the other kubevpn remain in the namespace after its Deployment was
// deleted. They give a ServiceAccount all rights in the cluster, and the traffic manager uses one with the same name.
// Bindings that the user may not see are ignored.
func (e *ensurer) upstreamLeftovers(ctx context.Context, ns string) error {
	var remove []string
	rbac := e.kube.RbacV1()
	for _, name := range []string{ManagerName, ManagerName + "-proxy", ManagerName + "-route"} {
		b, err := rbac.RoleBindings(ns).Get(ctx, name, metav1.GetOptions{})
		if ignoreDenied(err) != nil {
			return fmt.Errorf("looking for bindings of %s: %w", otherName, err)
		}
		if err == nil && bindsManager(b.Subjects, ns) {
			remove = append(remove, "kubectl -n "+ns+" delete rolebinding "+name)
		}
	}
	b, err := rbac.ClusterRoleBindings().Get(ctx, ManagerName+"-proxy", metav1.GetOptions{})
	if ignoreDenied(err) != nil {
		return fmt.Errorf("looking for bindings of %s: %w", otherName, err)
	}
	if err == nil && bindsManager(b.Subjects, ns) {
		remove = append(remove, "kubectl delete clusterrolebinding "+b.Name)
	}
	if len(remove) == 0 {
		return nil
	}
	return api.Errorf(api.ExitInstall,
		"bindings of %s remain in the namespace %s and would give its rights to the traffic manager", otherName, ns).
		WithHint("Nothing was changed. Use another namespace with --manager-namespace, or delete them:\n  %s\n%s",
			strings.Join(remove, "\n  "), migrating)
}

// bindsManager reports whether one of the subjects is the traffic manager's ServiceAccount.
func bindsManager(subjects []rbacv1.Subject, ns string) bool {
	return slices.ContainsFunc(subjects, func(s rbacv1.Subject) bool {
		return s.Kind == rbacv1.ServiceAccountKind && s.Name == ManagerName && s.Namespace == ns
	})
}
