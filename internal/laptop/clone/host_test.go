package clone

import (
	"fmt"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"kubevpn/internal/api"
)

// notAllowed is the API server's error for a request that the user's roles do not allow.
func notAllowed(verb, resource, name string) error {
	return apierrors.NewForbidden(corev1.Resource(resource), name,
		fmt.Errorf("User %q cannot %s resource %q in API group \"\" in the namespace %q", "ann", verb, resource, "shop"))
}

// TestServiceThatCannotBeChangedIsNoted checks that a clone has no name if the user may not read or update the
// Service of an earlier clone.
func TestServiceThatCannotBeChangedIsNoted(t *testing.T) {
	for _, verb := range []string{"get", "update"} {
		t.Run(verb, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				left := &corev1.Service{ObjectMeta: inShop("web-ann")}
				left.Labels = map[string]string{labelManagedBy: managedBy, labelClone: "web-ann"}
				w := newWorld(left)
				w.fail(verb, "services", func() error { return notAllowed(verb, "services", "web-ann") })
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
