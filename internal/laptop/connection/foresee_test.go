package connection

import (
	"net/netip"
	"slices"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

// The loopback network is a local network of every machine that no cluster may route, and 198.18.0.0/15 one of none.
func TestForeseePlansRoutes(t *testing.T) {
	free, excluded := netip.MustParsePrefix("198.18.64.0/24"), netip.MustParsePrefix("198.18.64.128/25")
	found := client.CIDRs{Services: []client.CIDR{{Prefix: free, Source: client.FromServiceCIDR},
		{Prefix: netip.MustParsePrefix("127.0.0.0/8"), Source: client.FromNodes}}}
	seen, err := Foresee(found, api.ConnectRequest{ConnectSettings: api.ConnectSettings{ExcludeCIDRs: []netip.Prefix{excluded}}}, nil, nil, nil, false)
	if err != nil || seen.Overlap != nil || len(seen.Warnings) != 1 {
		t.Fatalf("%+v, %v", seen, err)
	}
	if want := netip.MustParsePrefix("198.18.64.0/25"); !slices.Contains(seen.Routes, want) {
		t.Errorf("%v, want %v", seen.Routes, want)
	}
}
