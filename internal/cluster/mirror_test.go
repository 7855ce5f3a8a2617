package cluster

import (
	"context"
	"errors"
	"slices"
	"testing"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8stesting "k8s.io/client-go/testing"

	"kubevpn/internal/testenv"
)

func TestFollowReportsTheListAndEachChange(t *testing.T) {
	ignore := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, ignore) })
	kube := fakeCluster(nil, "", service("web", "10.96.0.1"), service("api", "10.96.0.2"))
	services := kube.CoreV1().Services("ns")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	lists, done := make(chan []string), make(chan error, 1)
	go func() {
		done <- NewMirror(kube, &corev1.Service{}, metav1.ListOptions{}, services).Follow(ctx, func(list []*corev1.Service) {
			var names []string
			for _, s := range list {
				names = append(names, s.Name)
			}
			slices.Sort(names)
			lists <- names
		})
	}()
	if got := <-lists; !slices.Equal(got, []string{"api", "web"}) {
		t.Fatalf("the first list is %q", got)
	}
	// The fake clientset does not replay what happens between its list and its watch.
	testenv.Until(t, "it watches", func() bool {
		return slices.ContainsFunc(kube.Actions(), func(a k8stesting.Action) bool { return a.GetVerb() == "watch" })
	})
	if err := services.Delete(ctx, "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := <-lists; !slices.Equal(got, []string{"api"}) {
		t.Fatalf("after a deletion the list is %q", got)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

func TestFollowFailsWithoutTheRight(t *testing.T) {
	kube := fakeCluster(nil, "list:services")
	err := NewMirror(kube, &corev1.Service{}, metav1.ListOptions{}, kube.CoreV1().Services("ns")).
		Follow(t.Context(), func([]*corev1.Service) {})
	if !apierrors.IsForbidden(err) {
		t.Fatal(err)
	}
}
