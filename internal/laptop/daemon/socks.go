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
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/connection"
	"kubevpn/pkg/protocol/dns"
	"kubevpn/pkg/protocol/httpmatch"
	"kubevpn/pkg/protocol/socks"
)

// socksUser is the user name of every proxy. The password is the secret.
const socksUser = "kubevpn"

// proxy lets programs of this machine reach a connection: SOCKS5 and HTTP on a listener. It is also the Helper of that
// connection, which has no device: the routes are in this process.
//
//	program ─▶ proxy ── name ─▶ resolver: cluster DNS, or this machine's
//	                 └─ address ─┬─ the cluster's ══▶ traffic manager, or a pod
//	                             └─ all else ───────▶ a socket of this process
type proxy struct {
	unprivileged
	listener       net.Listener
	headers        []httpmatch.Named // added to requests
	password, page string
	logger         *slog.Logger
	link           atomic.Pointer[api.Link] // nil: there is none yet

	// run sets these.
	resolver   *dns.Resolver
	inPod      bool // this machine is a pod of the cluster
	inside     func(netip.Addr) bool
	dialInside func(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error)
}

func newProxy(listener net.Listener, headers []httpmatch.Named, logger *slog.Logger) *proxy {
	return &proxy{
		unprivileged: newUnprivileged(), listener: listener, headers: headers, password: rand.Text(),
		page: "/" + rand.Text() + ".pac", logger: logger,
	}
}

// status returns what a program needs to use the proxy.
func (p *proxy) status() *api.SOCKS {
	at := p.listener.Addr().String()
	return &api.SOCKS{Address: at, User: socksUser, Password: p.password, PAC: "http://" + at + p.page}
}

// run runs conn, and serves the proxy while it is connected. It closes the listener if it has served it.
func (p *proxy) run(ctx context.Context, conn Connection, resolver *dns.Resolver) error {
	p.inside, p.dialInside, p.resolver = conn.Inside, conn.DialFlow, resolver
	p.inPod = conn.Cluster().InPod()
	ctx, cancel := context.WithCancel(ctx)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer cancel()
		return conn.Run(ctx)
	})
	g.Go(func() error {
		select {
		case <-conn.Connected():
			return p.serve(ctx)
		case <-ctx.Done():
			return nil
		}
	})
	return g.Wait()
}

// serve serves the proxy until ctx ends.
func (p *proxy) serve(ctx context.Context) error {
	server := socks.New(socks.Config{
		User: socksUser, Password: p.password, Dial: p.dial, Modify: p.addHeaders, Logger: p.logger,
		Page: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/x-ns-proxy-autoconfig")
			_, _ = w.Write(p.pac()) // it fails if the client has gone
		}),
		PagePath: p.page,
	})
	if err := server.Serve(ctx, p.listener); err != nil {
		return api.Errorf(api.ExitNetwork, "the proxy ended: %w", err)
	}
	return nil
}

func (p *proxy) CreateTUN(context.Context, string, int) (*os.File, error) {
	return nil, fmt.Errorf("a proxy has no device: %w", errors.ErrUnsupported)
}

// Apply stores the link. The last one stays while the connection ends.
func (p *proxy) Apply(_ context.Context, state api.NetworkState) (api.NetworkApplied, error) {
	if len(state.Links) > 0 {
		p.link.Store(&state.Links[0]) // there is one connection
	}
	return api.NetworkApplied{ResolverMode: api.ResolverProxy}, nil
}

func (p *proxy) Changes() <-chan api.NetworkApplied { return nil }

// routed reports whether a name of the cluster may lead to an address: to one in the cluster's networks, and in a pod
// to any, because the pod reaches it as others do. So it reaches the API server, which is never in these networks.
func (p *proxy) routed(a netip.Addr) bool {
	link := p.link.Load()
	covers := func(r netip.Prefix) bool { return r.Contains(a) }
	return p.inPod || link != nil && slices.ContainsFunc(link.Routes, covers)
}

// addHeaders adds headers to a request for the cluster, unless the client has set them. Baggage gets another member.
func (p *proxy) addHeaders(r *http.Request) {
	if len(p.headers) == 0 {
		return
	}
	addrs, err := p.addresses(r.Context(), r.URL.Hostname())
	if err != nil || !slices.ContainsFunc(addrs, p.inside) { // the dial tells of err
		return
	}
	for _, h := range p.headers {
		switch name := http.CanonicalHeaderKey(h.Name); {
		case r.Header[name] == nil:
			r.Header.Set(name, h.Value)
		case name == "Baggage":
			r.Header.Set(name, strings.Join(append(r.Header[name], h.Value), ","))
		}
	}
}

// addresses returns the addresses of a name, or the address that host is.
func (p *proxy) addresses(ctx context.Context, host string) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(host); err == nil {
		return []netip.Addr{a.Unmap()}, nil
	}
	return p.resolver.Lookup(ctx, host)
}

// dial connects a client of the proxy to HOST:PORT. It tries the addresses of a name in order.
func (p *proxy) dial(ctx context.Context, network, address string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	number, err := net.DefaultResolver.LookupPort(ctx, network, port)
	if err != nil {
		return nil, err
	}
	addrs, err := p.addresses(ctx, host)
	if err != nil {
		return nil, err
	}
	var errs []error
	for i, a := range addrs {
		conn, err := p.dialAddr(ctx, network, netip.AddrPortFrom(a, uint16(number)), len(addrs)-i)
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// dialAddr connects to one address. It uses the time that is left in equal shares for that many attempts.
func (p *proxy) dialAddr(
	ctx context.Context, network string, to netip.AddrPort, attempts int,
) (net.Conn, error) {
	if end, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(end)/time.Duration(attempts))
		defer cancel()
	}
	if p.inside(to.Addr()) {
		return p.dialInside(ctx, network, to)
	}
	return connection.DialOutside(ctx, network, to)
}
