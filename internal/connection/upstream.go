package connection

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/route"
)

// Another program is also named kubevpn (github.com/kubenetworks/kubevpn). Version 2.x of it gives its tunnel an
// address of these networks, and its daemon listens at this path in the home directory.
var (
	upstreamNetworks = []netip.Prefix{
		netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("223.254.0.0/16"),
		netip.MustParsePrefix("2001:2::/64"),
	}
	upstreamSocket = filepath.Join(".kubevpn", "daemon", "user_daemon.sock")
)

// upstreamTunnel returns the tunnel of the other kubevpn, or "". Other programs use the same addresses, so its daemon
// must run too. It connects to the daemon's socket and sends nothing.
func upstreamTunnel(ctx context.Context, home string, links map[string][]netip.Addr) string {
	for name, addrs := range links {
		// Tunnels of this program have addresses of 198.19.0.0/16 too.
		if strings.HasPrefix(name, ownDevices) || !slices.ContainsFunc(addrs, isUpstream) {
			continue
		}
		d := net.Dialer{Timeout: time.Second}
		conn, err := d.DialContext(ctx, "unix", filepath.Join(home, upstreamSocket))
		if err != nil {
			return ""
		}
		_ = conn.Close()
		return name
	}
	return ""
}

func isUpstream(addr netip.Addr) bool {
	return slices.ContainsFunc(upstreamNetworks, func(p netip.Prefix) bool { return p.Contains(addr.Unmap()) })
}

// findUpstream returns the tunnel of the other kubevpn on this machine, or "". It finds none if it cannot read the
// machine's interfaces, because a connection does not depend on the answer.
func (r *routes) findUpstream(ctx context.Context) string {
	home, err := os.UserHomeDir()
	if err != nil || r.cfg.isolated() || r.cfg.proxied() {
		return ""
	}
	interfaces, err := net.Interfaces()
	if err != nil {
		r.log.Info("cannot look for tunnels of the other kubevpn", "err", err)
		return ""
	}
	links := map[string][]netip.Addr{}
	for _, i := range interfaces {
		addrs, err := i.Addrs()
		if err != nil {
			continue // the interface is gone
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				links[i.Name] = append(links[i.Name], p.Addr())
			}
		}
	}
	return upstreamTunnel(ctx, home, links)
}

const upstreamConnected = "the other kubevpn (github.com/kubenetworks/kubevpn) is connected on this machine, through %s"

// checkUpstream warns about the tunnel of the other kubevpn, and returns an error if networks of the plan overlap it.
func (r *routes) checkUpstream(ctx context.Context, overlaps []route.Overlap) error {
	tunnel := r.findUpstream(ctx)
	if tunnel == "" {
		return nil
	}
	if slices.ContainsFunc(overlaps, func(o route.Overlap) bool { return o.Link == tunnel }) {
		return upstreamOverlap(tunnel, overlaps)
	}
	r.status.warn(fmt.Sprintf(upstreamConnected+". Names of both clusters can conflict", tunnel))
	return nil
}

func upstreamOverlap(tunnel string, overlaps []route.Overlap) *api.Error {
	return api.Errorf(api.ExitOverlap, upstreamConnected+": %s", tunnel, overlapError(overlaps).Message).
		WithHint("Nothing was changed. Run `kubevpn disconnect --all` of that program, then connect again.\n" +
			"docs/migrating.md compares the two programs.")
}
