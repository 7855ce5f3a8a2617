package install

import (
	"context"
	"slices"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/kube/client"
	"kubevpn/pkg/wakeup"
)

// lacking returns the permissions that the user does not have, in order. If the cluster does not answer, it assumes
// that the user has them; the request itself then fails.
func lacking(ctx context.Context, kube kubernetes.Interface, permissions []client.Permission) []client.Permission {
	denied := wakeup.All(permissions, func(p client.Permission) bool {
		resource, sub, _ := strings.Cut(p.Resource, "/")
		request := new(authorizationv1.SelfSubjectAccessReview)
		request.Spec.ResourceAttributes = &authorizationv1.ResourceAttributes{
			Namespace: p.Namespace, Verb: p.Verb, Group: p.Group, Resource: resource, Subresource: sub,
		}
		reviews := kube.AuthorizationV1().SelfSubjectAccessReviews()
		review, err := reviews.Create(ctx, request, metav1.CreateOptions{})
		return err == nil && !review.Status.Allowed
	})
	var missing []client.Permission
	for i, p := range permissions {
		if denied[i] {
			missing = append(missing, p)
		}
	}
	return missing
}

// each returns p with each of the verbs.
func each(verbs []string, p client.Permission) []client.Permission {
	var all []client.Permission
	for _, verb := range verbs {
		p.Verb = verb
		all = append(all, p)
	}
	return all
}

// toApply returns the permissions for server-side apply of a new object.
func toApply(group, resource, namespace string) []client.Permission {
	return each([]string{"create", "patch"}, client.Permission{Group: group, Resource: resource, Namespace: namespace})
}

// toInstall returns the permissions to install a manager without RBAC.
func toInstall(namespace string) []client.Permission {
	return append(toApply("", "serviceaccounts", namespace), toApply("apps", "deployments", namespace)...)
}

// toUse returns the permissions for a session in the manager's namespace. Before 1.35, Kubernetes also requires get of
// pods/portforward over WebSocket, but not over SPDY.
func toUse(namespace string) []client.Permission {
	return append(each([]string{"list", "watch"}, client.Permission{Resource: "pods", Namespace: namespace}),
		client.Permission{Verb: "create", Resource: "pods/portforward", Namespace: namespace})
}

// toGrant returns the permissions to grant the manager its rights. RBAC also requires that the user holds those rights,
// which only the attempt shows.
func toGrant(namespace string) []client.Permission {
	const group = rbacv1.GroupName
	return slices.Concat(toApply(group, "clusterroles", ""), toApply(group, "clusterrolebindings", ""),
		toApply(group, "roles", namespace))
}

// username returns the name of the user in the cluster, or "" if the cluster does not tell it.
func username(ctx context.Context, kube kubernetes.Interface) string {
	review, err := kube.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{},
		metav1.CreateOptions{})
	if err != nil {
		return "" // before Kubernetes 1.28
	}
	return review.Status.UserInfo.Username
}
