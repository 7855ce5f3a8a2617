package intercept

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
)

// objects reads and writes whole objects of any kind. It keeps fields that this program does not know.
type objects interface {
	read(ctx context.Context, r schema.GroupVersionResource, namespace, name string) (*unstructured.Unstructured, error)
	// write fails with a conflict if the object has changed since read returned it.
	write(ctx context.Context, r schema.GroupVersionResource, o *unstructured.Unstructured) error
}

// clusterObjects implements objects with the API server.
type clusterObjects struct{ client dynamic.Interface }

const fieldManager = "kubevpn"

func (o clusterObjects) read(ctx context.Context, r schema.GroupVersionResource, namespace,
	name string) (*unstructured.Unstructured, error) {
	return o.client.Resource(r).Namespace(namespace).Get(ctx, name, metav1.GetOptions{})
}

func (o clusterObjects) write(ctx context.Context, r schema.GroupVersionResource, u *unstructured.Unstructured) error {
	_, err := o.client.Resource(r).Namespace(u.GetNamespace()).Update(ctx, u,
		metav1.UpdateOptions{FieldManager: fieldManager})
	return err
}
