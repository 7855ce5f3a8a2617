package install

import (
	"context"
	"fmt"
	"sync"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metalabels "k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/kube/client"
	"kubevpn/pkg/wakeup"
)

// survey is everything that Ensure reads before it decides about a namespace. Concurrent requests read it, so that
// finding a running manager takes one round trip.
type survey struct {
	manager      *appsv1.Deployment
	managerErr   error
	namespace    *corev1.Namespace
	namespaceErr error
	lacking      []client.Permission // of toUse
	parts        []error             // of reading each of ensurer.parts
	pods         []*corev1.Pod       // of the manager; none if they could not be listed
}

func (e *ensurer) survey(ctx context.Context, ns string) *survey {
	parts := e.parts(ns)
	s := new(survey)
	var wg sync.WaitGroup
	wg.Go(func() {
		s.manager, s.managerErr = e.kube.AppsV1().Deployments(ns).Get(ctx, ManagerName, metav1.GetOptions{})
		if s.managerErr != nil {
			s.managerErr = fmt.Errorf("looking for the traffic manager in %s: %w", ns, s.managerErr)
		}
	})
	wg.Go(func() { s.namespace, s.namespaceErr = e.kube.CoreV1().Namespaces().Get(ctx, ns, metav1.GetOptions{}) })
	wg.Go(func() { s.lacking = lacking(ctx, e.kube, toUse(ns)) })
	wg.Go(func() { s.parts = wakeup.All(parts, func(p part) error { return p.look(ctx) }) })
	wg.Go(func() { s.pods, _ = listManagerPods(ctx, e.kube, ns) }) // lacking explains an error
	wg.Wait()
	return s
}

// ending reports whether the manager or its namespace is being deleted. If the user may not see the namespace, later
// requests report its deletion.
func (s *survey) ending() bool {
	return s.managerErr == nil &&
		(s.manager.DeletionTimestamp != nil || s.namespaceErr == nil && s.namespace.DeletionTimestamp != nil)
}

// managerPods selects the pods of the traffic manager.
func managerPods() metav1.ListOptions {
	return metav1.ListOptions{LabelSelector: metalabels.SelectorFromSet(selectorLabels()).String()}
}

func listManagerPods(ctx context.Context, kube kubernetes.Interface, namespace string) ([]*corev1.Pod, error) {
	list, err := kube.CoreV1().Pods(namespace).List(ctx, managerPods())
	if err != nil {
		return nil, err
	}
	return pointers(list.Items), nil
}

// pointers returns pointers to the items of a list.
func pointers[T any](items []T) (all []*T) {
	for i := range items {
		all = append(all, &items[i])
	}
	return all
}

// Pods returns the pods that look like the traffic manager's, and their namespace: in the namespace or, if that is
// empty, in the one that Ensure probably uses. It verifies nothing.
func Pods(ctx context.Context, c apiServer, namespace, fallback string) (ns string, pods []*corev1.Pod, err error) {
	o := Options{Namespace: namespace, FallbackNamespace: fallback}
	for _, ns = range o.namespaces() {
		if pods, err = listManagerPods(ctx, c.Kube(), ns); !apierrors.IsForbidden(err) {
			break
		}
	}
	return ns, pods, err
}

// GuessPod returns a ready pod that looks like the traffic manager's: in the namespace or, if that is empty, in the one
// that Ensure probably uses. It verifies nothing and does not wait. pod is empty if it finds none.
func GuessPod(ctx context.Context, c apiServer, namespace, fallback string) (found, pod string) {
	ns, pods, _ := Pods(ctx, c, namespace, fallback) // an error is no pod
	if v := judge(snapshot{namespace: ns, pods: pods}); v.ready {
		return ns, v.pod.Name
	}
	return "", ""
}
