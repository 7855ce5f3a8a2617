package route

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCommandsReachTheState(t *testing.T) {
	a := Link{Name: "utun7", MTU: 1500, Addrs: prefixes("198.19.0.1/32", "fd00::1/128"), Routes: prefixes("10.96.0.0/16", "fd00:10::/64")}
	b := Link{Name: "utun7", MTU: 9000, Addrs: prefixes("198.19.0.1/32"), Routes: prefixes("10.96.0.0/16", "10.244.0.0/16")}
	tests := []struct {
		name     string
		from, to Link
		want     []string
	}{
		{"new", Link{}, a, []string{
			"ifconfig utun7 mtu 1500",
			"ifconfig utun7 inet 198.19.0.1 198.19.0.1 netmask 255.255.255.255 alias",
			"ifconfig utun7 inet6 fd00::1 prefixlen 128 alias",
			"ifconfig utun7 up",
			"route -q -n add -inet 10.96.0.0/16 -interface utun7",
			"route -q -n add -inet6 fd00:10::/64 -interface utun7",
		}},
		{"same", a, a, nil},
		{"changed", a, b, []string{
			"ifconfig utun7 mtu 9000",
			"route -q -n add -inet 10.244.0.0/16 -interface utun7",
			"route -q -n delete -inet6 fd00:10::/64 -interface utun7",
			"ifconfig utun7 inet6 fd00::1 -alias",
		}},
		{"removed", b, Link{}, []string{
			"route -q -n delete -inet 10.96.0.0/16 -interface utun7",
			"route -q -n delete -inet 10.244.0.0/16 -interface utun7",
			"ifconfig utun7 inet 198.19.0.1 -alias",
			"ifconfig utun7 down",
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got []string
			for _, c := range commands("utun7", tt.from, tt.to) {
				got = append(got, strings.Join(c, " "))
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}
