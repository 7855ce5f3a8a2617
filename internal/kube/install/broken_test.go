package install

import (
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestDeploymentIsBrokenAfterAFailedPullOrAMinute(t *testing.T) {
	waiting := func(reason string) corev1.ContainerState {
		return corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason}}
	}
	for _, tt := range []struct {
		name      string
		available int32
		since     time.Duration // how long it has not been available
		state     corev1.ContainerState
		want      bool
	}{
		{name: "starting", since: time.Second, state: waiting("ContainerCreating")},
		{name: "not_for_long", since: time.Minute, state: waiting("ContainerCreating"), want: true},
		{name: "no_such_image", since: time.Second, state: waiting("ErrImagePull"), want: true},
		{name: "still_no_such_image", since: time.Second, state: waiting("ImagePullBackOff"), want: true},
		{name: "an_old_pod_serves", available: 1, since: time.Second, state: waiting("ImagePullBackOff")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "p"}, Status: corev1.PodStatus{
				ContainerStatuses: []corev1.ContainerStatus{{Name: containerName, State: tt.state}},
			}}
			d := deployment(Options{Namespace: "n", Image: "i"})
			d.Status = appsv1.DeploymentStatus{AvailableReplicas: tt.available, Conditions: []appsv1.DeploymentCondition{{
				Type: appsv1.DeploymentAvailable, Status: corev1.ConditionFalse, LastTransitionTime: metav1.NewTime(time.Now().Add(-tt.since)),
			}}}
			if got := isBroken(d, []*corev1.Pod{pod}); got != tt.want {
				t.Errorf("isBroken = %v, want %v", got, tt.want)
			}
		})
	}
}
