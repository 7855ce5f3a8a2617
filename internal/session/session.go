// Package session is one connection to one cluster, from a kubeconfig to "Connected" and back: it wires the
// cluster's API (internal/cluster), the traffic manager (internal/install), the transport, the netstack and the
// laptop's network together, and proves that they work before it says so.
//
//	Run ─▶ reach the API server ─▶ find or install the manager ─▶ transport session ─▶ greeting, lease
//	    ─▶ choose the netstack ─▶ plan: which prefixes ─▶ clash with a local network? ─▶ TUN, routes, names ─▶ canary ─▶ connected
//	    ─▶ follow the manager: prefixes and names change, carriers are mended ─▶ ctx ends: all is taken back
//
// It sits under internal/daemon, which owns it, and holds no privilege: what needs root it asks of Network.
package session

import (
	"cmp"
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
	"time"

	"go4.org/netipx"
	"golang.org/x/sync/errgroup"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/internal/config"
	"kubevpn/internal/version"
	"kubevpn/pkg/dns"
	"kubevpn/pkg/transport"
)

// mtu of the device with the gvisor netstack, and of every device at first. Connections end on the laptop, so it says
// nothing about the way to the cluster: the larger, the fewer packets, up to what one IPv4 packet holds.
const mtu = 65520

// greetingTimeout bounds the first session: dialling the manager's pod and its greeting.
const greetingTimeout = 30 * time.Second

// Network is what a session asks of the machine. What it has set is taken back by the owner when Run has returned.
type Network interface {
	CreateTUN(ctx context.Context, name string, mtu int) (*os.File, error)
	SetLink(ctx context.Context, link api.Link) (api.NetworkApplied, error)
	// RemoveLink undoes SetLink. It comes before the device is closed: a state that names a device that is gone
	// cannot be applied, and another connection may apply one at any time.
	RemoveLink(ctx context.Context, name string) error
	SetZone(zone *dns.Zone) error
	// DomainTaken reports whether an earlier connection of this machine has the same cluster domain.
	DomainTaken(domain string) bool
	// Reserve says in which networks the session's inner addresses are, in the place of those that it said before. If
	// another session has reserved something that overlaps them, nothing changes, and it returns all that others have.
	Reserve(networks []netip.Prefix) (others []netip.Prefix)
	// ServeDNS answers queries on sockets inside the tunnel until ctx ends, then closes them.
	ServeDNS(ctx context.Context, packets []net.PacketConn, listeners []net.Listener) error
}

// Config is what New needs.
type Config struct {
	Request api.ConnectRequest
	Network Network
	// Dial connects from the network namespace that the device is in, to which everything is sent: what is not the cluster's goes
	// by sockets of this process then. Nil: the device is this machine's, which sends it what is the cluster's.
	Dial     func(ctx context.Context, network, address string) (net.Conn, error)
	ClientID string          // stable identity of this user on this laptop
	Progress func(api.Event) // may be called concurrently; never blocks for long
	Logger   *slog.Logger
}

// Session is one connection. Run is called once; the other methods may be called at any time, concurrently.
type Session struct {
	cfg       Config
	log       *slog.Logger
	cluster   *cluster.Cluster
	client    *transport.Client
	current   *current
	lanes     *lanes
	gateways  gateways
	canary    func(context.Context, canaryTargets) []api.Check
	names     *names
	connected chan struct{}

	nameservers *dns.Nameservers // cluster DNS, through the tunnel
	zone        dns.Zone         // as the resolver has it; of apply alone
	servers     []netip.AddrPort // as nameservers has them; likewise
	facts       facts            // that the netstack was chosen by; of establish, then of watchGateway

	// serve answers DNS at an address inside the tunnel, until stop is called; at is where that is done now. They are
	// of apply alone; nil before there is a netstack.
	serve func(at netip.Addr) (stop func(), err error)
	at    netip.Addr
	stop  func()

	updated chan struct{} // buffered 1: the plan may have changed
	renamed chan struct{} // buffered 1: the namespace may have changed
	fatal   chan error    // buffered 1: the manager refused for good

	gatewayChanged chan struct{} // buffered 1: the gateway may have come or gone

	tickets *tickets

	mu      sync.Mutex
	moved   chan struct{} // closed and replaced when greeting, or the status, has changed
	status  api.Connection
	proxy   transport.ShortcutStatus // the api-proxy transport
	carried bool                     // the transport has a session, with a link that is up
	greeted bool                     // by the manager at the other end of that session
	state   api.ManagerState
	own     cluster.CIDRs // what the user's own rights show; zero unless the manager lacks something
	address addressing
	avoid   []netip.Prefix // other connections' inner networks, as far as they were in the way
	inner   []netip.Prefix // inner networks that can be routed on this machine
	routed  *netipx.IPSet  // with a device that everything is sent to: what goes to the cluster
	gateway *api.Gateway   // the last that there was
	applied api.NetworkApplied
	link    api.Link
	warned  map[string]bool
	// greeting is the latest; nil: no manager has greeted us.
	greeting *api.ManagerHello
	// gatewayPod is the pod that the gateway was in.
	gatewayPod string
	// imageWarning is the warning, if there is one, that is moot once another manager greets us.
	imageWarning string
}

// New reads the kubeconfig. It opens no connection. Errors are *api.Error.
func New(cfg Config) (*Session, error) {
	if n := cfg.Request.Netstack; n != "" && !slices.Contains(config.Netstacks(), n) {
		return nil, api.Errorf(api.ExitUsage, "there is no netstack %q", n).WithHint("use --netstack with one of %s", strings.Join(config.Netstacks(), ", "))
	}
	c, err := cluster.Load(cfg.Request.Kubeconfig, cluster.Options{UserAgent: "kubevpn/" + version.String(), Logger: cfg.Logger})
	if err != nil {
		return nil, err
	}
	s := &Session{
		cfg:       cfg,
		log:       cfg.Logger,
		cluster:   c,
		current:   newCurrent(),
		names:     newNames(),
		connected: make(chan struct{}),
		updated:   make(chan struct{}, 1),
		renamed:   make(chan struct{}, 1),
		fatal:     make(chan error, 1),
		moved:     make(chan struct{}),
		tickets:   newTickets(),
		warned:    map[string]bool{},

		gatewayChanged: make(chan struct{}, 1),

		status: api.Connection{
			ID: c.ID(), Cluster: c.Name(), Server: c.Server(), Context: c.Context(), Namespace: cfg.Request.Namespace,
			Status:    api.StatusConnecting,
			Addresses: []netip.Addr{}, CIDRs: []netip.Prefix{}, Checks: []api.Check{}, Since: time.Now(),
		},
	}
	s.canary = canary{dial: s.dialDevice, resolver: s.resolver()}.run
	s.gateways = clusterGateways{c}
	s.lanes = newLanes(s.current, func() netip.Addr { return s.addressing().Laptop4 }, cfg.Logger)
	s.nameservers = dns.NewNameservers(dns.NameserversConfig{Name: c.ID(), Dial: s.dialDNS, Logger: cfg.Logger})
	s.client = transport.NewClient(transport.ClientConfig{
		Dial: s.dialManager, DialTimeout: dialTimeout, OnSession: s.onSession, OnState: s.onState, Logger: cfg.Logger,
		Shortcut: s.shortcut(), Forced: cfg.Request.Transport == api.TransportAPIProxy, OnShortcut: s.onShortcut,
	})
	return s, nil
}

// ID is the same for every connection to the same cluster.
func (s *Session) ID() string { return s.cluster.ID() }

// Connected is closed once a name, a pod and a ClusterIP were reached through the tunnel.
func (s *Session) Connected() <-chan struct{} { return s.connected }

// Status is a snapshot.
func (s *Session) Status() api.Connection {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.status
	c.CIDRs, c.Checks, c.Warnings = slices.Clone(c.CIDRs), slices.Clone(c.Checks), slices.Clone(c.Warnings)
	c.Transport, c.Transports = s.transports()
	return c
}

// SetNamespace changes the namespace in which short names are looked up first.
func (s *Session) SetNamespace(namespace string) error {
	s.mu.Lock()
	s.status.Namespace = namespace
	s.mu.Unlock()
	select {
	case s.renamed <- struct{}{}:
	default:
	}
	s.poke()
	return nil
}

// Run makes the connection and keeps it until ctx ends, which is not an error, or it cannot be kept.
func (s *Session) Run(ctx context.Context) error {
	defer s.nameservers.Close()
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.establish(gctx, g) })
	g.Go(func() error {
		select {
		case err := <-s.fatal:
			return err
		case <-gctx.Done():
			return gctx.Err()
		}
	})
	err := g.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if ctx.Err() != nil {
		s.status.Status = api.StatusDisconnecting
		return nil
	}
	s.status.Status = api.StatusFailed
	s.status.Error = s.cluster.Explain(err)
	s.move()
	return s.status.Error
}

// establish does the steps up to connected; what must go on afterwards it leaves to g.
func (s *Session) establish(ctx context.Context, g *errgroup.Group) error {
	if err := s.reachAPIServer(ctx); err != nil {
		return err
	}
	if err := s.ensureManager(ctx); err != nil {
		return err
	}
	if err := s.openSession(ctx, g); err != nil {
		return err
	}
	if err := s.chooseNetstack(ctx, s.cluster.Proxy); err != nil {
		return err
	}
	if err := s.learnNetworks(ctx, g); err != nil {
		return err
	}
	if err := s.bringUp(ctx, g); err != nil {
		return err
	}
	if err := s.prove(ctx); err != nil {
		return err
	}
	g.Go(func() error { return s.maintain(ctx) })
	g.Go(func() error { return s.watchWake(ctx) })
	g.Go(func() error { return s.watchGateway(ctx) })
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.connected)
	s.assess() // something may have happened since the proof
	return nil
}

// addressing is the tunnel's own addresses.
func (s *Session) addressing() addressing {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.address
}

// step reports that a step begins; the function that it returns reports its end.
func (s *Session) step(format string, args ...any) (done func(format string, args ...any)) {
	name := fmt.Sprintf(format, args...)
	s.log.Info(name)
	s.cfg.Progress(api.Event{Time: time.Now(), Step: name})
	return func(format string, args ...any) {
		detail := fmt.Sprintf(format, args...)
		s.log.Info(name, "result", detail)
		s.cfg.Progress(api.Event{Time: time.Now(), Step: name, Detail: detail, Done: true})
	}
}

// warn tells the user once, and keeps it in the status.
func (s *Session) warn(warnings ...string) {
	for _, w := range warnings {
		s.mu.Lock()
		known := s.warned[w]
		if !known {
			s.warned[w] = true
			s.status.Warnings = append(s.status.Warnings, w)
		}
		s.mu.Unlock()
		if !known {
			s.log.Warn(w)
			s.cfg.Progress(api.Event{Time: time.Now(), Warning: w})
		}
	}
}

// poke asks maintain to look again.
func (s *Session) poke() {
	select {
	case s.updated <- struct{}{}:
	default:
	}
}

func (s *Session) reachAPIServer(ctx context.Context) error {
	done := s.step("Reaching the API server")
	if err := s.cluster.Resolve(ctx); err != nil {
		return err
	}
	done("%s", s.cluster.Server())
	return nil
}

func (s *Session) openSession(ctx context.Context, g *errgroup.Group) error {
	done := s.step("Opening the tunnel")
	g.Go(func() error { return s.client.Run(ctx) })
	bounded, cancel := context.WithTimeout(ctx, greetingTimeout)
	defer cancel()
	if err := s.await(bounded, func() bool { return s.greeting != nil }); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.mu.Lock()
		why := s.status.Error
		s.mu.Unlock()
		if why != nil {
			return why
		}
		return api.Errorf(api.ExitNotReady, "the traffic manager does not answer").
			WithHint("`kubectl -n %s logs deploy/kubevpn-traffic-manager` may tell why.", s.Status().ManagerNamespace)
	}
	if err := s.forced(bounded); err != nil {
		return err
	}
	st := s.Status()
	done("%s, pod %s", st.Transport, st.ManagerPod)
	return nil
}

// await waits until ok, which is called with mu held, holds of the greeting and of the status.
func (s *Session) await(ctx context.Context, ok func() bool) error {
	for {
		s.mu.Lock()
		there, moved := ok(), s.moved
		s.mu.Unlock()
		if there {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// move wakes those who await. Call with mu held.
func (s *Session) move() {
	close(s.moved)
	s.moved = make(chan struct{})
}

// onState follows the transport.
func (s *Session) onState(state transport.State, cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if cause != nil {
		s.log.Info("transport", "state", state, "cause", cause)
		s.status.Error = s.cluster.Explain(cause)
	}
	s.carried = state == transport.StateConnected
	if state == transport.StateConnecting {
		s.greeted = false
	}
	s.assess()
	if s.carried {
		s.poke() // another address of the API server may have to be kept out of the tunnel
	}
}

// assess makes the status of a connection that was proved say whether packets have a way now; s.mu is held.
func (s *Session) assess() {
	defer s.move()
	select {
	case <-s.connected:
	default:
		return // Run and the steps say what is going on
	}
	switch {
	case s.status.Status == api.StatusFailed || s.status.Status == api.StatusDisconnecting:
	case !s.carried || !s.greeted:
		s.status.Status = api.StatusReconnecting // and onState has said why
	case s.lacksGateway():
		s.status.Status = api.StatusReconnecting
		s.status.Error = api.Errorf(api.ExitNetstack, "the gateway in the traffic manager's pod has gone; waiting for another")
	default:
		s.status.Status, s.status.Error = api.StatusConnected, nil
	}
}

// onSession greets the manager on a new session and follows it until the session ends.
func (s *Session) onSession(ctx context.Context, ts *transport.Session) {
	err := s.converse(ctx, ts)
	s.current.clear(ts)
	var refused *api.Error
	if errors.As(err, &refused) { // also when the session is over already: the manager ends what it has refused
		select {
		case s.fatal <- refused:
		default:
		}
		return
	}
	if ctx.Err() != nil {
		return
	}
	s.log.Warn("the control stream ended; opening a new session", "err", err)
	if err := ts.Close(); err != nil {
		s.log.Debug("closing the session", "err", err)
	}
}

func (s *Session) converse(ctx context.Context, ts *transport.Session) error {
	stream, err := ts.Open(ctx, transport.Request{Proto: transport.ProtoControl})
	if err != nil {
		return fmt.Errorf("opening the control stream: %w", err)
	}
	defer stream.Close()
	greeting, err := s.hello()
	if err != nil {
		return err
	}
	c, hello, err := startControl(stream, greeting)
	if err != nil {
		return err
	}
	address, err := s.addressing().leased(hello.Lease)
	if err != nil {
		return err
	}
	if others := s.cfg.Network.Reserve(address.Networks); len(others) > 0 {
		// It was made at the same time, and its routes are not in the kernel yet.
		s.mu.Lock()
		s.avoid = others
		s.mu.Unlock()
		return fmt.Errorf("the lease overlaps that of another connection, which has %v", others)
	}
	s.mu.Lock()
	s.state = hello.State
	s.address.Laptop4, s.address.Laptop6, s.address.Resolver, s.address.Networks = address.Laptop4, address.Laptop6, address.Resolver, address.Networks
	if before := s.status.ManagerVersion; before != "" && before != hello.Version {
		s.status.Warnings = slices.DeleteFunc(s.status.Warnings, func(w string) bool { return w == s.imageWarning })
	}
	s.status.ManagerPod, s.status.ManagerVersion = hello.Pod, hello.Version
	s.current.set(ts) // who waits for it may dial the pod
	s.greeting, s.greeted = hello, true
	s.learnGateway()
	s.assess()
	s.mu.Unlock()
	s.resteer()
	s.poke()
	return c.follow(ctx, s.handle)
}

// hello is what the laptop says of itself. It says that it means to use the system netstack as long as that may be: this
// is what lets its packets through, once there is a gateway.
func (s *Session) hello() (api.ClientHello, error) {
	avoid, err := s.taken()
	if err != nil {
		return api.ClientHello{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	use := cmp.Or(s.status.Netstack, s.asked())
	if use == api.NetstackAuto {
		use = api.NetstackSystem
	}
	return api.ClientHello{
		Protocol: api.Protocol, Version: version.String(), Client: s.cfg.ClientID,
		Namespace: s.status.Namespace, Scheduler: s.cfg.Request.Scheduler,
		Netstack: use, Lease: s.address.addrs(), Avoid: avoid,
		NoGSO: !s.lanes.gso(),
	}, nil
}

// handle takes one message of the manager.
func (s *Session) handle(m api.ControlMessage) {
	if m.Names != nil {
		s.names.apply(fromManager, *m.Names)
	}
	if m.State != nil {
		s.mu.Lock()
		s.state = *m.State
		s.learnGateway()
		s.assess()
		s.mu.Unlock()
		s.resteer() // the gateway may forward something else
	}
	s.poke()
}
