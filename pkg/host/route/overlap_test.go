package route

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestOverlapsNameLocalNetworks(t *testing.T) {
	addr := netip.MustParseAddr
	pfx := netip.MustParsePrefix
	laptop := local{
		addrs: []localAddr{{addr("127.0.0.1"), "lo"}, {addr("192.168.1.7"), "wlan0"}, {addr("fd12::7"), "wlan0"}},
		routes: []localRoute{
			{dst: pfx("0.0.0.0/0"), link: "wlan0", gateway: addr("192.168.1.1")},
			{dst: pfx("192.168.1.0/24"), link: "wlan0", connected: true},
			{dst: pfx("172.17.0.0/16"), link: "docker0", connected: true},
			{dst: pfx("10.0.0.0/8"), link: "tun0", gateway: addr("10.8.0.1")},
			{dst: pfx("10.20.0.0/16"), link: "wg0"},
			{dst: pfx("10.30.30.0/24")},
			{dst: pfx("100.64.0.0/10"), link: "tailscale0", early: true},
			{dst: pfx("::/0"), link: "wlan0", gateway: addr("fe80::1")},
			{dst: pfx("fd12::/64"), link: "wlan0", connected: true},
		},
	}
	tests := []struct {
		name string
		ours []netip.Prefix
		want []string
	}{
		{"free", prefixes("10.96.0.0/12", "10.244.0.0/16", "fd00:10::/64"), nil},
		{"broader_vpn_gateway_route_is_fine", prefixes("10.9.0.0/16"), nil},
		{"vpn_gateway_itself", prefixes("10.8.0.0/16"), []string{"10.8.0.0/16 overlaps the gateway 10.8.0.1/32 of tun0"}},
		{"lan_inside_ours", prefixes("192.168.0.0/16"), []string{
			"192.168.0.0/16 overlaps the network 192.168.1.0/24 of wlan0",
			"192.168.0.0/16 overlaps the gateway 192.168.1.1/32 of wlan0",
			"192.168.0.0/16 overlaps the address 192.168.1.7/32 of wlan0",
		}},
		{"ours_inside_docker", prefixes("172.17.3.0/24"), []string{"172.17.3.0/24 overlaps the network 172.17.0.0/16 of docker0"}},
		{"equal_route", prefixes("10.20.0.0/16"), []string{"10.20.0.0/16 overlaps the route 10.20.0.0/16 of wg0"}},
		{"broader_point_to_point_route_is_fine", prefixes("10.20.1.0/24"), nil},
		{"more_specific_blackhole", prefixes("10.30.0.0/16"), []string{"10.30.0.0/16 overlaps the route 10.30.30.0/24 of no interface"}},
		{"early_table_wins_even_if_broader", prefixes("100.96.0.0/16"), []string{"100.96.0.0/16 overlaps the ip rule 100.64.0.0/10 of tailscale0"}},
		{"ipv6", prefixes("fd12::/32"), []string{
			"fd12::/32 overlaps the network fd12::/64 of wlan0",
			"fd12::/32 overlaps the address fd12::7/128 of wlan0",
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got []string
			for _, c := range laptop.overlaps(tt.ours) {
				got = append(got, c.String())
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}
