package daemon

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"kubevpn/internal/api"
	"kubevpn/internal/connection"
	"kubevpn/pkg/protocol/dns"
	"kubevpn/pkg/protocol/socks"
)

// SOCKSConfig configures SOCKS.
type SOCKSConfig struct {
	Request  api.ConnectRequest
	Listener net.Listener    // on a loopback address; SOCKS closes it if it has served it
	Progress func(api.Event) // receives each event; one with Connection set means connected
	Logger   *slog.Logger
	Factory  Factory // nil: NewFactory
}

// socksUser is the user name of every proxy. The password is the secret.
const socksUser = "kubevpn"

// SOCKS makes a connection that programs of this machine reach through a proxy of this process only: SOCKS5 and HTTP on
// the listener. It keeps the connection until ctx ends, and then returns nil, or until the connection fails. It needs
// no root and changes nothing on this machine.
//
//	program ─▶ proxy ── name ─▶ resolver: cluster DNS, or this machine's
//	                 └─ address ─┬─ the cluster's ══▶ traffic manager
//	                             └─ all else ───────▶ a socket of this process
func SOCKS(ctx context.Context, cfg SOCKSConfig) error {
	if cfg.Factory == nil {
		cfg.Factory = NewFactory()
	}
	cfg.Progress = serialized(cfg.Progress)
	n := newProxyNetwork(cfg.Logger)
	conn, err := cfg.Factory.NewConnection(connection.Config{
		Request: cfg.Request, Network: n, Lookup: n.resolver.Lookup, Client: newClient(), Progress: cfg.Progress,
		Logger: cfg.Logger,
	})
	if err != nil {
		return err
	}
	n.inside = conn.Dial
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		err := conn.Run(gctx)
		if err == nil && gctx.Err() == nil {
			err = api.Errorf(api.ExitLost, "the connection ended").WithHint("run `kubevpn connect` again")
		}
		return err
	})
	g.Go(func() error {
		select {
		case <-conn.Connected():
		case <-gctx.Done():
			return nil
		}
		return n.serve(gctx, cfg, conn.Status())
	})
	return g.Wait()
}

// serialized returns a function that calls f with one event at a time.
func serialized(f func(api.Event)) func(api.Event) {
	var mu sync.Mutex
	return func(e api.Event) {
		mu.Lock()
		defer mu.Unlock()
		f(e)
	}
}

// serve reports the connection with the credentials of the proxy, and serves the proxy until ctx ends.
func (n *proxyNetwork) serve(ctx context.Context, cfg SOCKSConfig, shown api.Connection) error {
	at, password, page := cfg.Listener.Addr().String(), rand.Text(), "/"+rand.Text()+".pac"
	server := socks.New(socks.Config{
		User: socksUser, Password: password, Dial: n.dial, Logger: cfg.Logger,
		Page: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/x-ns-proxy-autoconfig")
			_, _ = w.Write(n.pac(at)) // it fails if the client has gone
		}),
		PagePath: page,
	})
	shown.SOCKS = &api.SOCKS{Address: at, User: socksUser, Password: password, PAC: "http://" + at + page}
	cfg.Progress(api.Event{Connection: &shown})
	if err := server.Serve(ctx, cfg.Listener); err != nil {
		return api.Errorf(api.ExitNetwork, "the proxy ended: %w", err)
	}
	return nil
}

// proxyNetwork is the connection.Network of a connection without a device: it has the routes and names in this process.
type proxyNetwork struct {
	resolver *dns.Resolver
	inside   func(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error) // set before any dial

	mu   sync.Mutex
	link api.Link
}

var _ connection.Network = (*proxyNetwork)(nil)

func newProxyNetwork(logger *slog.Logger) *proxyNetwork {
	return &proxyNetwork{resolver: dns.New(dns.Config{Outside: dns.System{}, Logger: logger})}
}

func (n *proxyNetwork) CreateTUN(context.Context, string, int) (*os.File, error) {
	return nil, fmt.Errorf("a proxy has no device: %w", errors.ErrUnsupported)
}

func (n *proxyNetwork) SetLink(_ context.Context, link api.Link) (api.NetworkApplied, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.link = link
	return api.NetworkApplied{ResolverMode: api.ResolverProxy}, nil
}

func (n *proxyNetwork) RemoveLink(context.Context, string) error { return nil }

func (n *proxyNetwork) SetZone(zone *dns.Zone) error {
	if zone == nil {
		return n.resolver.SetZones(nil)
	}
	return n.resolver.SetZones([]dns.Zone{*zone})
}

func (n *proxyNetwork) DomainTaken(string) bool               { return false }
func (n *proxyNetwork) Reserve([]netip.Prefix) []netip.Prefix { return nil }

func (n *proxyNetwork) ServeDNS(ctx context.Context, packets []net.PacketConn, listeners []net.Listener) error {
	return n.resolver.Serve(ctx, packets, listeners)
}

// routed reports whether an address is in the cluster's networks.
func (n *proxyNetwork) routed(a netip.Addr) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, p := range n.link.Routes {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// dial connects a client of the proxy to HOST:PORT. It tries the addresses of a name in order.
func (n *proxyNetwork) dial(ctx context.Context, network, address string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	number, err := net.DefaultResolver.LookupPort(ctx, network, port)
	if err != nil {
		return nil, err
	}
	addrs := []netip.Addr{}
	if a, err := netip.ParseAddr(host); err == nil {
		addrs = append(addrs, a.Unmap())
	} else if addrs, err = n.resolver.Lookup(ctx, host); err != nil {
		return nil, err
	}
	var errs []error
	for i, a := range addrs {
		conn, err := n.dialAddr(ctx, network, netip.AddrPortFrom(a, uint16(number)), len(addrs)-i)
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// dialAddr connects to one address. It uses the time that is left in equal shares for that many attempts.
func (n *proxyNetwork) dialAddr(
	ctx context.Context, network string, to netip.AddrPort, attempts int,
) (net.Conn, error) {
	if end, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(end)/time.Duration(attempts))
		defer cancel()
	}
	if n.routed(to.Addr()) {
		return n.inside(ctx, network, to)
	}
	return connection.DialOutside(ctx, network, to)
}
