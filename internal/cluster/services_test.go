package cluster

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

func TestWatchServices(t *testing.T) {
	ignore := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, ignore) })
	kube := fakeCluster(nil, "", service("web", "10.96.0.1"), service("api", "10.96.0.2"))
	ctx, cancel := context.WithCancel(t.Context())
	deltas := make(chan api.NameDelta, 10)
	done := make(chan error, 1)
	go func() { done <- watchServices(ctx, kube, "ns", func(d api.NameDelta) { deltas <- d }) }()
	next := func(want api.NameDelta) {
		t.Helper()
		select {
		case got := <-deltas:
			if d := cmp.Diff(want, got); d != "" {
				t.Fatalf("(-want +got):\n%s", d)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("nothing")
		}
	}
	next(api.NameDelta{Reset: true, Add: map[string][]string{"ns": {"api", "web"}}})
	// The fake clientset does not replay what happens between its list and its watch.
	testenv.Until(t, "it watches", func() bool { return watching(kube.Actions()) })
	if err := kube.CoreV1().Services("ns").Delete(ctx, "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	next(api.NameDelta{Remove: map[string][]string{"ns": {"web"}}})
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func watching[A interface{ GetVerb() string }](actions []A) bool {
	for _, a := range actions {
		if a.GetVerb() == "watch" {
			return true
		}
	}
	return false
}

func TestWatchServicesDenied(t *testing.T) {
	err := watchServices(t.Context(), fakeCluster(nil, "list:services"), "ns", nil)
	if !apierrors.IsForbidden(err) {
		t.Fatal(err)
	}
}
