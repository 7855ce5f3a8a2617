package helper

import (
	"net/netip"
	"testing"

	"kubevpn/internal/api"
)

const policyText = `# what users of the service may do
networks: [203.0.113.0/24, "2001:db8::/32"]

domains:
- corp.example.com
`

func TestPolicyAppliesInPlaceOfConsent(t *testing.T) {
	edited, err := parsePolicy("/etc/kubevpn/helper.yaml", []byte(policyText))
	if err != nil {
		t.Fatal(err)
	}
	defaults, err := parsePolicy("/etc/kubevpn/helper.yaml", nil)
	if err != nil {
		t.Fatal(err)
	}
	route := func(s string) func(*api.Link) {
		return func(l *api.Link) { l.Routes, l.Named = prefixes(s), prefixes(s) } // the user allows it
	}
	match := func(s string) func(*api.Link) { return func(l *api.Link) { l.MatchDomains = []string{s} } }
	search := func(s string) func(*api.Link) { return func(l *api.Link) { l.SearchDomains = []string{s} } }
	const only = "only an administrator can allow it. "
	tests := []struct {
		name       string
		policy     *Policy
		change     func(*api.Link)
		want, hint string // "": allowed
	}{
		{"what a cluster has", defaults, func(*api.Link) {}, "", ""},
		{"shared addresses", defaults, route("100.64.0.0/10"), "", ""},
		{"unique local", defaults, route("fd12::/16"), "", ""},
		{"public network", defaults, route("203.0.113.0/24"), "the root helper refuses the route 203.0.113.0/24: it is not in private " +
			"address space, and not in a network that /etc/kubevpn/helper.yaml allows (link kubevpn0)",
			only + "Add this line to /etc/kubevpn/helper.yaml:\n  networks: [203.0.113.0/24]"},
		{"part of an allowed network", edited, route("203.0.113.128/25"), "", ""},
		{"allowed IPv6 network", edited, route("2001:db8::/32"), "", ""},
		{"another network", edited, route("140.82.0.0/16"), "the root helper refuses the route 140.82.0.0/16: it is not in private " +
			"address space, and not in a network that /etc/kubevpn/helper.yaml allows (link kubevpn0)",
			only + "Change line 2 of /etc/kubevpn/helper.yaml to\n  networks: [203.0.113.0/24, 2001:db8::/32, 140.82.0.0/16]"},
		{"namespaces", defaults, match("monitoring"), "", ""},
		{"reverse zones, widened", defaults, match("in-addr.arpa"), "", ""},
		{"private domain", defaults, match("corp.test"), "", ""},
		{"public domain", defaults, match("github.com"), `the root helper refuses the domain "github.com": it can contain names of ` +
			`the Internet, and /etc/kubevpn/helper.yaml does not allow it (link kubevpn0)`,
			only + "Add this line to /etc/kubevpn/helper.yaml:\n  domains: [github.com]"},
		{"allowed domain", edited, match("corp.example.com"), "", ""},
		{"below an allowed domain", edited, search("shop.corp.example.com"), "", ""},
		{"like an allowed domain", edited, search("evilcorp.example.com"), `the root helper refuses the domain "evilcorp.example.com": ` +
			`it can contain names of the Internet, and /etc/kubevpn/helper.yaml does not allow it (link kubevpn0)`,
			only + "Change line 4 of /etc/kubevpn/helper.yaml to\n  domains: [corp.example.com, evilcorp.example.com]"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			l := api.Link{Name: "kubevpn0", MTU: 1500, Routes: prefixes("10.96.0.0/12", "fd00:10:96::/112"),
				MatchDomains: []string{"cluster.local", "svc", "pod", "96.10.in-addr.arpa", "default"}, SearchDomains: []string{"default.svc.cluster.local"}}
			tt.change(&l)
			got := api.Error{}
			if err := tt.policy.check(l); err != nil {
				got = *api.AsError(err)
			}
			if got.Message != tt.want || got.Hint != tt.hint {
				t.Errorf("got  %s\n     %s\nwant %s\n     %s", got.Message, got.Hint, tt.want, tt.hint)
			}
		})
	}
}

// The policy only adds to the limits of the helper: no policy allows a default route.
func TestPolicyIsNotTheOnlyLimit(t *testing.T) {
	l := goodLink()
	l.Routes = prefixes("0.0.0.0/0")
	err := check(api.NetworkState{Links: []api.Link{l}}, &Policy{Networks: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}})
	if err == nil {
		t.Error("a default route is allowed")
	}
}

func TestInvalidPolicyIsAnError(t *testing.T) {
	for content, want := range map[string]string{
		"networks: [0.0.0.0/0]\n":       "networks: 0.0.0.0/0: it is a default route",
		"networks: [203.0.113.1/24]\n":  "networks: 203.0.113.1/24: it is not a masked prefix",
		"networks: [127.0.0.0/8]\n":     "networks: 127.0.0.0/8: it is loopback",
		"networks: [nonsense]\n":        `error unmarshaling JSON: while decoding JSON: netip.ParsePrefix("nonsense"): no '/'`,
		"allQueries: 1\n":               "error unmarshaling JSON: while decoding JSON: json: cannot unmarshal number into Go struct field Policy.allQueries of type bool",
		"domains: [com]\n":              `domains: domain "com" is a public suffix: names below it belong to others`,
		"domains: [Corp.example.com]\n": `domains: domain "Corp.example.com" has 'C' in the wrong place`,
		"network: [203.0.113.0/24]\n":   `error unmarshaling JSON: while decoding JSON: json: unknown field "network"`,
	} {
		_, err := parsePolicy("/p", []byte(content))
		if want = "cannot use the policy /p: " + want; err == nil || err.Error() != want {
			t.Errorf("%q: got %v\nwant %s", content, err, want)
		}
	}
}
