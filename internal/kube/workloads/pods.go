package workloads

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/pkg/wakeup"
)

// owns reports whether the pod belongs to the workload. The selectors of two workloads may overlap, for example those
// of a Deployment and its preview with one more label, so the pod's owner decides. A pod without an owner, or with an
// unknown one, belongs to every workload with a selector that matches.
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
	// The name of a Deployment's ReplicaSet is the Deployment's name and the hash. One that it adopted may have any
	// name.
	hash := p.Labels[appsv1.DefaultDeploymentUniqueLabelKey]
	deployment, found := strings.CutSuffix(owner.Name, "-"+hash)
	return owner.Kind == "ReplicaSet" && (hash == "" || !found || deployment == w.Name)
}

// WatchPods passes all of the workload's pods to f, sorted by name, at first and after each change, until ctx ends. For
// a Service it follows changes of the selector. f must not change the pods. Changes that come while f runs are joined
// to one. f is called from one goroutine at a time, and not after WatchPods has returned. WatchPods replaces
// connections that break. The error is ctx's, or an *api.Error if the user may not watch the pods.
func (c Client) WatchPods(ctx context.Context, w *Workload, f func([]corev1.Pod)) error {
	return c.ExplainContext(ctx, watchPods(ctx, c.Kube(), w, f))
}

func watchPods(ctx context.Context, kube kubernetes.Interface, w *Workload, f func([]corev1.Pod)) error {
	if w.Resource.GroupResource() != resourceServices {
		return watchSelected(ctx, kube, w, f)
	}
	// A blue-green deployment changes the selector.
	selectors := make(chan labels.Selector)
	defer wakeup.Go(ctx, func(ctx context.Context) { followSelector(ctx, kube, w, selectors) })()
	for now := w; ; {
		done := make(chan error, 1)
		stop := wakeup.Go(ctx, func(ctx context.Context) { done <- watchSelected(ctx, kube, now, f) })
		select {
		case s := <-selectors:
			stop() // f must have returned before the next watch calls it
			chosen := *w
			chosen.Selector = s
			now = &chosen
		case err := <-done:
			stop()
			return err
		}
	}
}

// followSelector sends each new selector of the Service w until ctx ends. It stops early if the user may not watch
// Services. A deleted Service keeps its last selector.
func followSelector(ctx context.Context, kube kubernetes.Interface, w *Workload, selectors chan<- labels.Selector) {
	byName := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, w.Name).String()}
	last := selectorText(w.Selector)
	_ = client.NewMirror(kube, &corev1.Service{}, byName, kube.CoreV1().Services(w.Namespace)).
		Follow(ctx, func(list []*corev1.Service) {
			for _, service := range list {
				if service.Name != w.Name {
					continue
				}
				s := labels.Nothing() // SelectorFromSet would return one that matches everything
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
				}
			}
		})
}

// selectorText returns a text that differs for different selectors. The String of labels.Nothing is that of everything.
func selectorText(s labels.Selector) string {
	if _, selectable := s.Requirements(); !selectable {
		return "nothing"
	}
	return s.String()
}

// watchSelected is watchPods with the selector of w.
func watchSelected(ctx context.Context, kube kubernetes.Interface, w *Workload, f func([]corev1.Pod)) error {
	err := client.NewMirror(kube, &corev1.Pod{}, w.choose(metav1.ListOptions{}), kube.CoreV1().Pods(w.Namespace)).
		Follow(ctx, func(all []*corev1.Pod) {
			var own []corev1.Pod
			for _, p := range all {
				if w.owns(p) {
					own = append(own, *p)
				}
			}
			slices.SortFunc(own, func(a, b corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
			f(own)
		})
	if ctx.Err() != nil {
		return err
	}
	return fmt.Errorf("watching the pods of %s: %w", w, err)
}

// Pods holds the pods that WatchPods passes to Update. The zero value is ready to use. It is safe for concurrent use.
type Pods struct {
	latest wakeup.Value[podList]
}

type podList struct {
	listed bool
	pods   []corev1.Pod
}

// Update replaces the pods.
func (ps *Pods) Update(list []corev1.Pod) {
	ps.latest.Update(func(l *podList) { *l = podList{listed: true, pods: list} })
}

// List waits until Update was called, and returns the latest pods. The caller must not change them. The error is ctx's.
func (ps *Pods) List(ctx context.Context) ([]corev1.Pod, error) {
	l, err := ps.latest.Await(ctx, func(l podList) bool { return l.listed })
	return l.pods, err
}

// Await returns an Await of p. It identifies p by the UID: a later pod may have the same name.
func (ps *Pods) Await(p *corev1.Pod) Await {
	return func(ctx context.Context, ok func(*corev1.Pod) bool) (*corev1.Pod, error) {
		var now *corev1.Pod
		_, err := ps.latest.Await(ctx, func(l podList) bool {
			now = api.Find(l.pods, func(now corev1.Pod) bool { return now.UID == p.UID })
			return now == nil && l.listed || now != nil && ok(now)
		})
		switch {
		case err != nil:
			return nil, err
		case now == nil:
			return nil, client.PodGone(p.Namespace, p.Name)
		}
		return now, nil
	}
}
