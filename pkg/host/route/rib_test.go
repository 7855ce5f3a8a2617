package route

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestLocalRouteOfEntry(t *testing.T) {
	addr := netip.MustParseAddr
	mask := func(n int) []byte {
		b := make([]byte, 4)
		for i := range n {
			b[i/8] |= 0x80 >> (i % 8)
		}
		return b
	}
	for name, tt := range map[string]struct {
		entry ribEntry
		want  string // empty: none
	}{
		"default": {ribEntry{flags: ribGateway, dst: addr("0.0.0.0"), mask: mask(0), gateway: addr("192.168.1.1"), link: "en0"},
			"0.0.0.0/0 via 192.168.1.1 en0"},
		"default_without_mask": {ribEntry{flags: ribGateway, dst: addr("::"), gateway: addr("fe80::1%en0"), link: "en0"},
			"::/0 via fe80::1%en0 en0"},
		"network":   {ribEntry{dst: addr("192.168.1.0"), mask: mask(24), link: "en0"}, "192.168.1.0/24 connected en0"},
		"neighbour": {ribEntry{flags: ribHost | ribCloned, dst: addr("192.168.1.1"), link: "en0"}, ""},
		"scoped":    {ribEntry{flags: ribGateway | ribScoped, dst: addr("0.0.0.0"), mask: mask(0), gateway: addr("10.0.0.1"), link: "en5"}, ""},
		"host":      {ribEntry{flags: ribHost, dst: addr("127.0.0.1"), link: "lo0"}, "127.0.0.1/32 lo0"},
		"vpn":       {ribEntry{dst: addr("10.96.0.0"), mask: mask(16), link: "utun4", pointToPoint: true}, "10.96.0.0/16 utun4"},
		"no_mask":   {ribEntry{dst: addr("10.0.0.0"), link: "en0"}, ""},
		"no_dst":    {ribEntry{link: "en0"}, ""},
		"long_mask": {ribEntry{dst: addr("10.0.0.0"), mask: []byte{255, 255, 255, 255, 255}, link: "en0"}, ""},
	} {
		got := ""
		if r, ok := tt.entry.localRoute(); ok {
			got = r.dst.String()
			if r.gateway.IsValid() {
				got += " via " + r.gateway.String()
			}
			if r.connected {
				got += " connected"
			}
			got += " " + r.link
		}
		if got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}

func TestCommandsRestoreWhatIsMissing(t *testing.T) {
	l := Link{Name: "utun7", MTU: 1500, Addrs: prefixes("198.19.0.1/32"), Routes: prefixes("10.96.0.0/16", "10.244.0.0/16")}
	whole := linkState{mtu: 1500, up: true, addrs: []netip.Addr{netip.MustParseAddr("198.19.0.1")}, routes: l.Routes}
	if missing := whole.missing(l); missing != nil {
		t.Errorf("missing %q", missing)
	}
	if c := commands(l.Name, whole.present(l), l); c != nil {
		t.Errorf("commands %q although nothing is missing", c)
	}
	for name, tt := range map[string]struct {
		change   func(*linkState)
		missing  []string
		commands [][]string
	}{
		"route": {func(s *linkState) { s.routes = prefixes("10.96.0.0/16", "169.254.0.0/16") }, []string{"route 10.244.0.0/16"},
			[][]string{{"route", "-q", "-n", "add", "-inet", "10.244.0.0/16", "-interface", "utun7"}}},
		"address": {func(s *linkState) { s.addrs = nil }, []string{"address 198.19.0.1/32"},
			[][]string{{"ifconfig", "utun7", "inet", "198.19.0.1", "198.19.0.1", "netmask", "255.255.255.255", "alias"}}},
		"mtu": {func(s *linkState) { s.mtu = 1380 }, []string{"up with MTU 1500 (it has 1380, up: true)"},
			[][]string{{"ifconfig", "utun7", "mtu", "1500"}}},
		"up": {func(s *linkState) { s.up = false }, []string{"up with MTU 1500 (it has 1500, up: false)"},
			[][]string{{"ifconfig", "utun7", "up"}}},
	} {
		state := whole
		state.routes = slices.Clone(whole.routes)
		tt.change(&state)
		if diff := cmp.Diff(tt.missing, state.missing(l)); diff != "" {
			t.Errorf("%s: missing (-want +got):\n%s", name, diff)
		}
		if diff := cmp.Diff(tt.commands, commands(l.Name, state.present(l), l)); diff != "" {
			t.Errorf("%s: commands (-want +got):\n%s", name, diff)
		}
	}
}
