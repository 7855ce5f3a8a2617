package install

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
)

// far answers the requests for objects by name, each after a round trip.
type far struct {
	roundTrip time.Duration
	objects   []runtime.Object
}

func (f far) RoundTrip(req *http.Request) (*http.Response, error) {
	time.Sleep(f.roundTrip)
	status, answer := http.StatusNotFound, runtime.Object(&metav1.Status{Status: metav1.StatusFailure,
		Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound})
	name := req.URL.Path[strings.LastIndexByte(req.URL.Path, '/')+1:]
	for _, o := range f.objects {
		kind := strings.ToLower(o.GetObjectKind().GroupVersionKind().Kind)
		if o.(metav1.Object).GetName() == name && strings.Contains(req.URL.Path, "/"+kind) {
			status, answer = http.StatusOK, o
		}
	}
	switch name {
	case "selfsubjectaccessreviews":
		status, answer = http.StatusCreated, &authorizationv1.SelfSubjectAccessReview{
			TypeMeta: metav1.TypeMeta{APIVersion: "authorization.k8s.io/v1", Kind: "SelfSubjectAccessReview"},
			Status:   authorizationv1.SubjectAccessReviewStatus{Allowed: true}}
	case "pods":
		list := &corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}}
		for _, o := range f.objects {
			if p, is := o.(*corev1.Pod); is {
				list.Items = append(list.Items, *p)
			}
		}
		status, answer = http.StatusOK, list
	}
	text, err := json.Marshal(answer)
	if err != nil {
		return nil, err
	}
	return &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {"application/json"}}, Request: req,
		Body: io.NopCloser(strings.NewReader(string(text)))}, nil
}

// typed returns the objects with their kinds, which an API server's answers have.
func typed(t *testing.T, objects []runtime.Object) []runtime.Object {
	for _, o := range objects {
		kinds, _, err := scheme.Scheme.ObjectKinds(o)
		if err != nil {
			t.Fatal(err)
		}
		o.GetObjectKind().SetGroupVersionKind(kinds[0])
	}
	return objects
}

func TestRunningManagerCostsOneRoundTrip(t *testing.T) {
	for name, o := range map[string]Options{
		"first choice": {Image: image},
		"named":        {Image: image, Namespace: "kubevpn", FallbackNamespace: "team"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := far{time.Second, typed(t, installed("kubevpn", image))}
				for _, o := range server.objects {
					if d, is := o.(*appsv1.Deployment); is {
						d.Status.AvailableReplicas = 1
					}
				}
				kube, err := kubernetes.NewForConfigAndClient(&rest.Config{Host: "http://far", QPS: -1},
					&http.Client{Transport: server})
				if err != nil {
					t.Fatal(err)
				}
				began := time.Now()
				e := &ensurer{kube: kube, o: o, timeout: 10 * time.Second}
				if err := e.run(t.Context()); err != nil {
					t.Fatal(err)
				}
				if d := time.Since(began); d != time.Second || e.result.Pod != "manager-pod" {
					t.Errorf("found %s after %v round trips", e.result.Pod, d.Seconds())
				}
			})
		})
	}
}
