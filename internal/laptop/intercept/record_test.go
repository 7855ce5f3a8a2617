package intercept

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
	"kubevpn/pkg/protocol/httpmatch"
)

func TestEventsNameTheOwnerAndNotTheMatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		match := httpmatch.Spec{Headers: []httpmatch.Named{{Name: "cookie", Value: "secret"}}}
		_, stop, err := begin(t, w, api.InterceptSpec{Match: match})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second) // the names of Events contain the time
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		list, err := w.kube.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var reasons []string
		for _, e := range list.Items {
			reasons = append(reasons, e.Reason)
			if e.InvolvedObject.Kind != "Deployment" || e.InvolvedObject.Name != "web" || !strings.Contains(e.Message, " (self-asserted) ") ||
				strings.Contains(e.Message, "secret") || e.ReportingController != "kubevpn" {
				t.Errorf("%+v", e)
			}
		}
		if slices.Sort(reasons); !slices.Equal(reasons, []string{"InterceptBegan", "InterceptEnded"}) {
			t.Errorf("events %v", reasons)
		}
	})
}

func TestInterceptNeedsNoRightToCreateEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		asked := 0
		w.kube.(*fake.Clientset).PrependReactor("create", "events", func(k8stesting.Action) (bool, runtime.Object, error) {
			asked++
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "events"}, "", nil)
		})
		i, stop, err := begin(t, w, api.InterceptSpec{})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if err := stop(); err != nil || asked != 1 || len(i.Status().Warnings) > 0 {
			t.Errorf("%v after %d requests; warnings: %v", err, asked, i.Status().Warnings)
		}
	})
}
