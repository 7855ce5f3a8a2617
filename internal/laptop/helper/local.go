package helper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/host/osdns"
	"kubevpn/pkg/host/route"
)

// LocalConfig configures Local. The zero value suits root on a laptop.
type LocalConfig struct {
	// UID is the user for whom it acts. It is only a part of the nftables table's name.
	UID int
	// StateDir is a directory for the journal that only root can write to. Default: /var/lib/kubevpn.
	StateDir string
	// ResolvConf names the machine's nameservers. Local edits it only if no other method works. Default:
	// /etc/resolv.conf.
	ResolvConf string
	// Policy limits what Apply accepts. Nil: the networks of the state that the user allowed count.
	Policy *Policy
	Logger *slog.Logger // default: nothing
	// Journal is a second place for what Serve logs, besides the daemon, which runs as the user. Nil: none.
	Journal slog.Handler
}

func (c LocalConfig) dns() osdns.Options {
	return osdns.Options{
		Table: fmt.Sprintf("kubevpn-%d-%d", c.UID, os.Getpid()), StateDir: c.StateDir, ResolvConf: c.ResolvConf,
		Logger: c.Logger,
	}
}

// Local changes the network of this machine from this process, which must run as root. Its methods are safe for
// concurrent use.
type Local struct {
	cfg       LocalConfig
	createTUN func(name string, mtu int) (*os.File, error)
	router    *route.Router
	dns       *osdns.Configurator
	changes   chan api.NetworkApplied
	done      chan struct{}

	mu        sync.Mutex // held during changes
	recovered bool
	closed    bool
	// links that CreateTUN created: name to index; another program created a link with the same name and another index
	created map[string]int
	judged  map[netip.Prefix]bool // addresses and routes that the policy allowed when they were new

	publishing sync.Mutex // guards warnings and sends to changes; locked after mu, and by the Configurator's watcher
	warnings   []string   // of the routes
}

// NewLocal returns a Local that has changed nothing.
func NewLocal(cfg LocalConfig) *Local {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	l := &Local{
		cfg:       cfg,
		createTUN: tun.Create,
		router:    route.New(),
		changes:   make(chan api.NetworkApplied, 1),
		done:      make(chan struct{}),
		created:   map[string]int{},
	}
	opt := cfg.dns()
	opt.OnChange = func(a osdns.Applied) {
		applied := l.applied(a)
		l.publishing.Lock()
		defer l.publishing.Unlock()
		publish(l.changes, applied)
	}
	l.dns = osdns.New(opt)
	return l
}

// CreateTUN creates a TUN device and returns its descriptor, which the caller owns. The name of the file is that of the
// interface: macOS chooses it if name is only utun. The kernel removes the device when its last descriptor is closed.
func (l *Local) CreateTUN(_ context.Context, name string, mtu int) (*os.File, error) {
	if err := checkTUN(name, mtu); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.begin(); err != nil {
		return nil, err
	}
	for name, index := range l.created {
		if link, err := net.InterfaceByName(name); err != nil || link.Index != index {
			delete(l.created, name)
		}
	}
	if len(l.created) >= maxLinks {
		return nil, refused("another link: there are already %d", len(l.created))
	}
	f, err := l.createTUN(name, mtu)
	if err != nil {
		return nil, explainTUN(err, ThisMachine())
	}
	link, err := net.InterfaceByName(f.Name())
	if err != nil {
		return nil, errors.Join(api.Errorf(api.ExitNetwork, "cannot find the device %s: %w", f.Name(), err), f.Close())
	}
	l.created[f.Name()] = link.Index
	return f, nil
}

// Apply brings the network into the state. CreateTUN must have created its links. Apply may be called again with the
// same state. After an error the network is between the old state and the new one; a later Apply, for example of the
// zero state, continues from there.
func (l *Local) Apply(_ context.Context, state api.NetworkState) (api.NetworkApplied, error) {
	if err := check(state, l.cfg.Policy); err != nil {
		return api.NetworkApplied{}, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.begin(); err != nil {
		return api.NetworkApplied{}, err
	}
	for _, link := range state.Links {
		got, err := net.InterfaceByName(link.Name)
		if index, ok := l.created[link.Name]; !ok || err != nil || got.Index != index {
			return api.NetworkApplied{},
				refused("the link %s: this helper has created no such link, or the link is gone", link.Name)
		}
	}
	if err := l.judge(routes(state)); err != nil {
		return api.NetworkApplied{}, err
	}
	// Queries must go to the resolver only while its addresses are routed: routes begin before names, and end after
	// them.
	if state.Resolver == nil {
		if err := l.dns.Close(); err != nil {
			return api.NetworkApplied{}, explainNetwork("configure name resolution", err)
		}
	}
	routed, err := l.router.Set(routes(state))
	if err != nil {
		return api.NetworkApplied{}, explainNetwork("configure addresses and routes", err)
	}
	for _, link := range state.Links {
		l.cfg.Logger.Info("link", "name", link.Name, "addresses", link.Addrs, "routes", fmt.Sprintf("%.1000s",
			fmt.Sprint(link.Routes)), "domains", fmt.Sprintf("%.1000s", fmt.Sprint(link.MatchDomains)))
	}
	l.publishing.Lock()
	l.warnings = routed.Warnings
	l.publishing.Unlock()
	if state.Resolver == nil {
		return l.applied(osdns.Applied{}), nil
	}
	wanted := names(state)
	wanted.DomainsOnly = l.cfg.Policy != nil && !l.cfg.Policy.AllQueries
	named, err := l.dns.Set(wanted)
	if wanted.DomainsOnly && errors.Is(err, osdns.ErrAllQueries) {
		return api.NetworkApplied{}, refused("name resolution: %w", err).
			WithHint("%s", hint(l.cfg.Policy, keyAllQueries, "true"))
	}
	if err != nil {
		return api.NetworkApplied{}, explainNetwork("configure name resolution", err)
	}
	return l.applied(named), nil
}

// judge returns an error if new addresses or routes would capture what this machine uses now, which the policy does not
// allow: nameservers, next hops, its addresses and networks. Others stay: a machine that joins a network keeps its
// links. l.mu is held.
func (l *Local) judge(cfg route.Config) error {
	if l.cfg.Policy == nil {
		return nil
	}
	judged, more := map[netip.Prefix]bool{}, []netip.Prefix(nil)
	for _, link := range cfg.Links {
		for _, p := range slices.Concat(link.Addrs, link.Routes) {
			if judged[p] = true; !l.judged[p] {
				more = append(more, p)
			}
		}
	}
	if len(more) > 0 {
		used, err := l.dns.Nameservers()
		if err != nil {
			return explainNetwork("read the nameservers of this machine", err)
		}
		for _, a := range used {
			if covers(more, a.Addr()) {
				return refused("the route to %v: this machine asks this nameserver", a.Addr()).
					WithHint("connect without it: --exclude-cidr %v/%d", a.Addr(), a.Addr().BitLen())
			}
		}
		found, err := route.Overlaps(more, slices.Collect(maps.Keys(l.created)))
		if err != nil {
			return explainNetwork("read the routes of this machine", err)
		} else if len(found) > 0 {
			return refused("the route %v: %v", found[0].Prefix, found[0])
		}
	}
	l.judged = judged
	return nil
}

// MarkedSocket returns an unconnected socket whose DNS queries are not redirected. network is udp4, udp6, tcp4 or tcp6.
// The caller owns the socket.
func (l *Local) MarkedSocket(_ context.Context, network string) (*os.File, error) {
	return markedSocket(network, osdns.Mark)
}

// Changes returns a channel that receives the new state after a change that no Apply made, such as other nameservers
// after a change of the network. It contains only the latest state. It is never closed.
func (l *Local) Changes() <-chan api.NetworkApplied { return l.changes }

// Done returns a channel that Close closes.
func (l *Local) Done() <-chan struct{} { return l.done }

// Close removes everything that Apply set. The callers close the devices. Only the first call has an effect.
func (l *Local) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	defer close(l.done)
	if err := errors.Join(l.dns.Close(), l.router.Close()); err != nil {
		return explainNetwork("remove the network configuration", err)
	}
	return nil
}

// begin recovers before the first change; l.mu is held.
func (l *Local) begin() error {
	if l.closed {
		return api.Errorf(api.ExitNetwork, "the root helper has been closed")
	}
	if l.recovered {
		return nil
	}
	did, err := Recover(l.cfg)
	if did != "" {
		l.cfg.Logger.Warn("recovered", "what", did)
	}
	if err != nil {
		return explainNetwork(recoverAction, err)
	}
	l.recovered = true
	return nil
}

// Recover undoes the only change that outlives a helper that ended without Close: an edited resolv.conf. It returns
// what it did; empty: there was nothing to undo. It leaves the edit of a running helper alone.
func Recover(cfg LocalConfig) (did string, err error) { return osdns.Recover(cfg.dns()) }

// publish replaces the value in a channel that has room for one. Nobody else sends meanwhile.
func publish(changes chan api.NetworkApplied, a api.NetworkApplied) {
	select {
	case <-changes:
	default:
	}
	changes <- a
}

func (l *Local) applied(a osdns.Applied) api.NetworkApplied {
	l.publishing.Lock()
	defer l.publishing.Unlock()
	return api.NetworkApplied{
		ResolverMode: api.ResolverMode(a.Mode),
		Upstreams:    a.Upstreams,
		Warnings:     slices.Concat(l.warnings, a.Warnings),
	}
}

func routes(s api.NetworkState) route.Config {
	var cfg route.Config
	for _, l := range s.Links {
		wanted := l.Routes
		if r := l.Resolver; r.IsValid() && !covers(wanted, r) {
			wanted = append(slices.Clone(wanted), netip.PrefixFrom(r, r.BitLen()))
		}
		cfg.Links = append(cfg.Links, route.Link{Name: l.Name, MTU: l.MTU, Addrs: l.Addrs, Routes: wanted})
	}
	return cfg
}

func names(s api.NetworkState) osdns.Config {
	cfg := osdns.Config{Listen4: s.Resolver.Listen4, Listen6: s.Resolver.Listen6}
	for _, l := range s.Links {
		link := osdns.Link{Name: l.Name, Resolver: l.Resolver, MatchDomains: l.MatchDomains,
			SearchDomains: l.SearchDomains}
		for _, p := range l.Addrs {
			link.Addrs = append(link.Addrs, p.Addr())
		}
		cfg.Links = append(cfg.Links, link)
	}
	return cfg
}

// recoverAction is the action of Recover, for explainNetwork.
const recoverAction = "undo the changes of a root helper that was killed"

// explainNetwork returns the error for an action that failed.
func explainNetwork(action string, err error) error {
	e := api.Errorf(api.ExitNetwork, "cannot %s: %w", action, err)
	if errors.Is(err, os.ErrPermission) {
		return e.WithHint("root without the capability NET_ADMIN, as in an unprivileged container, cannot do this")
	}
	return e
}

// explainTUN returns the error for a device that could not be created on a kind of machine.
func explainTUN(err error, on Machine) error {
	if errors.Is(err, tun.ErrNoTUN) || errors.Is(err, os.ErrPermission) {
		return api.Errorf(api.ExitNoTUN, "%w", err).WithHint("%s", on.withoutTUN())
	}
	return api.Errorf(api.ExitNetwork, "%w", err)
}
