package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/check"
	"kubevpn/pkg/host/osdns"
	"kubevpn/pkg/host/route"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

const (
	// fightWindow is the age of resolv.conf below which the check waits as long, to see whether it changes again.
	fightWindow = 3 * time.Second
	// queryTimeout limits a query, and queryTries is how often an unanswered one is sent.
	queryTimeout = time.Second
	queryTries   = 2
)

func inspect() (osdns.Inspection, error) {
	lacking, _ := lacksNFTables(release())
	return osdns.Inspect(osdns.Options{}, lacking)
}

// resolver checks how kubevpn would put its resolver into the path of queries, and who else wants that place.
func resolver(ctx context.Context, f *facts) api.Finding {
	i, err := inspect()
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return check.Skipped("%v", err)
	case err != nil:
		return broken(api.ExitNetwork, "names do not resolve", "ls -l /etc/resolv.conf",
			"cannot read the machine's nameservers: %v", err)
	}
	status, err := f.status()
	return resolverOf(i, len(status.Connections) > 0 || err != nil, changesAgain(ctx, i))
}

// changesAgain reports whether a file that changed just now changes once more.
func changesAgain(ctx context.Context, i osdns.Inspection) bool {
	if i.Changed.IsZero() || time.Since(i.Changed) > fightWindow || !wakeup.Pause(ctx, fightWindow) {
		return false
	}
	now, err := inspect()
	return err == nil && !now.Changed.Equal(i.Changed)
}

// resolverOf judges name resolution. connected: the daemon may have connections. fought: a program keeps writing
// resolv.conf.
func resolverOf(i osdns.Inspection, connected, fought bool) api.Finding {
	switch warnings := strings.Join(i.Warnings, "; "); {
	case i.Mode == osdns.ModeNone:
		return broken(api.ExitNetwork, "`kubevpn connect` fails", "sudo modprobe nf_tables",
			"no method to resolve cluster names fits this machine: %s", warnings)
	case fought:
		return warning("programs may use other nameservers from one moment to the next; kubevpn follows each change",
			"stop the program that writes the file: sudo lsof /etc/resolv.conf; ls -l /etc/resolv.conf",
			"%s keeps changing %s", cmp.Or(i.Writer, "another program"), i.File)
	case i.Edited && !connected:
		return warning("names do not resolve", "kubevpn connect   # its root helper puts the original back first",
			"%s still has the edit of a kubevpn that was killed", i.File)
	case i.Mode == osdns.ModeFile:
		return warning("another program that writes the file takes cluster names away until kubevpn edits it again",
			"sudo modprobe nf_tables   # or install systemd-resolved", "kubevpn will edit %s: %s", i.File, warnings)
	case warnings != "":
		return warning("some programs do not find cluster names", "sudo ln -sf "+
			"/run/systemd/resolve/stub-resolv.conf /etc/resolv.conf   # with systemd-resolved", "%s", warnings)
	}
	managed := ""
	if i.Writer != "" {
		managed = ", which " + i.Writer + " writes"
	}
	return check.OK("kubevpn would use %s; the file is %s%s", i.Mode, i.File, managed)
}

// nameservers checks whether the machine's nameservers answer.
func nameservers(ctx context.Context, _ *facts) api.Finding {
	i, err := inspect()
	if err != nil {
		return check.Skipped("%v", err)
	}
	return nameserversOf(i.Nameservers, wakeup.All(i.Nameservers, func(server netip.AddrPort) string {
		return unanswered(ctx, server)
	}))
}

// nameserversOf judges why each server does not answer; "" means that it does.
func nameserversOf(servers []netip.AddrPort, silent []string) api.Finding {
	var bad, names []string
	for n, server := range servers {
		names = append(names, server.Addr().String())
		if silent[n] != "" {
			bad = append(bad, fmt.Sprintf("%v (%s)", server.Addr(), silent[n]))
		}
	}
	const fix = "resolvectl status; cat /etc/resolv.conf   # restart the VPN or the network that set this nameserver"
	switch {
	case len(names) == 0:
		return warning("public names do not resolve", fix, "this machine has no nameserver")
	case len(bad) == len(names):
		return broken(api.ExitNetwork, "names do not resolve, that of the API server among them", fix,
			"no nameserver of this machine answers: %s", api.Join(bad))
	case len(bad) > 0:
		return warning("names resolve slowly", fix, "nameservers do not answer: %s", api.Join(bad))
	}
	return check.OK("%s answer", api.Join(names))
}

// unanswered queries a nameserver, and returns why there is no answer, or "". Any answer will do.
func unanswered(ctx context.Context, server netip.AddrPort) (why string) {
	m := new(dns.Msg)
	m.SetQuestion(".", dns.TypeNS)
	c := dns.Client{Timeout: queryTimeout}
	for range queryTries {
		_, _, err := c.ExchangeContext(ctx, m, server.String())
		if err == nil {
			return ""
		}
		why = transport.CodeOf(err).String()
	}
	return why
}

// ownDevices begins the names of kubevpn's devices on Linux.
const ownDevices = "kubevpn"

// otherVPNs looks for the tunnels of other VPNs.
func otherVPNs(context.Context, *facts) api.Finding {
	tunnels, err := route.Tunnels()
	if err != nil {
		return routesUnread(err)
	}
	return vpnsOf(tunnels)
}

func routesUnread(err error) api.Finding {
	if errors.Is(err, errors.ErrUnsupported) {
		return check.Skipped("%v", err)
	}
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
		return check.OK("other tunnels: %s", api.Join(some))
	}
	return check.OK("there is none")
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
		return check.Skipped("you may not see the cluster's networks; the traffic manager may")
	}
	status, _ := f.status() // the check of the daemon reports the error
	device := func(c api.Connection) string { return c.Device }
	seen, err := f.Foresee(found, api.ConnectRequest{ConnectSettings: f.Settings}, f.cluster.Addresses(),
		api.Texts(f.connections(), device), api.Texts(status.Connections, device), f.cluster.InPod())
	if err != nil {
		return routesUnread(err)
	}
	return foreseen(seen)
}

// connections returns the daemon's connections to this cluster.
func (f *facts) connections() []api.Connection {
	status, _ := f.status() // the check of the daemon reports the error
	return slices.DeleteFunc(slices.Clone(status.Connections), func(c api.Connection) bool {
		return c.ClusterID != f.cluster.ID()
	})
}

func foreseen(seen api.Foresight) api.Finding {
	if e := seen.Overlap; e != nil {
		_, command, _ := strings.Cut(e.Hint, "\n")
		return broken(e.Code, "`kubevpn connect` changes nothing and ends with this error",
			cmp.Or(strings.TrimSpace(command), e.Hint), "%s", e.Message)
	}
	i := slices.IndexFunc(seen.Warnings, func(w string) bool { return strings.Contains(w, " overlaps ") })
	if i >= 0 {
		return warning("programs do not reach that part of the cluster",
			"kubevpn connect --extra-cidr CIDR   # routes it, and hides the local network", "%s", seen.Warnings[i])
	}
	if len(seen.Mappings) > 0 {
		return check.OK("other hosts here have addresses of the cluster, so programs reach the cluster's at others "+
			"(CLUSTER=HERE): %s", api.Some(seen.Mappings, shown))
	}
	routes := slices.Clone(seen.Routes)
	slices.SortFunc(routes, func(a, b netip.Prefix) int { return a.Bits() - b.Bits() })
	return check.OK("free on this machine: %s", api.Some(routes, shown))
}
