package clone

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/api"
)

// TestNetworkPoliciesAreNoted checks a clone without the label app=web, by which policies select the pods of the
// workload. Package netpolicy tests the meaning of policies.
func TestNetworkPoliciesAreNoted(t *testing.T) {
	const (
		denyAll = `
- {metadata: {name: deny, namespace: shop}, spec: {podSelector: {}, policyTypes: [Ingress]}}`
		web = `
- {metadata: {name: web, namespace: shop}, spec: {podSelector: {matchLabels: {app: web}}, policyTypes: [Ingress], ingress: [{from: [{namespaceSelector: {}}]}]}}`
	)
	const (
		toClone  = "requests to the clone may fail with 502: NetworkPolicy "
		toClone2 = " blocks connections from the workload's pods to the clone's"
	)
	for _, tt := range []struct {
		name, policies string
		spec           api.CloneSpec
		notes          []string
	}{
		{"all_are_shut", denyAll + web, api.CloneSpec{}, []string{toClone + "deny" + toClone2, "NetworkPolicy web allows connections of the workload's pods, but not of the clone's"}},
		{"no_traffic", denyAll, api.CloneSpec{NoTraffic: true}, nil},
		{"a_database", `
- {metadata: {name: db, namespace: shop}, spec: {podSelector: {matchLabels: {app: db}}, policyTypes: [Ingress], ingress: [{from: [{podSelector: {matchLabels: {app: web}}}]}]}}`,
			api.CloneSpec{}, []string{"NetworkPolicy db allows connections to the workload's pods, but not to the clone's"}},
		{"elsewhere", denyAll + `
- {metadata: {name: theirs, namespace: other}, spec: {podSelector: {}, policyTypes: [Ingress], ingress: [{from: [{podSelector: {}}]}]}}`,
			api.CloneSpec{Namespace: "other"}, []string{toClone + "theirs" + toClone2}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := sourceOf(t, `{metadata: {labels: {app: web, kept: "yes"}}, spec: {containers: [{name: app}]}}`)
			s.selectors = selectorsOf(t, "Service web: app=web")
			var list []networkingv1.NetworkPolicy
			if err := yaml.UnmarshalStrict([]byte(tt.policies), &list); err != nil {
				t.Fatal(err)
			}
			s.policies = list
			_, notes, err := s.job(tt.spec, "ann@laptop", "hash")
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.notes, notes); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}
