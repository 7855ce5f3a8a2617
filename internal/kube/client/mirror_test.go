package client

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
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

func TestMirrorRetriesLessAndLessOften(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// The fake clock begins in 2000. k8s.io/apimachinery delays errors that are older than its first, of the real
		// clock.
		time.Sleep(100 * 365 * 24 * time.Hour)
		var lists atomic.Int32 // failed ones
		var up atomic.Bool
		kube := fakeCluster(nil, "", service("web", "10.96.0.1"))
		kube.PrependReactor("list", "services", func(k8stesting.Action) (bool, runtime.Object, error) {
			if !up.Load() {
				lists.Add(1)
			}
			return !up.Load(), nil, errors.New("connection refused")
		})
		ctx, cancel := context.WithCancel(t.Context())
		m := NewMirror(kube, &corev1.Service{}, metav1.ListOptions{}, kube.CoreV1().Services("ns"))
		done := make(chan struct{})
		go func() {
			defer close(done)
			m.Run(ctx)
		}()
		time.Sleep(time.Minute) // of a fake clock
		synctest.Wait()
		if n := lists.Load(); n < 3 || n > 8 {
			t.Errorf("%d lists in a minute, want 3 to 8", n)
		}
		up.Store(true)
		time.Sleep(time.Minute)
		synctest.Wait()
		if !m.Listed() {
			t.Error("it has not listed the objects after the API server came back")
		}
		cancel()
		<-done
	})
}
