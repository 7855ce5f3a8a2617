package workloads

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
)

func TestKernelTooOldAcceptsBackports(t *testing.T) {
	for release, want := range map[string]bool{
		"4.19.0-27-amd64": true, "5.4.0-190-generic": true, "5.11.22": true, "3.10.0": true,
		"5.12.0": false, "5.15.0-1064-azure": false, "6.1.0": false, "10.0": false,
		"4.18.0-553.el8_10.x86_64": false, // with later features: the agent finds out
		"":                         false, "unknown": false,
	} {
		if got := kernelTooOld(release); got != want {
			t.Errorf("%q: got %v, want %v", release, got, want)
		}
	}
}

func TestMayInjectRejectsOldKernel(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web-1"}, Spec: corev1.PodSpec{NodeName: "n1"}}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{KernelVersion: "5.4.0-190-generic"}}}
	kube := fake.NewClientset(pod, node)
	added := ephemeral(t, kube, nil)
	r := Client{fakeAPI{kube: kube}}
	e := api.AsError(r.MayInject(t.Context(), pod, Agent{Image: "i", Owner: "o"}))
	want := "cannot redirect in the pod web-1: its node n1 runs Linux 5.4.0-190-generic, and --mode ephemeral needs 5.12 or newer"
	if e == nil || e.Code != api.ExitInject || e.Message != want || !strings.Contains(e.Hint, "--mode sidecar") {
		t.Errorf("got %+v", e)
	}
	if len(*added) > 0 {
		t.Errorf("it added %q", *added)
	}

	kube.PrependReactor("get", "nodes", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(corev1.Resource("nodes"), "n1", errors.New("no"))
	})
	if err := r.MayInject(t.Context(), pod, Agent{Image: "i", Owner: "o"}); err != nil {
		t.Errorf("where the node cannot be read: %v", err)
	}
}
