package install

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

func clientDefaults(namespace string) runtime.Object {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: DefaultsName}, Data: map[string]string{"in": namespace}}
}

func TestDefaultsComeFromTheNamespaceOfTheManager(t *testing.T) {
	const role = "*:*@kubevpn" // a user without any right there
	tests := []struct {
		name    string
		deny    string
		objects []runtime.Object
		asked   string // --manager-namespace
		want    string // the namespace; empty: none
	}{
		{name: "none"},
		{name: "in kubevpn", objects: []runtime.Object{clientDefaults("kubevpn"), clientDefaults("shop")}, want: "kubevpn"},
		{name: "only in the current namespace, although the manager may be in kubevpn", objects: []runtime.Object{clientDefaults("shop")}},
		{name: "user may not look into kubevpn", deny: role, objects: []runtime.Object{clientDefaults("kubevpn"), clientDefaults("shop")}, want: "shop"},
		{name: "user may not look into kubevpn, and there are none", deny: role},
		{name: "older user Role", deny: "get:configmaps@kubevpn", objects: []runtime.Object{clientDefaults("kubevpn"), clientDefaults("shop")}},
		{name: "another namespace", asked: "tools", objects: []runtime.Object{clientDefaults("kubevpn"), clientDefaults("tools")}, want: "tools"},
		{name: "another namespace that the user may not see", asked: "tools", deny: "*:*@tools", objects: []runtime.Object{clientDefaults("tools"), clientDefaults("shop")}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ReadDefaults(t.Context(), newWorld(tt.deny, "", tt.objects...), tt.asked, "shop")
			if err != nil {
				t.Fatal(err)
			}
			source := ""
			if tt.want != "" {
				source = "ConfigMap " + tt.want + "/kubevpn-client-defaults"
			}
			if got.Source != source || got.Data["in"] != tt.want {
				t.Errorf("got %+v, want %q", got, source)
			}
		})
	}
}
