package manager

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/incluster/access"
	"kubevpn/internal/incluster/dial"
	"kubevpn/internal/incluster/manager/router"
	"kubevpn/internal/incluster/manager/session"
	"kubevpn/internal/incluster/manager/watch"
	"kubevpn/internal/process/footprint"
	"kubevpn/internal/process/metrics"
	"kubevpn/pkg/datapath/balancer"
	"kubevpn/pkg/wire/nonblock"
	"kubevpn/pkg/wire/transport"
)

// Config configures a Manager.
type Config struct {
	Listen string // for sessions: "127.0.0.1:10800"
	Health string // for GET /livez and /readyz: ":10801"
	Proxy  string // for conns by the transports api-proxy and direct: ":10802"; empty: none
	// Metrics is the address for GET /metrics: ":10803"; empty: none.
	Metrics string

	Kube kubernetes.Interface // nil: no API access; VIPs are dialed as they are
	// WatchNamespaces are the namespaces whose Services and EndpointSlices the manager watches. Empty: all.
	WatchNamespaces []string
	// AllowCIDRs and DenyCIDRs limit what the manager dials for laptops: see access.Filter. No AllowCIDRs: everything.
	AllowCIDRs, DenyCIDRs []netip.Prefix
	// AllowNamespaces are those whose Services and pods laptops may reach: see access.Policy. Empty: all.
	AllowNamespaces []string
	// APIServer is the ClusterIP and port of the Service default/kubernetes as the pod's environment has it. It
	// may be zero.
	APIServer netip.AddrPort

	// Authorize: laptops reach only pods of which their user may forward ports: see access.Policy. It needs Kube.
	Authorize                    bool
	PodName, Namespace, NodeName string
	PodIPs                       []netip.Addr
	ResolvConf                   string // path; empty: no cluster DNS
	GatewaySocket                string // to which a gateway connects (api.GatewaySocket); empty: none
	Logger                       *slog.Logger
}

// Manager serves laptops. Create it with New.
type Manager struct {
	cfg      Config
	log      *slog.Logger
	balancer *balancer.Balancer
	filter   *access.Filter
	limited  bool // an admin limits what laptops reach
	dialer   *dial.Dialer
	router   *router.Router
	watch    *watch.Publisher
	sessions *session.Server
	budget   *transport.Budget  // of all sessions
	gateways net.Listener       // nil: no gateway can connect
	proxy    *session.ProxyPort // nil: none
	metrics  net.Listener       // nil: none
}

// New returns a Manager. It does not touch the network.
func New(cfg Config) *Manager {
	m := &Manager{
		cfg: cfg, log: cfg.Logger, balancer: balancer.New(cfg.NodeName),
		filter: &access.Filter{Pod: cfg.PodIPs, Allow: cfg.AllowCIDRs, Deny: cfg.DenyCIDRs},
		budget: transport.NewBudget(maxStreams, maxBuffered),
	}
	policy := access.New(access.Config{
		Namespaces: cfg.AllowNamespaces, Authorize: cfg.Authorize, Filter: m.filter, Service: m.balancer.Service,
		HasAddress: func(ctx context.Context, pod access.PodRef) (bool, error) {
			return watch.HasAddress(ctx, cfg.Kube, pod)
		},
		Logger: m.log,
	})
	m.limited = policy != nil || len(cfg.AllowCIDRs)+len(cfg.DenyCIDRs) > 0
	m.router = router.New(m.filter.AllowsDirect, func() { m.watch.Changed() }, m.log)
	m.watch = watch.New(watch.Config{
		Kube: cfg.Kube, Namespaces: cfg.WatchNamespaces,
		Self:     watch.Self{Namespace: cfg.Namespace, Node: cfg.NodeName, Addrs: cfg.PodIPs, APIServer: cfg.APIServer},
		Balancer: m.balancer, Filter: m.filter, Policy: policy, GVisorOnly: m.limited, Describe: m.router.Describe,
		Laptops: func() int { return m.sessions.Laptops() }, Logger: m.log,
	})
	m.dialer = dial.New(m.balancer)
	m.dialer.Check, m.dialer.CheckHost, m.dialer.Policy = m.filter.Check, m.filter.CheckHost, policy
	m.dialer.InRange = m.watch.InServiceRange
	m.sessions = session.New(session.Config{PodName: cfg.PodName, Kube: cfg.Kube, Authorize: cfg.Authorize,
		Limited: m.limited, Dialer: m.dialer, Router: m.router, Watch: m.watch, Logger: m.log})
	return m
}

// Run serves laptops until ctx ends, and then returns nil.
func (m *Manager) Run(ctx context.Context) error {
	if m.cfg.ResolvConf != "" {
		resolv, err := access.ReadResolvConf(m.cfg.ResolvConf)
		if err != nil {
			return err
		}
		if domain := resolv.Domain(m.cfg.Namespace); domain != "" {
			m.watch.Self.DNS, m.filter.DNS = watch.DNS{Servers: resolv.Servers, Domain: domain}, resolv.Servers
		}
	}
	m.watch.Self.NoEcho = !dial.MayPing()
	var network net.ListenConfig
	sessions, err := network.Listen(ctx, "tcp", m.cfg.Listen)
	if err != nil {
		return fmt.Errorf("listening for sessions: %w", err)
	}
	defer sessions.Close()
	health, err := network.Listen(ctx, "tcp", m.cfg.Health)
	if err != nil {
		return fmt.Errorf("listening for health checks: %w", err)
	}
	defer health.Close()
	if m.cfg.Proxy != "" {
		l, err := network.Listen(ctx, "tcp", m.cfg.Proxy)
		if err != nil {
			return fmt.Errorf("listening on the proxy port: %w", err)
		}
		defer l.Close()
		if m.proxy, err = session.NewProxyPort(l, m.log); err != nil {
			return err
		}
		m.watch.Self.ProxyPort = m.proxy.Port()
	}
	if m.cfg.GatewaySocket != "" && !m.limited { // see acceptControl
		if m.gateways, err = router.ListenGateways(ctx, m.cfg.GatewaySocket); err != nil {
			return fmt.Errorf("listening for a gateway: %w", err)
		}
		defer m.gateways.Close()
	}
	if m.cfg.Metrics != "" {
		if m.metrics, err = network.Listen(ctx, "tcp", m.cfg.Metrics); err != nil {
			return fmt.Errorf("listening for metrics: %w", err)
		}
		defer m.metrics.Close()
	}
	m.log.Info("traffic manager", "sessions", sessions.Addr(), "health", health.Addr(), "proxy", m.cfg.Proxy,
		"metrics", m.cfg.Metrics, "dns", m.watch.Self.DNS.Servers, "domain", m.watch.Self.DNS.Domain,
		"ping", !m.watch.Self.NoEcho, "watch-namespaces", m.cfg.WatchNamespaces,
		"allow-cidr", m.cfg.AllowCIDRs, "deny-cidr", m.cfg.DenyCIDRs, "allow-namespaces", m.cfg.AllowNamespaces,
		"authorize", m.cfg.Authorize)
	return m.serve(ctx, sessions, health)
}

func (m *Manager) serve(ctx context.Context, sessions, health net.Listener) error {
	config := transport.ServerConfig{
		OnSession: m.sessions.Serve,
		Budget:    m.budget,
		Admission: true,
		MaxLinks:  maxLinks, MaxSessions: maxSessions,
		Logger: m.log,
	}
	listeners := []net.Listener{nonblock.Listener{Listener: sessions, Unsent: session.Unsent}}
	if m.proxy != nil {
		m.sessions.Proxy = m.proxy
		config.OnRefused = m.proxy.Refused
		listeners = append(listeners, m.proxy)
	}
	server := transport.NewServer(config)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return m.watch.Run(ctx) })
	g.Go(func() error { return m.serveHealth(ctx, health) })
	g.Go(func() error { return footprint.ReleaseMemory(ctx) })
	if m.gateways != nil {
		g.Go(func() error { return m.router.ServeGateways(ctx, m.gateways) })
	}
	if m.proxy != nil {
		g.Go(func() error { return m.proxy.Run(ctx) })
	}
	if m.metrics != nil {
		g.Go(func() error { return metrics.Serve(ctx, "metrics", m.metrics, metrics.Handler(m.collector())) })
	}
	g.Go(func() error { return server.Serve(ctx, listeners...) })
	return g.Wait()
}
