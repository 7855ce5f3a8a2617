package clone

import (
	"context"
	"strings"

	batchv1 "k8s.io/api/batch/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
)

// Listed is a clone as its Job describes it.
type Listed struct {
	Namespace string // of the workload
	Workload  string // TYPE/NAME
	api.Holder
}

// List returns the clones of all owners whose workload is in the namespace; an empty namespace means all. With an error
// it returns the clones that it found before.
func List(ctx context.Context, kube kubernetes.Interface, namespace string) (found []Listed, err error) {
	all, err := jobs(ctx, kube, namespace)
	for _, j := range all {
		in, workload, ok := strings.Cut(j.Annotations[annotationWorkload], "/")
		if !ok || j.DeletionTimestamp != nil || namespace != metav1.NamespaceAll && api.CleanLine(in) != namespace {
			continue
		}
		holder := api.Holder{
			Owner: api.CleanLine(j.Annotations[annotationOwner]), Name: j.Name, Namespace: j.Namespace,
		}
		found = append(found, Listed{Namespace: api.CleanLine(in), Workload: api.CleanLine(workload), Holder: holder})
	}
	return found, err
}

// jobs returns the Jobs of clones in all namespaces, because --target-namespace puts clones elsewhere, or only in this
// namespace if the user may not list all. With an error it returns the Jobs that it found before.
func jobs(ctx context.Context, kube kubernetes.Interface, namespace string) ([]batchv1.Job, error) {
	all, err := jobsIn(ctx, kube, metav1.NamespaceAll)
	if apierrors.IsForbidden(err) && namespace != metav1.NamespaceAll {
		return jobsIn(ctx, kube, namespace)
	}
	return all, err
}

func jobsIn(ctx context.Context, kube kubernetes.Interface, namespace string) (all []batchv1.Job, err error) {
	o := metav1.ListOptions{LabelSelector: labels.Set{labelManagedBy: managedBy}.String() + "," + labelClone}
	err = workloads.Each(ctx, o, kube.BatchV1().Jobs(namespace).List, func(object runtime.Object) {
		all = append(all, *object.(*batchv1.Job))
	})
	return all, err
}
