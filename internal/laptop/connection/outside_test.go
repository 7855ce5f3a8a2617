package connection

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"syscall"
	"testing"

	"go4.org/netipx"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/netstack"
)

// The program in the namespace, or behind the proxy, must not reach this machine: neither by loopback, nor by the
// addresses of its interfaces, nor where a cloud keeps the credentials of a machine.
func TestOutsideRejectsThisMachine(t *testing.T) {
	l, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	port := uint16(l.Addr().(*net.TCPAddr).Port)
	hosts := []string{"127.0.0.1", "::1", "0.0.0.0", "::", "224.0.0.1", "::ffff:127.0.0.1", "::ffff:0.0.0.0", "169.254.169.254",
		"::ffff:169.254.169.254", "fe80::1", "64:ff9b::7f00:1", "2002:7f00:1::1", "64:ff9b:1:7f00:0:100::",
		"64:ff9b:1::a9fe:a9fe", "::7f00:1"}
	own, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range own {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			hosts = append(hosts, p.Addr().String())
			if p.Addr().Is4() {
				hosts = append(hosts, "::ffff:"+p.Addr().String())
			}
		}
	}
	for _, host := range hosts {
		to := netip.AddrPortFrom(netip.MustParseAddr(host), port)
		if refuseOutside(to) == "" { // a dial may fail because this machine has no route
			t.Errorf("%s is outside", host)
		}
		if _, err := (outside{}).DialTCP(t.Context(), netip.AddrPort{}, to); !errors.Is(err, syscall.EHOSTUNREACH) {
			t.Errorf("TCP to %s: %v", host, err)
		}
		if _, err := (outside{}).DialUDP(t.Context(), netip.AddrPort{}, to); !errors.Is(err, syscall.EHOSTUNREACH) {
			t.Errorf("UDP to %s: %v", host, err)
		}
		if _, err := DialOutside(t.Context(), "tcp", to); !errors.Is(err, syscall.EHOSTUNREACH) {
			t.Errorf("the proxy to %s: %v", host, err)
		}
	}
}

func TestOutsideLeavesOtherAddresses(t *testing.T) {
	for _, host := range []string{"192.0.2.1", "2001:db8::1", "64:ff9b::c000:201", "2002:c000:201::1"} {
		if why := refuseOutside(netip.AddrPortFrom(netip.MustParseAddr(host), 80)); why != "" {
			t.Errorf("%s: %s", host, why)
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
	d := split{cluster: failing{cluster}, elsewhere: failing{elsewhere}, inside: routed.Contains}
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

// podVia is a Via whose flows leave from a pod with these nameservers.
type podVia struct {
	Via
	servers []netip.Addr
}

func (v podVia) Names() (*api.PodNames, <-chan struct{}) {
	return &api.PodNames{Servers: v.servers}, nil
}

func TestWhatLeavesFromThePod(t *testing.T) {
	cache, corporate := netip.MustParseAddr("169.254.20.10"), netip.MustParseAddr("192.168.7.53")
	for _, tt := range []struct {
		dst                   string
		manager, cluster, all bool
	}{
		{"10.96.0.1", true, true, true},
		{"192.0.2.1", false, false, true},
		{"2001:db8::1", false, false, true},
		{"169.254.169.254", false, true, true},
		{"169.254.20.10", false, true, true},
		{"192.168.7.53", false, true, true}, // a nameserver of the pod
		{"192.168.7.54", false, false, true},
	} {
		dst := netip.MustParseAddr(tt.dst)
		s := &shared{cfg: new(Config), hosts: new(hosts)}
		s.hosts.routes.Store(&[]netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")})
		manager := s.Inside(dst)
		s.via = podVia{servers: []netip.Addr{cache, corporate}}
		cluster := s.Inside(dst)
		s.cfg.Request.Egress = api.EgressAll
		if all := s.Inside(dst); manager != tt.manager || cluster != tt.cluster || all != tt.all {
			t.Errorf("%v leaves from the manager: %v, from the pod: %v, with all: %v", dst, manager, cluster, all)
		}
	}
}
