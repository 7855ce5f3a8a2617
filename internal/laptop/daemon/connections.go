package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/laptop/connection"
	"kubevpn/internal/laptop/intercept"
	"kubevpn/pkg/protocol/dns"
)

const (
	// endTimeout limits the Run of a connection after its context has ended. The end of the helper removes the rest.
	endTimeout = 15 * time.Second
	// helperLinger is the time that a helper stays without a connection. The CLI that started it is about to connect.
	helperLinger = 10 * time.Second
)

var (
	errNeedsHelper = errors.New("a root helper is needed")
	errEnding      = api.Errorf(api.ExitDaemon, "the daemon is ending").WithHint("try again")

	errConnectionEnded = api.Errorf(api.ExitLost, "the connection to the cluster ended").
				WithHint("`kubevpn status` shows why, unless a command ended it; `kubevpn proxy` connects again")
)

// connections owns the connections of this daemon, and the host network that they share.
type connections struct {
	// The mutex of the registry also guards the fields below the empty line. While it is held, the mutex of intercepts
	// must not be locked.
	registry[string, *connectionTask]
	factory    Factory
	client     []byte // secret of this client: see connection.Config
	linger     time.Duration
	dial       func(ctx context.Context, network, address string) (net.Conn, error) // see connection.Config
	localhost  intercept.Localhost                                                  // of the program; nil: none
	proxy      *proxy                                                               // nil: connections have devices
	logger     *slog.Logger
	changed    func() // called when inUse may return something else; does not block
	intercepts *intercepts
	queries    queryLog // that the resolver of host answered

	host        *hostNetwork   // nil: there is no helper
	closing     chan struct{}  // not nil while a helper is being closed; closed when it has ended
	lingering   bool           // the helper stays although no connection uses it yet
	keeping     int            // requests that keep the helper although no connection uses it
	prepared    *preparation   // for the next connect; nil: nothing
	discarded   sync.WaitGroup // closes preparations that no connection has taken
	shut        bool           // no more connections
	metricsAt   string         // address that serves metrics; empty: none
	stopMetrics context.CancelFunc
}

// newConnections returns connections that made makes; nil: the product's factory.
func newConnections(made Factory, client []byte, owner Owner, logger *slog.Logger) *connections {
	if made == nil {
		made = factory{}
	}
	cs := &connections{
		factory: made, client: client, linger: helperLinger, logger: logger, changed: func() {},
		intercepts: newIntercepts(made, owner, logger), stopMetrics: func() {},
	}
	cs.tasks = map[string]*connectionTask{}
	cs.ended = func() {
		cs.closeUnusedLocked()
		cs.changed()
	}
	return cs
}

// isolated reports whether no program of this machine uses the resolver: a Place or a proxy has its own way to names.
func (cs *connections) isolated() bool { return cs.dial != nil || cs.proxy != nil }

// resolverConfig returns what the resolver of the host network observes, and where it finds names outside of clusters.
func (cs *connections) resolverConfig() dns.Config {
	cfg := dns.Config{Observer: &cs.queries}
	if cs.proxy != nil {
		cfg.Routed = cs.proxy.routed
		cfg.Outside = dns.System{} // the proxy changes no resolver, so nothing has told it the nameservers
	}
	return cfg
}

// connect makes the connection that req asks for, or joins an existing one. It calls emit with each event, at last with
// the connected Connection. If ctx ends before that and no other request needs the connection, connect cleans it up
// before it returns.
func (cs *connections) connect(ctx context.Context, req api.ConnectRequest, emit func(api.Event)) error {
	t, err := cs.acquireConnection(ctx, req, emit)
	if err != nil {
		return err
	}
	cs.pin(t)
	c := t.status()
	emit(api.Event{Connection: &c})
	return cs.releaseAndReport(t, emit)
}

// acquireConnection is connect for a request that needs the connection until releaseAndReport: until then, the
// connection ends only if it fails or a user ends it. releaseAndReport ends it if no request has pinned it.
func (cs *connections) acquireConnection(
	ctx context.Context, req api.ConnectRequest, emit func(api.Event),
) (*connectionTask, error) {
	ids, err := cs.factory.Identify(req.Kubeconfig)
	if err != nil {
		return nil, err
	}
	if req.Reconnect {
		defer cs.keepHelper()() // another one would need sudo
		if err := cs.leave(ctx, ids, emit); err != nil {
			return nil, err
		}
	}
	id := cs.usable(ids, req)
	t, joined, err := cs.acquire(ctx, id, func(current *connectionTask) (*connectionTask, <-chan struct{}, error) {
		if current == nil && id != ids.Connection {
			return nil, nil, errConnectionEnded
		}
		return cs.chooseLocked(ids, req, current)
	})
	if err != nil {
		return nil, err
	}
	if err := cs.serveMetrics(req); err != nil {
		emit(api.Event{Warning: err.Error()})
	}
	if !joined || !t.wasReady() { // a request that joins a connected one does not need its earlier events
		err = t.follow(ctx, emit)
	}
	if err == nil && joined {
		err = cs.adapt(ctx, t, req, emit)
	}
	if err != nil {
		left := cs.releaseAndReport(t, emit)
		switch {
		case ctx.Err() == nil:
		case left != nil: // the caller reports only the interrupt
			e := api.AsError(left)
			emit(api.Event{Warning: e.Message + "; " + e.Hint})
		case !t.isOver():
			emit(api.Event{Warning: "the connection continues, because another command made it or uses it; " +
				"`kubevpn disconnect " + t.id + "` ends it"})
		}
		return nil, errors.Join(err, left)
	}
	return t, nil
}

// usable returns the ID of the connection for req: its user's or, if req may use any, that of another user of the
// cluster.
func (cs *connections) usable(ids client.IDs, req api.ConnectRequest) string {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if other := cs.otherUserLocked(ids); other != nil && req.Use {
		return other.id
	}
	return ids.Connection
}

// otherUserLocked returns the connection of another user to the cluster, or nil.
func (cs *connections) otherUserLocked(ids client.IDs) *connectionTask {
	for _, t := range cs.tasks {
		if t.cluster == ids.Cluster && t.id != ids.Connection && t.failed == nil {
			return t
		}
	}
	return nil
}

// chooseLocked returns the connection for req: current, or a new one if there is a helper. It rejects a second
// connection to one cluster, because their networks would overlap.
func (cs *connections) chooseLocked(ids client.IDs, req api.ConnectRequest,
	current *connectionTask) (*connectionTask, <-chan struct{}, error) {
	other := cs.otherUserLocked(ids)
	switch {
	case cs.shut:
		return nil, nil, errEnding
	case current != nil:
		current.logger.Info("request joins the existing connection")
		return current, nil, nil
	case other != nil && other.ending:
		return nil, other.over.Done(), nil
	case other != nil:
		return nil, nil, api.Errorf(api.ExitOverlap, "this cluster is already connected as another user, in context %s",
			other.request.Context).
			WithHint("run `kubevpn disconnect %s` first; `proxy`, `clone` and `dev` use that connection", other.id)
	case cs.closing != nil:
		return nil, cs.closing, nil
	case cs.host == nil:
		return nil, nil, errNeedsHelper
	}
	events, network := new(eventLog), &scopedNetwork{host: cs.host}
	cfg := connection.Config{
		Request: req, Network: network, Dial: cs.dial, Client: cs.client, Logger: cs.logger, Progress: events.add,
		Prepared: cs.takePreparedLocked(req),
	}
	if cs.proxy != nil {
		cfg.Lookup = cs.host.resolver.Lookup
	}
	if req.Via != "" {
		cfg.Via = func(c *connection.Connection) (connection.Via, error) {
			return newVia(req, c, cs.intercepts.owner, cs.localhost, events, cs.logger)
		}
	}
	conn, err := cs.factory.NewConnection(cfg)
	if err != nil {
		return nil, nil, err
	}
	cs.lingering = false
	logger := cs.logger.With("connection", ids.Connection, "context", req.Context, "namespace", req.Namespace)
	return &connectionTask{
		task: newTask("connection", logger, conn.Connected(), events), id: ids.Connection, cluster: ids.Cluster,
		conn: conn, request: req, network: network, proxy: cs.proxy,
	}, nil, nil
}

// releaseAndReport removes a waiter. If the connection ends because of that, it waits until the connection has ended,
// and the helper if no connection is left. It returns what went wrong with that.
func (cs *connections) releaseAndReport(t *connectionTask, emit func(api.Event)) error {
	if len(cs.release(t)) == 0 {
		return nil
	}
	err := cs.reportEnd(t, emit)
	cs.awaitClosed()
	return err
}

// adapt applies the settings of a later request to an existing connection. It warns about settings that it cannot
// change, and rejects flags that ask for them.
func (cs *connections) adapt(ctx context.Context, t *connectionTask, req api.ConnectRequest,
	emit func(api.Event)) error {
	now := t.conn.Status()
	cs.mu.Lock()
	was := t.request
	cs.mu.Unlock()
	if req.Via != "" && (req.Via != was.Via || req.Namespace != was.Namespace || req.Egress != was.Egress) {
		return api.Errorf(api.ExitUsage, "this cluster is already connected, and connections do not leave through %s",
			req.Via).WithHint("add --reconnect to end that connection first, or use `kubevpn run --via %s -- COMMAND` "+
			"beside it", req.Via)
	}
	flags, ignored := differences(was, req, now.Netstack)
	if len(flags) > 0 {
		hint := "add --reconnect to end that connection, its proxies and clones first"
		if req.Use {
			hint = "leave the flags out, or run `kubevpn connect --reconnect` with them first: that ends its proxies " +
				"and clones"
		}
		return api.Errorf(api.ExitUsage, "this cluster is already connected, otherwise than asked for: %s",
			strings.Join(flags, "; ")).WithHint("%s", hint)
	}
	if !req.Use && req.Namespace != "" && req.Namespace != now.Namespace {
		t.conn.SetNamespace(req.Namespace)
		emit(api.Event{
			Step: "Changing the namespace", Detail: now.Namespace + " → " + req.Namespace, Done: true,
		})
	}
	if req.Context == t.request.Context {
		if err := t.conn.SetCredential(req.Credential); err != nil {
			return err
		}
	}
	if req.Keep {
		if err := t.conn.Keep(ctx, emit); err != nil {
			return err
		}
	}
	if req.Upgrade {
		if err := t.conn.Upgrade(ctx, req.Image, emit); err != nil {
			return err
		}
	}
	cs.mu.Lock()
	if req.Upgrade {
		t.request.Image = req.Image
	}
	cs.mu.Unlock()
	if len(ignored) > 0 {
		emit(api.Event{Warning: "this cluster is already connected with different settings (" +
			strings.Join(ignored, ", ") + "): `kubevpn connect --reconnect` changes them"})
	}
	return nil
}

// differences names the settings of req that a connection that was requested otherwise, and has chosen a netstack, does
// not have: flags, with what it has instead, and others. A request that uses any connection may have another context,
// image and jump host for itself, and defaults of its own.
func differences(was, req api.ConnectRequest, netstack string) (flags, names []string) {
	keys := config.ConnectionKeys()
	add := func(key config.Key, has string) {
		if s := req.Setting(string(key)); s.Origin == api.OriginFlag {
			flags = append(flags, fmt.Sprintf("%s %s, and it has %s", s.Source, s.Value, cmp.Or(has, "none")))
		} else if !req.Use {
			names = append(names, string(key))
		}
	}
	if req.Name != "" && req.Name != was.Name {
		flags = append(flags, fmt.Sprintf("--name %s, and it has %s", req.Name, cmp.Or(was.Name, "none")))
	}
	if !req.Use {
		keys = append(keys, config.KeySSHJump)
		if req.Via != was.Via {
			names = append(names, "via")
		}
		if req.Context != was.Context {
			names = append(names, "context")
		}
		if req.Image != "" && req.Image != was.Image && !req.Upgrade {
			add(config.KeyImage, was.Image)
		}
	}
	for _, key := range keys {
		has, asked := was.Setting(string(key)).Value, req.Setting(string(key)).Value
		switch {
		case has == asked:
		case key != config.KeyNetstack:
			add(key, has)
		case asked != netstack:
			add(key, netstack)
		}
	}
	return flags, names
}

// activeLocked returns the number of connections that have not failed.
func (cs *connections) activeLocked() int {
	n := 0
	for _, t := range cs.tasks {
		if t.failed == nil {
			n++
		}
	}
	return n
}

// starter returns what started the helper process, or "" if there is none.
func (cs *connections) starter() string {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.host == nil {
		return ""
	}
	if h, ok := cs.host.helper.(interface{ Starter() string }); ok {
		return h.Starter()
	}
	return ""
}

// inUse reports whether the daemon has a reason to stay.
func (cs *connections) inUse() bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return len(cs.tasks) > 0 || cs.host != nil || cs.closing != nil
}

// status lists the connections, the oldest first.
func (cs *connections) status() []api.Connection {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	out := make([]api.Connection, 0, len(cs.tasks))
	for _, t := range cs.tasks {
		c := t.status()
		switch {
		case t.failed != nil:
			c.Status, c.Error = api.StatusFailed, t.failed
		case t.ending:
			c.Status = api.StatusDisconnecting
		default:
			if mode, ok := t.network.host.mode.Load().(api.ResolverMode); ok && c.DNS.Mode != api.ResolverNone {
				c.DNS.Mode = mode // it may change by itself: systemd-resolved comes and goes
			}
		}
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b api.Connection) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.ID, b.ID))
	})
	return out
}
