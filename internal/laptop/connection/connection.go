// Package connection makes one connection to one cluster, from a kubeconfig to "Connected", and keeps it. It checks
// that the connection works before it reports so. internal/laptop/daemon owns the connections. This package needs no
// root: Network does what requires root.
//
//	Run ─▶ find or install the manager ─▶ open a session ─▶ hello, lease ─▶ choose the netstack ─▶ plan the routes
//	    ─▶ create the TUN device, set routes and names ─▶ probe ─▶ connected ─▶ follow changes ─▶ ctx ends: remove all
//
// Independent steps run at the same time: Prepared dials while the manager is verified, and the chooser looks at the
// cluster while the session opens.
//
// A Connection consists of parts. Each owns its state, and each shared value has one writer:
//
//	traffic manager
//	   │ hello, state, names                        port-forward, api-proxy, direct
//	   ▼                                                   │
//	handshake ─▶ view ──┬─▶ routes ─▶ Network           manager, transports
//	   │                │      │ inner networks            │ dial
//	   │                │      ▼                           ▼
//	   ├─ lease ────────┼─▶ packets ══ packet streams ══ session ══▶ traffic manager
//	   │                │      ▲
//	   │                │      │ system or gvisor
//	   │                └─▶ chooser ─▶ gateway in the manager's pod
//	   └─ names ───────────────▶ zone ─▶ the machine's resolver
//	                              ▲
//	                            hosts: addresses of names under the extra domains, which routes routes
//
// Every part reports to status. The parts run in these goroutines:
//
//	establish      manager.ensure, chooser.choose, routes.bringUp, checker.check; then it starts the next two
//	maintain       routes: plans and applies again when the view or the namespace changes
//	keepLease      renews the lease of a temporary manager
//	watchNetwork   probes all conns when this machine's network changes; watchWake, when it has woken up
//	chooser.watch  replaces a gateway that is gone, or changes to gvisor
//	OnSession      handshake: one conversation per transport session, one after the other
package connection

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/install"
	"kubevpn/internal/kube/podconn"
	"kubevpn/pkg/protocol/dns"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

// helloTimeout limits the first session: the dial to the manager's pod, and its hello.
const helloTimeout = 30 * time.Second

// Network changes this machine's network on behalf of one connection. When Run has returned, the owner of the
// connection removes whatever the connection set. All methods may be called concurrently.
type Network interface {
	// CreateTUN creates a TUN device with the MTU, in bytes, and returns its descriptor. The caller owns the
	// descriptor. The name of the file is that of the interface, which may differ from name. The kernel removes the
	// device when its last descriptor is closed.
	CreateTUN(ctx context.Context, name string, mtu int) (*os.File, error)
	// SetLink sets or replaces the connection's link: its addresses, its routes, and name resolution through it.
	// CreateTUN must have created the device, and its descriptor must be open. SetLink returns what applies to the
	// whole machine afterwards. It fails with api.ExitOverlap if a route overlaps a route of another connection.
	SetLink(ctx context.Context, link api.Link) (api.NetworkApplied, error)
	// Others returns the links of the other connections.
	Others() []api.Link
	// RemoveLink undoes SetLink. Call it before the device closes: the network state contains the links of all
	// connections, and nobody can apply it while it names a device that does not exist. RemoveLink returns nil if the
	// connection has no link.
	RemoveLink(ctx context.Context) error
	// SetZone replaces the names that the connection resolves for this machine; nil means none. The zone of an earlier
	// connection takes precedence for names that both resolve. The caller must not change the zone afterwards.
	SetZone(zone *dns.Zone) error
	// DomainTaken reports whether an earlier connection of this machine has the domain, without dots at its ends, as
	// its cluster domain or as an extra domain. That connection resolves the names that both clusters have.
	DomainTaken(domain string) bool
	// Reserve reserves the networks that contain the connection's inner addresses, in place of those that it reserved
	// before. It returns nil on success. If another connection has reserved an overlapping network, Reserve changes
	// nothing and returns all networks that other connections have reserved.
	Reserve(networks []netip.Prefix) (others []netip.Prefix)
	// ServeDNS answers DNS queries on sockets inside the tunnel: as on loopback, or if zone is not empty, as for
	// programs with the search list of a pod of the zone with that Name. It blocks until ctx ends, which returns nil,
	// or until a socket fails, and closes all sockets before it returns.
	ServeDNS(ctx context.Context, zone string, packets []net.PacketConn, listeners []net.Listener) error
}

// Config configures New.
type Config struct {
	Request api.ConnectRequest
	Network Network
	// Dial and Lookup say where the device is. At most one of them is set:
	//
	//	neither  in this machine's network namespace, which sends it only traffic for the cluster
	//	Dial     isolated, in a network namespace of its own, which sends it everything
	//	Lookup   proxied: there is none, because programs use a proxy of this process
	//
	// Dial connects from the device's namespace. The connection opens sockets of this process for traffic outside of
	// the cluster.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Lookup resolves a name as programs do that use the proxy. SetLink receives a link with routes and domains, but
	// without a name and addresses.
	Lookup func(ctx context.Context, name string) ([]netip.Addr, error)
	// Via returns from where the flows of the connection leave, unless Request.Egress is api.EgressNone: then it only
	// gives the program the pod's localhost. Nil: they leave from the traffic manager.
	Via      func(*Connection) (Via, error)
	Prepared *Prepared       // for Request; New owns it. Nil: the connection prepares itself
	Client   []byte          // secret of this user on this laptop: clientID derives an identity for each manager
	Progress func(api.Event) // may be called concurrently; must not block for long
	Logger   *slog.Logger
}

// shared is what the parts of a connection have in common. Each value has one writer, or writers of separate fields.
type shared struct {
	cfg       *Config
	log       *slog.Logger
	cluster   *client.Cluster
	pods      *podconn.Dialer             // in cluster
	status    *status                     // written by every part: see report
	view      *wakeup.Value[view]         // written by handshake
	current   *current                    // written by handshake
	names     *names                      // written by handshake, or by names.follow
	packets   *packetPath                 // its steering is written by handshake, routes and chooser
	hosts     *hosts                      // written by the machine's resolver, routes and packets
	flows     *flows                      // written by the netstack's dialer
	namespace *wakeup.Value[string]       // in which short names are looked up first; written by SetNamespace
	reached   *wakeup.Value[[]netip.Addr] // of the manager, outside of the tunnel; written by direct
	mappings  *appliedMappings            // as applied; written by routes
	shortcuts *shortcuts                  // written by intercepts
	via       Via                         // nil: flows leave from the traffic manager; never changes after New
	changed   wakeup.Signal               // wakes routes: something that the plan depends on may have changed
}

// Connection is one connection. Run is called once. The other methods are safe for concurrent use at any time.
type Connection struct {
	*shared
	*manager
	objectNames *objectNames
	client      *transport.Client
	transports  *transports
	handshake   *handshake
	chooser     *chooser
	routes      *routes
	checker     *checker
	pod         Via              // nil: there is no Via
	moved       wakeup.Broadcast // sent by onMove
	lost        wakeup.Signal    // raised when the session has lost its last conn
}

// New reads the kubeconfig. It opens no network connection. Errors are *api.Error.
func New(cfg Config) (*Connection, error) {
	if name := cfg.Request.Name; name != "" && alias(&cfg.Request) == "" {
		return nil, api.Errorf(api.ExitUsage, "--name: %q cannot end names of the cluster", name).
			WithHint("choose a word of letters, digits and dashes that is no domain of the Internet: --name staging")
	}
	if cfg.Prepared == nil {
		p, err := Prepare(cfg.Request, cfg.Logger)
		if err != nil {
			return nil, err
		}
		cfg.Prepared = p
	}
	c := newConnection(cfg)
	if cfg.Via != nil {
		via, err := cfg.Via(c)
		if err != nil {
			return nil, err
		}
		if c.pod = via; cfg.leavesPod() {
			c.via = via
		}
	}
	return c, nil
}

// newConnection puts the parts together. It starts nothing.
func newConnection(cfg Config) *Connection {
	of := cfg.Prepared.cluster
	s := &shared{
		cfg: &cfg, log: cfg.Logger, cluster: of, pods: cfg.Prepared.pods,
		view: new(wakeup.Value[view]), current: new(current), names: newNames(), namespace: new(wakeup.Value[string]),
		reached: new(wakeup.Value[[]netip.Addr]), changed: wakeup.NewSignal(), flows: new(flows),
		mappings: new(appliedMappings), shortcuts: &shortcuts{open: newRecent()},
	}
	s.status = newStatus(&cfg, api.Connection{
		ID: of.ConnectionID(), Cluster: of.Name(), ClusterID: of.ID(), Server: of.Server(), Context: of.Context(),
		Status:    api.StatusConnecting,
		Addresses: []netip.Addr{}, CIDRs: []netip.Prefix{}, Checks: []api.Check{}, Since: time.Now(),
		AllowInbound: cfg.Request.AllowInbound, Settings: cfg.Request.Settings,
	})
	s.namespace.Update(func(n *string) { *n = cfg.Request.Namespace })
	s.hosts = newHosts(&cfg.Request, s.flows, func() string { return s.view.Load().state.DNSDomain },
		func(w string) { s.status.warn(w) }, cfg.Logger)
	s.packets = newPacketPath(s.current, s.hosts, s.shortcuts, cfg.Logger)
	s.packets.steer(func(to *steering) { to.foreign, to.open = cfg.isolated(), cfg.Request.AllowInbound })

	c := &Connection{shared: s, manager: &manager{shared: s, prepared: cfg.Prepared}, objectNames: newObjectNames(),
		lost: wakeup.NewSignal()}
	c.transports = &transports{shared: s, manager: c.manager, tickets: newTickets(), direct: newDirect(s)}
	c.handshake = &handshake{shared: s, manager: c.manager,
		retry: func() { c.client.Retry() }}
	c.chooser = newChooser(s, c.manager)
	c.routes = &routes{shared: s, zone: newZone(s, c.Dial)}
	c.checker = &checker{shared: s, routes: c.routes, chooser: c.chooser, probe: s.prober(c.DialFlow).run}
	c.client = transport.NewClient(transport.ClientConfig{
		Dial: c.manager.dial, DialTimeout: dialTimeout, OnSession: c.handshake.onSession, OnState: c.onState,
		Logger:    cfg.Logger,
		Preferred: c.transports.preferred(), Forced: c.transports.forced() != "",
		OnPreferred: c.transports.onPreferred,
	})
	return c
}

// Cluster returns the connection's cluster, with the credentials of the connection.
func (c *Connection) Cluster() *client.Cluster { return c.cluster }

// Connected returns a channel that is closed once a name, a pod and a ClusterIP were reached through the tunnel.
func (c *Connection) Connected() <-chan struct{} { return c.status.established }

// Status returns a snapshot.
func (c *Connection) Status() api.Connection {
	out := c.status.snapshot()
	out.Namespace = c.namespace.Load()
	place := c.manager.location.Load()
	out.ManagerNamespace, out.ManagerPod = place.namespace, place.pod
	if hello := c.view.Load().hello; hello != nil {
		out.ManagerVersion = hello.Version
	}
	out.DNS.StaleAnswers, out.DNS.Hosts = c.routes.zone.cache.Stale(), c.hosts.shown()
	out.Transport, out.Transports = c.transports.describe(out.Since)
	for _, t := range out.Transports {
		if t.State == api.TransportInUse {
			out.Seconds = t.Seconds
		}
	}
	if c.via != nil {
		via := c.via.Status()
		out.Via = &via
	}
	if out.Error == nil {
		out.Error = c.cluster.LoginRequired()
	}
	return out
}

// SetCredential replaces the credential of the user's credential plugin. Open flows continue.
func (c *Connection) SetCredential(credential *api.Credential) error {
	return c.cluster.SetCredential(credential)
}

// SetNamespace changes the namespace in which short names are looked up first.
func (c *Connection) SetNamespace(namespace string) {
	c.namespace.Update(func(n *string) { *n = namespace })
	c.changed.Raise()
}

// Run connects and stays connected until ctx ends, which returns nil, or until the connection fails for good.
func (c *Connection) Run(ctx context.Context) error {
	defer c.routes.zone.nameservers.Close()
	defer c.prepared.Close()
	inner, refuse := context.WithCancelCause(ctx)
	defer refuse(nil)
	c.handshake.refuse = refuse
	g, gctx := errgroup.WithContext(inner)
	g.Go(func() error { return c.establish(gctx, g) })
	err := g.Wait()
	if inner.Err() != nil {
		err = context.Cause(inner)
	}
	if ctx.Err() != nil {
		c.status.change(func(r *report) { r.shown.Status = api.StatusDisconnecting })
		return nil
	}
	failure := c.cluster.Explain(err)
	c.status.change(func(r *report) { r.shown.Status, r.shown.Error = api.StatusFailed, failure })
	return failure
}

// establish does the steps up to connected. It starts the tasks that continue afterwards in g.
func (c *Connection) establish(ctx context.Context, g *errgroup.Group) error {
	c.prepared.Begin()
	found, fctx := errgroup.WithContext(ctx)
	found.Go(func() error { return c.cluster.Resolve(fctx) })
	found.Go(func() error {
		if err := c.prepared.open(fctx); err != nil {
			return err
		}
		return c.manager.ensure(fctx)
	})
	if err := found.Wait(); err != nil {
		return err
	}
	if c.manager.location.Load().lease != (install.Lease{}) {
		g.Go(func() error { return c.keepLease(ctx) })
	}
	if err := checkDefaults(&c.cfg.Request); err != nil {
		return err
	}
	if !c.cfg.proxied() {
		g.Go(func() error {
			c.chooser.look(ctx, c.cluster.KubeProxy)
			return nil
		})
	}
	if err := c.openSession(ctx, g); err != nil {
		return err
	}
	awaitVia := c.startVia(ctx, g)
	if err := c.checkDomains(); err != nil {
		return err
	}
	if slices.Contains(c.transports.used(), api.TransportDirect) {
		g.Go(func() error { // before the routes
			c.transports.direct.survey(ctx)
			return nil
		})
	}
	if !c.cfg.proxied() {
		if err := c.chooser.choose(ctx); err != nil {
			return err
		}
	}
	if err := c.routes.learn(ctx, g); err != nil {
		return err
	}
	if err := awaitVia(); err != nil {
		return err
	}
	if err := c.routes.bringUp(ctx, g); err != nil {
		return err
	}
	g.Go(func() error { return c.routes.maintain(ctx) }) // an answer of cluster DNS may wait for it
	if err := c.checker.check(ctx); err != nil {
		return err
	}
	g.Go(func() error { return watchWake(ctx, c.onWake) })
	g.Go(func() error { return c.watchNetwork(ctx) })
	g.Go(func() error { return c.cluster.Follow(ctx, c.Moved) })
	g.Go(func() error { return c.chooser.watch(ctx) })
	g.Go(func() error { return c.objectNames.run(ctx, c.lookUpObject) })
	c.status.establish()
	return nil
}

// startVia starts the Via, if there is one. The function that it returns waits until flows can leave from a pod, and
// the pod's localhost answers. From then on routes follow the names of the pod.
func (c *Connection) startVia(ctx context.Context, g *errgroup.Group) (await func() error) {
	if c.pod == nil {
		return func() error { return nil }
	}
	without := make(chan struct{}) // closed if there is no localhost, which a connection can do without
	g.Go(func() error {
		err := c.pod.Run(ctx)
		if c.via != nil {
			return err
		}
		if err != nil {
			c.status.warn("the pod's localhost does not answer: " + err.Error())
		}
		close(without)
		return nil
	})
	return func() error {
		select {
		case <-c.pod.Begun():
		case <-without:
		case <-ctx.Done():
			return ctx.Err()
		}
		if c.via != nil {
			g.Go(func() error { return c.followNamesOfPod(ctx) })
		}
		return nil
	}
}

// followNamesOfPod makes routes plan again whenever flows leave from another pod, until ctx ends.
func (c *Connection) followNamesOfPod(ctx context.Context) error {
	for {
		_, changed := c.via.Names()
		c.changed.Raise()
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// openSession starts the transport and waits for the manager's hello.
func (c *Connection) openSession(ctx context.Context, g *errgroup.Group) error {
	done := c.status.step("Opening the tunnel")
	g.Go(func() error { return c.client.Run(ctx) })
	bounded, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	if _, err := c.status.report.Await(bounded, func(r report) bool { return r.greeted }); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if cause := c.status.snapshot().Error; cause != nil {
			return cause
		}
		return noAnswer(c.manager.location.Load().namespace)
	}
	if err := c.transports.awaitForced(bounded); err != nil {
		return err
	}
	st := c.Status()
	done("%s, pod %s", st.Transport, st.ManagerPod)
	return nil
}

// onState reports the transport's state.
func (c *Connection) onState(state transport.State, cause error) {
	var failure *api.Error
	if cause != nil {
		c.log.Info("transport", "state", state, "cause", cause)
		failure = c.cluster.Explain(cause)
	}
	c.status.change(func(r *report) {
		if failure != nil {
			r.shown.Error = failure
		}
		r.attached = state == transport.StateConnected
		r.greeted = r.greeted && state != transport.StateConnecting
	})
	if state == transport.StateConnected {
		c.changed.Raise() // the API server may have another address, which must stay out of the tunnel
	} else {
		c.lost.Raise()
	}
}
