package install

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	metalabels "k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"kubevpn/internal/api"
)

const (
	// readyTimeout bounds waiting for a running pod.
	readyTimeout = 2 * time.Minute
	// readyGrace is how long a pod that runs may take to become ready before it is used anyway: its sessions'
	// port listens before its health is asked.
	readyGrace = 2 * time.Second
)

// waiter waits for a pod of the traffic manager in one namespace. It watches; it does not poll.
type waiter struct {
	kube       kubernetes.Interface
	namespace  string
	generation int64 // as in scene
	timeout    time.Duration
	tell       func(format string, args ...any) // may be nil

	lasting map[string]time.Time // problems, and since when they last
	said    string
}

// wait returns the pod. Its errors are *api.Error, or ctx's.
func (w *waiter) wait(ctx context.Context) (*corev1.Pod, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, w.timeout, errNotInTime)
	defer cancel()
	changed := make(chan struct{}, 1)
	selector := metav1.ListOptions{LabelSelector: metalabels.SelectorFromSet(selectorLabels()).String()}
	byName := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", ManagerName).String()}
	apps, pods := w.kube.AppsV1(), w.kube.CoreV1().Pods(w.namespace)
	podStore := follow(ctx, w.kube, changed, &corev1.Pod{}, selector, pods.List, pods.Watch)
	deployments := follow(ctx, w.kube, changed, &appsv1.Deployment{}, byName, apps.Deployments(w.namespace).List, apps.Deployments(w.namespace).Watch)
	sets := follow(ctx, w.kube, changed, &appsv1.ReplicaSet{}, selector, apps.ReplicaSets(w.namespace).List, apps.ReplicaSets(w.namespace).Watch)
	defer func() {
		cancel()
		podStore.done.Wait()
		deployments.done.Wait()
		sets.done.Wait()
	}()

	w.lasting = make(map[string]time.Time)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil, w.end(ctx)
		case <-changed:
		case <-timer.C:
		}
		if !podStore.listed.Load() {
			continue // there may be pods
		}
		s := scene{namespace: w.namespace, generation: w.generation}
		for _, obj := range deployments.List() {
			s.deployment = obj.(*appsv1.Deployment)
		}
		for _, obj := range sets.List() {
			s.sets = append(s.sets, obj.(*appsv1.ReplicaSet))
		}
		for _, obj := range podStore.List() {
			s.pods = append(s.pods, obj.(*corev1.Pod))
		}
		pod, again, err := w.weigh(judge(s), time.Now())
		if pod != nil || err != nil {
			return pod, err
		}
		if again > 0 {
			timer.Reset(again)
		}
	}
}

// weigh turns a verdict into an end, or says when to look again if nothing changes.
func (w *waiter) weigh(v verdict, now time.Time) (pod *corev1.Pod, again time.Duration, err error) {
	if v.detail != "" && v.detail != w.said && w.tell != nil {
		w.tell("%s", v.detail)
	}
	if v.detail != "" {
		w.said = v.detail
	}
	if v.pod != nil && v.ready {
		return v.pod, 0, nil
	}
	key, grace := "", time.Duration(0)
	switch {
	case v.pod != nil:
		key, grace = "pod "+v.pod.Name, readyGrace
	case v.problem != nil:
		// The kubelet rewords a problem while it lasts, so that the code stands for it.
		key, grace = "problem "+itoa(int(v.problem.err.Code)), v.problem.grace
	default:
		clear(w.lasting)
		return nil, 0, nil
	}
	since, lasts := w.lasting[key]
	if !lasts {
		clear(w.lasting)
		since = now
		w.lasting[key] = now
	}
	if left := grace - now.Sub(since); left > 0 {
		return nil, left, nil
	}
	if v.pod != nil {
		return v.pod, 0, nil
	}
	return nil, 0, v.problem.err
}

var errNotInTime = errors.New("not in time")

func (w *waiter) end(ctx context.Context) error {
	if !errors.Is(context.Cause(ctx), errNotInTime) {
		return ctx.Err()
	}
	seen := w.said
	if seen == "" {
		seen = "nothing was seen of it"
	}
	return api.Errorf(api.ExitNotReady, "the traffic manager in %s was not ready within %v: %s", w.namespace, w.timeout, seen).
		WithHint("`kubectl -n %s describe deployment,pod -l %s=kubevpn` says more.", w.namespace, labelName)
}

// followed is a mirror of some objects that says when it changes.
type followed struct {
	cache.Store
	changed chan<- struct{}
	listed  *atomic.Bool // once
	done    *sync.WaitGroup
}

// follow lists and watches until ctx ends, and again whenever the connection breaks. What the user may not
// see stays empty.
func follow[L runtime.Object](ctx context.Context, kube kubernetes.Interface, changed chan<- struct{}, kind any, which metav1.ListOptions,
	list func(context.Context, metav1.ListOptions) (L, error), watcher func(context.Context, metav1.ListOptions) (watch.Interface, error)) followed {
	choose := func(o metav1.ListOptions) metav1.ListOptions {
		o.LabelSelector, o.FieldSelector = which.LabelSelector, which.FieldSelector
		return o
	}
	lw := cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return list(ctx, choose(o))
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return watcher(ctx, choose(o))
		},
	}, kube)
	f := followed{Store: cache.NewStore(cache.MetaNamespaceKeyFunc), changed: changed, listed: new(atomic.Bool), done: new(sync.WaitGroup)}
	quiet := klog.Logger{}
	reflector := cache.NewReflectorWithOptions(lw, kind, f, cache.ReflectorOptions{Name: "install", Logger: &quiet})
	ctx = klog.NewContext(ctx, quiet) // or it writes to standard error
	f.done.Go(func() { reflector.RunWithContext(ctx) })
	return f
}

func (f followed) notify(err error) error {
	select {
	case f.changed <- struct{}{}:
	default: // a look is due already
	}
	return err
}

func (f followed) Add(obj any) error    { return f.notify(f.Store.Add(obj)) }
func (f followed) Update(obj any) error { return f.notify(f.Store.Update(obj)) }
func (f followed) Delete(obj any) error { return f.notify(f.Store.Delete(obj)) }
func (f followed) Replace(list []any, version string) error {
	err := f.Store.Replace(list, version)
	f.listed.Store(true)
	return f.notify(err)
}
