package workloads

import (
	"context"
	"fmt"
	"slices"
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

// kind is a kind of namespaced objects.
type kind struct {
	kind     string
	resource schema.GroupVersionResource
	shown    string // TYPE of TYPE/NAME
}

// wellKnown returns the names of kinds that need no discovery, which takes two requests with large answers. In every
// cluster these names take precedence over all others. The short name is last.
func wellKnown() map[schema.GroupVersionKind][]string {
	core, apps := corev1.SchemeGroupVersion, appsv1.SchemeGroupVersion
	return map[schema.GroupVersionKind][]string{
		apps.WithKind("Deployment"):  {"deployments", "deployment", "deploy"},
		apps.WithKind("StatefulSet"): {"statefulsets", "statefulset", "sts"},
		apps.WithKind("DaemonSet"):   {"daemonsets", "daemonset", "ds"},
		apps.WithKind("ReplicaSet"):  {"replicasets", "replicaset", "rs"},
		core.WithKind("Pod"):         {"pods", "pod", "po"},
		core.WithKind("Service"):     {"services", "service", "svc"},

		batchv1.SchemeGroupVersion.WithKind("CronJob"): {"cronjobs", "cronjob", "cj"},
	}
}

// kind resolves a TYPE as kubectl does.
func (r workloads) kind(ctx context.Context, text string) (kind, error) {
	name, group, _ := strings.Cut(strings.ToLower(text), ".")
	for gvk, names := range wellKnown() {
		if slices.Contains(names, name) &&
			(group == "" || gvk.Group != "" && (group == gvk.Group || group == gvk.Version+"."+gvk.Group)) {
			return kind{gvk.Kind, gvk.GroupVersion().WithResource(names[0]), names[1]}, nil
		}
	}
	// client-go would write to standard error that an API does not answer.
	ctx = klog.NewContext(ctx, klog.Logger{})
	m, err := discover(ctx, discovery.ToDiscoveryInterfaceWithContext(r.kube.Discovery()), text)
	if meta.IsNoMatchError(err) {
		return kind{}, api.Errorf(api.ExitWorkload, "the cluster has no resource type %q", text).
			WithHint("`kubectl api-resources --namespaced` lists those that it has.")
	}
	if err != nil {
		return kind{}, fmt.Errorf("cannot list the cluster's resource types: %w", err)
	}
	if m.Scope.Name() != meta.RESTScopeNameNamespace {
		return kind{}, api.Errorf(api.ExitWorkload, "%s is not a workload: it belongs to no namespace", text).
			WithHint("Name a Deployment, StatefulSet, DaemonSet, ReplicaSet, Pod or Service.")
	}
	shown := strings.ToLower(m.GroupVersionKind.Kind)
	if g := m.GroupVersionKind.Group; g != "" {
		shown += "." + g
	}
	return kind{m.GroupVersionKind.Kind, m.Resource, shown}, nil
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
