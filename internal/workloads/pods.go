package workloads

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/cluster"
)

// owns reports whether the pod belongs to the workload. The selectors of two workloads may overlap (a preview's
// Deployment with one more label), so the pod's owner decides. A pod without an owner, or with an unknown one, belongs
// to every workload whose selector matches.
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

// WatchPods tells f the workload's pods, a Service's by the selector that it has at the time, sorted by name, at first
// and after each change, until ctx ends. A list is whole, and its pods are not to be changed; changes that come while f
// works are told together. f is called from one goroutine at a time, and not after WatchPods has returned. Connections
// that break are replaced, and what was missed meanwhile is told. An error is returned when the user may not watch
// (then an *api.Error), or ctx's.
func (c Client) WatchPods(ctx context.Context, w *Workload, f func([]corev1.Pod)) error {
	return c.ExplainContext(ctx, watchPods(ctx, c.Kube(), w, f))
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
			<-done // f is called by one goroutine; the watch ended because of stop
			chosen := *w
			chosen.Selector = s
			now = &chosen
		case err := <-done:
			stop()
			return err
		}
	}
}

// followSelector gives the Service's selectors that differ from the one that w has, as they come, until ctx ends, or
// the user turns out not to have the right to watch Services. One that has gone keeps its last.
func followSelector(ctx context.Context, kube kubernetes.Interface, w *Workload, selectors chan<- labels.Selector) {
	ctx, cancel := context.WithCancel(ctx)
	var following sync.WaitGroup
	defer following.Wait()
	defer cancel()
	services := kube.CoreV1().Services(w.Namespace)
	mirror := cluster.NewMirror(kube, &corev1.Service{}, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, w.Name).String(),
	}, services.List, services.Watch)
	mirror.OnError = func(err error) {
		if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
			cancel()
		}
	}
	following.Go(func() { mirror.Run(ctx) })
	last := selectorText(w.Selector)
	for {
		select {
		case <-ctx.Done():
			return
		case <-mirror.Changed:
		}
		for _, obj := range mirror.List() {
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

// watchSelected is watchPods by the selector that the workload has.
func watchSelected(ctx context.Context, kube kubernetes.Interface, w *Workload, f func([]corev1.Pod)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var following sync.WaitGroup
	defer following.Wait()
	defer cancel(nil)
	pods := kube.CoreV1().Pods(w.Namespace)
	mirror := cluster.NewMirror(kube, &corev1.Pod{}, w.choose(metav1.ListOptions{}), pods.List, pods.Watch)
	mirror.OnError = func(err error) {
		if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
			cancel(fmt.Errorf("watching the pods of %s: %w", w, err))
		}
	}
	following.Go(func() { mirror.Run(ctx) })
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-mirror.Changed:
		}
		if !mirror.Listed() {
			continue
		}
		var list []corev1.Pod
		for _, obj := range mirror.List() {
			if p := obj.(*corev1.Pod); w.owns(p) {
				list = append(list, *p)
			}
		}
		slices.SortFunc(list, func(a, b corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
		f(list)
	}
}

// Pods holds the pods that WatchPods passes to Update. The zero value is ready to use. It is safe for concurrent use.
type Pods struct {
	mu      sync.Mutex
	listed  bool
	list    []corev1.Pod
	changed chan struct{} // closed and replaced by Update
}

// Update takes the pods as they are.
func (ps *Pods) Update(list []corev1.Pod) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if ps.changed != nil {
		close(ps.changed)
	}
	ps.list, ps.listed, ps.changed = list, true, make(chan struct{})
}

// Await returns an Await of p. A pod that took p's name is another one.
func (ps *Pods) Await(p *corev1.Pod) Await {
	return func(ctx context.Context, ok func(*corev1.Pod) bool) (*corev1.Pod, error) {
		for {
			ps.mu.Lock()
			if ps.changed == nil {
				ps.changed = make(chan struct{})
			}
			listed, changed := ps.listed, ps.changed
			n := slices.IndexFunc(ps.list, func(now corev1.Pod) bool { return now.UID == p.UID })
			var now *corev1.Pod
			if n >= 0 {
				now = &ps.list[n]
			}
			ps.mu.Unlock()
			switch {
			case now != nil && ok(now):
				return now, nil
			case now == nil && listed:
				return nil, cluster.PodGone(p.Namespace, p.Name)
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	}
}
