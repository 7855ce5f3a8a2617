package install

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/kube/workloads"
)

// Manifest returns all objects of an admin's install, including the namespace, as YAML documents for `kubectl apply -f
// -`. It does not contact a cluster: set Options.APIServers for a cluster without kube-proxy.
func Manifest(o Options) ([]byte, error) {
	if err := o.noImage(); err != nil {
		return nil, err
	}
	if err := o.checkExpose(); err != nil {
		return nil, err
	}
	var out bytes.Buffer
	objects := slices.Concat([]runtime.Object{namespaceObject(o.namespace())}, rightsObjects(o), baseObjects(o),
		directObjects(o))
	for i, obj := range objects {
		if i > 0 {
			out.WriteString("---\n")
		}
		fields, err := o.applied(obj)
		if err != nil {
			return nil, err
		}
		text, err := yaml.Marshal(fields)
		if err != nil {
			return nil, fmt.Errorf("writing the manifest: %w", err)
		}
		out.Write(text)
	}
	return out.Bytes(), nil
}

// decorate gives an object what Options.Objects say.
func (o Options) decorate(obj runtime.Object) {
	workloads.Decorate(obj.(metav1.Object), o.Objects)
	obj.(metav1.Object).SetOwnerReferences(o.owner)
	if d, is := obj.(*appsv1.Deployment); is {
		workloads.Decorate(&d.Spec.Template, o.Objects)
		c := &d.Spec.Template.Spec.Containers[0]
		workloads.SetResources(c, o.Objects)
		for n := range c.Env {
			if memory := c.Resources.Limits.Memory().Value(); c.Env[n].Name == "GOMEMLIMIT" && memory < 1<<30 {
				c.Env[n].Value = strconv.FormatInt(memory/10*9, 10)
			}
		}
	}
}

// applied returns obj, with what Options.Objects say, for server-side apply: only the fields that kubevpn sets.
func (o Options) applied(obj runtime.Object) (map[string]any, error) {
	o.decorate(obj)
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
	if err != nil {
		return nil, fmt.Errorf("writing %T: %w", obj, err)
	}
	delete(fields, "status")
	if _, is := obj.(*corev1.Namespace); is {
		delete(fields, "spec")
	}
	return fields, nil
}
