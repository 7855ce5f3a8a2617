package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/sandbox"
	"kubevpn/pkg/host/unixsocket"
	"kubevpn/pkg/wakeup"
)

// resolvConfInterval is the pause between two reads of the nameservers of this machine, which change with its network.
const resolvConfInterval = 3 * time.Second

// placeHelper is the Helper that configures a Place.
type placeHelper struct {
	unprivileged
	place      sandbox.Place
	resolvConf string // path, on this machine
	log        *slog.Logger
	changes    chan api.NetworkApplied

	mu   sync.Mutex
	last api.NetworkApplied
}

func newPlaceHelper(place sandbox.Place, resolvConf string, logger *slog.Logger) *placeHelper {
	return &placeHelper{unprivileged: newUnprivileged(), place: place, resolvConf: resolvConf, log: logger,
		changes: make(chan api.NetworkApplied, 1)}
}

// CreateTUN returns the Place's device and ignores name and MTU.
func (h *placeHelper) CreateTUN(context.Context, string, int) (*os.File, error) {
	f, err := unixsocket.Dup(h.place.TUN(), h.place.TUN().Name())
	if err != nil {
		return nil, fmt.Errorf("cannot duplicate the device of the program's network: %w", err)
	}
	return f, nil
}

func (h *placeHelper) Apply(ctx context.Context, state api.NetworkState) (api.NetworkApplied, error) {
	if len(state.Links) == 0 {
		return api.NetworkApplied{}, nil // the kernel removes the device with the Place
	}
	upstreams, err := nameservers(h.resolvConf)
	if err != nil {
		return api.NetworkApplied{}, err
	}
	l := state.Links[0] // a Place has one connection
	// This machine's search domains are left out: with ndots:5, a wildcard record in one of them would answer for every
	// name outside of the cluster.
	n := sandbox.Network{Addresses: l.Addrs, MTU: l.MTU, Search: l.SearchDomains, Options: []string{"ndots:5"}}
	if l.Resolver.IsValid() {
		n.DNS = []netip.Addr{l.Resolver}
	}
	if l.Names != nil {
		n.Search, n.Options, n.Hosts = l.Names.Search, l.Names.Options, l.Names.Hosts
		if len(l.Names.Servers) > 0 {
			n.DNS = l.Names.Servers
		}
	}
	if err := h.place.SetNetwork(ctx, n); err != nil {
		return api.NetworkApplied{}, err
	}
	applied := api.NetworkApplied{ResolverMode: api.ResolverFile, Upstreams: upstreams}
	h.mu.Lock()
	h.last = applied
	h.mu.Unlock()
	return applied, nil
}

// nameservers reads the nameservers of a resolv.conf.
func nameservers(resolvConf string) (servers []netip.AddrPort, err error) {
	c, err := dns.ClientConfigFromFile(resolvConf)
	if errors.Is(err, fs.ErrNotExist) {
		c, err = &dns.ClientConfig{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("cannot read the nameservers of this machine: %w", err)
	}
	for _, text := range c.Servers {
		if a, err := netip.ParseAddr(text); err == nil {
			servers = append(servers, netip.AddrPortFrom(a, 53))
		}
	}
	if len(servers) == 0 {
		servers = []netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 53)} // resolv.conf(5)
	}
	return servers, nil
}

// follow calls look at intervals until the helper is closed.
func (h *placeHelper) follow() {
	for wakeup.Pause(h.over, resolvConfInterval) {
		h.look()
	}
}

// look delivers the nameservers to Changes if they have changed since Apply.
func (h *placeHelper) look() {
	upstreams, err := nameservers(h.resolvConf)
	if err != nil {
		h.log.Warn("reading the nameservers", "err", err)
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.last.ResolverMode == api.ResolverNone || slices.Equal(h.last.Upstreams, upstreams) {
		return
	}
	h.last.Upstreams = upstreams
	select {
	case <-h.changes: // the latest only
	default:
	}
	h.changes <- h.last
}

func (h *placeHelper) Changes() <-chan api.NetworkApplied { return h.changes }
