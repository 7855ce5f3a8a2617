package clone

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"kubevpn/internal/api"
)

func TestCloneKeepsVariablesOfLabels(t *testing.T) {
	label := func(name, key string) corev1.EnvVar {
		return corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.labels['" + key + "']"}}}
	}
	s := source{workload: "deployment/web", namespace: "shop", container: "app",
		selectors: []selector{{"Service web", labels.SelectorFromSet(labels.Set{"app": "web$1"})}},
		template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web$1", "tier": "front"}},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Env: []corev1.EnvVar{label("APP", "app"), label("TIER", "tier")}}}}}}
	job, _, err := s.job(api.CloneSpec{}, "ann@laptop", "hash")
	if err != nil {
		t.Fatal(err)
	}
	env := job.Spec.Template.Spec.Containers[0].Env
	if env[0].Value != "web$$1" || env[0].ValueFrom != nil || env[1].ValueFrom == nil {
		t.Errorf("the clone has the variables %+v", env)
	}
}
