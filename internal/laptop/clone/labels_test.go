package clone

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/kubectl/pkg/util/fieldpath"

	"kubevpn/internal/api"
)

// TestCloneKeepsFieldsOfLabels checks what the kubelet makes of variables and files in the clone, which lacks a label.
func TestCloneKeepsFieldsOfLabels(t *testing.T) {
	field := func(path string) *corev1.ObjectFieldSelector { return &corev1.ObjectFieldSelector{FieldPath: path} }
	file := func(path string) []corev1.DownwardAPIVolumeFile {
		return []corev1.DownwardAPIVolumeFile{{Path: "a", FieldRef: field(path)}, {Path: "b", ResourceFieldRef: &corev1.ResourceFieldSelector{Resource: "limits.cpu"}}}
	}
	const app, all = "metadata.labels['app']", "metadata.labels"
	s := original{workload: "deployment/web", namespace: "shop", container: "app",
		selectors: []selector{{"Service web", labels.SelectorFromSet(labels.Set{"app": "web$1"})}},
		template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web$1", "tier": "front"}},
			Spec: corev1.PodSpec{
				InitContainers: []corev1.Container{{Name: "first", Env: []corev1.EnvVar{{Name: "PLAIN", Value: "x"},
					{Name: "APP", ValueFrom: &corev1.EnvVarSource{FieldRef: field(app)}}}}},
				Containers: []corev1.Container{{Name: "app", Env: []corev1.EnvVar{
					{Name: "TIER", ValueFrom: &corev1.EnvVarSource{FieldRef: field("metadata.labels['tier']")}}}}},
				Volumes: []corev1.Volume{
					{Name: "info", VolumeSource: corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: file(all)}}},
					{Name: "projected", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
						{Secret: &corev1.SecretProjection{}}, {DownwardAPI: &corev1.DownwardAPIProjection{Items: file(app)}}}}}},
				},
			}}}
	job, _, err := s.job(api.CloneSpec{}, "ann@laptop", "hash")
	if err != nil {
		t.Fatal(err)
	}
	pod := &corev1.Pod{ObjectMeta: job.Spec.Template.ObjectMeta}
	spec := job.Spec.Template.Spec
	for _, tt := range []struct {
		name, want string
		field      *corev1.ObjectFieldSelector
	}{
		{"variable", "web$1", spec.InitContainers[0].Env[1].ValueFrom.FieldRef},
		{"variable of a label that the clone has", "front", spec.Containers[0].Env[0].ValueFrom.FieldRef},
		{"file of all labels", "app=\"web$1\"\ntier=\"front\"", spec.Volumes[0].DownwardAPI.Items[0].FieldRef},
		{"projected file", "web$1", spec.Volumes[1].Projected.Sources[1].DownwardAPI.Items[0].FieldRef},
	} {
		if got, err := fieldpath.ExtractFieldPathAsString(pod, tt.field.FieldPath); got != tt.want || err != nil {
			t.Errorf("%s: %s is %q, %v, want %q", tt.name, tt.field.FieldPath, got, err, tt.want)
		}
	}
	if s.template.Spec.Volumes[0].DownwardAPI.Items[0].FieldRef.FieldPath != all {
		t.Error("the template of the workload has changed")
	}
}
