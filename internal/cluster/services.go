package cluster

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"kubevpn/internal/api"
)

// WatchServices tells f the names of the namespace's Services: all of them with Reset set, at first and after
// a watch could not be continued, then each change, until ctx ends. It is for a laptop whose traffic manager
// may not watch. f is called from one goroutine. Connections that break are replaced; an error is only
// returned when the Services cannot be listed at the start (then an *api.Error), or ctx's.
func (c *Cluster) WatchServices(ctx context.Context, namespace string, f func(api.NameDelta)) error {
	if err := watchServices(ctx, c.kube, namespace, f); err != nil && ctx.Err() == nil {
		return c.Explain(err)
	}
	return ctx.Err()
}

func watchServices(ctx context.Context, kube kubernetes.Interface, namespace string, f func(api.NameDelta)) error {
	services := kube.CoreV1().Services(namespace)
	if _, err := services.List(ctx, metav1.ListOptions{Limit: 1}); err != nil {
		return fmt.Errorf("listing Services in %s: %w", namespace, err)
	}
	lw := cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return services.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return services.Watch(ctx, o)
		},
	}, kube)
	quiet := klog.Logger{} // what goes wrong on the way is retried, and client-go writes to standard error
	cache.NewReflectorWithOptions(lw, &corev1.Service{}, nameReflector{namespace, f},
		cache.ReflectorOptions{Name: "services", Logger: &quiet}).RunWithContext(klog.NewContext(ctx, quiet))
	return nil
}

// nameReflector converts the events of a reflector to NameDeltas. It keeps no state; the receiver has the index.
type nameReflector struct {
	namespace string
	tell      func(api.NameDelta)
}

func (n nameReflector) named(obj any) map[string][]string {
	return map[string][]string{n.namespace: {obj.(*corev1.Service).Name}}
}

func (n nameReflector) Add(obj any) error {
	n.tell(api.NameDelta{Add: n.named(obj)})
	return nil
}

func (n nameReflector) Update(any) error { return nil }

func (n nameReflector) Delete(obj any) error {
	n.tell(api.NameDelta{Remove: n.named(obj)})
	return nil
}

func (n nameReflector) Replace(list []any, _ string) error {
	names := make([]string, len(list))
	for i, obj := range list {
		names[i] = obj.(*corev1.Service).Name
	}
	slices.Sort(names)
	n.tell(api.NameDelta{Reset: true, Add: map[string][]string{n.namespace: names}})
	return nil
}

func (n nameReflector) Resync() error { return nil }
