package connection

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"kubevpn/internal/testenv"
)

// outsideAddress returns an address that no interface of the test's namespace has, and where its servers answer.
func outsideAddress(t *testing.T) netip.Addr {
	t.Helper()
	testenv.Run(t, "ip route add local 192.0.2.9/32 dev lo")
	return netip.MustParseAddr("192.0.2.9")
}

func TestOutsideTCPCrossesBothWays(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	l, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	to := netip.AddrPortFrom(outsideAddress(t), uint16(l.Addr().(*net.TCPAddr).Port))
	stream, err := outside{}.DialTCP(t.Context(), netip.AddrPort{}, to)
	if err != nil {
		t.Fatal(err)
	}
	far, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	if _, err := stream.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if err := stream.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(far); string(b) != "hello" || err != nil {
		t.Errorf("it reads %q, %v", b, err)
	}
	if err := stream.Reset(); err != nil {
		t.Fatal(err)
	}
	if _, err := far.Read(make([]byte, 1)); err == nil {
		t.Error("it reads on after a reset")
	}
	l.Close()
	if _, err := (outside{}).DialTCP(t.Context(), netip.AddrPort{}, to); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a port that nobody listens on: %v", err)
	}
}

func TestOutsideUDPKeepsBoundaries(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	far, err := net.ListenPacket("udp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	p, err := outside{}.DialUDP(t.Context(), netip.AddrPort{}, netip.AddrPortFrom(outsideAddress(t), uint16(far.LocalAddr().(*net.UDPAddr).Port)))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for _, size := range []int{5, 0, 1000} {
		if err := p.WritePacket(make([]byte, size)); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 2000)
		n, from, err := far.ReadFrom(b)
		if err != nil || n != size {
			t.Fatalf("%d bytes, %v; want %d", n, err, size)
		}
		if _, err := far.WriteTo(b[:n], from); err != nil {
			t.Fatal(err)
		}
		if n, err := p.ReadPacket(b); n != size || err != nil {
			t.Errorf("back come %d bytes, %v; want %d", n, err, size)
		}
	}
}
