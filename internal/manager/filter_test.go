package manager

import (
	"net/netip"
	"testing"
)

func TestFilterRejectsSpecialAddresses(t *testing.T) {
	f := filter{
		pod: []netip.Addr{netip.MustParseAddr("10.244.0.5"), netip.MustParseAddr("fd00:244::5")},
		dns: []netip.Addr{netip.MustParseAddr("169.254.20.10")},
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
	}
	for _, tt := range tests {
		if got := f.allows(netip.MustParseAddrPort(tt.dst)); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.dst, got, tt.want)
		}
	}
	if f.allows(netip.AddrPort{}) {
		t.Error("the filter allows an invalid address")
	}
}
