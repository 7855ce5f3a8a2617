package routable

import (
	"net/netip"
	"testing"
)

func TestSpaceIsPrivateAndNamedNetworks(t *testing.T) {
	for _, tt := range []struct {
		name    string
		named   []netip.Prefix
		in, out []netip.Prefix
	}{
		{
			name: "private networks need no question",
			in: prefixes("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "198.18.0.0/15", "fc00::/7", "34.118.224.0/20",
				"240.10.0.0/16", "255.255.255.0/25", "255.255.255.254/32"),
		},
		{
			name: "public and special networks are not routed",
			out: prefixes("140.82.121.0/24", "8.8.8.8/32", "34.118.240.0/20", "172.32.0.0/16", "100.128.0.0/16", "11.0.0.0/8", "2001:db8::/32",
				"0.0.0.0/24", "127.0.0.0/8", "169.254.169.254/32", "224.0.0.0/24", "255.255.255.255/32", "255.255.255.0/24", "0.0.0.0/0",
				"::/0", "::1/128", "::ffff:10.0.0.0/104", "fe80::/64", "ff02::/16"),
		},
		{
			name: "adjacent named networks merge", named: prefixes("10.0.0.0/8", "11.0.0.0/8", "2001:db8::/33", "2001:db8:8000::/33"),
			in: prefixes("10.0.0.0/7", "2001:db8::/32"), out: prefixes("12.0.0.0/8"),
		},
		{
			name: "a named network holds no special address", named: prefixes("169.0.0.0/8", "127.0.0.0/8", "0.0.0.0/0", "::/0", "::ffff:8.8.8.8/128"),
			in: prefixes("169.253.0.0/16"), out: prefixes("169.254.0.0/16", "127.0.0.1/32", "8.8.8.8/32", "2001:db8::/32"),
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			space := Space(tt.named...)
			for _, p := range tt.in {
				if !space.ContainsPrefix(p) {
					t.Errorf("%v may not be routed", p)
				}
			}
			for _, p := range tt.out {
				if space.ContainsPrefix(p) {
					t.Errorf("%v may be routed", p)
				}
			}
		})
	}
}

func TestRefuseNamesTheReason(t *testing.T) {
	for in, want := range map[string]string{
		"0.0.0.0/0": "it is a default route", "128.0.0.0/1": "it is too wide", "2000::/3": "it is too wide",
		"127.0.0.53/32": "it is loopback", "169.254.169.254/32": "it is link-local", "239.1.0.0/16": "it is multicast", "ff02::/16": "it is multicast",
		"0.0.0.5/32": "it is in 0.0.0.0/8, a special-purpose network", "255.255.255.255/32": "it is in 255.255.255.255/32, a special-purpose network",
		"::ffff:10.0.0.0/104": "it is not a prefix", "10.0.0.0/8": "", "240.0.0.0/8": "", "169.0.0.0/8": "", "8.8.8.8/32": "", "2001:db8::/32": "",
	} {
		if got := Refuse(netip.MustParsePrefix(in)); got != want {
			t.Errorf("Refuse(%s) = %q, want %q", in, got, want)
		}
	}
	if Refuse(netip.Prefix{}) == "" {
		t.Error("Refuse accepts the zero prefix")
	}
}

// FuzzSpace checks that no named network makes a special address routable or a private one unroutable.
func FuzzSpace(f *testing.F) {
	f.Add("0.0.0.0/0", "127.0.0.1")
	f.Add("169.0.0.0/8", "169.254.169.254")
	f.Add("10.0.0.0/7", "255.255.255.255")
	f.Add("::/0", "::1")
	f.Fuzz(func(t *testing.T, named, probe string) {
		p, err := netip.ParsePrefix(named)
		a, err2 := netip.ParseAddr(probe)
		if err != nil || err2 != nil || a.Zone() != "" || a.Is4In6() {
			return
		}
		with, without := Space(p).Contains(a), Space().Contains(a)
		switch {
		case with && (a.IsLoopback() || a.IsMulticast() || a.IsLinkLocalUnicast() || a.IsUnspecified() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255})):
			t.Errorf("%v may be routed once %v is named", a, p)
		case without && !with:
			t.Errorf("%v may not be routed once %v is named", a, p)
		case with && !without && !p.Contains(a):
			t.Errorf("%v may be routed although only %v is named", a, p)
		}
	})
}

func FuzzCheck(f *testing.F) {
	f.Add("10.0.0.0/7", "11.0.0.0/8")
	f.Add("::ffff:0:0/96", "::/8")
	f.Fuzz(func(t *testing.T, route, named string) {
		p, err := netip.ParsePrefix(route)
		n, err2 := netip.ParsePrefix(named)
		if err != nil || err2 != nil || Check([]netip.Prefix{p}, []netip.Prefix{n}) != nil {
			return
		}
		// An accepted route contains no special address.
		for _, a := range []string{"127.0.0.1", "0.0.0.0", "169.254.169.254", "224.0.0.251", "255.255.255.255", "::", "::1", "fe80::1", "ff02::1"} {
			if p.Contains(netip.MustParseAddr(a)) {
				t.Errorf("Check accepts %s, which contains %s", p, a)
			}
		}
		if p.Addr().Is4() && p.Bits() < 5 || p.Addr().Is6() && p.Bits() < 7 {
			t.Errorf("Check accepts %s", p)
		}
	})
}

func TestBlocksSurroundTheirAddress(t *testing.T) {
	for _, tt := range []struct{ addr, pod, service string }{
		{"10.96.3.4", "10.96.3.0/24", "10.96.3.0/24"},
		{"::ffff:10.96.3.4", "10.96.3.0/24", "10.96.3.0/24"},
		{"fd00:96::1:1234", "fd00:96::/64", "fd00:96::1:1200/120"},
	} {
		addr := netip.MustParseAddr(tt.addr)
		if got := PodBlock(addr).String(); got != tt.pod {
			t.Errorf("the pods around %s: %s, want %s", addr, got, tt.pod)
		}
		if got := ServiceBlock(addr).String(); got != tt.service {
			t.Errorf("the Services around %s: %s, want %s", addr, got, tt.service)
		}
	}
}
