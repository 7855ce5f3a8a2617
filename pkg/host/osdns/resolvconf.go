package osdns

import (
	"bytes"
	"net/netip"
	"slices"
	"strings"
)

// header is the first line of a resolv.conf that kubevpn wrote.
const header = "# Edited by kubevpn, which puts the original back when it ends."

// nameservers returns the distinct addresses of a resolv.conf's nameserver lines, in order (resolv.conf(5)). It leaves
// out what it cannot parse, as every resolver does. Resolvers use three of them, but not all the same three, so it
// returns all.
func nameservers(conf []byte) []netip.Addr {
	var out []netip.Addr
	for line := range strings.Lines(string(conf)) {
		f := strings.Fields(line)
		if len(f) < 2 || f[0] != "nameserver" { // a comment begins with another word
			continue
		}
		addr, err := netip.ParseAddr(f[1])
		switch addr = addr.Unmap(); addr {
		case netip.IPv4Unspecified(): // it means this host
			addr = netip.AddrFrom4([4]byte{127, 0, 0, 1})
		case netip.IPv6Unspecified():
			addr = netip.IPv6Loopback()
		}
		if err == nil && !addr.IsMulticast() && !slices.Contains(out, addr) {
			out = append(out, addr)
		}
	}
	return out
}

// withNameservers returns conf with other nameserver lines. Search domains and options stay.
func withNameservers(conf []byte, servers []netip.Addr) []byte {
	var b bytes.Buffer
	b.WriteString(header + "\n")
	put := func() {
		for _, s := range servers {
			b.WriteString("nameserver " + s.String() + "\n")
		}
		servers = nil
	}
	for line := range strings.Lines(string(conf)) {
		if f := strings.Fields(line); len(f) > 0 && f[0] == "nameserver" {
			put()
			continue
		}
		if strings.HasPrefix(line, header) {
			continue
		}
		b.WriteString(line)
		if !strings.HasSuffix(line, "\n") {
			b.WriteByte('\n')
		}
	}
	put()
	return b.Bytes()
}
