package workloads

import (
	"context"
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/restmapper"
	"k8s.io/klog/v2"

	"kubevpn/internal/api"
)

var (
	resourcePods     = corev1.Resource("pods")
	resourceServices = corev1.Resource("services")
	resourceCronJobs = batchv1.Resource("cronjobs")
)

// Kind is a kind of namespaced objects.
type Kind struct {
	Name     string // "Deployment"
	Resource schema.GroupVersionResource
	Type     string // TYPE of TYPE/NAME: "deployment", "rollout.argoproj.io"
	Short    string // another TYPE, of built-in kinds: "deploy"
}

// BuiltinKinds returns the kinds of Kubernetes itself that run pods or select them. They need no discovery, which takes
// two requests with large answers. In every cluster their names take precedence over all others.
func BuiltinKinds() []Kind {
	core, apps, batch := corev1.SchemeGroupVersion, appsv1.SchemeGroupVersion, batchv1.SchemeGroupVersion
	return []Kind{
		{"Deployment", apps.WithResource("deployments"), "deployment", "deploy"},
		{"StatefulSet", apps.WithResource("statefulsets"), "statefulset", "sts"},
		{"DaemonSet", apps.WithResource("daemonsets"), "daemonset", "ds"},
		{"ReplicaSet", apps.WithResource("replicasets"), "replicaset", "rs"},
		{"ReplicationController", core.WithResource("replicationcontrollers"), "replicationcontroller", "rc"},
		{"CronJob", batch.WithResource("cronjobs"), "cronjob", "cj"},
		{"Service", core.WithResource("services"), "service", "svc"},
		{"Pod", core.WithResource("pods"), "pod", "po"},
	}
}

// BuiltinKind returns the built-in kind that a TYPE means for kubectl, in any case: singular, plural or short, with or
// without its group or its version and group.
func BuiltinKind(text string) (Kind, bool) {
	name, group, _ := strings.Cut(strings.ToLower(text), ".")
	for _, k := range BuiltinKinds() {
		of := k.Resource
		if (name == k.Type || name == of.Resource || name == k.Short) &&
			(group == "" || group == of.Group || group == of.Version+"."+of.Group) {
			return k, true
		}
	}
	return Kind{}, false
}

// workload returns the object of that name, without what must be read from the cluster.
func (k Kind) workload(namespace, name string) *Workload {
	return &Workload{Namespace: namespace, Name: name, Kind: k.Name, Resource: k.Resource, shown: k.Type}
}

// kind resolves a TYPE as kubectl does.
func (c Client) kind(ctx context.Context, text string) (Kind, error) {
	if k, ok := BuiltinKind(text); ok {
		return k, nil
	}
	// client-go would write to standard error if an API does not answer.
	ctx = klog.NewContext(ctx, klog.Logger{})
	m, err := discover(ctx, discovery.ToDiscoveryInterfaceWithContext(c.Kube().Discovery()), text)
	if meta.IsNoMatchError(err) {
		return Kind{}, api.Errorf(api.ExitWorkload, "the cluster has no resource type %q", text).
			WithHint("`kubectl api-resources --namespaced` lists those that it has.")
	}
	if err != nil {
		return Kind{}, fmt.Errorf("cannot list the cluster's resource types: %w", err)
	}
	if m.Scope.Name() != meta.RESTScopeNameNamespace {
		return Kind{}, api.Errorf(api.ExitWorkload, "%s is not a workload: it belongs to no namespace", text).
			WithHint("Name a Deployment, StatefulSet, DaemonSet, ReplicaSet, Pod or Service.")
	}
	k := Kind{Name: m.GroupVersionKind.Kind, Resource: m.Resource, Type: strings.ToLower(m.GroupVersionKind.Kind)}
	if g := m.GroupVersionKind.Group; g != "" {
		k.Type += "." + g
	}
	return k, nil
}

// discover resolves a TYPE among all resources of the API server, in kubectl's order: a resource or its short name,
// then a kind; with and without version and group.
func discover(ctx context.Context, server discovery.DiscoveryInterfaceWithContext,
	text string) (*meta.RESTMapping, error) {
	cached := memory.NewMemCacheClientWithContext(server)
	groups, err := restmapper.GetAPIGroupResourcesWithContext(ctx, cached)
	if err != nil {
		return nil, err
	}
	mapper := restmapper.NewShortcutExpanderWithContext(restmapper.NewDiscoveryRESTMapperWithContext(groups), cached,
		nil)
	full, resource := schema.ParseResourceArg(text)
	if full != nil {
		if gvk, err := mapper.KindForWithContext(ctx, *full); err == nil {
			return mapper.RESTMappingWithContext(ctx, gvk.GroupKind(), gvk.Version)
		}
	}
	if gvk, err := mapper.KindForWithContext(ctx, resource.WithVersion("")); err == nil {
		return mapper.RESTMappingWithContext(ctx, gvk.GroupKind(), gvk.Version)
	}
	fullKind, groupKind := schema.ParseKindArg(text)
	if fullKind != nil {
		if m, err := mapper.RESTMappingWithContext(ctx, fullKind.GroupKind(), fullKind.Version); err == nil {
			return m, nil
		}
	}
	return mapper.RESTMappingWithContext(ctx, groupKind)
}
