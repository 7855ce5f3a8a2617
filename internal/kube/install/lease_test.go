package install

import (
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// aLease returns the objects of a temporary manager in the namespace team, whose Job is two hours old by the clock of
// the API server.
func aLease(edit ...func(*batchv1.Job)) (Lease, []runtime.Object) {
	l := Lease{Namespace: "team", UID: "jobs"}
	created := metav1.NewTime(time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC))
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: ManagerName, Namespace: "team", UID: l.UID, CreationTimestamp: created,
		ManagedFields: []metav1.ManagedFieldsEntry{{Manager: leaseManager, Time: new(metav1.NewTime(created.Add(2 * time.Hour)))}}}}
	for _, f := range edit {
		f(job)
	}
	objects := without[*appsv1.Deployment](installed("team", image))
	d := deployment(Options{Namespace: "team", Image: image})
	d.OwnerReferences = l.owner()
	return l, append(objects, d, job)
}

func TestAgeIsByTheClockOfTheAPIServer(t *testing.T) {
	_, objects := aLease()
	if got := age(objects[len(objects)-1].(*batchv1.Job)); got != 2*time.Hour {
		t.Errorf("the age is %v", got)
	}
}

func TestRenewReportsALeaseThatHasEnded(t *testing.T) {
	failed := func(j *batchv1.Job) {
		j.Status.Conditions = []batchv1.JobCondition{{Type: batchv1.JobFailed, Status: corev1.ConditionTrue}}
	}
	l, objects := aLease(failed)
	for name, objects := range map[string][]runtime.Object{"failed": objects, "deleted": nil} {
		t.Run(name, func(t *testing.T) {
			w := newWorld("", "", objects...)
			if lives, err := l.renew(t.Context(), w, LeaseTime); err != nil || lives {
				t.Error(lives, err)
			}
		})
	}
}

func TestKeepMakesATemporaryManagerStay(t *testing.T) {
	_, objects := aLease()
	w := newWorld(developer, "", objects...)
	e := &ensurer{kube: w, o: Options{Namespace: "team", Keep: true}, timeout: 10 * time.Second}
	if err := e.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if e.result.Lease != (Lease{}) || e.result.Image != image {
		t.Errorf("%+v", e.result)
	}
	if list, err := w.BatchV1().Jobs("team").List(t.Context(), metav1.ListOptions{}); err != nil || len(list.Items) > 0 {
		t.Errorf("the Job is left: %v %v", list, err)
	}
}
