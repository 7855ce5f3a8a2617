package install

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

// apply creates or updates one object with server-side apply. Several laptops may apply the same object at once.
func (o Options) apply(ctx context.Context, kube kubernetes.Interface, obj runtime.Object) error {
	fields, err := o.applied(obj)
	if err != nil {
		return err
	}
	data, err := json.Marshal(fields)
	if err != nil {
		return fmt.Errorf("writing %T: %w", obj, err)
	}
	force := metav1.PatchOptions{FieldManager: fieldManager, Force: new(true)}
	switch obj := obj.(type) {
	case *corev1.ServiceAccount:
		_, err = kube.CoreV1().ServiceAccounts(obj.Namespace).Patch(ctx, obj.Name, types.ApplyPatchType, data, force)
	case *corev1.Service:
		_, err = kube.CoreV1().Services(obj.Namespace).Patch(ctx, obj.Name, types.ApplyPatchType, data, force)
	case *appsv1.Deployment:
		_, err = kube.AppsV1().Deployments(obj.Namespace).Patch(ctx, obj.Name, types.ApplyPatchType, data, force)
	case *rbacv1.ClusterRole:
		_, err = kube.RbacV1().ClusterRoles().Patch(ctx, obj.Name, types.ApplyPatchType, data, force)
	case *rbacv1.ClusterRoleBinding:
		_, err = kube.RbacV1().ClusterRoleBindings().Patch(ctx, obj.Name, types.ApplyPatchType, data, force)
	case *rbacv1.Role:
		_, err = kube.RbacV1().Roles(obj.Namespace).Patch(ctx, obj.Name, types.ApplyPatchType, data, force)
	default:
		return fmt.Errorf("applying %T: unknown kind", obj)
	}
	if err != nil {
		return fmt.Errorf("applying the %v: %w", describe(obj), err)
	}
	return nil
}

// describe returns the kind and the name of the object.
func describe(obj runtime.Object) Removed {
	m := obj.(metav1.Object)
	return Removed{Kind: obj.GetObjectKind().GroupVersionKind().Kind, Namespace: m.GetNamespace(), Name: m.GetName()}
}

func (o Options) applyAll(ctx context.Context, kube kubernetes.Interface, objects []runtime.Object) error {
	for _, obj := range objects {
		if err := o.apply(ctx, kube, obj); err != nil {
			return err
		}
	}
	return nil
}

// apiServers returns the API server's addresses that pods reach without kube-proxy: the endpoints of the Service
// "kubernetes". It returns nil if the user may not read them; the manager then uses the ClusterIP.
func apiServers(ctx context.Context, kube kubernetes.Interface) []string {
	list, err := kube.DiscoveryV1().EndpointSlices("default").List(ctx, metav1.ListOptions{
		LabelSelector: discoveryv1.LabelServiceName + "=kubernetes",
	})
	if err != nil {
		return nil
	}
	var servers []string
	for _, slice := range list.Items {
		for _, port := range slice.Ports {
			if name := ptr.Deref(port.Name, ""); port.Port == nil || name != "https" && name != "" {
				continue
			}
			for _, e := range slice.Endpoints {
				if !ptr.Deref(e.Conditions.Ready, true) {
					continue
				}
				for _, addr := range e.Addresses {
					servers = append(servers, net.JoinHostPort(addr, strconv.Itoa(int(*port.Port))))
				}
			}
		}
	}
	slices.Sort(servers)
	return slices.Compact(servers)
}
