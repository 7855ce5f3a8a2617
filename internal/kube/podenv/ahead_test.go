package podenv

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

func TestReadAheadReadsEachObjectOnce(t *testing.T) {
	kube := fake.NewClientset(objectsOf(t, manifests)...)
	r := reader(t, kube, `
containers:
- name: app
  envFrom: [{configMapRef: {name: settings}}, {secretRef: {name: none, optional: true}}]
  env: [{name: PASSWORD, valueFrom: {secretKeyRef: {name: keys, key: password}}}]
  volumeMounts: [{name: all, mountPath: /all}, {name: keys, mountPath: /keys}]
volumes:
- {name: keys, secret: {secretName: keys}}
- {name: all, projected: {sources: [{configMap: {name: settings}}, {configMap: {name: more, optional: true}}]}}
- {name: unused, configMap: {name: unused}}
`)
	r.ReadAhead(t.Context())
	var read []string
	for _, a := range kube.Actions() {
		name := "*"
		if get, is := a.(clienttesting.GetAction); is {
			name = get.GetName()
		}
		read = append(read, a.GetResource().Resource+" "+name)
	}
	slices.Sort(read)
	want := []string{"configmaps more", "configmaps settings", "secrets keys", "secrets none", "services *",
		"services kubernetes"}
	if d := cmp.Diff(want, read); d != "" {
		t.Errorf("ReadAhead (-want +got):\n%s", d)
	}
	variables, problems := r.Environment(t.Context())
	_, volumes, more := r.Volumes(t.Context())
	if again := kube.Actions()[len(want):]; len(again) > 0 {
		t.Errorf("read again: %v", again)
	}
	if len(volumes) != 2 || len(problems)+len(more) > 0 ||
		!slices.Contains(variables, Variable{Name: "PASSWORD", Value: "hunter2", Secret: true}) {
		t.Errorf("%v, %v, %v, %v", variables, volumes, problems, more)
	}
	r.Volumes(t.Context())
	if len(kube.Actions()) == len(want) {
		t.Error("the next Volumes does not see changes")
	}
}
