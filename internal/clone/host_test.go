package clone

import (
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"kubevpn/internal/api"
)

// TestServiceThatCannotBeChangedIsNoted checks that a clone has no name if the user may not read or update the
// Service of an earlier clone.
func TestServiceThatCannotBeChangedIsNoted(t *testing.T) {
	for _, verb := range []string{"get", "update"} {
		t.Run(verb, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				left := &corev1.Service{ObjectMeta: inShop("web-ann")}
				left.Labels = map[string]string{labelManagedBy: managedBy, labelClone: "web-ann"}
				w := newWorld(left)
				w.fail(verb, "services", func() error { return apierrors.NewForbidden(corev1.Resource("services"), "web-ann", nil) })
				r := w.run(t, api.CloneSpec{})
				r.have(pod("web-ann-1", corev1.PodRunning))
				<-r.Begun()
				want := "the clone has no name in DNS: you may not " + verb + " Services in the namespace shop"
				if s := r.Status(); s.Host != "" || len(s.Notes) != 1 || s.Notes[0] != want {
					t.Errorf("%+v", s)
				}
				r.end()
			})
		})
	}
}
