package connection

import (
	"net/netip"
	"slices"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
)

// The loopback network is a local network of every machine that no cluster may route, and 198.18.0.0/15 one of none.
func TestForeseePlansRoutes(t *testing.T) {
	free, excluded := netip.MustParsePrefix("198.18.64.0/24"), netip.MustParsePrefix("198.18.64.128/25")
	found := cluster.CIDRs{Services: []cluster.CIDR{{Prefix: free, Source: cluster.FromServiceCIDR},
		{Prefix: netip.MustParsePrefix("127.0.0.0/8"), Source: cluster.FromNodes}}}
	seen, err := Foresee(found, api.ConnectRequest{ConnectSettings: api.ConnectSettings{ExcludeCIDRs: []netip.Prefix{excluded}}}, nil, nil, false)
	if err != nil || seen.Overlap != nil || len(seen.Warnings) != 1 {
		t.Fatalf("%+v, %v", seen, err)
	}
	if want := netip.MustParsePrefix("198.18.64.0/25"); !slices.Contains(seen.Routes, want) {
		t.Errorf("%v, want %v", seen.Routes, want)
	}
}
