package intercept

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestRunningAgent(t *testing.T) {
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
		want string
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
		}, ""},
		{"the one that runs", corev1.Pod{
			Spec: corev1.PodSpec{EphemeralContainers: []corev1.EphemeralContainer{
				ephemeral("kubevpn-agent-1", "k:1"), ephemeral("kubevpn-agent-2", "k:2"), ephemeral("kubevpn-agent-3", "k:3"),
			}},
			Status: corev1.PodStatus{EphemeralContainerStatuses: []corev1.ContainerStatus{ended("kubevpn-agent-1"), running("kubevpn-agent-2")}},
		}, "k:2"},
		{"sidecar", corev1.Pod{
			Spec:   corev1.PodSpec{Containers: []corev1.Container{{Name: "kubevpn-agent-1", Image: "k:1"}}},
			Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{running("kubevpn-agent-1")}},
		}, "k:1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := runningAgent(&tt.pod); got != tt.want {
				t.Errorf("image = %q, want %q", got, tt.want)
			}
		})
	}
}
