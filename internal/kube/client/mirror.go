package client

import (
	"context"
	"sync/atomic"

	"kubevpn/pkg/wakeup"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// Mirror is a local copy of objects of type T, which Run keeps up to date. Its methods are safe for concurrent use.
type Mirror[T runtime.Object] struct {
	// Changed is raised after a change; several mirrors may share one. Set it before Run.
	Changed wakeup.Signal

	store   cache.Store
	listed  atomic.Bool
	from    cache.ListerWatcher
	kind    T
	onError func(error) // may be nil
}

// Objects lists and watches objects whose list has type L. Typed clients implement it.
type Objects[L runtime.Object] interface {
	List(ctx context.Context, o metav1.ListOptions) (L, error)
	Watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error)
}

// NewMirror returns a Mirror of the objects that the selectors of o choose. kind is an empty object.
func NewMirror[T, L runtime.Object](kube kubernetes.Interface, kind T, o metav1.ListOptions,
	objects Objects[L]) *Mirror[T] {
	m := &Mirror[T]{store: cache.NewStore(cache.MetaNamespaceKeyFunc), Changed: wakeup.NewSignal(), kind: kind}
	choose := func(to metav1.ListOptions) metav1.ListOptions {
		to.LabelSelector, to.FieldSelector = o.LabelSelector, o.FieldSelector
		return to
	}
	failed := func(err error) error {
		if err != nil && m.onError != nil {
			m.onError(err)
		}
		return err
	}
	m.from = cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, to metav1.ListOptions) (runtime.Object, error) {
			l, err := objects.List(ctx, choose(to))
			return l, failed(err)
		},
		WatchFuncWithContext: func(ctx context.Context, to metav1.ListOptions) (watch.Interface, error) {
			w, err := objects.Watch(ctx, choose(to))
			return w, failed(err)
		},
	}, kube)
	return m
}

// Follow calls Run, and passes all objects to f, at first and after each change, until ctx ends. Call it, or Run, once.
// Changes that come while f runs are joined to one. f is called from the caller's goroutine, and must not change the
// objects. Follow replaces connections that break. The error is never nil: it is ctx's, or the API server's if the user
// may not list or watch the objects.
func (m *Mirror[T]) Follow(ctx context.Context, f func([]T)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	m.onError = func(err error) {
		if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
			cancel(err)
		}
	}
	defer wakeup.Go(ctx, m.Run)()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-m.Changed:
		}
		if m.Listed() {
			f(m.Objects())
		}
	}
}

// Run lists and watches until ctx ends, and again whenever the connection breaks. If the user may not see the objects,
// the Mirror stays empty. The pause between two attempts is client-go's: 0.8 s at first and 30 s to 60 s at last, so
// that the mirrors of many laptops do not keep an API server down. It is short again after 2 minutes without a failure.
func (m *Mirror[T]) Run(ctx context.Context) {
	quiet := klog.Logger{} // client-go would write errors to standard error before it retries
	cache.NewReflectorWithOptions(m.from, m.kind, m, cache.ReflectorOptions{
		Name: "mirror", Logger: &quiet,
	}).RunWithContext(klog.NewContext(ctx, quiet))
}

// Listed reports whether all objects were listed once. Before that, Objects returns none or a part of them.
func (m *Mirror[T]) Listed() bool { return m.listed.Load() }

// Objects returns the objects, in no order. The caller must not change them.
func (m *Mirror[T]) Objects() []T {
	list := m.store.List()
	objects := make([]T, len(list))
	for i, o := range list {
		objects[i] = o.(T)
	}
	return objects
}

func (m *Mirror[T]) notify(err error) error {
	m.Changed.Raise()
	return err
}

// Add, Update, Delete, Replace and Resync implement cache.ReflectorStore.
func (m *Mirror[T]) Add(obj any) error    { return m.notify(m.store.Add(obj)) }
func (m *Mirror[T]) Update(obj any) error { return m.notify(m.store.Update(obj)) }
func (m *Mirror[T]) Delete(obj any) error { return m.notify(m.store.Delete(obj)) }
func (m *Mirror[T]) Resync() error        { return nil }
func (m *Mirror[T]) Replace(list []any, version string) error {
	err := m.store.Replace(list, version)
	m.listed.Store(true)
	return m.notify(err)
}
