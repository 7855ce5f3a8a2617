package route

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/netfilter"
	"kubevpn/pkg/wakeup"
)

// guard keeps this machine from becoming a gateway into its tunnels for the networks that it is attached to. Packets
// that enter through an interface with a default route are not forwarded into a guarded link, even if the machine
// masquerades them. Containers and virtual machines pass: their interfaces have no default route.
//
//	table inet kubevpn.guard-RANDOM { flags owner
//	  chain forward { type filter hook forward priority filter
//	    iif WLAN oifname LINK drop                # for each interface with a default route, and each link
//	  }
//	}
//
// It needs root, because the kernel forwards and masquerades such packets before the reader of the TUN device sees
// them. The kernel removes the table when the process ends.
type guard struct {
	table   *netfilter.Table
	forward *nftables.Chain
	handle  *netlink.Handle
	end     func() // stops follow

	mu      sync.Mutex // guards what follows, and the table
	links   []string
	uplinks []int // the interfaces that rules are for
	ruled   []string
}

// retryTime is the pause after a failure to follow the routes, or to update the rules.
const retryTime = time.Second

// openGuard creates a guard that drops nothing yet. Its error says which feature the kernel lacks.
func openGuard() (*guard, error) {
	table, err := netfilter.OpenTable("kubevpn.guard-" + strings.ToLower(rand.Text()[:8]))
	if err != nil {
		return nil, err
	}
	g := &guard{
		table: table,
		forward: table.Chain("forward", nftables.ChainTypeFilter, nftables.ChainHookForward,
			*nftables.ChainPriorityFilter),
	}
	if err := table.Flush(); err != nil {
		return nil, errors.Join(fmt.Errorf("making a chain in the forward hook: %w", err), table.Close())
	}
	if g.handle, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, errors.Join(fmt.Errorf("opening a netlink socket: %w", err), table.Close())
	}
	g.end = wakeup.Go(context.Background(), g.follow)
	return g, nil
}

// follow updates the rules while default routes change. After a failure the rules stay as they are, and it retries.
func (g *guard) follow(ctx context.Context) {
	events := wakeup.NewSignal()
	defer wakeup.Go(ctx, func(ctx context.Context) {
		for notice(ctx, events.Raise) != nil && wakeup.Pause(ctx, retryTime) {
		}
	})()
	for {
		select {
		case <-events:
		case <-ctx.Done():
			return
		}
		if err := g.refresh(); err != nil && wakeup.Pause(ctx, retryTime) {
			events.Raise()
		}
	}
}

// set replaces the guarded links.
func (g *guard) set(links []string) error {
	g.mu.Lock()
	g.links = links
	g.mu.Unlock()
	return g.refresh()
}

// refresh replaces the rules in one transaction, according to the guarded links and the current default routes.
func (g *guard) refresh() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	uplinks, err := defaultRoutes(g.handle)
	if err != nil {
		return err
	}
	if slices.Equal(uplinks, g.uplinks) && slices.Equal(g.links, g.ruled) {
		return nil
	}
	g.table.FlushChain(g.forward)
	for _, uplink := range uplinks {
		for _, link := range g.links {
			g.table.Rule(g.forward,
				netfilter.MetaIs(expr.MetaKeyIIF, binaryutil.NativeEndian.PutUint32(uint32(uplink))),
				netfilter.MetaIs(expr.MetaKeyOIFNAME, netfilter.InterfaceName(link)),
				netfilter.Verdict(expr.VerdictDrop))
		}
	}
	if err := g.table.Flush(); err != nil {
		return fmt.Errorf("keeping the neighbours of this machine out of the tunnel: %w", err)
	}
	g.uplinks, g.ruled = uplinks, slices.Clone(g.links)
	return nil
}

// defaultRoutes returns the sorted indices of the interfaces with a default route of either family, in any table.
// Halves of a default route count, such as OpenVPN's 0.0.0.0/1.
func defaultRoutes(h *netlink.Handle) ([]int, error) {
	routes, err := allRoutes(h)
	if err != nil {
		return nil, err
	}
	var out []int
	for _, r := range routes {
		if r.Type != unix.RTN_UNICAST || destination(r).Bits() > 1 {
			continue
		}
		for _, hop := range hops(r) {
			if hop.LinkIndex > 0 {
				out = append(out, hop.LinkIndex)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// Uplinks returns the links with a default route of either family.
func Uplinks() ([]netlink.Link, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("opening a netlink socket: %w", err)
	}
	defer h.Close()
	indices, err := defaultRoutes(h)
	if err != nil {
		return nil, err
	}
	var links []netlink.Link
	for _, index := range indices {
		l, err := h.LinkByIndex(index)
		if err != nil {
			return nil, fmt.Errorf("looking for the link of a default route: %w", err)
		}
		links = append(links, l)
	}
	return links, nil
}

// close removes the table and stops follow.
func (g *guard) close() error {
	g.end()
	g.handle.Close()
	return g.table.Close()
}

// keepNeighboursOut guards the links of cfg, if there are any. It returns a warning if the kernel has no nftables and
// this machine forwards packets. Then only the reader of the link drops packets, by their source address, which does
// not stop masqueraded ones.
func (r *Router) keepNeighboursOut(cfg Config) (warning string, err error) {
	if len(cfg.Links) == 0 || cfg.Forwards {
		if r.guard == nil {
			return "", nil
		}
		err := r.guard.close()
		r.guard = nil
		return "", err
	}
	if r.guard == nil {
		if r.guard, err = r.openGuard(); err != nil {
			if !forwards() {
				return "", nil
			}
			return "this machine forwards packets, and its kernel cannot keep those of other machines out of the " +
				"tunnel, if a rule masquerades them: " + err.Error(), nil
		}
	}
	var links []string
	for _, l := range cfg.Links {
		links = append(links, l.Name)
	}
	return "", r.guard.set(links)
}

// forwards reports whether this machine forwards packets.
func forwards() bool {
	return slices.ContainsFunc([]string{"/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding"},
		func(path string) bool {
			b, err := os.ReadFile(path)
			return err == nil && strings.TrimSpace(string(b)) != "0"
		})
}
