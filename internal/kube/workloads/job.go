package workloads

import (
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
)

// JobEnded reports whether a Job has completed or failed, is about to, or is being deleted.
func JobEnded(j *batchv1.Job) bool {
	return j.DeletionTimestamp != nil || slices.ContainsFunc(j.Status.Conditions, func(c batchv1.JobCondition) bool {
		return c.Status == corev1.ConditionTrue &&
			(c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed || c.Type == batchv1.JobFailureTarget ||
				c.Type == batchv1.JobSuccessCriteriaMet)
	})
}
