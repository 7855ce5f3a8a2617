package clone

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/api"
)

// What NetworkPolicies mean for a clone that lacks the label app=web, in the namespace of the workload and in another one.
func TestJudge(t *testing.T) {
	const (
		denyAll = `
- {metadata: {name: deny, namespace: shop}, spec: {podSelector: {}, policyTypes: [Ingress]}}`
		web = `
- {metadata: {name: web, namespace: shop}, spec: {podSelector: {matchLabels: {app: web}}, policyTypes: [Ingress], ingress: [{from: [{namespaceSelector: {}}]}]}}`
	)
	const (
		toClone  = "requests may not reach the clone, and be answered with 502: NetworkPolicy "
		toClone2 = " lets nothing pass from the workload's pods to the clone's"
	)
	for _, tt := range []struct {
		name, policies string
		spec           api.CloneSpec
		notes          []string
	}{
		{"none", ``, api.CloneSpec{}, nil},
		{"others", `
- {metadata: {name: db, namespace: shop}, spec: {podSelector: {matchLabels: {app: db}}, policyTypes: [Ingress]}}`, api.CloneSpec{}, nil},
		{"only_the_workload_is_shut", web, api.CloneSpec{}, nil},
		{"all_are_shut", denyAll + web, api.CloneSpec{}, []string{toClone + "deny" + toClone2, "what NetworkPolicy web allows is for the workload's pods, and not for the clone's"}},
		{"no_traffic", denyAll, api.CloneSpec{NoTraffic: true}, nil},
		{"another_lets_it_in", denyAll + `
- {metadata: {name: inside, namespace: shop}, spec: {podSelector: {}, policyTypes: [Ingress], ingress: [{from: [{podSelector: {}}]}]}}`, api.CloneSpec{}, nil},
		{"by_the_label_it_keeps", denyAll + `
- {metadata: {name: kept, namespace: shop}, spec: {podSelector: {matchLabels: {kept: "yes"}}, policyTypes: [Ingress], ingress: [{from: [{podSelector: {matchLabels: {app: web}}}], ports: [{port: 8080}]}]}}`,
			api.CloneSpec{}, []string{"NetworkPolicy kept allows connections with the workload's pods, and not with the clone's"}},
		{"everybody", denyAll + `
- {metadata: {name: open, namespace: shop}, spec: {podSelector: {}, policyTypes: [Ingress], ingress: [{}]}}`, api.CloneSpec{}, nil},
		{"every_address", denyAll + `
- {metadata: {name: open, namespace: shop}, spec: {podSelector: {}, policyTypes: [Ingress], ingress: [{from: [{ipBlock: {cidr: 0.0.0.0/0}}]}]}}`, api.CloneSpec{}, nil},
		{"the_workload_may_not_go_out", `
- {metadata: {name: out, namespace: shop}, spec: {podSelector: {matchLabels: {app: web}}, policyTypes: [Egress], egress: [{to: [{podSelector: {matchLabels: {app: db}}}]}]}}`,
			api.CloneSpec{}, []string{toClone + "out" + toClone2}},
		{"a_database", `
- {metadata: {name: db, namespace: shop}, spec: {podSelector: {matchLabels: {app: db}}, policyTypes: [Ingress], ingress: [{from: [{podSelector: {matchLabels: {app: web}}}]}]}}`,
			api.CloneSpec{}, []string{"NetworkPolicy db allows connections with the workload's pods, and not with the clone's"}},
		{"elsewhere", denyAll + `
- {metadata: {name: theirs, namespace: other}, spec: {podSelector: {}, policyTypes: [Ingress], ingress: [{from: [{podSelector: {}}]}]}}`,
			api.CloneSpec{Namespace: "other"}, []string{toClone + "theirs" + toClone2}},
		{"elsewhere_by_name", `
- {metadata: {name: theirs, namespace: other}, spec: {podSelector: {}, policyTypes: [Ingress], ingress: [{from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: shop}}}]}]}}`,
			api.CloneSpec{Namespace: "other", NoTraffic: false}, []string{"NetworkPolicy theirs allows connections with the workload's pods, and not with the clone's"}},
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
