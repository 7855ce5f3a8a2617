package install

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// DefaultsName is the name of the ConfigMap in the manager's namespace with the client defaults: what an admin
// recommends to all laptops. kubevpn only reads it.
const DefaultsName = "kubevpn-client-defaults"

// Defaults are the client defaults of a cluster. The user may not trust their author.
type Defaults struct {
	Source string // "ConfigMap NAMESPACE/NAME"; empty: there are none
	Data   map[string]string
}

// ReadDefaults reads the client defaults from the namespace or, if that is empty, from the one that Ensure uses: the
// fallback if the user may not look for a manager in DefaultNamespace. Missing defaults, and defaults that the user may
// not read, are no error. Errors are *api.Error, or ctx's.
func ReadDefaults(ctx context.Context, c apiServer, namespace, fallback string) (Defaults, error) {
	kube, o := c.Kube(), Options{Namespace: namespace, FallbackNamespace: fallback}
	ns := o.namespace()
	d, err := defaultsIn(ctx, kube, ns)
	if apierrors.IsForbidden(err) && len(o.namespaces()) > 1 {
		// The manager may still be in ns: an older user Role does not allow to read the defaults.
		_, err = kube.AppsV1().Deployments(ns).Get(ctx, ManagerName, metav1.GetOptions{})
		if apierrors.IsForbidden(err) {
			d, err = defaultsIn(ctx, kube, fallback)
		}
	}
	return d, c.ExplainContext(ctx, ignoreDenied(err))
}

func defaultsIn(ctx context.Context, kube kubernetes.Interface, namespace string) (Defaults, error) {
	m, err := kube.CoreV1().ConfigMaps(namespace).Get(ctx, DefaultsName, metav1.GetOptions{})
	if err != nil {
		return Defaults{}, fmt.Errorf("reading the client defaults in %s: %w", namespace, err)
	}
	return Defaults{Source: "ConfigMap " + namespace + "/" + DefaultsName, Data: m.Data}, nil
}
