package install

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/workloads"
)

// A temporary traffic manager belongs to a Job that never has a pod. Kubernetes ends the Job at its deadline, deletes
// it because of its TTL, and then deletes what it owns:
//
//	laptops ── activeDeadlineSeconds ──▶ Job (parallelism 0) ◀── ownerReferences ── Deployment, ServiceAccount
//
// Each connected laptop moves the deadline ahead. See the Kubernetes documentation, "Jobs: Job termination and cleanup"
// and "Garbage Collection: Owners and dependents".

const (
	// LeaseTime is how long a temporary manager lives after a laptop has renewed its lease: as long as a laptop resumes
	// a lost session.
	LeaseTime = 5 * time.Minute
	// LeaseEvery is the time between two renewals.
	LeaseEvery = 20 * time.Second
	// LeaseEnd is how long it lives after a laptop has left. Others renew the lease meanwhile.
	LeaseEnd = 45 * time.Second

	annotationRenewed = "kubevpn/renewed"
	leaseManager      = "kubevpn-lease" // the field manager of renewals
)

// Lease is the Job that owns a temporary traffic manager. The zero value is that of a manager that stays.
type Lease struct {
	Namespace string
	UID       types.UID
}

// leaseOf returns the lease of the Deployment of a manager.
func leaseOf(d *appsv1.Deployment) Lease {
	owner := api.Find(d.OwnerReferences, func(r metav1.OwnerReference) bool { return r.Kind == "Job" })
	if owner == nil {
		return Lease{}
	}
	return Lease{Namespace: d.Namespace, UID: owner.UID}
}

func (l Lease) owner() []metav1.OwnerReference {
	if l.UID == "" {
		return nil
	}
	return []metav1.OwnerReference{{APIVersion: "batch/v1", Kind: "Job", Name: ManagerName, UID: l.UID}}
}

// Renew lets the manager live for a time from now on, by the clock of the API server. It reports whether the lease
// lives: else Kubernetes deletes the manager, or somebody has. Errors are *api.Error, or ctx's.
func (l Lease) Renew(ctx context.Context, c apiServer, lasts time.Duration) (lives bool, err error) {
	lives, err = l.renew(ctx, c.Kube(), lasts)
	return lives, c.ExplainContext(ctx, err)
}

func (l Lease) renew(ctx context.Context, kube kubernetes.Interface, lasts time.Duration) (lives bool, err error) {
	patch := func(more map[string]any) (*batchv1.Job, error) {
		data, err := json.Marshal(more)
		if err != nil {
			return nil, err
		}
		return kube.BatchV1().Jobs(l.Namespace).Patch(ctx, ManagerName, types.MergePatchType, data,
			metav1.PatchOptions{FieldManager: leaseManager})
	}
	meta := map[string]any{"uid": l.UID, "annotations": map[string]any{
		annotationRenewed: time.Now().UTC().Format(time.RFC3339Nano)}}
	job, err := patch(map[string]any{"metadata": meta})
	if err == nil && !workloads.JobEnded(job) {
		// The API server has just noted its time; this machine's clock may be wrong.
		deadline := int64((age(job) + lasts) / time.Second)
		job, err = patch(map[string]any{"metadata": meta, "spec": map[string]any{"activeDeadlineSeconds": deadline}})
	}
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err): // a conflict: another Job has the name
		return false, nil
	case err != nil:
		return false, fmt.Errorf("renewing the lease of the traffic manager: %w", err)
	}
	return !workloads.JobEnded(job), nil
}

// age returns how long the Job had existed when it was last renewed.
func age(job *batchv1.Job) time.Duration {
	renewed := job.CreationTimestamp.Time
	for _, f := range job.ManagedFields {
		if f.Manager == leaseManager && f.Time != nil && f.Time.After(renewed) {
			renewed = f.Time.Time
		}
	}
	return renewed.Sub(job.CreationTimestamp.Time)
}

// toLease returns the permissions for a temporary manager.
func toLease(namespace string) []client.Permission {
	return toApply("batch", "jobs", namespace)
}

// lease creates the Job, or uses the one of another laptop that is installing.
func (e *ensurer) lease(ctx context.Context, ns string) (Lease, error) {
	manager := deployment(Options{Namespace: ns, Image: e.o.Image})
	e.o.decorate(manager)
	job := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: ManagerName, Namespace: ns, Labels: manager.Labels,
			Annotations: manager.Annotations},
		Spec: batchv1.JobSpec{
			Parallelism:             new(int32(0)),
			ActiveDeadlineSeconds:   new(int64(LeaseTime / time.Second)),
			TTLSecondsAfterFinished: new(int32(0)),
			// policies may look at it, though it makes no pod
			Template: corev1.PodTemplateSpec{Spec: manager.Spec.Template.Spec},
		},
	}
	job.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
	jobs := e.kube.BatchV1().Jobs(ns)
	err := e.afterDeletion(ctx, "the former traffic manager in "+ns, func(ctx context.Context) (bool, error) {
		made, err := jobs.Create(ctx, job, metav1.CreateOptions{FieldManager: fieldManager})
		if apierrors.IsAlreadyExists(err) {
			made, err = jobs.Get(ctx, ManagerName, metav1.GetOptions{})
			if err == nil && ptr.Deref(made.Spec.Parallelism, 1) != 0 {
				return false, api.Errorf(api.ExitConflict, "the Job %s/%s is not kubevpn's", ns, ManagerName)
			}
			if apierrors.IsNotFound(err) || err == nil && workloads.JobEnded(made) {
				return true, nil
			}
		}
		if err != nil {
			return false, fmt.Errorf("creating the lease of the traffic manager: %w", err)
		}
		job = made
		return false, nil
	})
	return Lease{Namespace: ns, UID: job.UID}, err
}

// keep makes a temporary manager one that stays. It keeps the image, so that no session breaks.
func (e *ensurer) keep(ctx context.Context, ns string) error {
	l := e.result.Lease
	e.own(Lease{})
	if !e.o.Upgrade {
		e.o.Image = e.result.Image
	}
	if err := e.applyManager(ctx, ns); err != nil {
		return err
	}
	err := e.kube.BatchV1().Jobs(ns).Delete(ctx, ManagerName, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &l.UID}, PropagationPolicy: new(metav1.DeletePropagationBackground)})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("ending the lease of the traffic manager: %w", err)
	}
	return nil
}
