package install

import (
	"context"
	"sync"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/cluster"
)

// lacking returns the permissions that the user does not have, in order. If the cluster does not answer, it assumes
// that the user has them; the request itself then fails.
func lacking(ctx context.Context, kube kubernetes.Interface, permissions []cluster.Permission) []cluster.Permission {
	denied := make([]bool, len(permissions))
	var wg sync.WaitGroup
	for i, p := range permissions {
		wg.Go(func() {
			resource, sub, _ := cut(p.Resource)
			request := new(authorizationv1.SelfSubjectAccessReview)
			request.Spec.ResourceAttributes = &authorizationv1.ResourceAttributes{
				Namespace: p.Namespace, Verb: p.Verb, Group: p.Group, Resource: resource, Subresource: sub,
			}
			reviews := kube.AuthorizationV1().SelfSubjectAccessReviews()
			review, err := reviews.Create(ctx, request, metav1.CreateOptions{})
			denied[i] = err == nil && !review.Status.Allowed
		})
	}
	wg.Wait()
	var missing []cluster.Permission
	for i, p := range permissions {
		if denied[i] {
			missing = append(missing, p)
		}
	}
	return missing
}

func each(verbs []string, p cluster.Permission) []cluster.Permission {
	var all []cluster.Permission
	for _, verb := range verbs {
		p.Verb = verb
		all = append(all, p)
	}
	return all
}

// toApply is what server-side apply of a new object needs.
func toApply(group, resource, namespace string) []cluster.Permission {
	return each([]string{"create", "patch"}, cluster.Permission{Group: group, Resource: resource, Namespace: namespace})
}

// toInstall is what a manager without RBAC needs of its installer.
func toInstall(namespace string) []cluster.Permission {
	return append(toApply("", "serviceaccounts", namespace), toApply("apps", "deployments", namespace)...)
}

// toUse is what a session needs in the manager's namespace. Kubernetes before 1.35 asks for get of
// pods/portforward when it goes over WebSocket; SPDY is then the fallback, so create alone will do.
func toUse(namespace string) []cluster.Permission {
	return append(each([]string{"list", "watch"}, cluster.Permission{Resource: "pods", Namespace: namespace}),
		cluster.Permission{Verb: "create", Resource: "pods/portforward", Namespace: namespace})
}

// toGrant is what the manager's own rights need of their installer. Besides these, RBAC wants the installer to
// hold what it grants: only trying tells.
func toGrant(namespace string) []cluster.Permission {
	const group = "rbac.authorization.k8s.io"
	all := toApply(group, "clusterroles", "")
	all = append(all, toApply(group, "clusterrolebindings", "")...)
	return append(all, toApply(group, "roles", namespace)...)
}

// username is the name under which the cluster knows the user, "" where it does not tell.
func username(ctx context.Context, kube kubernetes.Interface) string {
	review, err := kube.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{},
		metav1.CreateOptions{})
	if err != nil {
		return "" // before Kubernetes 1.28
	}
	return review.Status.UserInfo.Username
}
