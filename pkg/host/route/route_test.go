package route

import (
	"net/netip"
	"testing"
)

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func TestProbeAddrIsNotAnOwnAddress(t *testing.T) {
	tests := []struct {
		prefix string
		own    []netip.Prefix
		want   string
	}{
		{"10.96.0.0/16", nil, "10.96.0.1"},
		{"198.19.0.0/16", prefixes("198.19.0.1/32"), "198.19.0.2"},
		{"::/0", nil, "::2"}, // ::1 belongs to the machine itself
		{"10.1.2.3/32", nil, "10.1.2.3"},
		{"10.1.2.3/32", prefixes("10.1.2.3/32"), ""},
		{"255.255.255.254/31", prefixes("255.255.255.255/32"), ""},
	}
	for _, tt := range tests {
		got, ok := probeAddr(netip.MustParsePrefix(tt.prefix), tt.own)
		if !ok && tt.want == "" {
			continue
		}
		if got.String() != tt.want {
			t.Errorf("probeAddr(%s, %v) = %v, want %s", tt.prefix, tt.own, got, tt.want)
		}
	}
}

func TestValidateRejectsInvalidConfigs(t *testing.T) {
	ok := Link{Name: "kubevpn0", MTU: 1500}
	tests := []struct {
		name string
		cfg  Config
		want string
	}{
		{"zero", Config{}, ""},
		{"plain", Config{Links: []Link{ok}}, ""},
		{"no_name", Config{Links: []Link{{MTU: 1500}}}, "a link has no name"},
		{"twice", Config{Links: []Link{ok, ok}}, "link kubevpn0 is named twice"},
		{"no_mtu", Config{Links: []Link{{Name: "kubevpn0"}}}, "link kubevpn0: MTU 0"},
		{"host_bits", Config{Links: []Link{{Name: "kubevpn0", MTU: 1500, Routes: prefixes("10.1.2.3/8")}}},
			"link kubevpn0: route 10.1.2.3/8 is not a masked prefix"},
		{"mapped", Config{Links: []Link{{Name: "kubevpn0", MTU: 1500, Addrs: prefixes("::ffff:10.1.2.3/128")}}},
			"link kubevpn0: address ::ffff:10.1.2.3/128"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := ""
			if err := tt.cfg.validate(); err != nil {
				got = err.Error()
			}
			if got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}
