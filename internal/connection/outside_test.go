package connection

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"runtime"
	"syscall"
	"testing"

	"go4.org/netipx"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/netstack"
)

// lanAddress is an address of this machine that is not loopback; none is a skip.
func lanAddress(t *testing.T) netip.Addr {
	t.Helper()
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() && !p.Addr().IsLoopback() {
			return p.Addr()
		}
	}
	t.Skip("this machine has loopback alone")
	return netip.Addr{}
}

func TestOutsideTCPCrossesBothWays(t *testing.T) {
	l, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	to := netip.AddrPortFrom(lanAddress(t), uint16(l.Addr().(*net.TCPAddr).Port))
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

// The program in the namespace must not reach this machine's loopback.
func TestOutsideRejectsLoopback(t *testing.T) {
	for _, dst := range []string{"127.0.0.1:80", "[::1]:80", "0.0.0.0:80", "[::]:80", "224.0.0.1:80"} {
		to := netip.MustParseAddrPort(dst)
		if _, err := (outside{}).DialTCP(t.Context(), netip.AddrPort{}, to); !errors.Is(err, syscall.EHOSTUNREACH) {
			t.Errorf("TCP to %s: %v", dst, err)
		}
		if _, err := (outside{}).DialUDP(t.Context(), netip.AddrPort{}, to); !errors.Is(err, syscall.EHOSTUNREACH) {
			t.Errorf("UDP to %s: %v", dst, err)
		}
	}
}

func TestOutsideUDPKeepsBoundaries(t *testing.T) {
	far, err := net.ListenPacket("udp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	p, err := outside{}.DialUDP(t.Context(), netip.AddrPort{}, netip.AddrPortFrom(lanAddress(t), uint16(far.LocalAddr().(*net.UDPAddr).Port)))
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

func TestOutsideEchoIsAnswered(t *testing.T) {
	p, err := outside{}.DialEcho(t.Context(), netip.Addr{}, netip.MustParseAddr("127.0.0.1"))
	if errors.Is(err, syscall.EACCES) || errors.Is(err, syscall.EPERM) || runtime.GOOS == "windows" {
		t.Skipf("this user may not ping: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	want := "\x01\x02payload"
	if err := p.WritePacket([]byte(want)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	if n, err := p.ReadPacket(b); err != nil || string(b[:n]) != want {
		t.Errorf("%q, %v; want %q", b[:n], err, want)
	}
	if err := p.WritePacket([]byte{1}); err == nil {
		t.Error("a ping without a number")
	}
}

// failing is a Dialer that returns its own error.
type failing struct{ err error }

func (d failing) DialTCP(context.Context, netip.AddrPort, netip.AddrPort) (netstack.Stream, error) {
	return nil, d.err
}
func (d failing) DialUDP(context.Context, netip.AddrPort, netip.AddrPort) (netstack.PacketStream, error) {
	return nil, d.err
}
func (d failing) DialEcho(context.Context, netip.Addr, netip.Addr) (netstack.PacketStream, error) {
	return nil, d.err
}

// If the device receives all traffic, packets for other networks bypass the packet streams and the tunnel.
func TestSplitSendsOtherTrafficOutside(t *testing.T) {
	var b netipx.IPSetBuilder
	b.AddPrefix(netip.MustParsePrefix("10.96.0.0/16"))
	routed, err := b.IPSet()
	if err != nil {
		t.Fatal(err)
	}
	cluster, elsewhere := errors.New("cluster"), errors.New("elsewhere")
	d := split{cluster: failing{cluster}, elsewhere: failing{elsewhere}, routed: routed.Contains}
	steer := &steering{system: true, gateway: &api.Gateway{IPv4: true, IPv6: true}, resolver: netip.MustParseAddr("10.96.0.53"), routed: routed}
	for _, tt := range []struct {
		dst   string
		want  error
		whole bool
	}{
		{"10.96.0.1", cluster, true},
		{"10.96.0.53", cluster, false}, // answered here
		{"10.97.0.1", elsewhere, false},
		{"192.0.2.1", elsewhere, false},
		{"2001:db8::1", elsewhere, false},
	} {
		dst := netip.MustParseAddr(tt.dst)
		to := netip.AddrPortFrom(dst, 80)
		_, tcp := d.DialTCP(t.Context(), to, to)
		_, udp := d.DialUDP(t.Context(), to, to)
		_, echo := d.DialEcho(t.Context(), dst, dst)
		if tcp != tt.want || udp != tt.want || echo != tt.want {
			t.Errorf("%s goes by %v, %v, %v; want %v", dst, tcp, udp, echo, tt.want)
		}
		if got := steer.whole(dst); got != tt.whole {
			t.Errorf("%s crosses whole: %v", dst, got)
		}
	}
}
