package clone

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
)

func TestListReturnsClonesOfAllOwners(t *testing.T) {
	job := func(namespace, name, workload, owner string, l map[string]string) *batchv1.Job {
		return &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: l,
			Annotations: map[string]string{annotationWorkload: workload, annotationOwner: owner}}}
	}
	ours := map[string]string{labelManagedBy: managedBy, labelClone: "x"}
	kube := fake.NewClientset(
		job("ns", "web-ann", "ns/deployment/web", "ann@laptop", ours),
		job("sandbox", "web-bob", "ns/deployment/web", "bob@\x1b[31mdesk\nx", ours),
		job("other", "api-bob", "other/deployment/api", "bob@desk", ours),
		job("ns", "backup", "ns/deployment/web", "nobody", nil),
		job("ns", "broken", "nonsense", "nobody", ours),
	)
	ann := Listed{"ns", "deployment/web", api.Holder{Owner: "ann@laptop", Name: "web-ann", Namespace: "ns"}}
	bob := Listed{"ns", "deployment/web", api.Holder{Owner: "bob@[31mdesk x", Name: "web-bob", Namespace: "sandbox"}}
	got, err := List(t.Context(), kube, "ns")
	if d := cmp.Diff([]Listed{ann, bob}, got); d != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, d)
	}
	if got, err := List(t.Context(), kube, ""); err != nil || len(got) != 3 {
		t.Errorf("all namespaces: %v, %v", got, err)
	}
	kube.PrependReactor("list", "jobs", func(action k8stesting.Action) (bool, runtime.Object, error) {
		return action.GetNamespace() == "", nil, apierrors.NewForbidden(batchv1.Resource("jobs"), "", nil)
	})
	got, err = List(t.Context(), kube, "ns")
	if d := cmp.Diff([]Listed{ann}, got); d != "" || err != nil {
		t.Errorf("without the right in the whole cluster: %v (-want +got):\n%s", err, d)
	}
}
