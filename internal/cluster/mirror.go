package cluster

import (
	"context"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// Mirror is a local copy of some of the cluster's objects, kept up to date. Its Store may be read at any time.
type Mirror struct {
	cache.Store
	// Changed has a value after a change; several mirrors may share one. Set it before Run, with a buffer of 1.
	Changed chan struct{}
	// OnError, if it is set, is called with each error of the API server. The Mirror tries again all the same.
	OnError func(error)

	listed atomic.Bool
	from   cache.ListerWatcher
	kind   runtime.Object
}

// NewMirror returns a Mirror of the objects of one kind that o chooses, by its label and field selectors. list and
// watch are the methods of a typed client.
func NewMirror[L runtime.Object](kube kubernetes.Interface, kind runtime.Object, o metav1.ListOptions,
	list func(context.Context, metav1.ListOptions) (L, error),
	watcher func(context.Context, metav1.ListOptions) (watch.Interface, error)) *Mirror {
	m := &Mirror{Store: cache.NewStore(cache.MetaNamespaceKeyFunc), Changed: make(chan struct{}, 1), kind: kind}
	choose := func(to metav1.ListOptions) metav1.ListOptions {
		to.LabelSelector, to.FieldSelector = o.LabelSelector, o.FieldSelector
		return to
	}
	failed := func(err error) error {
		if err != nil && m.OnError != nil {
			m.OnError(err)
		}
		return err
	}
	m.from = cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, to metav1.ListOptions) (runtime.Object, error) {
			l, err := list(ctx, choose(to))
			return l, failed(err)
		},
		WatchFuncWithContext: func(ctx context.Context, to metav1.ListOptions) (watch.Interface, error) {
			w, err := watcher(ctx, choose(to))
			return w, failed(err)
		},
	}, kube)
	return m
}

// Run lists and watches until ctx ends, and again whenever the connection breaks. What the user may not see stays
// empty.
func (m *Mirror) Run(ctx context.Context) {
	quiet := klog.Logger{} // client-go writes to standard error what it is going to retry
	cache.NewReflectorWithOptions(m.from, m.kind, m, cache.ReflectorOptions{
		Name: "mirror", Logger: &quiet,
		Backoff: &wait.Backoff{Duration: 100 * time.Millisecond, Cap: 2 * time.Second, Steps: 6, Factor: 2,
			Jitter: 0.5},
	}).RunWithContext(klog.NewContext(ctx, quiet))
}

// Listed reports whether all objects have been listed once. Before that, the Store has none or a part of them.
func (m *Mirror) Listed() bool { return m.listed.Load() }

func (m *Mirror) notify(err error) error {
	select {
	case m.Changed <- struct{}{}:
	default: // its reader is going to look anyway
	}
	return err
}

// Add, Update, Delete and Replace are for client-go.
func (m *Mirror) Add(obj any) error    { return m.notify(m.Store.Add(obj)) }
func (m *Mirror) Update(obj any) error { return m.notify(m.Store.Update(obj)) }
func (m *Mirror) Delete(obj any) error { return m.notify(m.Store.Delete(obj)) }
func (m *Mirror) Replace(list []any, version string) error {
	err := m.Store.Replace(list, version)
	m.listed.Store(true)
	return m.notify(err)
}
