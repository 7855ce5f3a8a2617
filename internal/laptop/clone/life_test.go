package clone

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"kubevpn/internal/api"
)

func TestCloneIsCreatedRenewedAndDeleted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newWorld().run(t, api.CloneSpec{})
		synctest.Wait()
		j := r.job(t, "web-ann")
		if j == nil || *j.Spec.ActiveDeadlineSeconds != 120 {
			t.Fatalf("%+v", j)
		}
		r.has(api.CloneStarting, "")
		select {
		case <-r.Begun():
			t.Error("the clone started without a pod")
		default:
		}
		r.have(pod("web-ann-1", corev1.PodRunning), pod("web-ann-2", corev1.PodPending, waiting("ContainerCreating")))
		<-r.Begun()
		r.has(api.CloneRunning, "")
		if diff := cmp.Diff([]api.ClonePod{{Name: "web-ann-1", IP: "10.244.0.9", Ready: true}, {Name: "web-ann-2", IP: "10.244.0.9"}}, r.told[len(r.told)-1]); diff != "" {
			t.Errorf("-want +told\n%s", diff)
		}
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if j := r.job(t, "web-ann"); *j.Spec.ActiveDeadlineSeconds != 300+120 {
			t.Errorf("after five minutes the lease is %d s", *j.Spec.ActiveDeadlineSeconds)
		}
		r.have(pod("web-ann-1", corev1.PodPending, waiting("CrashLoopBackOff")))
		synctest.Wait()
		r.has(api.CloneWaiting, "app: CrashLoopBackOff")
		r.have(pod("web-ann-1", corev1.PodRunning))
		synctest.Wait()
		r.has(api.CloneRunning, "")
		r.end()
		if j := r.job(t, "web-ann"); j != nil {
			t.Errorf("left: %+v", j)
		}
		r.has(api.CloneLeaving, "")
		list, err := r.world.kube.CoreV1().Events("shop").List(t.Context(), metav1.ListOptions{})
		if err != nil || len(list.Items) != 2 {
			t.Fatalf("%v, events %+v", err, list)
		}
		for n, want := range []string{"ann@laptop (self-asserted) runs the clone web-ann of /web in the namespace shop",
			"ann@laptop (self-asserted) no longer runs the clone web-ann of /web"} {
			if got := list.Items[n]; got.Message != want || got.InvolvedObject.Name != "web" {
				t.Errorf("got %+v, want %s", got, want)
			}
		}
	})
}

func TestServiceHasPortsOfWorkload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(&corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: "web-ann", Namespace: "shop", Labels: map[string]string{labelManagedBy: managedBy, labelClone: "web-ann"}},
			Spec:       corev1.ServiceSpec{ClusterIP: "10.96.0.5", Selector: map[string]string{labelClone: "web-ann"}},
		})
		r := w.run(t, api.CloneSpec{NoTraffic: true})
		r.have(pod("web-ann-1", corev1.PodRunning))
		<-r.Begun()
		s, err := w.kube.CoreV1().Services("shop").Get(t.Context(), "web-ann", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var ports []string
		for _, p := range s.Spec.Ports {
			ports = append(ports, fmt.Sprintf("%s %s/%d→%s", p.Name, p.Protocol, p.Port, p.TargetPort.String()))
		}
		if diff := cmp.Diff([]string{"http TCP/80→8080", "tcp-8080 TCP/8080→8080", "tcp-9090 TCP/9090→9090"}, ports); diff != "" {
			t.Errorf("-want +got\n%s", diff)
		}
		if len(s.OwnerReferences) != 1 || s.OwnerReferences[0].UID != "job-1" || s.Spec.ClusterIP != "10.96.0.5" || s.Spec.Selector[labelClone] != "web-ann" {
			t.Errorf("%+v", s)
		}
		want := []api.ClonePort{{Protocol: "tcp", Port: 80, Target: 8080}, {Protocol: "tcp", Port: 8080, Target: 8080}, {Protocol: "tcp", Port: 9090, Target: 9090}}
		if status := r.Status(); status.Host != "web-ann.shop" || !status.NoTraffic || !cmp.Equal(want, status.Ports) || len(status.Notes) > 0 {
			t.Errorf("%+v", status)
		}
		r.end()
	})
}

func TestServiceWithoutPortsIsHeadless(t *testing.T) {
	s := service(&batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: "x", Namespace: "shop"}}, nil)
	if s.Spec.ClusterIP != corev1.ClusterIPNone || len(s.Spec.Ports) > 0 {
		t.Errorf("%+v", s.Spec)
	}
}

func TestCloneRunsWithoutService(t *testing.T) {
	for _, tt := range []struct {
		name, note string
		refusal    error
	}{
		{"mine", "the clone has no name in DNS: you may not create Services in the namespace shop", notAllowed("create", "services", "mine")},
		{"mine", `the clone has no name in DNS: the cluster does not admit its Service: services "mine" is forbidden: exceeded quota: all, requested: services=1, used: services=1, limited: services=1`,
			apierrors.NewForbidden(corev1.Resource("services"), "mine", errors.New("exceeded quota: all, requested: services=1, used: services=1, limited: services=1"))},
		{"7zip", "the clone has no name in DNS: its name is not valid for a Service: a DNS-1035 label must consist of lower case alphanumeric characters or '-', " +
			"start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')", nil},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld()
			if tt.refusal != nil {
				w.fail("create", "services", func() error { return tt.refusal })
			}
			r := w.run(t, api.CloneSpec{Name: tt.name})
			r.have(pod("a", corev1.PodRunning))
			<-r.Begun()
			if diff := cmp.Diff([]string{tt.note}, r.warnings()); diff != "" {
				t.Errorf("-want +told\n%s", diff)
			}
			if s := r.Status(); s.Host != "" || !cmp.Equal([]string{tt.note}, s.Notes) {
				t.Errorf("%+v", s)
			}
			r.end()
		})
	}
}

func TestDeletedCloneIsNotCreatedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newWorld().run(t, api.CloneSpec{})
		r.have(pod("a", corev1.PodRunning))
		<-r.Begun()
		r.deleteJob(t, "web-ann")
		began := time.Now()
		r.fails(api.ExitLost, "somebody deleted the clone web-ann in the namespace shop")
		if took := time.Since(began); took > renewEvery {
			t.Errorf("the deletion was noticed after %v", took)
		}
		if j := r.job(t, "web-ann"); j != nil {
			t.Errorf("left: %+v", j)
		}
	})
}

// TestExpiredCloneIsCreatedAgain checks that a laptop that slept longer than the lease creates its clone again,
// although some requests fail.
func TestExpiredCloneIsCreatedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		var away atomic.Bool
		unreachable := func() error {
			if away.Load() {
				return errUnreachable
			}
			return nil
		}
		w.fail("*", "jobs", unreachable)
		var creations atomic.Int32
		w.fail("create", "jobs", func() error {
			if n := creations.Add(1); n > 1 && n < 5 {
				return errUnreachable
			}
			return nil
		})
		r := w.run(t, api.CloneSpec{})
		r.have(pod("a", corev1.PodRunning))
		<-r.Begun()
		away.Store(true)
		time.Sleep(lease + time.Minute)
		// Delete it before the laptop is back: a clone that renewed the Job would take this for a deletion by somebody.
		r.deleteJob(t, "web-ann")
		r.have()
		away.Store(false)
		time.Sleep(renewEvery)
		synctest.Wait()
		r.has(api.CloneStarting, "its lease expired or its program ended; creating it again")
		j := r.job(t, "web-ann")
		if j == nil || *j.Spec.ActiveDeadlineSeconds != 120 || creations.Load() != 5 {
			t.Fatalf("%+v, after %d attempts", j, creations.Load())
		}
		s, err := w.kube.CoreV1().Services("shop").Get(t.Context(), "web-ann", metav1.GetOptions{})
		if err != nil || s.OwnerReferences[0].UID != j.UID {
			t.Errorf("Service %+v, %v", s, err)
		}
		time.Sleep(renewEvery + time.Second)
		synctest.Wait()
		if d := *r.job(t, "web-ann").Spec.ActiveDeadlineSeconds; d < 120 || d > 180 {
			t.Errorf("the new lease is %d s", d)
		}
		r.have(pod("b", corev1.PodRunning))
		synctest.Wait()
		r.has(api.CloneRunning, "")
		r.end()
	})
}

// TestEndedServerIsCreatedAgain checks that a server whose program ends with 0 runs again, also if its pod was evicted.
func TestEndedServerIsCreatedAgain(t *testing.T) {
	for _, evicted := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := newWorld().run(t, api.CloneSpec{})
			r.have(pod("a", corev1.PodRunning))
			<-r.Begun()
			time.Sleep(renewEvery + 5*time.Second)
			ended := pod("a", corev1.PodSucceeded)
			ended.OwnerReferences = ownedBy("job-1")
			if evicted {
				ended.DeletionTimestamp = new(metav1.Now())
			}
			r.have(ended)
			synctest.Wait()
			// The Job controller reacts between two renewals: the fake patch would overwrite a concurrent update.
			time.Sleep(2*retryPause + retryPause/2)
			j := r.job(t, "web-ann").DeepCopy()
			j.Status.Conditions = []batchv1.JobCondition{{Type: batchv1.JobComplete, Status: corev1.ConditionTrue}}
			if _, err := r.world.kube.BatchV1().Jobs("shop").UpdateStatus(t.Context(), j, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(3 * time.Second)
			synctest.Wait()
			if j := r.job(t, "web-ann"); j == nil || j.UID == "job-1" {
				t.Fatalf("%+v", j)
			}
			r.has(api.CloneStarting, "its lease expired or its program ended; creating it again")
			r.have(ended, pod("b", corev1.PodRunning)) // the old pod does not excuse the deletion of the new Job
			synctest.Wait()
			r.deleteJob(t, "web-ann")
			r.fails(api.ExitLost, "somebody deleted the clone web-ann in the namespace shop")
		})
	}
}

func TestDeletedCloneWithEndedPodsIsNotCreatedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newWorld().run(t, api.CloneSpec{})
		r.have(pod("a", corev1.PodRunning))
		<-r.Begun()
		time.Sleep(renewEvery)
		synctest.Wait()
		r.deleteJob(t, "web-ann")
		ended := pod("a", corev1.PodSucceeded)
		ended.DeletionTimestamp = new(metav1.Now())
		r.have(ended)
		r.fails(api.ExitLost, "somebody deleted the clone web-ann in the namespace shop")
	})
}

// TestEndedTaskIsDone checks that pods that are expected to end do not run again after success.
func TestEndedTaskIsDone(t *testing.T) {
	for _, fast := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld()
			w.workload.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
			r := w.run(t, api.CloneSpec{NoTraffic: true})
			synctest.Wait()
			if j := r.job(t, "web-ann"); *j.Spec.TTLSecondsAfterFinished != 120 || j.Spec.Template.Spec.RestartPolicy != corev1.RestartPolicyNever {
				t.Errorf("%+v", j.Spec)
			}
			if !fast { // else it ends before its pod is seen running
				r.have(pod("a", corev1.PodRunning))
				<-r.Begun()
				r.has(api.CloneRunning, "")
			}
			r.have(pod("a", corev1.PodSucceeded))
			<-r.Begun()
			synctest.Wait()
			r.has(api.CloneDone, "")
			r.deleteJob(t, "web-ann")
			r.have()
			time.Sleep(10 * lease)
			r.has(api.CloneDone, "")
			if j := r.job(t, "web-ann"); j != nil {
				t.Errorf("the Job exists again: %+v", j)
			}
			r.end()
		})
	}
}

func TestFailedTaskFailsClone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.workload.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
		r := w.run(t, api.CloneSpec{})
		r.have(pod("a", corev1.PodFailed, corev1.ContainerStatus{Name: "app", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 3, Reason: "Error"}}}))
		r.fails(api.ExitNotReady, "the clone web-ann does not start: app ended with exit code 3 (Error)")
	})
}

func TestCloneFailsWhenPodDoesNotStart(t *testing.T) {
	unschedulable := pod("a", corev1.PodPending)
	unschedulable.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "0/2 nodes are available."}}
	notReady := pod("a", corev1.PodRunning)
	notReady.Status.Conditions = nil
	for _, tt := range []struct {
		name string
		pod  corev1.Pod
		code api.ExitCode
		err  string
	}{
		{"image", pod("a", corev1.PodPending, waiting("ErrImagePull")), api.ExitImagePull, "the clone web-ann does not start: app: ErrImagePull"},
		{"program", pod("a", corev1.PodPending, waiting("CrashLoopBackOff")), api.ExitNotReady, "the clone web-ann does not start: app: CrashLoopBackOff"},
		{"place", unschedulable, api.ExitNotReady, "the clone web-ann does not start: 0/2 nodes are available"},
		{"probe", notReady, api.ExitNotReady, "no pod of the clone web-ann became ready within 2m0s: its readiness probe has not succeeded yet"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newWorld().run(t, api.CloneSpec{})
				r.have(tt.pod)
				r.fails(tt.code, tt.err)
				if j := r.job(t, "web-ann"); j != nil {
					t.Errorf("left: %+v", j)
				}
			})
		})
	}
}

func jobOf(annotations map[string]string, labels ...string) *batchv1.Job {
	j := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{
		Name: "web-ann", Namespace: "shop", UID: "other", Annotations: annotations, Labels: map[string]string{}, CreationTimestamp: metav1.Unix(0, 0),
	}}
	for n := 0; n < len(labels); n += 2 {
		j.Labels[labels[n]] = labels[n+1]
	}
	return j
}

// TestObjectsOfOthersAreNotReplaced checks that a clone replaces only a clone that an earlier daemon of the same owner
// left.
func TestObjectsOfOthersAreNotReplaced(t *testing.T) {
	const of = "shop/deployment/web"
	since := time.Unix(0, 0).Local().Format(time.DateTime)
	for _, tt := range []struct {
		name  string
		there runtime.Object
		err   string
	}{
		{"by a Job", jobOf(nil), "the namespace shop already has a Job web-ann that is not a clone"},
		{"by another owner", jobOf(map[string]string{annotationWorkload: of, annotationOwner: "ann@desk", annotationKey: "another's"}, labelManagedBy, managedBy),
			"the namespace shop already has a clone web-ann of shop/deployment/web, which ann@desk owns since " + since},
		{"by a clone of something else", jobOf(map[string]string{annotationWorkload: "shop/deployment/web-ann", annotationOwner: "ann@laptop", annotationKey: "hash"}, labelManagedBy, managedBy),
			"the namespace shop already has a clone web-ann of shop/deployment/web-ann, which ann@laptop owns since " + since},
		{"by a namesake", jobOf(map[string]string{annotationWorkload: "shop/" + newWorld().workload.String(), annotationOwner: "ann@laptop", annotationKey: "another's"}, labelManagedBy, managedBy),
			"the namespace shop already has a clone web-ann of " + "shop/" + newWorld().workload.String() + ", which ann@laptop owns since " + since},
		{"by a Service", &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web-ann", Namespace: "shop"}},
			"the namespace shop already has a Service web-ann that belongs to no clone"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(tt.there)
				r := w.run(t, api.CloneSpec{})
				r.fails(api.ExitConflict, tt.err)
				_, service := tt.there.(*corev1.Service)
				if j := w.job(t, "web-ann"); (j == nil) != service {
					t.Errorf("there is %+v", j)
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		own := "shop/" + newWorld().workload.String()
		r := newWorld(jobOf(map[string]string{annotationWorkload: own, annotationOwner: "ann@laptop", annotationKey: "hash"}, labelManagedBy, managedBy)).run(t, api.CloneSpec{})
		r.have(pod("a", corev1.PodRunning))
		<-r.Begun()
		if j := r.job(t, "web-ann"); j.UID == "other" || j.Annotations[annotationKey] != "hash" {
			t.Errorf("%+v", j)
		}
		r.end()
	})
}

// TestCloneOfLiveDaemonIsNotReplaced checks machines that share a home directory and thus a key: a daemon that lives
// renews its clone.
func TestCloneOfLiveDaemonIsNotReplaced(t *testing.T) {
	of := map[string]string{annotationWorkload: "shop/" + newWorld().workload.String(), annotationOwner: "ann@laptop", annotationKey: "hash"}
	since := time.Unix(0, 0).Local().Format(time.DateTime)
	for _, tt := range []struct {
		name  string
		lives bool
		err   string
	}{
		{"and renews", true, "the namespace shop already has a clone web-ann of " + of[annotationWorkload] + ", which another ann@laptop owns since " + since},
		{"or does not", false, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				there := jobOf(of, labelManagedBy, managedBy)
				there.Spec.ActiveDeadlineSeconds = new(int64(140))
				w := newWorld(there)
				r := w.run(t, api.CloneSpec{})
				time.Sleep(renewEvery - time.Second)
				synctest.Wait()
				if j := r.job(t, "web-ann"); j.UID != "other" {
					t.Fatalf("%+v", j)
				}
				if tt.lives {
					there.Spec.ActiveDeadlineSeconds = new(int64(160))
					if _, err := w.kube.BatchV1().Jobs("shop").Update(t.Context(), there, metav1.UpdateOptions{}); err != nil {
						t.Fatal(err)
					}
					r.fails(api.ExitConflict, tt.err)
					if j := r.job(t, "web-ann"); j == nil || j.UID != "other" {
						t.Errorf("%+v", j)
					}
					return
				}
				r.have(pod("a", corev1.PodRunning))
				<-r.Begun()
				r.end()
			})
		})
	}
	synctest.Test(t, func(t *testing.T) { // a finished Job is replaced at once
		there := jobOf(of, labelManagedBy, managedBy)
		there.Status.Conditions = []batchv1.JobCondition{{Type: batchv1.JobFailed, Status: corev1.ConditionTrue}}
		r := newWorld(there).run(t, api.CloneSpec{})
		synctest.Wait()
		if j := r.job(t, "web-ann"); j == nil || j.UID != "job-1" && j.UID != "job-2" {
			t.Errorf("%+v", j)
		}
		r.have(pod("a", corev1.PodRunning))
		<-r.Begun()
		r.end()
	})
}

func TestPodsOfEarlierJobAreIgnored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newWorld().run(t, api.CloneSpec{})
		old, ended := pod("old", corev1.PodRunning), pod("ended", corev1.PodSucceeded)
		old.OwnerReferences, ended.OwnerReferences = ownedBy("job-0"), ownedBy("job-0")
		r.have(old, ended)
		time.Sleep(renewEvery)
		synctest.Wait()
		select {
		case <-r.Begun():
			t.Error("the clone started with a pod of an earlier Job")
		default:
		}
		if s := r.Status(); len(s.Pods) > 0 {
			t.Errorf("%+v", s.Pods)
		}
		r.have(old, pod("own", corev1.PodRunning))
		<-r.Begun()
		if s := r.Status(); len(s.Pods) != 1 || s.Pods[0].Name != "own" {
			t.Errorf("%+v", s.Pods)
		}
		r.end()
	})
}

func TestJobOfOthersIsNotDeleted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		r := w.run(t, api.CloneSpec{})
		r.have(pod("a", corev1.PodRunning))
		<-r.Begun()
		r.deleteJob(t, "web-ann")
		if _, err := w.kube.BatchV1().Jobs("shop").Create(t.Context(), jobOf(nil), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		r.end()
		if w.job(t, "web-ann") == nil {
			t.Error("the Job of another owner was deleted")
		}
	})
}

func TestFailedDeletionIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.fail("delete", "jobs", func() error { return errUnreachable })
		r := w.run(t, api.CloneSpec{})
		r.have(pod("a", corev1.PodRunning))
		<-r.Begun()
		r.leave()
		checkError(t, <-r.ended, api.ExitUnexpected, "explained: cannot delete the clone web-ann, which ends by itself 2m0s after its last renewal: connection refused")
	})
}

func TestRemoveLeftDeletesOwnClones(t *testing.T) {
	clones := func() []runtime.Object {
		var all []runtime.Object
		for _, c := range []struct{ name, namespace, of, key string }{
			{"mine", "shop", "shop/deployment/web", "ann's"},
			{"mine-elsewhere", "other", "shop/deployment/web", "ann's"},
			{"namesakes", "shop", "shop/deployment/web", "another's"},
			{"of-another", "shop", "shop/deployment/api", "ann's"},
			{"of-another-namespace", "shop", "other/deployment/web", "ann's"},
		} {
			j := jobOf(map[string]string{annotationWorkload: c.of, annotationOwner: "ann@laptop", annotationKey: c.key}, labelManagedBy, managedBy, labelClone, c.name)
			j.Name, j.Namespace = c.name, c.namespace
			all = append(all, j)
		}
		all = append(all, jobOf(map[string]string{annotationWorkload: "shop/deployment/web", annotationOwner: "ann@laptop"})) // no clone
		return all
	}
	for _, tt := range []struct {
		name, key  string
		own        bool // may list the one namespace only
		want, left []string
	}{
		{"mine", "ann's", false, []string{"mine-elsewhere", "mine"}, []string{"namesakes", "of-another", "of-another-namespace", "web-ann"}},
		{"everybody's", "", false, []string{"mine-elsewhere", "mine", "namesakes"}, []string{"of-another", "of-another-namespace", "web-ann"}},
		{"mine of one namespace", "ann's", true, []string{"mine"}, []string{"mine-elsewhere", "namesakes", "of-another", "of-another-namespace", "web-ann"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(clones()...)
			first := true
			w.fail("list", "jobs", func() error {
				if tt.own && first {
					first = false
					return apierrors.NewForbidden(batchv1.Resource("jobs"), "", nil)
				}
				return nil
			})
			got, err := RemoveLeft(t.Context(), w.kube, "shop", "deployment/web", tt.key)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +removed\n%s", diff)
			}
			list, err := w.kube.BatchV1().Jobs("").List(t.Context(), metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			var left []string
			for _, j := range list.Items {
				left = append(left, j.Name)
			}
			if diff := cmp.Diff(tt.left, left); diff != "" {
				t.Errorf("-want +left\n%s", diff)
			}
		})
	}
}
