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
	"kubevpn/pkg/dns"
)

// Network is what a connection may do to this machine's network. What a connection has set is taken back when
// its Run has returned, whatever Run did. All methods may be called concurrently.
type Network interface {
	// CreateTUN returns a new TUN device, which goes when its last descriptor is closed.
	CreateTUN(ctx context.Context, name string, mtu int) (*os.File, error)
	// SetLink adds the link, or replaces the connection's link of that name: addresses, routes, and the machine's
	// name resolution with them. The device must exist.
	SetLink(ctx context.Context, link api.Link) (api.NetworkApplied, error)
	// RemoveLink undoes SetLink. A link that there is not is no error.
	RemoveLink(ctx context.Context, name string) error
	// SetZone says which names are the connection's; nil means none. It replaces what was said before.
	SetZone(zone *dns.Zone) error
	// DomainTaken reports whether a connection that came earlier has the same cluster domain: names that both
	// clusters have are then resolved by that one.
	DomainTaken(domain string) bool
	// Reserve says in which networks the connection's inner addresses are, in the place of those that it said before. If
	// another connection has reserved something that overlaps them, nothing changes, and it returns all that others have.
	Reserve(networks []netip.Prefix) (others []netip.Prefix)
	// ServeDNS answers queries on sockets of the connection's own (inside its tunnel) like on loopback, until ctx
	// ends; then it closes them.
	ServeDNS(ctx context.Context, packets []net.PacketConn, listeners []net.Listener) error
}

// removeTimeout bounds taking back what a connection left.
const removeTimeout = 5 * time.Second

// machine is this machine's network as all connections together want it. Each change is one Apply of the whole
// to the helper.
//
//	share A: links, zone ─┐                       ┌─▶ helper: devices, routes, resolver in the path
//	share B: links, zone ─┴─▶ machine: one state ─┤
//	                                              └─▶ resolver on 127.0.0.1 and ::1 while there are links
//	                                                     └─ other names ─▶ upstreams, as the helper found them
type machine struct {
	helper   Helper
	logger   *slog.Logger
	resolver *dns.Resolver
	marked   atomic.Bool              // queries to upstreams need a marked socket
	mode     atomic.Value             // api.ResolverMode: how names get here now; nil: not yet
	present  func(device string) bool // whether there is such a device
	placed   bool                     // names are asked inside the tunnel only

	mu       sync.Mutex
	links    []ownedLink // in the order in which they came
	zones    []ownedZone
	reserved map[*share][]netip.Prefix
	loopback *loopback // nil: there are no links
	closed   bool
}

type ownedLink struct {
	owner *share
	api.Link
}

type ownedZone struct {
	owner *share
	dns.Zone
}

// newMachine takes ownership of the helper; close closes it.
func newMachine(helper Helper, logger *slog.Logger) *machine {
	m := &machine{helper: helper, logger: logger, reserved: map[*share][]netip.Prefix{}, present: func(device string) bool {
		_, err := net.InterfaceByName(device)
		return err == nil
	}}
	m.resolver = dns.New(dns.Config{Dial: m.dialUpstream, Logger: logger})
	return m
}

var errMachineClosed = errors.New("the root helper has been closed")

// addLink makes links, which has one more or another one than before, the machine's; m.mu is held. On an error
// the machine is as it was before.
func (m *machine) addLink(ctx context.Context, links []ownedLink) (api.NetworkApplied, error) {
	if m.closed {
		return api.NetworkApplied{}, errMachineClosed
	}
	if m.loopback == nil && !m.placed {
		b, err := m.listenLoopback()
		if err != nil {
			return api.NetworkApplied{}, err
		}
		m.loopback = b
	}
	applied, err := m.apply(ctx, links)
	if err == nil {
		m.links = links
		if m.loopback != nil {
			m.serveLoopback()
		}
		return applied, nil
	}
	// It may have been applied in part.
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	if _, undoErr := m.apply(undo, m.links); undoErr != nil {
		err = errors.Join(err, fmt.Errorf("undoing it: %w", undoErr))
	}
	if len(m.links) == 0 {
		m.closeLoopback()
	}
	return api.NetworkApplied{}, err
}

// dropLinks makes links, which has fewer than before, the machine's; m.mu is held. After an error they are
// gone from the wanted state all the same, so that the next change, or the helper's end, takes them away.
func (m *machine) dropLinks(ctx context.Context, links []ownedLink) error {
	if m.closed {
		return nil
	}
	m.links = links
	if _, err := m.apply(ctx, links); err != nil {
		return err
	}
	if len(links) == 0 {
		m.closeLoopback()
	}
	return nil
}

// apply makes the network as these links want it.
func (m *machine) apply(ctx context.Context, links []ownedLink) (api.NetworkApplied, error) {
	var state api.NetworkState
	for _, l := range links {
		state.Links = append(state.Links, l.Link)
	}
	if len(links) > 0 && m.loopback != nil {
		state.Resolver = &m.loopback.addrs
	}
	applied, err := m.helper.Apply(ctx, state)
	if err != nil {
		return api.NetworkApplied{}, err
	}
	m.learn(applied)
	return applied, nil
}

// learn takes in what the helper says of name resolution.
func (m *machine) learn(applied api.NetworkApplied) {
	m.marked.Store(applied.ResolverMode == api.ResolverNFTables)
	m.mode.Store(applied.ResolverMode)
	m.resolver.SetUpstreams(applied.Upstreams)
	m.logger.Info("network applied", "resolver", applied.ResolverMode, "upstreams", applied.Upstreams, "warnings", applied.Warnings)
}

// watch follows what the helper changes by itself, until it has ended.
func (m *machine) watch() {
	for {
		select {
		case <-m.helper.Done():
			return
		case applied := <-m.helper.Changes():
			m.mu.Lock()
			if len(m.links) > 0 && !m.closed {
				m.learn(applied)
			}
			m.mu.Unlock()
		}
	}
}

// setZones hands the zones to the resolver; m.mu is held.
func (m *machine) setZones(zones []ownedZone) error {
	list := make([]dns.Zone, len(zones))
	for i, z := range zones {
		list[i] = z.Zone
	}
	if err := m.resolver.SetZones(list); err != nil {
		return err
	}
	m.zones = zones
	return nil
}

// close removes everything and ends the helper. The resolver answers until nothing is sent to it any more.
func (m *machine) close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	err := m.helper.Close()
	m.closeLoopback()
	return err
}

// share is the Network of one connection: its part of the machine.
type share struct {
	logger  *slog.Logger
	machine *machine // set before the connection runs
}

func newShare(logger *slog.Logger) *share { return &share{logger: logger} }

func (s *share) CreateTUN(ctx context.Context, name string, mtu int) (*os.File, error) {
	return s.machine.helper.CreateTUN(ctx, name, mtu)
}

func (s *share) SetLink(ctx context.Context, link api.Link) (api.NetworkApplied, error) {
	m := s.machine
	m.mu.Lock()
	defer m.mu.Unlock()
	// A connection that is just ending has closed its device, and not yet taken its link back.
	links := slices.DeleteFunc(slices.Clone(m.links), func(l ownedLink) bool { return l.owner != s && !m.present(l.Name) })
	at := len(links)
	for i, other := range links {
		switch {
		case other.owner == s && other.Name == link.Name:
			at = i
		case other.Name == link.Name:
			return api.NetworkApplied{}, api.Errorf(api.ExitClash, "another connection has a device called %s", link.Name)
		case other.owner != s:
			if a, b, clash := overlap(link.Routes, other.Routes); clash {
				return api.NetworkApplied{}, api.Errorf(api.ExitClash, "%s overlaps %s of another connected cluster", a, b).
					WithHint("disconnect that one first, or leave the network out with --exclude-cidr %s", a)
			}
		}
	}
	if at == len(links) {
		links = append(links, ownedLink{})
	}
	links[at] = ownedLink{owner: s, Link: link}
	return m.addLink(ctx, links)
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

func (s *share) RemoveLink(ctx context.Context, name string) error {
	return s.removeLinks(ctx, func(l ownedLink) bool { return l.Name == name })
}

func (s *share) removeLinks(ctx context.Context, remove func(ownedLink) bool) error {
	m := s.machine
	m.mu.Lock()
	defer m.mu.Unlock()
	links := slices.DeleteFunc(slices.Clone(m.links), func(l ownedLink) bool { return l.owner == s && remove(l) })
	if len(links) == len(m.links) {
		return nil
	}
	return m.dropLinks(ctx, links)
}

func (s *share) SetZone(zone *dns.Zone) error {
	m := s.machine
	m.mu.Lock()
	defer m.mu.Unlock()
	zones := slices.Clone(m.zones)
	at := slices.IndexFunc(zones, func(z ownedZone) bool { return z.owner == s })
	switch {
	case zone == nil && at < 0:
		return nil
	case zone == nil:
		zones = slices.Delete(zones, at, at+1)
	case at < 0:
		zones = append(zones, ownedZone{s, *zone})
	default:
		zones[at].Zone = *zone
	}
	return m.setZones(zones)
}

func (s *share) DomainTaken(domain string) bool {
	m := s.machine
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, z := range m.zones {
		if z.owner == s {
			return false
		}
		if strings.EqualFold(z.Domain, domain) {
			return true
		}
	}
	return false
}

func (s *share) Reserve(networks []netip.Prefix) (others []netip.Prefix) {
	m := s.machine
	m.mu.Lock()
	defer m.mu.Unlock()
	for owner, theirs := range m.reserved {
		if owner != s {
			others = append(others, theirs...)
		}
	}
	if _, _, clash := overlap(networks, others); clash {
		slices.SortFunc(others, netip.Prefix.Compare)
		return others
	}
	m.reserved[s] = networks
	return nil
}

func (s *share) release() {
	m := s.machine
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.reserved, s)
}

func (s *share) ServeDNS(ctx context.Context, packets []net.PacketConn, listeners []net.Listener) error {
	return s.machine.resolver.Serve(ctx, packets, listeners)
}

// close takes back what the connection has set. Where the helper has ended there is nothing to take back.
func (s *share) close() error {
	defer s.release()
	zoneErr := s.SetZone(nil)
	if isClosed(s.machine.helper.Done()) {
		return zoneErr
	}
	ctx, cancel := context.WithTimeout(context.Background(), removeTimeout)
	defer cancel()
	return errors.Join(s.removeLinks(ctx, func(ownedLink) bool { return true }), zoneErr)
}
