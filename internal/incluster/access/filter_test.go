package access

import (
	"net/netip"
	"testing"
)

func TestFilterRejectsSpecialAddresses(t *testing.T) {
	f := Filter{
		Pod: []netip.Addr{netip.MustParseAddr("10.244.0.5"), netip.MustParseAddr("fd00:244::5")},
		DNS: []netip.Addr{netip.MustParseAddr("169.254.20.10")},
	}
	tests := []struct {
		dst  string
		want bool
	}{
		{"10.244.0.6:80", true},
		{"[fd00:244::6]:80", true},
		{"10.96.0.1:443", true},
		{"192.168.0.1:22", true}, // a node
		{"1.1.1.1:443", true},
		{"10.244.0.5:80", false},
		{"[fd00:244::5]:80", false},
		{"[::ffff:10.244.0.5]:80", false},
		{"127.0.0.1:10800", false},
		{"127.9.9.9:10800", false},
		{"[::1]:10800", false},
		{"[::ffff:127.0.0.1]:10800", false},
		{"0.0.0.0:10800", false},
		{"0.1.2.3:80", false},
		{"[::]:10800", false},
		{"169.254.169.254:80", false},
		{"169.254.20.10:53", true},
		{"169.254.20.10:80", false},
		{"[fe80::1]:80", false},
		{"[fe80::1%eth0]:80", false},
		{"224.0.0.1:80", false},
		{"[ff02::1]:80", false},
		{"255.255.255.255:67", false},
		{"168.63.129.16:80", false},
		{"[fd00:ec2::254]:80", false},
		{"[fd00:ec2::23]:80", false},
		{"[fd20:ce::254]:80", false},
		{"[fd00:42::42]:80", false},
		{"[fd00:c1::a9fe:a9fe]:80", false},
		{"[fec0::1]:80", false},
		{"192.0.0.192:80", false},
		{"100.100.100.200:80", false},
		{"[64:ff9b::a9fe:a9fe]:80", false}, // NAT64
		{"[64:ff9b::7f00:1]:80", false},
		{"[64:ff9b::af4:5]:80", false},           // of the manager's own address
		{"[64:ff9b:1:a9fe:a9:fe00::]:80", false}, // of the local site
		{"[64:ff9b:1::a9fe:a9fe]:80", false},     // a /96 of it
		{"[64:ff9b:1:ffff:1:2:a9fe:a9fe]:80", false},
		{"[2002:a9fe:a9fe::1]:80", false},        // 6to4
		{"[::a9fe:a9fe]:80", false},              // IPv4-compatible
		{"[::ffff:0:169.254.169.254]:80", false}, // SIIT
		{"[64:ff9b::101:101]:443", true},
		{"[2002:101:101::1]:443", true},
		{"[2001:db8::a9fe:a9fe]:443", true}, // the last bits of an ordinary address
		{"[fd00:244::a9fe:a9fe]:80", true},
	}
	for _, tt := range tests {
		if got := f.Allows(netip.MustParseAddrPort(tt.dst)); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.dst, got, tt.want)
		}
	}
	if f.Allows(netip.AddrPort{}) {
		t.Error("the filter allows an invalid address")
	}
}

// The router calls AllowsDirect for each packet.
func BenchmarkFilterAllows(b *testing.B) {
	f := Filter{Pod: []netip.Addr{netip.MustParseAddr("10.244.0.5")}}
	f.Hosts.Store(&Hosts{Addrs: map[netip.Addr]struct{}{netip.MustParseAddr("192.168.0.1"): {}}})
	for _, dst := range []string{"10.244.0.6:80", "[fd00:244::6]:80", "[64:ff9b::101:101]:443"} {
		b.Run(dst, func(b *testing.B) {
			to := netip.MustParseAddrPort(dst)
			b.ReportAllocs()
			for b.Loop() {
				if !f.AllowsDirect(to, nil) {
					b.Fatal("refused")
				}
			}
		})
	}
}
