package intercept

import (
	"context"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
)

func TestAgentRuns(t *testing.T) {
	ephemeral := func(name, image string) corev1.EphemeralContainer {
		return corev1.EphemeralContainer{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: name, Image: image}}
	}
	running := func(name string) corev1.ContainerStatus {
		return corev1.ContainerStatus{Name: name, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}
	}
	ended := func(name string) corev1.ContainerStatus {
		return corev1.ContainerStatus{Name: name, State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}}
	}
	for _, tt := range []struct {
		name string
		pod  corev1.Pod
		want bool
	}{
		{"none", corev1.Pod{
			Spec: corev1.PodSpec{
				Containers:          []corev1.Container{{Name: "app", Image: "app:1"}},
				EphemeralContainers: []corev1.EphemeralContainer{ephemeral("debugger-1", "busybox")},
			},
			Status: corev1.PodStatus{
				ContainerStatuses:          []corev1.ContainerStatus{running("app")},
				EphemeralContainerStatuses: []corev1.ContainerStatus{running("debugger-1")},
			},
		}, false},
		{"second of three", corev1.Pod{
			Spec: corev1.PodSpec{EphemeralContainers: []corev1.EphemeralContainer{
				ephemeral("kubevpn-agent-1", "k:1"), ephemeral("kubevpn-agent-2", "k:2"), ephemeral("kubevpn-agent-3", "k:3"),
			}},
			Status: corev1.PodStatus{EphemeralContainerStatuses: []corev1.ContainerStatus{ended("kubevpn-agent-1"), running("kubevpn-agent-2")}},
		}, true},
		{"sidecar", corev1.Pod{
			Spec:   corev1.PodSpec{Containers: []corev1.Container{{Name: "kubevpn-agent-1", Image: "k:1"}}},
			Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{running("kubevpn-agent-1")}},
		}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := agentRuns(&tt.pod); got != tt.want {
				t.Errorf("agentRuns = %v, want %v", got, tt.want)
			}
		})
	}
}

func TestResetRunsNoImageOfAPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		_, stop, err := begin(t, w, api.InterceptSpec{})
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		w.mu.Lock()
		w.pod("web-a").Spec.EphemeralContainers[0].Image = "evil.example/agent:1" // every user with write access to the namespace may add any container
		w.mu.Unlock()
		cfg := ResetConfig{
			Namespace: "default", Workload: "deployment/web", Owner: "root@desk", Key: newKey(t), Logger: quiet(), Progress: func(api.Event) {},
			Image: func(context.Context) (string, error) { return "", api.Errorf(api.ExitConsent, "not trusted") },
		}
		if err := resetAll(t.Context(), cfg, w, w.dynamic()); api.AsError(err).Code != api.ExitConsent || len(w.injected) != 1 {
			t.Errorf("without a trusted image: %v, agents were added to %v", err, w.injected)
		}
		cfg.Image = func(context.Context) (string, error) { return "kubevpn:trusted", nil }
		if err := resetAll(t.Context(), cfg, w, w.dynamic()); err != nil {
			t.Fatal(err)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if all := w.pod("web-a").Spec.EphemeralContainers; len(all) != 2 || all[1].Image != "kubevpn:trusted" {
			t.Errorf("the pod's agents are %+v", all)
		}
	})
}
