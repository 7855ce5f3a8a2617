package api

import (
	"encoding/json"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// connectJSON is what a laptop sends and an older daemon reads: keys and forms of values stay.
const connectJSON = `{
	"kubeconfig": "eyJ9", "context": "staging", "namespace": "shop", "managerNamespace": "tools",
	"image": "r.example/k:1", "upgrade": true, "netstack": "system", "transport": "direct", "scheduler": "lc",
	"extraCIDRs": ["10.20.0.0/16"], "excludeCIDRs": ["10.20.30.0/24"], "extraDomains": ["corp.test"],
	"excludeDomains": ["mail.corp.test"], "allowInbound": ["53/udp"],
	"objects": {"labels": ["team=shop"], "annotations": ["a=b"], "resources": ["limits.cpu=1"]},
	"consent": {"domain": "."},
	"settings": [{"key": "netstack", "value": "system", "origin": "flag", "source": "--netstack"}],
	"use": true
}`

func TestConnectRequestKeepsItsJSON(t *testing.T) {
	decode := func(text []byte) (all map[string]any) {
		t.Helper()
		if err := json.Unmarshal(text, &all); err != nil {
			t.Fatal(err)
		}
		return all
	}
	var full ConnectRequest
	if err := json.Unmarshal([]byte(connectJSON), &full); err != nil {
		t.Fatal(err)
	}
	if full.Netstack != NetstackSystem || full.ExtraCIDRs[0] != netip.MustParsePrefix("10.20.0.0/16") ||
		full.AllowInbound[0] != (Inbound{Port: 53, UDP: true}) || full.Objects.Labels[0] != "team=shop" {
		t.Errorf("decoded %+v", full)
	}
	for want, r := range map[string]ConnectRequest{
		connectJSON: full,
		`{"kubeconfig":null,"context":"","namespace":"","managerNamespace":"","image":"","netstack":"","scheduler":""}`: {},
	} {
		got, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(decode([]byte(want)), decode(got)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}
