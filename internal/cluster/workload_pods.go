package cluster

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// owns reports whether the pod is the workload's. Selectors are all that kubectl looks at; but two workloads' may overlap (a
// canary's Deployment with one label more), and who made a pod tells them apart. A pod of nobody's, or of a controller that
// is not known here, belongs to whose selector it matches.
func (w *Workload) owns(p *corev1.Pod) bool {
	if w.Selector == nil {
		return p.Name == w.Name
	}
	if !w.Selector.Matches(labels.Set(p.Labels)) {
		return false
	}
	owner := metav1.GetControllerOf(p)
	if owner == nil || w.Resource.Group != appsv1.GroupName {
		return true
	}
	if w.Kind != "Deployment" {
		return owner.Kind == w.Kind && owner.Name == w.Name
	}
	// A Deployment calls its ReplicaSets by its own name and the hash; one that it adopted may be called anything.
	hash := p.Labels[appsv1.DefaultDeploymentUniqueLabelKey]
	deployment, found := strings.CutSuffix(owner.Name, "-"+hash)
	return owner.Kind == "ReplicaSet" && (hash == "" || !found || deployment == w.Name)
}

// WatchPods tells f the workload's pods, sorted by name, at first and after each change, until ctx ends. A list is whole, and
// its pods are not to be changed; changes that come while f works are told together. f is called from one goroutine at a time, and not after
// WatchPods has returned. Connections that break are replaced, and what was missed meanwhile is told. An error is returned
// when the user may not watch (then an *api.Error), or ctx's.
func (c *Cluster) WatchPods(ctx context.Context, w *Workload, f func([]corev1.Pod)) error {
	return c.explained(ctx, watchPods(ctx, c.kube, w, f))
}

func watchPods(ctx context.Context, kube kubernetes.Interface, w *Workload, f func([]corev1.Pod)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var following sync.WaitGroup
	defer following.Wait()
	defer cancel(nil)
	denied := func(err error) error {
		if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
			cancel(fmt.Errorf("watching the pods of %s: %w", w, err))
		}
		return err
	}
	pods := kube.CoreV1().Pods(w.Namespace)
	lw := cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list, err := pods.List(ctx, w.choose(o))
			return list, denied(err)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			events, err := pods.Watch(ctx, w.choose(o))
			return events, denied(err)
		},
	}, kube)
	store := podStore{Store: cache.NewStore(cache.MetaNamespaceKeyFunc), changed: make(chan struct{}, 1), listed: new(atomic.Bool)}
	quiet := klog.Logger{} // what goes wrong on the way is retried, and client-go writes to standard error
	reflector := cache.NewReflectorWithOptions(lw, &corev1.Pod{}, store, cache.ReflectorOptions{
		Name: "pods", Logger: &quiet,
		Backoff: &wait.Backoff{Duration: 100 * time.Millisecond, Cap: 2 * time.Second, Steps: 6, Factor: 2, Jitter: 0.5},
	})
	following.Go(func() { reflector.RunWithContext(klog.NewContext(ctx, quiet)) })
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-store.changed:
		}
		if !store.listed.Load() {
			continue // a part of the pods
		}
		var list []corev1.Pod
		for _, obj := range store.List() {
			if p := obj.(*corev1.Pod); w.owns(p) {
				list = append(list, *p)
			}
		}
		slices.SortFunc(list, func(a, b corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
		f(list)
	}
}

// podStore is a mirror of pods that says when it changes.
type podStore struct {
	cache.Store
	changed chan struct{}
	listed  *atomic.Bool // once
}

func (s podStore) notify(err error) error {
	select {
	case s.changed <- struct{}{}:
	default: // a look is due already
	}
	return err
}

func (s podStore) Add(obj any) error    { return s.notify(s.Store.Add(obj)) }
func (s podStore) Update(obj any) error { return s.notify(s.Store.Update(obj)) }
func (s podStore) Delete(obj any) error { return s.notify(s.Store.Delete(obj)) }
func (s podStore) Replace(list []any, version string) error {
	err := s.Store.Replace(list, version)
	s.listed.Store(true)
	return s.notify(err)
}
