package clone

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
)

// TestPassedFollowsTheWallClock checks how much time counts after sleep and after changes of the clock.
func TestPassedFollowsTheWallClock(t *testing.T) {
	const day = 24 * time.Hour
	for _, tt := range []struct {
		name               string
		steady, wall, want time.Duration
	}{
		{"as always", 20 * time.Second, 20 * time.Second, 20 * time.Second},
		{"asleep for a while", 20 * time.Second, 80 * time.Second, 80 * time.Second},
		{"asleep for longer than the lease", 20 * time.Second, 8 * time.Hour, 20*time.Second + lease},
		{"set back", 20 * time.Second, -day, 20 * time.Second},
		{"set ahead", 20 * time.Second, day, 20*time.Second + lease},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := passed(tt.steady, tt.wall); got != tt.want {
				t.Errorf("%v, want %v", got, tt.want)
			}
		})
	}
}

func TestFailedRenewalIsInStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		var down atomic.Bool
		w.fail("patch", "jobs", func() error {
			if down.Load() {
				return errUnreachable
			}
			return nil
		})
		r := w.run(t, api.CloneSpec{})
		r.have(pod("a", corev1.PodRunning))
		<-r.Begun()
		down.Store(true)
		time.Sleep(renewEvery + time.Second)
		r.have(pod("a", corev1.PodRunning)) // keeps the error
		synctest.Wait()
		r.has(api.CloneRunning, "explained: cannot renew the lease of the clone: connection refused")
		down.Store(false)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		r.has(api.CloneRunning, "")
		if d := *r.job(t, "web-ann").Spec.ActiveDeadlineSeconds; d < 120+20 {
			t.Errorf("the lease is %d s", d)
		}
		r.end()
	})
}

// An API server that restarts knows the roles of users, or their tokens, only after some time.
func TestCloneOutlivesDenialsOfARestartingAPIServer(t *testing.T) {
	for name, denial := range map[string]error{
		"forbidden": apierrors.NewForbidden(batchv1.Resource("jobs"), "web-ann", nil), "unauthorized": apierrors.NewUnauthorized("who?"),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				var denies atomic.Bool
				w.fail("patch", "jobs", func() error {
					if denies.Load() {
						return denial
					}
					return nil
				})
				r := w.run(t, api.CloneSpec{})
				r.have(pod("a", corev1.PodRunning))
				<-r.Begun()
				for range 3 { // each time shorter than the lease
					denies.Store(true)
					time.Sleep(lease * 3 / 4)
					denies.Store(false)
					time.Sleep(lease)
					synctest.Wait()
					r.has(api.CloneRunning, "")
				}
				r.end()
			})
		})
	}
}

func TestForbiddenRenewalEndsClone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.fail("patch", "jobs", func() error {
			return apierrors.NewForbidden(batchv1.Resource("jobs"), "web-ann", errors.New("no role"))
		})
		r := w.run(t, api.CloneSpec{})
		r.have(pod("a", corev1.PodRunning))
		<-r.Begun()
		r.fails(api.ExitUnexpected, `explained: cannot renew the lease of the clone: jobs.batch "web-ann" is forbidden: no role`)
		if j := r.job(t, "web-ann"); j != nil {
			t.Errorf("left: %+v", j)
		}
	})
}

// TestInvalidRenewalChecksJob checks that the clone goes on after an invalid renewal, unless another Job has its name.
func TestInvalidRenewalChecksJob(t *testing.T) {
	for _, another := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld()
			w.fail("patch", "jobs", func() error {
				return apierrors.NewInvalid(batchv1.SchemeGroupVersion.WithKind("Job").GroupKind(), "web-ann", nil)
			})
			r := w.run(t, api.CloneSpec{})
			r.have(pod("a", corev1.PodRunning))
			<-r.Begun()
			if another {
				r.deleteJob(t, "web-ann")
				if _, err := w.kube.BatchV1().Jobs("shop").Create(t.Context(), jobOf(nil), metav1.CreateOptions{}); err != nil {
					t.Fatal(err)
				}
				r.fails(api.ExitLost, "somebody deleted the clone web-ann in the namespace shop")
				return
			}
			time.Sleep(2 * renewEvery)
			synctest.Wait()
			if j := r.job(t, "web-ann"); j == nil || j.UID != "job-1" {
				t.Errorf("%+v", j)
			}
			r.has(api.CloneRunning, `explained: cannot renew the lease of the clone: Job.batch "web-ann" is invalid`)
			r.end()
		})
	}
}
