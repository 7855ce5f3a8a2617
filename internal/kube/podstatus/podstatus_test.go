package podstatus

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
)

func pod(edit func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "web-1", Namespace: "ns"},
		Spec:       corev1.PodSpec{NodeName: "node1", Containers: []corev1.Container{{Name: "app", Image: "registry.example/app:1"}}},
	}
	edit(p)
	return p
}

func state(s corev1.ContainerState, more ...func(*corev1.ContainerStatus)) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		c := corev1.ContainerStatus{Name: "app", State: s}
		for _, f := range more {
			f(&c)
		}
		p.Status.ContainerStatuses = []corev1.ContainerStatus{c}
	}
}

func waiting(reason, message string, more ...func(*corev1.ContainerStatus)) func(*corev1.Pod) {
	return state(corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}, more...)
}

func TestOfNamesWhyAContainerDoesNotRun(t *testing.T) {
	died := corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 3, Reason: "Error", Message: "1\n2\n3\nlast words\n"}}
	ephemeral := func(p *corev1.Pod) {
		p.Status.EphemeralContainerStatuses = []corev1.ContainerStatus{{Name: "app", State: died}}
	}
	for _, tt := range []struct {
		name     string
		pod      func(*corev1.Pod)
		running  bool
		problem  Problem
		retrying bool
		text     string
		code     api.ExitCode // of Error; 0: none
		message  string
		hint     string
	}{
		{name: "no node yet", pod: func(p *corev1.Pod) { p.Spec.NodeName = "" }, text: "waiting for a node"},
		{name: "on a node", pod: func(*corev1.Pod) {}, text: "the node node1 is starting the pod"},
		{name: "unknown state", pod: state(corev1.ContainerState{}), text: "the node is starting the container"},
		{name: "being created", pod: waiting("ContainerCreating", ""), text: "the node node1 is pulling the image and starting the container"},
		{name: "after init containers", pod: waiting("PodInitializing", ""), text: "the node node1 is pulling the image and starting the container"},
		{name: "another reason", pod: waiting("Sleepy", ""), text: "Sleepy"},
		{name: "running", pod: state(corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}), running: true},
		{name: "no room", pod: func(p *corev1.Pod) {
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: "0/2 nodes\nare available."}}
		}, problem: Unscheduled, text: "0/2 nodes are available", code: api.ExitNotReady, message: "no node can run the pod web-1 of it: 0/2 nodes are available", hint: "describe pod web-1"},
		{name: "not admitted", pod: func(p *corev1.Pod) {
			p.Status.Phase, p.Status.Reason, p.Status.Message = corev1.PodFailed, "SysctlForbidden", "forbidden sysctl"
		}, problem: PodFailed, retrying: true, text: "SysctlForbidden: forbidden sysctl", code: api.ExitNotReady, message: "the pod web-1 of it failed: SysctlForbidden: forbidden sysctl", hint: "describe"},
		{name: "image, once", pod: waiting("ErrImagePull", "not found"), problem: Image, retrying: true, text: "ErrImagePull: not found",
			code: api.ExitImagePull, message: "the node node1 cannot pull the image registry.example/app:1: ErrImagePull: not found", hint: "describe"},
		{name: "image, again", pod: waiting("ImagePullBackOff", `Back-off pulling image "x": ErrImagePull: not found`), problem: Image, text: "ImagePullBackOff: not found",
			code: api.ExitImagePull, message: "the node node1 cannot pull the image registry.example/app:1: ImagePullBackOff: not found", hint: "describe"},
		{name: "image, never", pod: waiting("ErrImageNeverPull", ""), problem: Image, text: "ErrImageNeverPull",
			code: api.ExitImagePull, message: "the node node1 cannot pull the image registry.example/app:1: ErrImageNeverPull", hint: "describe"},
		{name: "no Secret", pod: waiting("CreateContainerConfigError", `secret "x" not found`), problem: Config, retrying: true, text: `CreateContainerConfigError: secret "x" not found`,
			code: api.ExitNotReady, message: `the node node1 cannot start it: CreateContainerConfigError: secret "x" not found`, hint: "describe"},
		{name: "ended once", pod: state(died), problem: Ended, retrying: true, text: "2; 3; last words",
			code: api.ExitNotReady, message: "it has ended with exit code 3: 2; 3; last words", hint: "logs web-1 -c app"},
		{name: "ended again", pod: state(died, func(c *corev1.ContainerStatus) { c.RestartCount = 1 }), problem: Ended, text: "2; 3; last words",
			code: api.ExitNotReady, message: "it has ended with exit code 3: 2; 3; last words", hint: "logs"},
		{name: "crash loop", pod: waiting("CrashLoopBackOff", "back-off 10s", func(c *corev1.ContainerStatus) { c.LastTerminationState = died }), problem: Ended, text: "2; 3; last words",
			code: api.ExitNotReady, message: "it has ended with exit code 3: 2; 3; last words", hint: "logs"},
		{name: "crash loop of unknown cause", pod: waiting("CrashLoopBackOff", "back-off 10s"), problem: Ended, text: "CrashLoopBackOff: back-off 10s",
			code: api.ExitNotReady, message: "it has ended with exit code 0: CrashLoopBackOff: back-off 10s", hint: "logs"},
		{name: "ephemeral", pod: ephemeral, problem: Ended, retrying: true, text: "2; 3; last words", code: api.ExitNotReady, message: "it has ended with exit code 3: 2; 3; last words", hint: "logs"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := Of(pod(tt.pod), "app")
			if s.Running != tt.running || s.Problem != tt.problem || s.Retrying != tt.retrying || s.Text != tt.text {
				t.Errorf("got %+v", s)
			}
			e := s.Error("it", api.ExitNotReady)
			if tt.code == 0 {
				if e != nil {
					t.Errorf("error %v", e)
				}
				return
			}
			if e == nil || e.Code != tt.code || e.Message != tt.message || !strings.Contains(e.Hint, tt.hint) {
				t.Errorf("error %+v", e)
			}
		})
	}
}
