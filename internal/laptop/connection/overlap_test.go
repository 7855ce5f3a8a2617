package connection

import (
	"net/netip"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/route"
)

func TestOverlapErrorNamesNetworksAndLink(t *testing.T) {
	overlap := func(kind route.OverlapKind, ours, theirs, link string) route.Overlap {
		return route.Overlap{Kind: kind, Prefix: netip.MustParsePrefix(ours), Other: netip.MustParsePrefix(theirs), Link: link}
	}
	const before, nothing = "the cluster's network overlaps a local one: ", "Nothing was changed. To go on without that part of the cluster:\n  kubevpn connect "
	for _, tt := range []struct {
		name          string
		in            []route.Overlap
		message, hint string
	}{
		{
			"an_address_goes_with_its_network",
			[]route.Overlap{
				overlap(route.OverlapConnected, "10.244.1.0/24", "10.244.1.128/25", "eth1"),
				overlap(route.OverlapAddress, "10.244.1.0/24", "10.244.1.129/32", "eth1"),
			},
			"10.244.1.0/24 overlaps the network 10.244.1.128/25 of eth1",
			"--exclude-cidr 10.244.1.128/25",
		},
		{
			"a_wider_local_network_takes_all_of_ours",
			[]route.Overlap{overlap(route.OverlapConnected, "10.96.0.0/16", "10.0.0.0/8", "wlan0")},
			"10.96.0.0/16 overlaps the network 10.0.0.0/8 of wlan0",
			"--exclude-cidr 10.96.0.0/16",
		},
		{
			"two_links",
			[]route.Overlap{
				overlap(route.OverlapConnected, "10.96.0.0/16", "10.96.1.0/24", "br0"),
				overlap(route.OverlapAddress, "10.96.0.0/16", "10.96.1.5/32", "br1"),
				overlap(route.OverlapConnected, "fd00:96::/112", "fd00:96::/112", "br0"),
			},
			"10.96.0.0/16 overlaps the network 10.96.1.0/24 of br0; 10.96.0.0/16 overlaps the address 10.96.1.5/32 of br1; fd00:96::/112 overlaps the network fd00:96::/112 of br0",
			"--exclude-cidr 10.96.1.0/24 --exclude-cidr fd00:96::/112",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := overlapError(tt.in)
			if e.Code != api.ExitOverlap || e.Message != before+tt.message || e.Hint != nothing+tt.hint {
				t.Errorf("got %d %s\n%s", e.Code, e.Message, e.Hint)
			}
		})
	}
}
