package session

import (
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"kubevpn/internal/incluster/access"
	"kubevpn/internal/incluster/manager/managertest"
)

// An authorizer that does not answer, such as a webhook, is no denial.
func TestUncertainReviewIsAnError(t *testing.T) {
	fails, kube := "", managertest.NewFakeAPI(nil)
	kube.PrependReactor("create", "subjectaccessreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		review := action.(clienttesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview).DeepCopy()
		review.Status.Allowed, review.Status.EvaluationError = fails == "", fails
		return true, review, nil
	})
	ask := New(Config{Kube: kube}).mayForward(&certificatesv1.CertificateSigningRequestSpec{Username: "ann"})
	pod := access.PodRef{Namespace: "shop", Name: "web"}
	if yes, err := ask(t.Context(), pod); err != nil || !yes {
		t.Fatalf("got %v, %v", yes, err)
	}
	fails = "webhook: connection refused"
	if yes, err := ask(t.Context(), pod); err == nil || yes {
		t.Errorf("without an answer: got %v, %v", yes, err)
	}
}
