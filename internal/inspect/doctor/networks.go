package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/route"
)

// ownDevices begins the names of kubevpn's devices on Linux.
const ownDevices = "kubevpn"

// otherVPNs looks for the tunnels of other VPNs.
func otherVPNs(context.Context, *facts) api.Finding {
	tunnels, err := route.Tunnels()
	if errors.Is(err, errors.ErrUnsupported) {
		return skipped("%v", err)
	}
	if err != nil {
		return routesUnread(err)
	}
	return vpnsOf(tunnels)
}

func routesUnread(err error) api.Finding {
	return broken(api.ExitNetwork, "kubevpn cannot see what its routes would hide", "ip route show table all",
		"cannot read this machine's routes: %v", err)
}

func vpnsOf(tunnels []route.Tunnel) api.Finding {
	var all, some []string
	fix := ""
	for _, t := range tunnels {
		switch {
		case strings.HasPrefix(t.Link, ownDevices):
		case t.Everything():
			all = append(all, fmt.Sprintf("%s (%s)", t.Link, t.Kind))
			fix = "sudo ip link set " + api.ShellQuote(t.Link) + " down   # or end it with its own program"
		default:
			some = append(some, fmt.Sprintf("%s (%s: %s)", t.Link, t.Kind, api.Some(t.Routes, shown)))
		}
	}
	switch {
	case len(all) > 0:
		return warning("the connection to the API server goes through it, and pauses when it ends. If the VPN filters "+
			"what is not its own, or its routes are in a table before the main one, cluster addresses do not answer",
			fix, "another VPN takes all traffic of this machine: %s", api.Join(all))
	case len(some) > 0:
		return ok("other tunnels: %s", api.Join(some))
	}
	return ok("there is none")
}

// shown is how many items of a list a finding names.
const shown = 4

// overlap checks whether the cluster's networks would hide networks of this machine.
func overlap(ctx context.Context, f *facts) api.Finding {
	found, err := f.cluster.CIDRs(ctx, f.prepared.Namespace)
	if err != nil {
		return failed(err, "the networks of the cluster are unknown")
	}
	if len(found.Pods)+len(found.Services) == 0 {
		return skipped("you may not see the cluster's networks; the traffic manager may")
	}
	devices := api.Texts(f.connections(), func(c api.Connection) string { return c.Device })
	seen, err := f.Foresee(found, api.ConnectRequest{ConnectSettings: f.Settings}, f.cluster.Addresses(),
		devices, f.cluster.InPod())
	if err != nil {
		return routesUnread(err)
	}
	return foreseen(seen)
}

// connections returns the daemon's connections to this cluster.
func (f *facts) connections() []api.Connection {
	status, err := f.status()
	if err != nil || status == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(status.Connections), func(c api.Connection) bool {
		return c.ClusterID != f.cluster.ID()
	})
}

func foreseen(seen api.Foresight) api.Finding {
	if seen.Overlap != nil {
		f := failed(seen.Overlap, "`kubevpn connect` changes nothing and ends with this error")
		if _, command, found := strings.Cut(f.Fix, "\n"); found {
			f.Fix = strings.TrimSpace(command)
		}
		return f
	}
	i := slices.IndexFunc(seen.Warnings, func(w string) bool { return strings.Contains(w, " overlaps ") })
	if i >= 0 {
		return warning("programs do not reach that part of the cluster",
			"kubevpn connect --extra-cidr CIDR   # routes it, and hides the local network", "%s", seen.Warnings[i])
	}
	routes := slices.Clone(seen.Routes)
	slices.SortFunc(routes, func(a, b netip.Prefix) int { return a.Bits() - b.Bits() })
	return ok("free on this machine: %s", api.Some(routes, shown))
}
