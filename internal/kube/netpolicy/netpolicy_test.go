package netpolicy

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/yaml"
)

// A workload's pod and a copy of it that lacks the label app=web, in the same namespace and in another one.
func TestPoliciesThatDistinguishACopyAreNamed(t *testing.T) {
	const (
		denyAll = `
- {metadata: {name: deny, namespace: shop}, spec: {podSelector: {}, policyTypes: [Ingress]}}`
		web = `
- {metadata: {name: web, namespace: shop}, spec: {podSelector: {matchLabels: {app: web}}, policyTypes: [Ingress], ingress: [{from: [{namespaceSelector: {}}]}]}}`
	)
	original := Pod{"shop", map[string]string{"app": "web", "kept": "yes"}}
	here, there := Pod{"shop", map[string]string{"kept": "yes"}}, Pod{"other", map[string]string{"kept": "yes"}}
	for _, tt := range []struct {
		name, policies                   string
		copy                             Pod
		blocking, onlyApplying, allowing []string
	}{
		{name: "no policies", copy: here},
		{name: "policies of other pods", copy: here, policies: `
- {metadata: {name: db, namespace: shop}, spec: {podSelector: {matchLabels: {app: db}}, policyTypes: [Ingress]}}`},
		{name: "the original alone is isolated", copy: here, policies: web},
		{name: "both are isolated", copy: here, policies: denyAll + web, blocking: []string{"deny"}, onlyApplying: []string{"web"}},
		{name: "another policy allows the namespace", copy: here, policies: denyAll + `
- {metadata: {name: inside, namespace: shop}, spec: {podSelector: {}, policyTypes: [Ingress], ingress: [{from: [{podSelector: {}}]}]}}`},
		{name: "allowed by a label that both have", copy: here, policies: denyAll + `
- {metadata: {name: kept, namespace: shop}, spec: {podSelector: {matchLabels: {kept: "yes"}}, policyTypes: [Ingress], ingress: [{from: [{podSelector: {matchLabels: {app: web}}}], ports: [{port: 8080}]}]}}`,
			allowing: []string{"kept"}},
		{name: "a rule without peers", copy: here, policies: denyAll + `
- {metadata: {name: open, namespace: shop}, spec: {podSelector: {}, policyTypes: [Ingress], ingress: [{}]}}`},
		{name: "every address", copy: here, policies: denyAll + `
- {metadata: {name: open, namespace: shop}, spec: {podSelector: {}, policyTypes: [Ingress], ingress: [{from: [{ipBlock: {cidr: 0.0.0.0/0}}]}]}}`},
		{name: "some addresses", copy: here, policies: denyAll + `
- {metadata: {name: some, namespace: shop}, spec: {podSelector: {}, policyTypes: [Ingress], ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8}}]}]}}`,
			blocking: []string{"deny", "some"}},
		{name: "egress", copy: here, policies: `
- {metadata: {name: out, namespace: shop}, spec: {podSelector: {matchLabels: {app: web}}, policyTypes: [Egress], egress: [{to: [{podSelector: {matchLabels: {app: db}}}]}]}}`,
			blocking: []string{"out"}},
		{name: "a database allows the original", copy: here, policies: `
- {metadata: {name: db, namespace: shop}, spec: {podSelector: {matchLabels: {app: db}}, policyTypes: [Ingress], ingress: [{from: [{podSelector: {matchLabels: {app: web}}}]}]}}`,
			allowing: []string{"db"}},
		{name: "another namespace", copy: there, policies: denyAll + `
- {metadata: {name: theirs, namespace: other}, spec: {podSelector: {}, policyTypes: [Ingress], ingress: [{from: [{podSelector: {}}]}]}}`,
			blocking: []string{"theirs"}},
		{name: "another namespace by its name", copy: there, policies: denyAll + `
- {metadata: {name: theirs, namespace: other}, spec: {podSelector: {}, policyTypes: [Ingress], ingress: [{from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: shop}}}]}]}}`,
			allowing: []string{"theirs"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var policies []networkingv1.NetworkPolicy
			if err := yaml.UnmarshalStrict([]byte(tt.policies), &policies); err != nil {
				t.Fatal(err)
			}
			for _, check := range []struct {
				what      string
				want, got []string
			}{
				{"Blocking", tt.blocking, Flow{From: original, To: tt.copy}.Blocking(policies)},
				{"OnlyApplying", tt.onlyApplying, OnlyApplying(policies, original, tt.copy)},
				{"OnlyAllowing", tt.allowing, OnlyAllowing(policies, original, tt.copy)},
			} {
				if diff := cmp.Diff(check.want, check.got); diff != "" {
					t.Errorf("%s: -want +got\n%s", check.what, diff)
				}
			}
		})
	}
}

func TestFlowHasPortAndAddress(t *testing.T) {
	const rule = `
- {metadata: {name: rule, namespace: shop}, spec: {podSelector: {}, policyTypes: [Ingress], ingress: [INGRESS]}}`
	flow := Flow{From: Pod{Namespace: "kubevpn"}, To: Pod{Namespace: "shop"}, FromIP: netip.MustParseAddr("10.244.1.7"),
		Port: 8080, PortName: "http"}
	for ingress, allowed := range map[string]bool{
		`{}`:                                     true,
		`{ports: [{port: 8080}]}`:                true,
		`{ports: [{port: http}]}`:                true,
		`{ports: [{port: 8000, endPort: 8100}]}`: true,
		`{ports: [{port: 9090}, {port: 53, protocol: UDP}]}`:                     false,
		`{ports: [{port: 8080, protocol: UDP}]}`:                                 false,
		`{ports: [{port: grpc}]}`:                                                false,
		`{from: [{ipBlock: {cidr: 10.244.0.0/16}}]}`:                             true,
		`{from: [{ipBlock: {cidr: 10.244.0.0/16, except: [10.244.1.0/24]}}]}`:    false,
		`{from: [{ipBlock: {cidr: 192.168.0.0/16}}]}`:                            false,
		`{from: [{namespaceSelector: {}}], ports: [{port: 9090}]}`:               false,
		`{from: [{namespaceSelector: {}}], ports: [{port: 9090}, {port: 8080}]}`: true,
		`{from: [{podSelector: {}}]}`:                                            false,
	} {
		var policies []networkingv1.NetworkPolicy
		if err := yaml.UnmarshalStrict([]byte(strings.Replace(rule, "INGRESS", ingress, 1)), &policies); err != nil {
			t.Fatal(err)
		}
		if got := flow.Blocking(policies); (len(got) == 0) != allowed {
			t.Errorf("%s: blocked by %q", ingress, got)
		}
	}
}
