package clone

import (
	"context"
	"strings"

	batchv1 "k8s.io/api/batch/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/workloads"
)

// Listed is a clone as its Job describes it.
type Listed struct {
	Namespace string // of the workload
	Workload  string // TYPE/NAME
	api.Holder
}

// List returns the clones of all owners whose workload is in the namespace; an empty namespace means all. It looks in
// all namespaces, because --target-namespace puts clones elsewhere, or only in this one if the user may not. With an
// error it returns the clones that it found before.
func List(ctx context.Context, kube kubernetes.Interface, namespace string) ([]Listed, error) {
	all, err := list(ctx, kube, metav1.NamespaceAll)
	if apierrors.IsForbidden(err) && namespace != metav1.NamespaceAll {
		all, err = list(ctx, kube, namespace)
	}
	var found []Listed
	for _, l := range all {
		if namespace == metav1.NamespaceAll || l.Namespace == namespace {
			found = append(found, l)
		}
	}
	return found, err
}

func list(ctx context.Context, kube kubernetes.Interface, namespace string) (all []Listed, err error) {
	err = workloads.Each(ctx, ofClones(), kube.BatchV1().Jobs(namespace).List,
		func(object runtime.Object) {
			j := object.(*batchv1.Job)
			of, workload, found := strings.Cut(j.Annotations[annotationWorkload], "/")
			if !found || j.DeletionTimestamp != nil {
				return
			}
			clean := func(s string) string { return api.OneLine(api.Clean(s)) }
			all = append(all, Listed{Namespace: clean(of), Workload: clean(workload), Holder: api.Holder{
				Owner: clean(j.Annotations[annotationOwner]), Name: j.Name, Namespace: j.Namespace,
			}})
		})
	return all, err
}
