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
	"kubevpn/pkg/wakeup"
)

// removeTimeout limits the removal of the network of a connection.
const removeTimeout = 5 * time.Second

// hostNetwork is the network configuration of this machine that all connections together need. Each change is one Apply
// of the whole state to the helper.
//
//	connection A: link, zone ──┐                           ┌─▶ helper: devices, routes, resolver in the path
//	connection B: link, zone ──┴─▶ hostNetwork: one state ─┤
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
	scopes   []*scopedNetwork // those that have a link, a zone or a reservation; the zones are in this order
	loopback *loopback        // nil: there are no links
	closed   bool
}

// newHostNetwork takes ownership of the helper; close closes it. Its resolver has the Observer and Outside of names.
func newHostNetwork(helper Helper, names dns.Config, logger *slog.Logger) *hostNetwork {
	h := &hostNetwork{helper: helper, logger: logger,
		present: func(device string) bool {
			_, err := net.InterfaceByName(device)
			return err == nil
		}}
	names.Dial, names.Logger = h.dialUpstream, logger
	h.resolver = dns.New(names)
	return h
}

var errHelperClosed = errors.New("the root helper has been closed")

// linkedLocked reports whether there are links.
func (h *hostNetwork) linkedLocked() bool {
	return slices.ContainsFunc(h.scopes, func(n *scopedNetwork) bool { return n.link != nil })
}

// leaveLocked removes a part of the network, without an Apply.
func (h *hostNetwork) leaveLocked(n *scopedNetwork) {
	h.scopes = slices.DeleteFunc(slices.Clone(h.scopes), func(other *scopedNetwork) bool { return other == n })
}

// applyLocked has the helper apply all links. Without any, nothing sends queries to the loopback sockets any more.
func (h *hostNetwork) applyLocked(ctx context.Context) (api.NetworkApplied, error) {
	var state api.NetworkState
	for _, n := range h.scopes {
		if n.link != nil {
			state.Links = append(state.Links, *n.link)
		}
	}
	if len(state.Links) > 0 && h.loopback != nil {
		state.Resolver = &h.loopback.addrs
	}
	applied, err := h.helper.Apply(ctx, state)
	if err != nil {
		return api.NetworkApplied{}, err
	}
	h.learn(applied)
	if len(state.Links) == 0 {
		h.closeLoopbackLocked()
	}
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
			if h.linkedLocked() && !h.closed {
				h.learn(applied)
			}
			h.mu.Unlock()
		}
	}
}

// close removes everything and ends the helper. The resolver answers until the helper sends it no more queries.
func (h *hostNetwork) close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	err := h.helper.Close()
	h.closeLoopbackLocked()
	return err
}

// scopedNetwork is the connection.Network of one connection: its part of the host's network. The mutex of the host
// guards the parts.
type scopedNetwork struct {
	host     *hostNetwork
	link     *api.Link // nil: none
	zone     *dns.Zone // nil: none
	reserved []netip.Prefix
}

// joinLocked makes n a part of the network.
func (n *scopedNetwork) joinLocked() {
	if !slices.Contains(n.host.scopes, n) {
		n.host.scopes = append(n.host.scopes, n)
	}
}

func (n *scopedNetwork) CreateTUN(ctx context.Context, name string, mtu int) (*os.File, error) {
	return n.host.helper.CreateTUN(ctx, name, mtu)
}

// SetLink applies the link, and those of the other connections. After an error the network is as it was before.
func (n *scopedNetwork) SetLink(ctx context.Context, link api.Link) (api.NetworkApplied, error) {
	h := n.host
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := n.fitsLocked(link); err != nil {
		return api.NetworkApplied{}, err
	}
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
	before := n.link
	n.link = &link
	n.joinLocked()
	applied, err := h.applyLocked(ctx)
	if err == nil {
		h.serveLoopbackLocked()
		return applied, nil
	}
	n.link = before
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	if _, undoErr := h.applyLocked(undo); undoErr != nil { // the helper may have applied a part
		err = errors.Join(err, fmt.Errorf("cannot undo the change: %w", undoErr))
	}
	return api.NetworkApplied{}, err
}

// fitsLocked returns an error if the link overlaps one of another connection. Otherwise it drops links whose device is
// gone: a connection that is about to end may have closed its device, and not yet removed its link.
func (n *scopedNetwork) fitsLocked(link api.Link) error {
	var gone []*scopedNetwork
	for _, other := range n.host.scopes {
		switch {
		case other == n || other.link == nil:
		case !n.host.present(other.link.Name):
			gone = append(gone, other)
		case other.link.Name == link.Name:
			return api.Errorf(api.ExitOverlap, "another connection has a device named %s", link.Name)
		default:
			if a, b, found := overlap(link.Routes, other.link.Routes); found {
				return api.Errorf(api.ExitOverlap, "%s overlaps %s of another connected cluster", a, b).
					WithHint("disconnect that cluster first, or exclude the network with --exclude-cidr %s", a)
			}
		}
	}
	for _, other := range gone {
		other.link = nil
	}
	return nil
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

// Others returns the links of the other connections whose device exists.
func (n *scopedNetwork) Others() (links []api.Link) {
	n.host.mu.Lock()
	defer n.host.mu.Unlock()
	for _, other := range n.host.scopes {
		if other != n && other.link != nil && n.host.present(other.link.Name) {
			links = append(links, *other.link)
		}
	}
	return links
}

// RemoveLink removes the link of the connection. After an error the next change, or the end of the helper, removes it.
func (n *scopedNetwork) RemoveLink(ctx context.Context) error {
	h := n.host
	h.mu.Lock()
	defer h.mu.Unlock()
	if n.link == nil || h.closed {
		return nil
	}
	n.link = nil
	_, err := h.applyLocked(ctx)
	return err
}

// SetZone passes the zones of all connections to the resolver. The connection that had a zone first takes precedence.
func (n *scopedNetwork) SetZone(zone *dns.Zone) error {
	h := n.host
	h.mu.Lock()
	defer h.mu.Unlock()
	before, scopes := n.zone, h.scopes
	if n.zone == nil {
		if zone == nil {
			return nil
		}
		h.leaveLocked(n)
		n.joinLocked()
	}
	n.zone = zone
	var zones []dns.Zone
	for _, other := range h.scopes {
		if other.zone != nil {
			zones = append(zones, *other.zone)
		}
	}
	if err := h.resolver.SetZones(zones); err != nil {
		n.zone, h.scopes = before, scopes
		return err
	}
	return nil
}

func (n *scopedNetwork) DomainTaken(domain string) bool {
	h := n.host
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, other := range h.scopes {
		z := other.zone
		switch {
		case z == nil:
		case other == n:
			return false
		case strings.EqualFold(z.Domain, domain) || slices.Contains(z.Extra, domain) || z.Alias == domain:
			return true
		}
	}
	return false
}

func (n *scopedNetwork) Reserve(networks []netip.Prefix) (others []netip.Prefix) {
	h := n.host
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, other := range h.scopes {
		if other != n {
			others = append(others, other.reserved...)
		}
	}
	if _, _, found := overlap(networks, others); found {
		slices.SortFunc(others, netip.Prefix.Compare)
		return others
	}
	n.reserved = networks
	n.joinLocked()
	return nil
}

func (n *scopedNetwork) ServeDNS(ctx context.Context, zone string, packets []net.PacketConn,
	listeners []net.Listener) error {
	if zone != "" {
		return n.host.resolver.ServePrograms(ctx, zone, packets, listeners)
	}
	return n.host.resolver.Serve(ctx, packets, listeners)
}

// close removes the link, zone and reservation of the connection. If the helper has ended, its end has removed the
// link.
func (n *scopedNetwork) close() error {
	err := n.SetZone(nil)
	if !wakeup.IsClosed(n.host.helper.Done()) {
		ctx, cancel := context.WithTimeout(context.Background(), removeTimeout)
		defer cancel()
		err = errors.Join(n.RemoveLink(ctx), err)
	}
	n.host.mu.Lock()
	defer n.host.mu.Unlock()
	n.host.leaveLocked(n)
	return err
}
