package route

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go4.org/netipx"
)

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func TestSubtract(t *testing.T) {
	tests := []struct {
		name        string
		from, minus []netip.Prefix
		want        []netip.Prefix
	}{
		{"nothing", nil, nil, nil},
		{"nothing_taken", prefixes("10.96.0.0/16"), nil, prefixes("10.96.0.0/16")},
		{"neighbours_merge", prefixes("10.0.0.0/9", "10.128.0.0/9"), nil, prefixes("10.0.0.0/8")},
		{"unmasked", prefixes("10.96.3.4/16"), nil, prefixes("10.96.0.0/16")},
		{"an_address_out_of_the_middle", prefixes("10.96.0.0/29"), prefixes("10.96.0.2/32"),
			prefixes("10.96.0.0/31", "10.96.0.3/32", "10.96.0.4/30")},
		{"all", prefixes("10.96.0.0/16", "fd00::/64"), prefixes("10.0.0.0/8", "::/0"), nil},
		{"other_family_untouched", prefixes("10.96.0.0/16", "fd00::/64"), prefixes("0.0.0.0/0"), prefixes("fd00::/64")},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Subtract(tt.from, tt.minus)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got, cmpopts.EquateComparable(netip.Prefix{}), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("Subtract(%v, %v): -want +got\n%s", tt.from, tt.minus, diff)
			}
		})
	}
}

func FuzzSubtract(f *testing.F) {
	f.Add([]byte{10, 96, 0, 0}, 16, []byte{10, 96, 3, 4}, 32, []byte{10, 96, 3, 5})
	f.Fuzz(func(t *testing.T, a []byte, abits int, b []byte, bbits int, probe []byte) {
		from, ok := netip.AddrFromSlice(a)
		minus, ok2 := netip.AddrFromSlice(b)
		at, ok3 := netip.AddrFromSlice(probe)
		if !ok || !ok2 || !ok3 {
			return
		}
		pf, err := from.Prefix(abits)
		pm, err2 := minus.Prefix(bbits)
		if err != nil || err2 != nil {
			return
		}
		got, err := Subtract([]netip.Prefix{pf}, []netip.Prefix{pm})
		if err != nil {
			t.Fatal(err)
		}
		in := false
		for _, p := range got {
			if p.Masked() != p {
				t.Errorf("%v is not masked", p)
			}
			in = in || p.Contains(at)
		}
		if want := pf.Contains(at) && !pm.Contains(at); in != want {
			t.Errorf("%v in %v minus %v = %v: %v, want %v", at, pf, pm, got, in, want)
		}
		if len(got) > 0 {
			var b netipx.IPSetBuilder
			for _, p := range got {
				b.AddPrefix(p)
			}
			if s, _ := b.IPSet(); !s.OverlapsPrefix(pf) {
				t.Errorf("%v is not within %v", got, pf)
			}
		}
	})
}

func TestProbeAddr(t *testing.T) {
	tests := []struct {
		prefix string
		own    []netip.Prefix
		want   string
	}{
		{"10.96.0.0/16", nil, "10.96.0.1"},
		{"198.19.0.0/16", prefixes("198.19.0.1/32"), "198.19.0.2"},
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

func TestConfigValidate(t *testing.T) {
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
