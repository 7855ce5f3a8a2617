package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/miekg/dns"

	"kubevpn/internal/api"
	"kubevpn/pkg/sandbox"
)

// Place is a network namespace with a device in it, held by another process: a *sandbox.Process, or the *sandbox.Remote of a
// container. Its methods may be called concurrently.
type Place interface {
	// TUN is the device, which stays the Place's. Its Name is the interface's.
	TUN() *os.File
	// SetNetwork gives the device addresses, routes everything to it, and says who resolves names. It may be called again.
	SetNetwork(ctx context.Context, n sandbox.Network) error
	// Dial connects from inside. Its conns are sockets.
	Dial(ctx context.Context, network, address string) (net.Conn, error)
}

// IsolatedConfig is a connection, with or without intercepts, for what runs in a Place.
type IsolatedConfig struct {
	Request  api.InterceptRequest // Attached is implied; without workloads it is the connection alone
	Place    Place
	Owner    Owner
	ClientID string          // of its own: the daemon may have a connection to the same cluster
	Progress func(api.Event) // may be called concurrently
	Ready    func()          // called once, when all of it is there
	Logger   *slog.Logger

	NewConnection func(ConnectionConfig) (Connection, error) // nil: of internal/session
	Interceptor   Interceptor                                // nil: NewInterceptor
}

// Isolated makes a connection for a Place in this process, and intercepts whose requests go there, and keeps them until ctx
// ends, which is no error, or one of them does. Nothing of this machine's network is changed, or matters.
//
//	Place: program ─▶ TUN ─▶ session ─┬─ the cluster's ══▶ traffic manager
//	            ▲                     └─ all else ───────▶ a socket of this process
//	            └── Place.Dial ◀── intercepts ◀══ agents
//
// It is the daemon's own set with one connection. Its helper, which needs root on a machine, is the Place's holder.
func Isolated(ctx context.Context, cfg IsolatedConfig) error {
	newConnection, maker := cfg.NewConnection, cfg.Interceptor
	if newConnection == nil {
		newConnection = func(c ConnectionConfig) (Connection, error) { return newSession(c, cfg.Place.Dial) }
	}
	if maker == nil {
		maker = NewInterceptor()
	}
	is := newIntercepts(maker, cfg.Owner, cfg.Logger)
	is.dial = cfg.Place.Dial
	s := newSet(newConnection, is, cfg.ClientID, cfg.Logger)
	s.placed = true
	h := newHolder(cfg.Place, "/etc/resolv.conf", cfg.Logger)
	if err := s.adopt(h); err != nil {
		return err
	}
	s.tasks.Go(h.follow)
	ready := sync.OnceFunc(cfg.Ready)
	req := cfg.Request
	req.Attached = true
	err := s.intercept(ctx, req, func(string) {}, func(e api.Event) {
		cfg.Progress(e)
		if e.Held {
			ready()
		}
	})
	err = errors.Join(err, s.shutDown(cfg.Progress))
	is.tasks.Wait()
	s.tasks.Wait()
	return err
}

// resolvConfPause is between two looks at this machine's name servers. Other networks have others.
const resolvConfPause = 3 * time.Second

// holder is the Helper that a Place's holder is.
type holder struct {
	place      Place
	resolvConf string // this machine's
	log        *slog.Logger
	changes    chan api.NetworkApplied
	done       chan struct{}
	close      func()

	mu   sync.Mutex
	last api.NetworkApplied
}

func newHolder(place Place, resolvConf string, logger *slog.Logger) *holder {
	h := &holder{place: place, resolvConf: resolvConf, log: logger, changes: make(chan api.NetworkApplied, 1), done: make(chan struct{})}
	h.close = sync.OnceFunc(func() { close(h.done) })
	return h
}

// CreateTUN gives the Place's device, whatever name and MTU would be wanted on a machine.
func (h *holder) CreateTUN(context.Context, string, int) (*os.File, error) {
	f, err := duplicate(h.place.TUN())
	if err != nil {
		return nil, fmt.Errorf("taking the device of the program's network: %w", err)
	}
	return f, nil
}

func (h *holder) Apply(ctx context.Context, state api.NetworkState) (api.NetworkApplied, error) {
	if len(state.Links) == 0 {
		return api.NetworkApplied{}, nil // the device goes with the Place
	}
	upstreams, search, err := nameservers(h.resolvConf)
	if err != nil {
		return api.NetworkApplied{}, err
	}
	l := state.Links[0] // a Place has one connection
	n := sandbox.Network{Addresses: l.Addrs, MTU: l.MTU, Search: l.SearchDomains, Options: []string{"ndots:5"}}
	if l.Resolver.IsValid() {
		n.DNS = []netip.Addr{l.Resolver}
	}
	for _, domain := range search { // as a pod has its node's
		if !slices.Contains(n.Search, domain) {
			n.Search = append(slices.Clip(n.Search), domain)
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

// nameservers are those of a resolv.conf, as a resolver takes them, and its search domains.
func nameservers(resolvConf string) (servers []netip.AddrPort, search []string, err error) {
	c, err := dns.ClientConfigFromFile(resolvConf)
	if errors.Is(err, fs.ErrNotExist) {
		c, err = &dns.ClientConfig{}, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("reading this machine's name servers: %w", err)
	}
	for _, text := range c.Servers {
		if a, err := netip.ParseAddr(text); err == nil {
			servers = append(servers, netip.AddrPortFrom(a, 53))
		}
	}
	if len(servers) == 0 {
		servers = []netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 53)} // resolv.conf(5)
	}
	for _, domain := range c.Search {
		if domain != "." && domain != "" {
			search = append(search, domain)
		}
	}
	return servers, search, nil
}

// follow looks for other name servers until the helper is closed.
func (h *holder) follow() {
	tick := time.NewTicker(resolvConfPause)
	defer tick.Stop()
	for {
		select {
		case <-h.done:
			return
		case <-tick.C:
			h.look()
		}
	}
}

func (h *holder) look() {
	upstreams, _, err := nameservers(h.resolvConf)
	if err != nil {
		h.log.Warn("looking for other name servers", "err", err)
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

func (h *holder) MarkedSocket(_ context.Context, network string) (*os.File, error) {
	return nil, fmt.Errorf("a marked socket (%s): %w: nothing is redirected", strconv.Quote(network), errors.ErrUnsupported)
}

func (h *holder) Changes() <-chan api.NetworkApplied { return h.changes }
func (h *holder) Done() <-chan struct{}              { return h.done }

func (h *holder) Close() error {
	h.close()
	return nil
}
