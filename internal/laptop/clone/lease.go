package clone

import (
	"context"
	"errors"
	"fmt"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
)

// endChecks is how often the Job is checked, retryPause apart, after one of its pods has ended.
const endChecks = 10

// keeper renews the lease of a clone's Job, and creates the Job again when it is gone. It belongs to one goroutine.
type keeper struct {
	*Clone
	job     *batchv1.Job // as it is created
	service *corev1.Service
	live    *batchv1.Job  // nil: the clone must create it again
	age     *age          // of live
	renewed time.Duration // age at the last renewal
	denied  *age          // since the API server has denied every request; nil: the last one was permitted
	checks  int           // how many are left after a pod of the Job has ended, and perhaps the Job
}

// keep renews the lease and creates the Job again when it is gone. It fails if somebody deleted the Job.
func (c *Clone) keep(ctx context.Context, job, live *batchv1.Job, own *corev1.Service) error {
	k := &keeper{Clone: c, job: job, service: own, live: live, age: newAge()}
	for wait := c.renewEvery; ; {
		if err := k.wait(ctx, wait); err != nil {
			return err
		}
		if c.isDone() {
			return nil // Kubernetes ends it
		}
		var err error
		if k.live == nil {
			wait, err = k.recreate(ctx)
		} else {
			wait, err = k.check(ctx)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return err
		}
	}
}

// wait returns after a time, or when a pod of the Job has ended.
func (k *keeper) wait(ctx context.Context, d time.Duration) error {
	var ended <-chan struct{}
	if k.live != nil && k.age.now() >= k.renewEvery { // a program that ends at once must not run in a loop
		ended = k.ended
	}
	select {
	case <-time.After(d):
		return nil
	case <-ended:
		k.checks = endChecks
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// recreate creates the Job again. It returns the time until the next step. Its errors are permanent.
func (k *keeper) recreate(ctx context.Context) (wait time.Duration, err error) {
	live, _, err := k.create(ctx, k.job, k.service)
	switch {
	case err == nil:
		k.live, k.age, k.renewed, k.checks = live, newAge(), 0, 0
		return k.renewEvery, nil
	case k.denies(err), lasting(err):
		return 0, err
	}
	k.log.Warn("cannot create the clone again", "err", err)
	return retryPause, nil
}

// check renews the lease. It returns the time until the next step. Its errors are permanent.
func (k *keeper) check(ctx context.Context) (wait time.Duration, err error) {
	wait = k.renewEvery
	if k.checks > 0 {
		k.checks--
		wait = retryPause
	}
	now := k.age.now()
	state, err := k.renew(ctx, k.live, now+k.lease)
	since := now - k.renewed
	denied := k.denies(err)
	switch {
	case err == nil && state == jobLives:
		k.renewed = now
		k.setRenewalError(nil)
		return wait, nil
	case k.isDone(): // it may have ended meanwhile
		return wait, nil
	case denied:
		return 0, err
	case err != nil:
		k.log.Warn("cannot renew the lease of the clone", "err", err)
		k.setRenewalError(err)
		return retryPause, nil
	case state == jobDeleted && (since < jobTTL || since < k.lease && !k.isOver()):
		command, _ := k.advice()
		return 0, api.Errorf(api.ExitLost, "somebody deleted the %s %s in the namespace %s", k.kind(),
			k.job.Name, k.job.Namespace).
			WithHint("`kubevpn %s` makes it again.", command)
	}
	k.log.Warn("the clone is gone; creating it again", "deleted", state == jobDeleted)
	k.setRenewalError(nil)
	k.change(func(s *api.Clone) {
		s.State, s.LastError = api.CloneStarting, "its lease expired or its program ended; creating it again"
	})
	k.live = nil
	return 0, nil
}

// denies reports whether the API server has denied requests for as long as a lease. An API server that restarts also
// denies them, until it knows all roles.
func (k *keeper) denies(err error) bool {
	if !apierrors.IsForbidden(err) && !apierrors.IsUnauthorized(err) {
		k.denied = nil
		return false
	}
	if k.denied == nil {
		k.denied = newAge()
	}
	return k.denied.now() >= k.lease
}

// jobState is the state of a Job.
type jobState int

const (
	jobLives   jobState = iota
	jobEnded            // it exists, and has completed or failed
	jobDeleted          // or it is being deleted, or another one has its name
)

// renew sets the age at which a Job ends.
func (c *Clone) renew(ctx context.Context, job *batchv1.Job, at time.Duration) (jobState, error) {
	jobs := c.kube.BatchV1().Jobs(job.Namespace)
	patch := fmt.Appendf(nil, `{"metadata":{"uid":%q},"spec":{"activeDeadlineSeconds":%d}}`, job.UID,
		int64(at/time.Second))
	there, err := jobs.Patch(ctx, job.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	if apierrors.IsInvalid(err) || apierrors.IsConflict(err) { // also if another Job has the name
		if now, getErr := jobs.Get(ctx, job.Name, metav1.GetOptions{}); getErr == nil && now.UID != job.UID ||
			apierrors.IsNotFound(getErr) {
			return jobDeleted, nil
		}
	}
	switch {
	case apierrors.IsNotFound(err), err == nil && there.DeletionTimestamp != nil:
		return jobDeleted, nil
	case err != nil:
		return jobLives, fmt.Errorf("cannot renew the lease of the clone: %w", err)
	case workloads.JobEnded(there):
		return jobEnded, nil
	}
	return jobLives, nil
}

// setRenewalError stores in the status why the lease could not be renewed.
func (c *Clone) setRenewalError(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unrenewed = ""
	if err != nil {
		c.unrenewed = c.cfg.Cluster.Explain(err).Message
	}
}

// lasting reports whether a retry would fail the same way: an error of this package, or one about the request.
func lasting(err error) bool {
	said := (*api.Error)(nil)
	return errors.As(err, &said) || apierrors.IsInvalid(err) || apierrors.IsNotFound(err)
}

func (c *Clone) isDone() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.status.State == api.CloneDone
}

func (c *Clone) isOver() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.over
}

// age is the age of an object in the cluster, whose clocks continue while this machine sleeps.
type age struct {
	last time.Time
	sum  time.Duration
}

func newAge() *age { return &age{last: time.Now()} }

func (a *age) now() time.Duration {
	t := time.Now()
	a.sum += passed(t.Sub(a.last), t.Round(0).Sub(a.last.Round(0)))
	a.last = t
	return a.sum
}

// passed combines two clocks: steady stops while this machine sleeps, and the wall clock may be set. It follows the
// wall clock for at most one lease: after a longer sleep, the Job has ended in any case.
func passed(steady, wall time.Duration) time.Duration { return min(max(steady, wall), steady+lease) }
