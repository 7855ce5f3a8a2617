package clone

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
)

// Requests for a host from outside of the cluster reach the Service by an HTTPRoute, if a Gateway admits one for that
// host from this namespace, else by an Ingress. The Job owns either, so Kubernetes deletes it with the Job.

const (
	acceptTimeout = 5 * time.Second // for the controller of the Gateway or of the Ingress
	acceptPause   = 250 * time.Millisecond
)

// ingressRoute is an HTTPRoute or an Ingress.
type ingressRoute struct {
	schema.GroupVersionResource
	kind, by string // by: of the Gateway infra/public
	spec     map[string]any
	accepted func(*unstructured.Unstructured) bool
}

// addRoute lets requests for the host in, and returns text like "hook.example.com (HTTPRoute, Gateway infra/public)".
func (c *Clone) addRoute(ctx context.Context, own *corev1.Service, owner *batchv1.Job) (string, error) {
	host := c.cfg.Spec.Host
	d, err := c.chooseRoute(ctx, own, host)
	if err != nil {
		return "", err
	}
	done := c.step("Creating the %s %s", d.kind, own.Name)
	object := &unstructured.Unstructured{Object: map[string]any{"spec": d.spec}}
	object.SetAPIVersion(d.GroupVersion().String())
	object.SetKind(d.kind)
	object.SetName(own.Name)
	object.SetNamespace(own.Namespace)
	object.SetLabels(owner.Labels)
	object.SetAnnotations(owner.Annotations)
	object.SetOwnerReferences([]metav1.OwnerReference{ownerReference(owner)})
	objects := c.cfg.Cluster.Dynamic().Resource(d.GroupVersionResource).Namespace(own.Namespace)
	there, err := objects.Get(ctx, own.Name, metav1.GetOptions{})
	if err == nil && there.GetLabels()[labelClone] != own.Name {
		return "", api.Errorf(api.ExitConflict, "the namespace %s already has another %s %s", own.Namespace, d.kind,
			own.Name).WithHint("Choose another name for the Service.")
	} else if err != nil && !apierrors.IsNotFound(err) {
		return "", err
	}
	o := metav1.ApplyOptions{FieldManager: managedBy, Force: true}
	if _, err := objects.Apply(ctx, own.Name, object, o); err != nil {
		return "", err
	}
	for until := time.Now().Add(acceptTimeout); ; {
		there, err := objects.Get(ctx, own.Name, metav1.GetOptions{})
		if err == nil && d.accepted(there) {
			done("%s: %s", host, d.by)
			break
		}
		if time.Now().After(until) || !wakeup.Pause(ctx, acceptPause) {
			done("%s", host)
			c.cfg.Progress(api.Event{Time: time.Now(), Warning: fmt.Sprintf("no controller has accepted the %s %s "+
				"(%s) yet: requests from outside of the cluster may not arrive", d.kind, own.Name, d.by)})
			break
		}
	}
	return fmt.Sprintf("%s (%s, %s)", host, d.kind, d.by), ctx.Err()
}

// chooseRoute returns the object for a host. It does not create it.
func (c *Clone) chooseRoute(ctx context.Context, own *corev1.Service, host string) (ingressRoute, error) {
	gateway, section, err := c.gateway(ctx, own.Namespace, host)
	if err != nil {
		return ingressRoute{}, err
	}
	port := own.Spec.Ports[0].Port
	if gateway == nil {
		return c.ingress(ctx, own.Name, host, port)
	}
	parent := map[string]any{"namespace": gateway.GetNamespace(), "name": gateway.GetName(), "sectionName": section}
	return ingressRoute{
		GroupVersionResource: gateways.GroupVersion().WithResource("httproutes"), kind: "HTTPRoute",
		by: "Gateway " + gateway.GetNamespace() + "/" + gateway.GetName(),
		spec: map[string]any{
			"parentRefs": []any{parent}, "hostnames": []any{host},
			"rules": []any{map[string]any{"backendRefs": []any{map[string]any{"name": own.Name, "port": int64(port)}}}},
		},
		accepted: func(r *unstructured.Unstructured) bool {
			parents, _, _ := unstructured.NestedSlice(r.Object, "status", "parents")
			return slices.ContainsFunc(parents, func(p any) bool { return isTrue(p, "Accepted") })
		},
	}, nil
}

// isTrue reports whether an object's status has a condition that is True.
func isTrue(status any, condition string) bool {
	s, _ := status.(map[string]any)
	conditions, _, _ := unstructured.NestedSlice(s, "conditions")
	return slices.ContainsFunc(conditions, func(c any) bool {
		m, _ := c.(map[string]any)
		return m["type"] == condition && m["status"] == string(metav1.ConditionTrue)
	})
}

var gateways = schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: "gateways"}

// gateway returns the first Gateway with a listener for HTTP that admits routes for the host from the namespace, and
// the name of that listener; nil: there is none, or the user may not see it.
func (c *Clone) gateway(ctx context.Context, namespace, host string) (*unstructured.Unstructured, string, error) {
	list, err := c.cfg.Cluster.Dynamic().Resource(gateways).List(ctx, metav1.ListOptions{})
	if apierrors.IsForbidden(err) {
		list, err = c.cfg.Cluster.Dynamic().Resource(gateways).Namespace(namespace).List(ctx, metav1.ListOptions{})
	}
	if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) { // not served
		return nil, "", nil
	} else if err != nil {
		return nil, "", err
	}
	for n := range list.Items {
		g := &list.Items[n]
		listeners, _, _ := unstructured.NestedSlice(g.Object, "spec", "listeners")
		for _, raw := range listeners {
			l, _ := raw.(map[string]any)
			from, _, _ := unstructured.NestedString(l, "allowedRoutes", "namespaces", "from")
			protocol, _, _ := unstructured.NestedString(l, "protocol")
			pattern, _, _ := unstructured.NestedString(l, "hostname")
			name, _, _ := unstructured.NestedString(l, "name")
			open := from == "All" || cmp.Or(from, "Same") == "Same" && g.GetNamespace() == namespace
			if open && (protocol == "HTTP" || protocol == "HTTPS") && hostMatches(pattern, host) {
				return g, name, nil
			}
		}
	}
	return nil, "", nil
}

// hostMatches reports whether a listener's hostname admits a host: "*.example.com" stands for one label or more.
func hostMatches(pattern, host string) bool {
	suffix, wild := strings.CutPrefix(pattern, "*")
	return pattern == "" || pattern == host || wild && strings.HasSuffix(host, suffix)
}

// ingress returns an Ingress of the default class, or of the only one.
func (c *Clone) ingress(ctx context.Context, name, host string, port int32) (ingressRoute, error) {
	d := ingressRoute{
		GroupVersionResource: networkingv1.SchemeGroupVersion.WithResource("ingresses"), kind: "Ingress",
		by: "the default class",
		accepted: func(i *unstructured.Unstructured) bool {
			at, _, _ := unstructured.NestedSlice(i.Object, "status", "loadBalancer", "ingress")
			return len(at) > 0
		},
	}
	d.spec = map[string]any{"rules": []any{map[string]any{"host": host, "http": map[string]any{"paths": []any{
		map[string]any{"path": "/", "pathType": "Prefix", "backend": map[string]any{"service": map[string]any{
			"name": name, "port": map[string]any{"number": int64(port)}}}}}}}}}
	classes, err := c.kube.NetworkingV1().IngressClasses().List(ctx, metav1.ListOptions{})
	switch {
	case apierrors.IsForbidden(err):
		return d, nil // the API server sets the default class
	case err != nil:
		return d, err
	case len(classes.Items) == 0:
		return d, api.Errorf(api.ExitWorkload, "no Gateway admits routes for %s from this namespace, and the cluster "+
			"has no IngressClass", host).
			WithHint("Leave out --host, or ask an admin for a Gateway or an ingress controller.")
	}
	isDefault := func(k networkingv1.IngressClass) bool {
		return k.Annotations[networkingv1.AnnotationIsDefaultIngressClass] == "true"
	}
	if !slices.ContainsFunc(classes.Items, isDefault) {
		class := classes.Items[0].Name
		d.spec["ingressClassName"], d.by = class, "class "+class
	}
	return d, nil
}
