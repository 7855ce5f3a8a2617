package route

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kubevpn/internal/testenv"
)

// network is a laptop between a network with a neighbour, and the bridge of a container:
//
//	neighbour eth0 ── wlan0 ┐
//	                        ├ this namespace, which forwards ── kubevpn0
//	container eth0 ─ docker0 ┘
//
// It masquerades packets that leave through kubevpn0, and those of the container, as Docker does.
func network(t *testing.T) {
	t.Helper()
	for _, line := range []string{
		"mount -t tmpfs none /run", // for the names of the namespaces
		"ip netns add neighbour", "ip netns add container",
		"ip link add wlan0 type veth peer name eth0 netns neighbour",
		"ip link add docker0 type bridge",
		"ip link add veth0 master docker0 type veth peer name eth0 netns container",
		"ip link set wlan0 up", "ip link set docker0 up", "ip link set veth0 up",
		"ip addr add 192.0.2.1/24 dev wlan0", "ip addr add 2001:db8::1/64 dev wlan0 nodad",
		"ip addr add 172.17.0.1/16 dev docker0", "ip addr add fd00:17::1/64 dev docker0 nodad",
		"ip -n neighbour link set eth0 up", "ip -n container link set eth0 up",
		"ip -n neighbour addr add 192.0.2.7/24 dev eth0", "ip -n neighbour addr add 2001:db8::7/64 dev eth0 nodad",
		"ip -n neighbour route add default via 192.0.2.1", "ip -n neighbour route add default via 2001:db8::1",
		"ip -n container addr add 172.17.0.2/16 dev eth0", "ip -n container addr add fd00:17::2/64 dev eth0 nodad",
		"ip -n container route add default via 172.17.0.1", "ip -n container route add default via fd00:17::1",
		"sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1",
		"nft add table inet nat",
		"nft add chain inet nat postrouting { type nat hook postrouting priority 100 ; }",
		"nft add rule inet nat postrouting ip saddr 172.17.0.0/16 oifname != docker0 masquerade",
		"nft add rule inet nat postrouting ip6 saddr fd00:17::/64 oifname != docker0 masquerade",
		"nft add rule inet nat postrouting oifname kubevpn0 masquerade",
	} {
		testenv.Run(t, line)
	}
}

// send sends a datagram from a namespace.
func send(t *testing.T, from, to string) {
	t.Helper()
	if out, err := exec.Command("ip", "netns", "exec", from, "bash", "-c", "echo hello >/dev/udp/"+to+"/9").CombinedOutput(); err != nil {
		t.Fatalf("%s to %s: %v: %s", from, to, err, out)
	}
}

// received returns the source and destination of the next packet from the TUN. It skips the kernel's multicast.
func received(t *testing.T, tun *os.File) (src, dst string) {
	t.Helper()
	b := make([]byte, 9000)
	for {
		n, err := tun.Read(b)
		if err != nil {
			t.Fatalf("reading a packet from the TUN: %v", err)
		}
		at, size := 12, 4
		if b[0]>>4 == 6 {
			at, size = 8, 16
		}
		if n < at+2*size {
			t.Fatalf("a packet of %d bytes", n)
		}
		s, _ := netip.AddrFromSlice(b[at : at+size])
		d, _ := netip.AddrFromSlice(b[at+size : at+2*size])
		if !d.IsMulticast() {
			return s.String(), d.String()
		}
	}
}

func TestNeighboursDoNotEnterTheTunnel(t *testing.T) {
	if !testenv.InNamespace(t, "nft", "bash", "sysctl") {
		return
	}
	defer goleak.VerifyNone(t)
	network(t)
	tun := newTUN(t, "kubevpn0")
	r := New()
	applied, err := r.Set(Config{Links: []Link{{
		Name: "kubevpn0", MTU: 1500, Addrs: prefixes("198.19.0.1/32", "fd00:198::1/128"), Routes: prefixes("10.96.0.0/16", "fd00:96::/64"),
	}}})
	if err != nil || len(applied.Warnings) > 0 {
		t.Fatal(applied.Warnings, err)
	}
	// passes reports whether the neighbour's packets get into the tunnel. The container's always do.
	passes := func(format, own string) bool {
		t.Helper()
		ours := fmt.Sprintf(format, "82")
		send(t, "neighbour", fmt.Sprintf(format, "81"))
		send(t, "container", ours)
		_, first := received(t, tun)
		if first == ours {
			return false
		}
		src, dst := received(t, tun)
		if src != own || dst != ours {
			t.Errorf("the packet after %s is to %s from %s, want %s from %s", first, dst, src, ours, own)
		}
		return true
	}
	for _, f := range []struct{ name, format, own, via string }{
		{"IPv4", "10.96.0.%s", "198.19.0.1", "192.0.2.254"},
		{"IPv6", "fd00:96::%s", "fd00:198::1", "2001:db8::fe"},
	} {
		t.Run(f.name, func(t *testing.T) {
			if !passes(f.format, f.own) {
				t.Error("the guard drops packets from an interface without a default route, as a hotspot has")
			}
			testenv.Run(t, "ip route add default via "+f.via+" dev wlan0")
			testenv.Eventually(t, 5*time.Second, func() error {
				if passes(f.format, f.own) {
					return fmt.Errorf("a neighbour's packet got into the tunnel")
				}
				return nil
			})
			testenv.Run(t, "ip route del default via "+f.via+" dev wlan0")
			testenv.Eventually(t, 5*time.Second, func() error {
				if !passes(f.format, f.own) {
					return fmt.Errorf("without the default route, the guard still drops packets from its interface")
				}
				return nil
			})
		})
	}
	testenv.Run(t, "ip route add default via 192.0.2.254 dev wlan0")
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if rules := testenv.Run(t, "nft list ruleset"); strings.Contains(rules, "kubevpn.") {
		t.Errorf("left:\n%s", rules)
	}
}

// The user gets a warning if the kernel forwards packets and cannot keep neighbours out.
func TestRouterWarnsWithoutAGuard(t *testing.T) {
	if !testenv.InNamespace(t, "sysctl") {
		return
	}
	newTUN(t, "kubevpn0")
	r := New()
	r.openGuard = func() (*guard, error) { return nil, os.ErrInvalid }
	cfg := Config{Links: []Link{{Name: "kubevpn0", MTU: 1500, Addrs: prefixes("198.19.0.1/32"), Routes: prefixes("10.96.0.0/16")}}}
	for _, tt := range []struct {
		forward string
		want    int
	}{{"0", 0}, {"1", 1}} {
		testenv.Run(t, "sysctl -qw net.ipv4.ip_forward="+tt.forward)
		applied, err := r.Set(cfg)
		if err != nil || len(applied.Warnings) != tt.want {
			t.Errorf("ip_forward=%s: warnings %q, %v; want %d", tt.forward, applied.Warnings, err, tt.want)
		}
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}
