package intercept

import (
	"context"
	"encoding/json"
	"fmt"
	"path"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
)

// objects reads and writes whole objects of any kind. It keeps fields that this program does not know.
type objects interface {
	read(ctx context.Context, r schema.GroupVersionResource, namespace, name string) (*unstructured.Unstructured, error)
	// write fails with a conflict if the object has changed since read returned it.
	write(ctx context.Context, r schema.GroupVersionResource, o *unstructured.Unstructured) error
}

// restObjects implements objects with a REST client.
type restObjects struct{ client rest.Interface }

const (
	jsonType     = "application/json"
	fieldManager = "kubevpn"
)

func (o restObjects) read(ctx context.Context, r schema.GroupVersionResource, namespace,
	name string) (*unstructured.Unstructured, error) {
	data, err := o.client.Get().AbsPath(pathOf(r, namespace, name)).SetHeader("Accept", jsonType).Do(ctx).Raw()
	if err != nil {
		return nil, err
	}
	read, err := runtime.Decode(unstructured.UnstructuredJSONScheme, data)
	if err != nil {
		return nil, fmt.Errorf("reading %s %s: %w", r.Resource, name, err)
	}
	return read.(*unstructured.Unstructured), nil
}

func (o restObjects) write(ctx context.Context, r schema.GroupVersionResource, u *unstructured.Unstructured) error {
	data, err := json.Marshal(u)
	if err != nil {
		return fmt.Errorf("writing %s %s: %w", r.Resource, u.GetName(), err)
	}
	return o.client.Put().AbsPath(pathOf(r, u.GetNamespace(), u.GetName())).Param("fieldManager", fieldManager).
		SetHeader("Accept", jsonType).SetHeader("Content-Type", jsonType).
		WarningHandler(rest.NoWarnings{}). // a sidecar repeats a port name of the application on purpose
		Body(data).Do(ctx).Error()
}

func pathOf(r schema.GroupVersionResource, namespace, name string) string {
	api := "/api"
	if r.Group != "" {
		api = "/apis"
	}
	return path.Join(api, r.Group, r.Version, "namespaces", namespace, r.Resource, name)
}
