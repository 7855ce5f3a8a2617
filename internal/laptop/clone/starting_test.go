package clone

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevpn/internal/api"
)

// tell creates an event about an object.
func (w *world) tell(t *testing.T, about types.UID, kind, reason, message, field string, at time.Time) {
	t.Helper()
	e := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{GenerateName: "e-", Name: reason + at.String() + field, Namespace: "shop"},
		InvolvedObject: corev1.ObjectReference{UID: about, FieldPath: field},
		Type:           kind, Reason: reason, Message: message, LastTimestamp: metav1.NewTime(at),
		Source: corev1.EventSource{Component: "kubelet"},
	}
	if _, err := w.kube.CoreV1().Events("shop").Create(t.Context(), e, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// details returns the progress that was reported while waiting.
func (r *running) details() (all []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		if strings.HasPrefix(e.Step, "Waiting for a pod") && e.Detail != "" {
			all = append(all, e.Detail)
		}
	}
	return all
}

func creating(name string) corev1.Pod {
	return pod(name, corev1.PodPending, waiting("ContainerCreating"))
}

// TestQuotaErrorIsReported checks that the error has the latest warning about the Job.
func TestQuotaErrorIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		r := w.run(t, api.CloneSpec{})
		synctest.Wait()
		now := time.Now()
		w.tell(t, "another", corev1.EventTypeWarning, "FailedCreate", "of another one", "", now.Add(time.Minute))
		w.tell(t, "job-1", corev1.EventTypeWarning, "ZFailedCreate", "an earlier one, which comes later in a list", "", now.Add(-time.Minute))
		w.tell(t, "job-1", corev1.EventTypeWarning, "FailedCreate", "Error creating:\npods is forbidden: exceeded quota", "", now)
		w.tell(t, "job-1", corev1.EventTypeNormal, "SuccessfulCreate", "by the way", "", now.Add(time.Minute))
		began := time.Now()
		r.fails(api.ExitNotReady, "the clone web-ann does not start: Error creating: pods is forbidden: exceeded quota")
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("that took %v", took)
		}
	})
}

func TestSlowImageExtendsTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		r := w.run(t, api.CloneSpec{})
		synctest.Wait()
		w.tell(t, "a", corev1.EventTypeNormal, "Pulling", `Pulling image "first:1"`, "spec.containers{aaa}", time.Now())
		w.tell(t, "a", corev1.EventTypeNormal, "Pulled", `Successfully pulled image "first:1"`, "spec.containers{aaa}", time.Now())
		w.tell(t, "a", corev1.EventTypeNormal, "Pulling", `Pulling image "web:7"`, "spec.containers{app}", time.Now())
		r.have(creating("a"))
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if got := r.details(); !slices.Contains(got, "pulling the image web:7") {
			t.Errorf("told: %q", got)
		}
		initializing := pod("a", corev1.PodPending, waiting("PodInitializing"))
		initializing.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "init", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
		r.have(initializing)
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		if got := r.details(); !slices.Contains(got, "the init container init runs") {
			t.Errorf("told: %q", got)
		}
		r.have(pod("a", corev1.PodRunning))
		<-r.Begun()
		r.end()
	})
	synctest.Test(t, func(t *testing.T) { // to a limit
		w := newWorld()
		r := w.run(t, api.CloneSpec{})
		w.tell(t, "a", corev1.EventTypeNormal, "Pulling", `Pulling image "web:7"`, "spec.containers{app}", time.Now())
		r.have(creating("a"))
		err := <-r.ended
		if err == nil || !strings.HasSuffix(err.Error(), ": pulling the image web:7") || !strings.HasPrefix(err.Error(), "no pod of the clone web-ann became ready within 16m") {
			t.Errorf("%v", err)
		}
	})
}

func TestNewNodeExtendsTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		r := w.run(t, api.CloneSpec{})
		synctest.Wait()
		unplaced := pod("a", corev1.PodPending)
		unplaced.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "0/2 nodes are available."}}
		r.have(unplaced)
		time.Sleep(scheduleGrace / 2)
		w.tell(t, "a", corev1.EventTypeNormal, "TriggeredScaleUp", "pod triggered scale-up: [{pool 2->3 (max: 5)}]", "", time.Now())
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if got, want := r.details(), []string{"0/2 nodes are available", "0/2 nodes are available: pod triggered scale-up: [{pool 2->3 (max: 5)}]"}; !slices.Equal(got[max(0, len(got)-2):], want) {
			t.Errorf("told %q", got)
		}
		r.have(pod("a", corev1.PodRunning))
		<-r.Begun()
		r.end()
	})
}

func TestUnmountedVolumeIsNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		r := w.run(t, api.CloneSpec{})
		w.tell(t, "a", corev1.EventTypeWarning, "FailedMount", `MountVolume.SetUp failed for volume "s": secret "s" not found`, "", time.Now())
		r.have(creating("a"))
		r.fails(api.ExitNotReady, `no pod of the clone web-ann became ready within 2m0s: MountVolume.SetUp failed for volume "s": secret "s" not found`)
	})
}

func TestErrorContainsLog(t *testing.T) {
	crashing := pod("a", corev1.PodPending, waiting("CrashLoopBackOff"))
	crashing.Status.ContainerStatuses[0].LastTerminationState.Terminated = &corev1.ContainerStateTerminated{ExitCode: 2}
	notReady := pod("a", corev1.PodRunning)
	notReady.Status.Conditions = nil
	for _, tt := range []struct {
		name string
		pod  corev1.Pod
		want string
	}{
		{"of one that ended", crashing, "The last lines of its container app:\n  fake logs"},
		{"of one that runs", notReady, "The last lines of its container app:\n  fake logs"},
		{"of one that never began", pod("a", corev1.PodPending, waiting("ErrImagePull")), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newWorld().run(t, api.CloneSpec{})
				r.have(tt.pod)
				var got *api.Error
				if err := <-r.ended; !errors.As(err, &got) || got.Hint != tt.want {
					t.Errorf("%+v, want the hint %q", got, tt.want)
				}
			})
		})
	}
}

func TestLineShortensText(t *testing.T) {
	if got := line(" two\n lines\t"); got != "two lines" {
		t.Errorf("%q", got)
	}
	if got := line(strings.Repeat("é", messageBytes)); len(got) > messageBytes+3 || !strings.HasSuffix(got, "é...") {
		t.Errorf("%d bytes: %q", len(got), got)
	}
}
