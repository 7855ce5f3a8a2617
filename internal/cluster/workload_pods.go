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
	"k8s.io/apimachinery/pkg/fields"
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

// WatchPods tells f the workload's pods, a Service's by the selector that it has at the time, sorted by name, at first and
// after each change, until ctx ends. A list is whole, and its pods are not to be changed; changes that come while f works are
// told together. f is called from one goroutine at a time, and not after WatchPods has returned. Connections
// that break are replaced, and what was missed meanwhile is told. An error is returned when the user may not watch (then an *api.Error), or ctx's.
func (c *Cluster) WatchPods(ctx context.Context, w *Workload, f func([]corev1.Pod)) error {
	return c.explained(ctx, watchPods(ctx, c.kube, w, f))
}

func watchPods(ctx context.Context, kube kubernetes.Interface, w *Workload, f func([]corev1.Pod)) error {
	if w.Resource.GroupResource() != resourceServices {
		return watchSelected(ctx, kube, w, f)
	}
	// A Service's selector is what chooses its pods from one moment to the other: a blue and green deployment, for one.
	ctx, cancel := context.WithCancel(ctx)
	var following sync.WaitGroup
	defer following.Wait()
	defer cancel()
	selectors := make(chan labels.Selector)
	following.Go(func() { followSelector(ctx, kube, w, selectors) })
	for now := w; ; {
		inner, stop := context.WithCancel(ctx)
		done := make(chan error, 1)
		following.Go(func() { done <- watchSelected(inner, kube, now, f) })
		select {
		case s := <-selectors:
			stop()
			<-done // f is called by one goroutine
			chosen := *w
			chosen.Selector = s
			now = &chosen
		case err := <-done:
			stop()
			return err
		}
	}
}

// followSelector gives the Service's selectors that differ from the one that w has, as they come, until ctx ends, or the user
// turns out not to have the right to watch Services. One that has gone keeps its last.
func followSelector(ctx context.Context, kube kubernetes.Interface, w *Workload, selectors chan<- labels.Selector) {
	ctx, cancel := context.WithCancel(ctx)
	var following sync.WaitGroup
	defer following.Wait()
	defer cancel()
	denied := func(err error) error {
		if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
			cancel()
		}
		return err
	}
	named := func(o metav1.ListOptions) metav1.ListOptions {
		o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, w.Name).String()
		return o
	}
	services := kube.CoreV1().Services(w.Namespace)
	store, run := mirror(&corev1.Service{}, cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list, err := services.List(ctx, named(o))
			return list, denied(err)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			events, err := services.Watch(ctx, named(o))
			return events, denied(err)
		},
	}, kube))
	following.Go(func() { run(ctx) })
	last := selectorText(w.Selector)
	for {
		select {
		case <-ctx.Done():
			return
		case <-store.changed:
		}
		for _, obj := range store.List() {
			service := obj.(*corev1.Service)
			if service.Name != w.Name {
				continue
			}
			s := labels.Nothing() // and not everything
			if len(service.Spec.Selector) > 0 {
				s = labels.SelectorFromSet(service.Spec.Selector)
			}
			if selectorText(s) == last {
				continue
			}
			last = selectorText(s)
			select {
			case selectors <- s:
			case <-ctx.Done():
				return
			}
		}
	}
}

// selectorText tells selectors apart, that of nothing too, whose own text is that of everything.
func selectorText(s labels.Selector) string {
	if _, selectable := s.Requirements(); !selectable {
		return "nothing"
	}
	return s.String()
}

// mirror makes a store that run fills.
func mirror(of runtime.Object, from cache.ListerWatcher) (store mirrored, run func(context.Context)) {
	store = mirrored{Store: cache.NewStore(cache.MetaNamespaceKeyFunc), changed: make(chan struct{}, 1), listed: new(atomic.Bool)}
	quiet := klog.Logger{} // what goes wrong on the way is retried, and client-go writes to standard error
	reflector := cache.NewReflectorWithOptions(from, of, store, cache.ReflectorOptions{
		Name: "pods", Logger: &quiet,
		Backoff: &wait.Backoff{Duration: 100 * time.Millisecond, Cap: 2 * time.Second, Steps: 6, Factor: 2, Jitter: 0.5},
	})
	return store, func(ctx context.Context) { reflector.RunWithContext(klog.NewContext(ctx, quiet)) }
}

// watchSelected is watchPods by the selector that the workload has.
func watchSelected(ctx context.Context, kube kubernetes.Interface, w *Workload, f func([]corev1.Pod)) error {
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
	store, run := mirror(&corev1.Pod{}, lw)
	following.Go(func() { run(ctx) })
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

// mirrored is a mirror of objects that says when it changes.
type mirrored struct {
	cache.Store
	changed chan struct{}
	listed  *atomic.Bool // once
}

func (s mirrored) notify(err error) error {
	select {
	case s.changed <- struct{}{}:
	default: // a look is due already
	}
	return err
}

func (s mirrored) Add(obj any) error    { return s.notify(s.Store.Add(obj)) }
func (s mirrored) Update(obj any) error { return s.notify(s.Store.Update(obj)) }
func (s mirrored) Delete(obj any) error { return s.notify(s.Store.Delete(obj)) }
func (s mirrored) Replace(list []any, version string) error {
	err := s.Store.Replace(list, version)
	s.listed.Store(true)
	return s.notify(err)
}
