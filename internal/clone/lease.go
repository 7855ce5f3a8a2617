package clone

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevpn/internal/api"
)

// endLooks is how often a Job is looked at, retryPause apart, after one of its pods has ended.
const endLooks = 10

// keep moves the Job's deadline ahead, and makes the Job again when it is gone, unless somebody deleted it, who will have had a
// reason.
func (c *Clone) keep(ctx context.Context, job, live *batchv1.Job, own *corev1.Service) error {
	age := newAge() // the Job's
	var renewed time.Duration
	looks := 0 // for a Job that has ended, as one of its pods has
	for wait := c.renewEvery; ; {
		var ended <-chan struct{}
		if live != nil && age.now() >= c.renewEvery { // a program that ends at once is not started all the time
			ended = c.ended
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ended:
			timer.Stop()
			looks = endLooks
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
		wait = c.renewEvery
		if looks > 0 {
			looks--
			wait = retryPause
		}
		if c.isDone() {
			return nil // its end is Kubernetes' to see to
		}
		if live == nil {
			again, _, err := c.create(ctx, job, own)
			switch {
			case ctx.Err() != nil:
				return ctx.Err()
			case err == nil:
				live, age, renewed, looks = again, newAge(), 0, 0
				wait = c.renewEvery
			case lasting(err):
				return err
			default:
				c.log.Warn("making the clone again", "err", err)
				wait = retryPause
			}
			continue
		}
		now := age.now()
		became, err := c.renew(ctx, live, now+lease)
		since := now - renewed
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil && became == jobLives:
			renewed = now
			c.tellRenewal(nil)
		case c.isDone(): // it may have come to its end meanwhile
		case apierrors.IsForbidden(err):
			return err
		case err != nil:
			c.log.Warn("renewing the clone's lease", "err", err)
			c.tellRenewal(err)
			wait = retryPause
		case became == jobDeleted && (since < kept || since < lease && !c.isOver()):
			return api.Errorf(api.ExitLost, "somebody deleted the clone %s in the namespace %s", job.Name, job.Namespace).
				WithHint("`kubevpn clone` makes it again.")
		default:
			c.log.Warn("the clone is gone; making it again", "deleted", became == jobDeleted)
			c.tellRenewal(nil)
			c.change(func(s *api.Clone) {
				s.State, s.LastError = api.CloneStarting, "its lease ran out, or its program ended; it is made again"
			})
			live, wait = nil, 0
		}
	}
}

// fate is what has become of a Job.
type fate int

const (
	jobLives   fate = iota
	jobEnded        // it is there, and has come to its end
	jobDeleted      // or it is about to be, or another one has its name
)

// renew has a Job end at an age.
func (c *Clone) renew(ctx context.Context, job *batchv1.Job, at time.Duration) (fate, error) {
	jobs := c.kube.BatchV1().Jobs(job.Namespace)
	patch := fmt.Appendf(nil, `{"metadata":{"uid":%q},"spec":{"activeDeadlineSeconds":%d}}`, job.UID, int64(at/time.Second))
	there, err := jobs.Patch(ctx, job.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	if apierrors.IsInvalid(err) || apierrors.IsConflict(err) { // as it is said of another one's UID, among other things
		if now, getErr := jobs.Get(ctx, job.Name, metav1.GetOptions{}); getErr == nil && now.UID != job.UID || apierrors.IsNotFound(getErr) {
			return jobDeleted, nil
		}
	}
	switch {
	case apierrors.IsNotFound(err), err == nil && there.DeletionTimestamp != nil:
		return jobDeleted, nil
	case err != nil:
		return jobLives, fmt.Errorf("renewing the clone's lease: %w", err)
	case finished(there):
		return jobEnded, nil
	}
	return jobLives, nil
}

// tellRenewal has the status say why the lease could not be renewed.
func (c *Clone) tellRenewal(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unrenewed = ""
	if err != nil {
		c.unrenewed = c.explained(err).Message
	}
}

// lasting reports whether trying again does not help: errors of ours are about what is there, and others about rights.
func lasting(err error) bool {
	said := (*api.Error)(nil)
	return errors.As(err, &said) || apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) || apierrors.IsInvalid(err) || apierrors.IsNotFound(err)
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

func finished(j *batchv1.Job) bool {
	return j.DeletionTimestamp != nil || slices.ContainsFunc(j.Status.Conditions, func(c batchv1.JobCondition) bool {
		return c.Status == corev1.ConditionTrue && (c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed || c.Type == batchv1.JobFailureTarget || c.Type == batchv1.JobSuccessCriteriaMet)
	})
}

// age is how old something is in the cluster, whose clocks go on while this machine sleeps.
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

// passed is the time that has passed where two clocks say so: one that stands still while this machine sleeps, and the wall's, which
// may be set. Of what the wall's is ahead, a lease is enough: a Job has ended after a longer sleep.
func passed(steady, wall time.Duration) time.Duration { return min(max(steady, wall), steady+lease) }
