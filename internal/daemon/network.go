package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/protocol/dns"
)

// removeTimeout limits the removal of the network of a connection.
const removeTimeout = 5 * time.Second

// hostNetwork is the network configuration of this machine that all connections together need. Each change is one Apply
// of the whole state to the helper.
//
//	connection A: links, zone ─┐                           ┌─▶ helper: devices, routes, resolver in the path
//	connection B: links, zone ─┴─▶ hostNetwork: one state ─┤
//	                                                       └─▶ resolver on 127.0.0.1 and ::1 while there are links
//	                                                              └─ other names ─▶ upstreams, as the helper found them
type hostNetwork struct {
	helper   Helper
	logger   *slog.Logger
	resolver *dns.Resolver
	marked   atomic.Bool              // queries to upstreams need a marked socket
	mode     atomic.Value             // api.ResolverMode: how queries reach the resolver; nil: not yet known
	present  func(device string) bool // reports whether the device exists
	isolated bool                     // programs use the resolver inside the tunnel only

	mu       sync.Mutex
	links    []ownedLink // the oldest first
	zones    []ownedZone
	reserved map[*scopedNetwork][]netip.Prefix
	loopback *loopback // nil: there are no links
	closed   bool
}

type ownedLink struct {
	owner *scopedNetwork
	api.Link
}

type ownedZone struct {
	owner *scopedNetwork
	dns.Zone
}

// newHostNetwork takes ownership of the helper; close closes it. Its resolver has the Observer and Outside of names.
func newHostNetwork(helper Helper, names dns.Config, logger *slog.Logger) *hostNetwork {
	h := &hostNetwork{helper: helper, logger: logger, reserved: map[*scopedNetwork][]netip.Prefix{},
		present: func(device string) bool {
			_, err := net.InterfaceByName(device)
			return err == nil
		}}
	names.Dial, names.Logger = h.dialUpstream, logger
	h.resolver = dns.New(names)
	return h
}

var errHelperClosed = errors.New("the root helper has been closed")

// addLink applies links, which has one more link or a changed one; h.mu is held. After an error the network is as it
// was before.
func (h *hostNetwork) addLink(ctx context.Context, links []ownedLink) (api.NetworkApplied, error) {
	if h.closed {
		return api.NetworkApplied{}, errHelperClosed
	}
	if h.loopback == nil && !h.isolated {
		b, err := h.listenLoopback()
		if err != nil {
			return api.NetworkApplied{}, err
		}
		h.loopback = b
	}
	applied, err := h.apply(ctx, links)
	if err == nil {
		h.links = links
		if h.loopback != nil {
			h.serveLoopback()
		}
		return applied, nil
	}
	// The helper may have applied a part.
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	if _, undoErr := h.apply(undo, h.links); undoErr != nil {
		err = errors.Join(err, fmt.Errorf("cannot undo the change: %w", undoErr))
	}
	if len(h.links) == 0 {
		h.closeLoopback()
	}
	return api.NetworkApplied{}, err
}

// dropLinks applies links, which has fewer links than before; h.mu is held. After an error the next change, or the end
// of the helper, removes the others.
func (h *hostNetwork) dropLinks(ctx context.Context, links []ownedLink) error {
	if h.closed {
		return nil
	}
	h.links = links
	if _, err := h.apply(ctx, links); err != nil {
		return err
	}
	if len(links) == 0 {
		h.closeLoopback()
	}
	return nil
}

// apply has the helper apply these links.
func (h *hostNetwork) apply(ctx context.Context, links []ownedLink) (api.NetworkApplied, error) {
	var state api.NetworkState
	for _, l := range links {
		state.Links = append(state.Links, l.Link)
	}
	if len(links) > 0 && h.loopback != nil {
		state.Resolver = &h.loopback.addrs
	}
	applied, err := h.helper.Apply(ctx, state)
	if err != nil {
		return api.NetworkApplied{}, err
	}
	h.learn(applied)
	return applied, nil
}

// learn stores the report of the helper about name resolution.
func (h *hostNetwork) learn(applied api.NetworkApplied) {
	h.marked.Store(applied.ResolverMode == api.ResolverNFTables)
	h.mode.Store(applied.ResolverMode)
	h.resolver.SetUpstreams(applied.Upstreams)
	h.logger.Info("network applied", "resolver", applied.ResolverMode, "upstreams", applied.Upstreams, "warnings",
		applied.Warnings)
}

// watch stores the changes that the helper reports, until the helper has ended.
func (h *hostNetwork) watch() {
	for {
		select {
		case <-h.helper.Done():
			return
		case applied := <-h.helper.Changes():
			h.mu.Lock()
			if len(h.links) > 0 && !h.closed {
				h.learn(applied)
			}
			h.mu.Unlock()
		}
	}
}

// setZones passes the zones to the resolver; h.mu is held.
func (h *hostNetwork) setZones(zones []ownedZone) error {
	list := make([]dns.Zone, len(zones))
	for i, z := range zones {
		list[i] = z.Zone
	}
	if err := h.resolver.SetZones(list); err != nil {
		return err
	}
	h.zones = zones
	return nil
}

// close removes everything and ends the helper. The resolver answers until the helper sends it no more queries.
func (h *hostNetwork) close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	err := h.helper.Close()
	h.closeLoopback()
	return err
}

// scopedNetwork is the connection.Network of one connection: its part of the host's network.
type scopedNetwork struct{ host *hostNetwork }

func (n *scopedNetwork) CreateTUN(ctx context.Context, name string, mtu int) (*os.File, error) {
	return n.host.helper.CreateTUN(ctx, name, mtu)
}

func (n *scopedNetwork) SetLink(ctx context.Context, link api.Link) (api.NetworkApplied, error) {
	h := n.host
	h.mu.Lock()
	defer h.mu.Unlock()
	// A connection that is about to end may have closed its device, and not yet removed its link.
	links := slices.DeleteFunc(slices.Clone(h.links), func(l ownedLink) bool {
		return l.owner != n && !h.present(l.Name)
	})
	at := len(links)
	for i, other := range links {
		switch {
		case other.owner == n && other.Name == link.Name:
			at = i
		case other.Name == link.Name:
			return api.NetworkApplied{},
				api.Errorf(api.ExitOverlap, "another connection has a device named %s", link.Name)
		case other.owner != n:
			if a, b, found := overlap(link.Routes, other.Routes); found {
				return api.NetworkApplied{},
					api.Errorf(api.ExitOverlap, "%s overlaps %s of another connected cluster", a, b).
						WithHint("disconnect that cluster first, or exclude the network with --exclude-cidr %s", a)
			}
		}
	}
	if at == len(links) {
		links = append(links, ownedLink{})
	}
	links[at] = ownedLink{owner: n, Link: link}
	return h.addLink(ctx, links)
}

// overlap finds a prefix of a that shares addresses with one of b.
func overlap(a, b []netip.Prefix) (netip.Prefix, netip.Prefix, bool) {
	for _, p := range a {
		for _, q := range b {
			if p.Overlaps(q) {
				return p, q, true
			}
		}
	}
	return netip.Prefix{}, netip.Prefix{}, false
}

func (n *scopedNetwork) RemoveLink(ctx context.Context, name string) error {
	return n.removeLinks(ctx, func(l ownedLink) bool { return l.Name == name })
}

func (n *scopedNetwork) removeLinks(ctx context.Context, remove func(ownedLink) bool) error {
	h := n.host
	h.mu.Lock()
	defer h.mu.Unlock()
	links := slices.DeleteFunc(slices.Clone(h.links), func(l ownedLink) bool { return l.owner == n && remove(l) })
	if len(links) == len(h.links) {
		return nil
	}
	return h.dropLinks(ctx, links)
}

func (n *scopedNetwork) SetZone(zone *dns.Zone) error {
	h := n.host
	h.mu.Lock()
	defer h.mu.Unlock()
	zones := slices.Clone(h.zones)
	at := slices.IndexFunc(zones, func(z ownedZone) bool { return z.owner == n })
	switch {
	case zone == nil && at < 0:
		return nil
	case zone == nil:
		zones = slices.Delete(zones, at, at+1)
	case at < 0:
		zones = append(zones, ownedZone{n, *zone})
	default:
		zones[at].Zone = *zone
	}
	return h.setZones(zones)
}

func (n *scopedNetwork) DomainTaken(domain string) bool {
	h := n.host
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, z := range h.zones {
		if z.owner == n {
			return false
		}
		if strings.EqualFold(z.Domain, domain) || slices.Contains(z.Extra, domain) {
			return true
		}
	}
	return false
}

func (n *scopedNetwork) Reserve(networks []netip.Prefix) (others []netip.Prefix) {
	h := n.host
	h.mu.Lock()
	defer h.mu.Unlock()
	for owner, theirs := range h.reserved {
		if owner != n {
			others = append(others, theirs...)
		}
	}
	if _, _, found := overlap(networks, others); found {
		slices.SortFunc(others, netip.Prefix.Compare)
		return others
	}
	h.reserved[n] = networks
	return nil
}

func (n *scopedNetwork) release() {
	h := n.host
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.reserved, n)
}

func (n *scopedNetwork) ServeDNS(ctx context.Context, packets []net.PacketConn, listeners []net.Listener) error {
	return n.host.resolver.Serve(ctx, packets, listeners)
}

// close removes the links, zone and reservation of the connection. If the helper has ended, its end has removed the
// links.
func (n *scopedNetwork) close() error {
	defer n.release()
	zoneErr := n.SetZone(nil)
	if isClosed(n.host.helper.Done()) {
		return zoneErr
	}
	ctx, cancel := context.WithTimeout(context.Background(), removeTimeout)
	defer cancel()
	return errors.Join(n.removeLinks(ctx, func(ownedLink) bool { return true }), zoneErr)
}
