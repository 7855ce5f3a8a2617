package connection

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/route"
)

func TestTunnelOfOtherKubevpnIsRecognized(t *testing.T) {
	running := upstreamHome(t)
	addrs := func(text ...string) (all []netip.Addr) {
		for _, a := range text {
			all = append(all, netip.MustParseAddr(a))
		}
		return all
	}
	for _, tt := range []struct {
		name  string
		home  string
		links map[string][]netip.Addr
		want  string
	}{
		{"IPv4", running, map[string][]netip.Addr{"eth0": addrs("192.0.2.7"), "utun0": addrs("198.18.0.5")}, "utun0"},
		{"IPv6", running, map[string][]netip.Addr{"utun3": addrs("fe80::1", "2001:2::5")}, "utun3"},
		{"an older version", running, map[string][]netip.Addr{"utun0": addrs("223.254.0.101")}, "utun0"},
		{"connected to nothing", running, map[string][]netip.Addr{"eth0": addrs("10.0.0.7", "fe80::1")}, ""},
		{"a tunnel of this program", running, map[string][]netip.Addr{deviceName(1): addrs("198.19.0.5")}, ""},
		{"another VPN with such an address", t.TempDir(), map[string][]netip.Addr{"utun0": addrs("198.18.0.1")}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := upstreamTunnel(t.Context(), tt.home, tt.links); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

// upstreamHome is a home directory in which the daemon of the other kubevpn listens.
func upstreamHome(t *testing.T) string {
	t.Helper()
	home, err := os.MkdirTemp("", "home")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(home) })
	socket := filepath.Join(home, upstreamSocket)
	if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return home
}

func TestOverlapWithTunnelOfOtherKubevpnNamesIt(t *testing.T) {
	e := upstreamOverlap("utun0", []route.Overlap{{
		Kind: route.OverlapConnected, Link: "utun0",
		Prefix: netip.MustParsePrefix("10.96.0.0/16"), Other: netip.MustParsePrefix("10.96.0.0/12"),
	}})
	if e.Code != api.ExitOverlap || !strings.Contains(e.Message, "is connected on this machine, through utun0") ||
		!strings.Contains(e.Message, "10.96.0.0/12 of utun0") || !strings.Contains(e.Hint, "kubevpn disconnect --all") {
		t.Errorf("got %+v", e)
	}
}
