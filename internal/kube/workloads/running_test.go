package workloads

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"kubevpn/internal/kube/podenv"
)

func TestModelPrefersReadyPods(t *testing.T) {
	at := func(name string, minute int, phase corev1.PodPhase, isReady bool) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "shop", Labels: map[string]string{"app": "web"},
			CreationTimestamp: metav1.NewTime(time.Unix(int64(60*minute), 0))}, Status: corev1.PodStatus{Phase: phase}}
		if isReady {
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		}
		return p
	}
	going := at("going", 9, corev1.PodRunning, true)
	going.DeletionTimestamp, going.Finalizers = new(metav1.Now()), []string{"x/y"}
	selector := labels.SelectorFromSet(labels.Set{"app": "web"})
	for _, tt := range []struct {
		name string
		pods []runtime.Object
		want string
	}{
		{"the newest that is ready", []runtime.Object{at("old", 1, corev1.PodRunning, true), at("new", 2, corev1.PodRunning, true), at("newest", 3, corev1.PodRunning, false), going, at("done", 4, corev1.PodSucceeded, false)}, "new"},
		{"one that runs", []runtime.Object{at("old", 1, corev1.PodRunning, false), at("new", 2, corev1.PodRunning, false), going}, "new"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, missing, err := (&Workload{Namespace: "shop", Name: "web", Kind: "Deployment", Selector: selector}).Model(t.Context(), fake.NewClientset(tt.pods...))
			if err != nil || missing != "" || p.Name != tt.want {
				t.Errorf("%v, %q, %v", p, missing, err)
			}
		})
	}
	w := &Workload{Namespace: "shop", Name: "web", Kind: "Deployment", Selector: selector}
	w.Template.Labels = map[string]string{"app": "web"}
	w.Template.Spec.Containers = []corev1.Container{{Name: "app"}}
	t.Run("no pod runs", func(t *testing.T) {
		kube := fake.NewClientset(going)
		kube.PrependReactor("create", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
			create := a.(clienttesting.CreateActionImpl)
			if diff := cmp.Diff([]string{metav1.DryRunAll}, create.CreateOptions.DryRun); diff != "" {
				t.Errorf("it would be made: %s", diff)
			}
			p := create.Object.(*corev1.Pod).DeepCopy()
			p.Name, p.UID, p.Spec.ServiceAccountName = p.GenerateName+"x7k2p", "u-9", "default"
			return true, p, nil
		})
		p, missing, err := w.Model(t.Context(), kube)
		if err != nil || p.Name != "web-x7k2p" || p.UID != "" || p.Spec.ServiceAccountName != "default" || p.Labels["app"] != "web" || !strings.Contains(missing, "are empty") || podenv.Runs(p) {
			t.Errorf("%v, %q, %v", p, missing, err)
		}
	})
	t.Run("no pod runs, and the dry run is forbidden", func(t *testing.T) {
		kube := fake.NewClientset()
		kube.PrependReactor("create", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(corev1.Resource("pods"), "", errors.New("no"))
		})
		p, missing, err := w.Model(t.Context(), kube)
		if err != nil || p.Name != "" || len(p.Spec.Containers) != 1 || !strings.Contains(missing, "token") {
			t.Errorf("%v, %q, %v", p, missing, err)
		}
	})
	t.Run("a workload with only a template", func(t *testing.T) {
		kube := fake.NewClientset(at("web", 1, corev1.PodRunning, true)) // a pod that only has the same name
		none, err := labels.Parse("job-name,!job-name")                  // as of a CronJob without an active Job
		if err != nil {
			t.Fatal(err)
		}
		p, missing, err := (&Workload{Namespace: "shop", Name: "web", Kind: "CronJob", Selector: none, Template: w.Template}).Model(t.Context(), kube)
		if err != nil || podenv.Runs(p) || missing == "" {
			t.Errorf("%v, %q, %v", p, missing, err)
		}
	})
	t.Run("a pod", func(t *testing.T) {
		kube := fake.NewClientset(at("web", 1, corev1.PodRunning, true))
		if p, missing, err := (&Workload{Namespace: "shop", Name: "web", Kind: "Pod"}).Model(t.Context(), kube); err != nil || missing != "" || p.Name != "web" {
			t.Errorf("%v, %q, %v", p, missing, err)
		}
	})
}
