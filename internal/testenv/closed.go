package testenv

import (
	"net"
	"net/netip"
	"testing"
)

// ClosedPort returns a port of 127.0.0.1 that refuses clients until the test ends, for "tcp" or "udp". A port that was
// only closed could be given to the next listener of the machine. So a connected socket holds this one: nobody else can
// bind it, and it accepts nothing but what its peer sends.
func ClosedPort(t testing.TB, network string) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	c, err := net.Dial(network, l.Addr().String()) // over UDP it sends nothing
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return netip.MustParseAddrPort(c.LocalAddr().String())
}
