//go:build linux

package agent

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/access"
	"kubevpn/internal/incluster/dial"
	"kubevpn/internal/process/version"
	"kubevpn/pkg/datapath/balancer"
	"kubevpn/pkg/protocol/interceptor"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/authlistener"
	"kubevpn/pkg/wire/nonblock"
	"kubevpn/pkg/wire/transport"
)

const (
	// tickInterval is the interval at which the leader checks which laptops are away.
	tickInterval = 500 * time.Millisecond
	// lookTicks is how many ticks lie between two looks at where the pod's sockets listen, for which the kernel lists
	// all sockets.
	lookTicks = 2
	// awayTimeout is how long an owner that is away keeps its claims, and how long an owner without claims is
	// remembered.
	awayTimeout = time.Minute

	// The budget of all laptops together: control streams, of which each laptop needs one, and flows; and bytes that a
	// client or a laptop has not read yet.
	maxStreams  = 1 << 13
	maxBuffered = 128 << 20

	maxNameBytes = 256
	probeTimeout = time.Minute // how long an announced probe is expected
	maxProbes    = 1024
	probeDue     = 3 * time.Second // within which a laptop sends the probe that it announced, or gives up
)

// unauthorized is the reason for rejecting a client whose key belongs to no owner.
const unauthorized authlistener.Reason = "not the key of an owner"

// errEnding rejects orders to a leader that is ending.
var errEnding = api.Errorf(api.ExitLost, "this agent is ending")

// owner is one daemon of one user on one laptop, which gives orders.
type owner struct {
	hash, name string
	own        bool                // of this agent: never forgotten
	sidecar    bool                // never forgotten while its sidecar runs, because the kubelet would restart that
	take       func(net.Conn) bool // transport.Server.Take of its own server: no session has conns of two owners
	end        func()              // stops that server
	standbys   map[*standby]struct{}
	sessions   map[*laptopSession]struct{}
	idleSince  time.Time // since when it has had neither a claim nor a conn; zero: it has one
}

// attached reports whether one of the owner's laptops answers.
func (o *owner) attached() bool {
	for s := range o.sessions {
		if !s.laptop.Away() {
			return true
		}
	}
	return false
}

// leader is the agent of a pod that does the work. mu guards everything that changes.
type leader struct {
	info     api.AgentInfo
	log      *slog.Logger
	listener *authlistener.Listener
	receiver *receiver
	own      []netip.Addr  // of the pod
	sidecar  bool          // a sidecar: it does not end by itself
	arrived  func()        // called when the agent's own owner connects
	announce func() error  // prints info
	reset    chan struct{} // closed by the order to reset
	table    atomic.Pointer[table]
	probed   atomic.Int64 // when the last probe was announced, in nanoseconds since 1970
	traces   tracer
	dialer   *dial.Dialer  // of laptops' flows
	filter   access.Filter // of flows of users who may not exec in the pod

	budget   *transport.Budget // of the sessions of all owners
	recorded atomic.Int64      // bytes that wait in recordQueues

	live context.Context // ends everything that work runs
	work sync.WaitGroup

	mu      sync.Mutex
	owners  map[string]*owner // by hash
	claims  []*claim
	dirty   bool // the receiver could not be set to what claims need
	notes   map[port][]string
	listens []netip.AddrPort     // where the pod's sockets listen; known while a session asks
	probes  map[string]time.Time // until when
	ending  bool
	cleared bool             // by a reset, after which standbys end as well
	changed wakeup.Broadcast // sent when the reported state changes
}

// newLeader takes ownership of the listener for laptops. live ends what it starts.
func newLeader(live context.Context, conns net.Listener, number uint16, log *slog.Logger) (*leader, error) {
	certificate, hash, err := newKey()
	if err != nil {
		return nil, err
	}
	l := &leader{
		info: api.AgentInfo{Protocol: api.Protocol, Oldest: api.OldestProtocol, Version: version.String(),
			Port: number, Key: hash, Leader: api.LeaderSelf},
		log: log, live: live, reset: make(chan struct{}), budget: transport.NewBudget(maxStreams, maxBuffered),
		owners: make(map[string]*owner), notes: make(map[port][]string), probes: make(map[string]time.Time),
		traces: tracer{traces: make(map[string]*trace)}, dialer: dial.New(balancer.New("")),
	}
	if c, err := access.ReadResolvConf(resolvConf); err == nil {
		l.filter.DNS = c.Servers // a node-local cache has a link-local address
	}
	// ClusterIPs are dialed as such: the node of the pod decides, as for the pod's own connections.
	l.dialer.Check = func(netip.AddrPort) error { return nil }
	l.dialer.CheckHost = func(netip.AddrPort, []netip.Prefix) error { return nil }
	l.dialer.InRange = func(netip.Addr) bool { return false }
	l.table.Store(new(table))
	config := tlsConfig(certificate, func(hash string) bool { return l.owner(hash) != nil })
	l.listener = authlistener.New(authlistener.Config{
		Name: "agent's port", Listener: conns, Logger: log,
		Authenticate: func(conn net.Conn) (net.Conn, authlistener.Reason, error) {
			c, why, err := authlistener.Handshake(conn, config)
			if errors.Is(err, errUnauthorized) {
				why = unauthorized
			}
			if why != "" {
				return nil, why, err
			}
			return c, "", nil
		},
	})
	return l, nil
}

// dispatch gives conns to their owners' servers until the listener is closed.
func (l *leader) dispatch() {
	for {
		conn, err := l.listener.Accept()
		if err != nil {
			return // closed
		}
		o := l.owner(api.PeerKeyHash(conn.(*nonblock.TLS).ConnectionState()))
		if o == nil || !o.take(conn) { // forgotten a moment ago
			l.listener.CountRejected(unauthorized, conn.RemoteAddr())
			conn.Close()
		}
	}
}

func (l *leader) owner(hash string) *owner {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.owners[hash]
}

// register returns the owner with this hash, and adds it if it is new. Call with mu held.
func (l *leader) register(hash, name string) (*owner, error) {
	if raw, err := base64.RawURLEncoding.Strict().DecodeString(hash); err != nil || len(raw) != 32 {
		return nil, api.Errorf(api.ExitUsage, "%q is not the hash of a key", hash)
	}
	if len(name) > maxNameBytes {
		return nil, api.Errorf(api.ExitUsage, "the owner's name has more than %d bytes", maxNameBytes)
	}
	if o := l.owners[hash]; o != nil {
		o.idleSince = time.Time{} // restarts its minute
		return o, nil
	}
	if len(l.owners) >= maxOwners {
		return nil, api.Errorf(api.ExitConflict, "the agent has %d owners already", maxOwners)
	}
	ctx, cancel := context.WithCancel(l.live)
	o := &owner{
		hash: hash, name: name, end: cancel,
		standbys: make(map[*standby]struct{}), sessions: make(map[*laptopSession]struct{}),
	}
	server := transport.NewServer(transport.ServerConfig{
		OnSession: func(ctx context.Context, s *transport.Session) { l.serve(ctx, o, s) },
		Grace:     awayTimeout, MaxSessions: 64, MaxLinks: 4, MaxHandshakes: 16, Budget: l.budget,
		Tuning: transport.Tuning{Heartbeat: time.Second, DeadAfter: 3 * time.Second},
		Logger: l.log.With("owner", name),
	})
	o.take = func(conn net.Conn) bool { return server.Take(ctx, conn) }
	l.work.Go(func() {
		_ = server.Serve(ctx) // without a listener there is no error
	})
	l.owners[hash] = o
	l.log.Info("owner", "name", name, "hash", hash)
	return o, nil
}

// serve serves one session of an owner until it ends.
func (l *leader) serve(ctx context.Context, o *owner, session *transport.Session) {
	s := &laptopSession{leader: l, owner: o, laptop: laptop{session}, log: l.log.With("owner", o.name)}
	l.mu.Lock()
	o.sessions[s] = struct{}{}
	l.changed.Send()
	l.mu.Unlock()
	if o.own {
		l.arrived()
	}
	s.serve(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(o.sessions, s)
	l.changed.Send()
	if errors.Is(session.Err(), transport.ErrSessionClosed) { // the laptop closed it
		l.release(func(c *claim) bool { return c.by == s.laptop })
	}
}

// claim carries out an order to claim. Its errors are *api.Error, for the laptop.
func (l *leader) claim(o *api.ClaimOrder, s *laptopSession) error {
	l.receiver.await() // without the lock
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ending {
		return errEnding
	}
	c, err := newClaim(o, s.owner, s.laptop, time.Now())
	if err != nil {
		return err
	}
	claims := make([]*claim, 0, len(l.claims)+1)
	own := 0
	for _, other := range l.claims {
		if other.owner == c.owner && other.id == c.id {
			c.since, c.stats, c.record = other.since, other.stats, other.record
			continue
		}
		if both := c.overlaps(other); len(both) > 0 {
			// Another session with the same key takes over: a killed daemon that is back. A name proves nothing.
			switch away := other.by.Away(); {
			case away && other.owner != c.owner:
				return conflict(c, other, both).
					WithHint("Its laptop does not answer. Unless it comes back, the intercept ends within a minute.")
			case !away:
				return conflict(c, other, both)
			}
			l.log.Info("released: another session of its owner intercepts the same", "claim", other.id, "owner",
				other.owner.name)
			continue
		}
		if other.owner == c.owner {
			own++
		}
		claims = append(claims, other)
	}
	if own >= maxOwnClaims {
		return api.Errorf(api.ExitConflict, "%s already has %d intercepts of this pod", c.owner.name, own)
	}
	claims = append(claims, c)
	if err := l.receiver.set(wanted(claims)); err != nil {
		return err
	}
	l.publish(claims)
	l.log.Info("claim", "claim", c.id, "owner", c.owner.name, "match", c.match, "ports", c.ports, "mirror", c.mirror)
	if o.Flush {
		l.flush(c)
	}
	return nil
}

// flush ends the application's connections on the claim's ports. If that fails, the claim holds for new ones.
func (l *leader) flush(c *claim) {
	n, err := l.receiver.flush(c.at())
	if err != nil {
		l.log.Warn("cannot end the connections that were open", "claim", c.id, "err", err)
		for _, at := range c.at() {
			l.addNote(at, fmt.Sprintf("connections that were open before stay with the application: %v", err))
		}
		return
	}
	l.log.Info("ended the connections that were open", "claim", c.id, "connections", n)
}

// release drops claims. Call with mu held.
func (l *leader) release(which func(*claim) bool) {
	rest := slices.DeleteFunc(slices.Clone(l.claims), which)
	if len(rest) == len(l.claims) {
		return
	}
	for _, c := range l.claims {
		if which(c) {
			l.log.Info("released", "claim", c.id, "owner", c.owner.name, "requests", c.stats.Requests())
			c.record.set(nil)
		}
	}
	l.publish(rest)
	l.settle()
}

// settle sets the receiver to what claims need. If that fails, requests still come here and are forwarded to the
// application, and the next tick tries again. Call with mu held.
func (l *leader) settle() {
	err := l.receiver.set(wanted(l.claims))
	l.dirty = err != nil
	if err != nil {
		l.log.Error("cannot remove redirects", "err", err)
	}
}

// publish replaces the claims that the interceptor uses. Call with mu held.
func (l *leader) publish(claims []*claim) {
	l.claims = claims
	t := newTable(claims)
	l.table.Store(&t)
	maps.DeleteFunc(l.notes, func(at port, _ []string) bool { return t[at] == nil })
	l.changed.Send()
}

// wanted returns the ports of claims, each with the port on which a sidecar listens for it.
func wanted(claims []*claim) map[port]uint16 {
	want := make(map[port]uint16)
	for _, c := range claims {
		for _, at := range c.ports {
			want[portOf(at)] = at.Listen
		}
	}
	return want
}

// claimsOf returns the claims of a port in their order. The interceptor calls it for each request.
func (l *leader) claimsOf(protocol string, number uint16) []interceptor.Claim {
	return (*l.table.Load())[port{Protocol: protocol, Port: number}]
}

// state returns the state to report to a laptop, and a channel that is closed when it changes. over, unless nil, is the
// error that ends the session.
func (l *leader) state(to *laptopSession) (state *api.AgentState, over *api.Error, changed <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	state = &api.AgentState{Claims: make([]api.Claim, 0, len(l.claims)), Source: l.receiver.source}
	for _, c := range l.claims {
		state.Claims = append(state.Claims, c.describe(to.owner, l.notes))
	}
	if to.asksListens() {
		state.Listens = l.listens
	}
	return state, to.over, l.changed.Next()
}

// look notices where the pod's sockets listen, if a session asks for that.
func (l *leader) look() {
	l.mu.Lock()
	wanted := false
	for _, o := range l.owners {
		for s := range o.sessions {
			wanted = wanted || s.asksListens()
		}
	}
	l.mu.Unlock()
	if !wanted {
		return
	}
	now, err := othersListeners()
	if err != nil {
		l.log.Warn("cannot see where the pod's sockets listen", "err", err)
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !slices.Equal(now, l.listens) {
		l.listens = now
		l.changed.Send()
	}
}

// note stores a remark about a port for the laptops that intercept it.
func (l *leader) note(protocol string, number uint16, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.addNote(port{Protocol: protocol, Port: number}, text)
}

// addNote is note with mu held.
func (l *leader) addNote(at port, text string) {
	text = text[:min(len(text), maxNoteBytes)]
	if _, claimed := (*l.table.Load())[at]; !claimed || len(l.notes[at]) >= maxPortsNotes ||
		slices.Contains(l.notes[at], text) {
		return
	}
	l.notes[at] = append(l.notes[at], text)
	l.changed.Send()
}

// expect records a probe that a laptop announces.
func (l *leader) expect(c *api.Probe) error {
	if len(c.Preface) != api.ProbeLength || string(c.Preface[:len(api.ProbePrefix)]) != api.ProbePrefix {
		return api.Errorf(api.ExitUsage, "a probe has %d bytes, of which the first are %q", api.ProbeLength,
			api.ProbePrefix)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ending {
		return errEnding
	}
	if len(l.probes) >= maxProbes {
		return api.Errorf(api.ExitConflict, "the agent expects %d probes already", maxProbes)
	}
	now := time.Now()
	l.probes[string(c.Preface)] = now.Add(probeTimeout)
	l.probed.Store(now.UnixNano())
	return nil
}

// probeDue reports whether an announced probe may come at any moment. Every connection asks, so it takes no lock.
func (l *leader) probeDue() bool { return time.Since(time.Unix(0, l.probed.Load())) < probeDue }

// expects reports whether a probe was announced. The probe may arrive more than once, because a mesh may retry.
func (l *leader) expects(preface []byte) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	until, ok := l.probes[string(preface)]
	return ok && time.Now().Before(until)
}

// clear carries out a reset: it releases all claims, and ends the agents that are not sidecars.
func (l *leader) clear(by *owner) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ending {
		return
	}
	l.log.Info("reset", "by", by.name)
	l.release(func(*claim) bool { return true })
	over := api.Errorf(api.ExitIntercept, "%s has removed all intercepts of this pod",
		cmp.Or(by.name, "another laptop"))
	for _, o := range l.owners {
		for s := range o.sessions {
			s.over = over
		}
	}
	l.changed.Send()
	if !l.sidecar {
		l.ending, l.cleared = true, true
		close(l.reset)
	}
}

// watch returns when the leader must end, and the reason: ctx ended, a reset, or no owner is left.
func (l *leader) watch(ctx context.Context) (why string) {
	ticker, counter := time.NewTicker(tickInterval), time.NewTicker(reportPause)
	defer ticker.Stop()
	defer counter.Stop()
	looks := 0
	for {
		select {
		case <-counter.C: // `kubevpn status` right after a request shows it
			l.count()
			continue
		case <-ticker.C:
		case <-ctx.Done():
			return "signal"
		case <-l.reset:
			return "reset"
		}
		if looks++; looks%lookTicks == 0 {
			l.look()
		}
		if l.tick(time.Now()) && !l.sidecar {
			return "no owner is left"
		}
	}
}

// count notifies laptops of new requests.
func (l *leader) count() {
	l.mu.Lock()
	defer l.mu.Unlock()
	changed := false
	for _, c := range l.claims {
		changed = c.count() || changed
	}
	if changed {
		l.changed.Send()
	}
}

// tick notices which laptops went away, came back, or were away for awayTimeout. It reports whether no owner is left;
// then the leader is ending.
func (l *leader) tick(now time.Time) (alone bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	changed := false
	for _, c := range l.claims {
		away := c.by.Away() // of the laptop, even if a clone without pods is the target
		if away != !c.awaySince.IsZero() {
			changed = true
			l.log.Info("laptop", "owner", c.owner.name, "claim", c.id, "away", away)
			c.awaySince = time.Time{}
			if away {
				c.awaySince = now
			}
		}
	}
	if changed {
		l.changed.Send()
	}
	l.release(func(c *claim) bool { return !c.awaySince.IsZero() && now.Sub(c.awaySince) >= awayTimeout })
	if l.dirty {
		l.settle()
	}
	maps.DeleteFunc(l.probes, func(_ string, until time.Time) bool { return now.After(until) })
	l.traces.expire(now)
	claiming := make(map[*owner]bool)
	for _, c := range l.claims {
		claiming[c.owner] = true
	}
	idle := 0
	for _, o := range l.owners {
		switch {
		case claiming[o] || o.attached():
			o.idleSince = time.Time{}
		case o.idleSince.IsZero():
			o.idleSince = now
		case now.Sub(o.idleSince) < awayTimeout:
		case o.own:
			idle++
		case o.sidecar && len(o.standbys) > 0:
		default:
			l.forget(o)
		}
	}
	alone = idle == len(l.owners) && l.receiver.idle()
	l.ending = l.ending || alone && !l.sidecar
	return alone
}

// forget removes an owner and ends its sessions and standbys. Call with mu held.
func (l *leader) forget(o *owner) {
	l.log.Info("forgotten", "owner", o.name, "hash", o.hash)
	delete(l.owners, o.hash)
	for s := range o.standbys {
		s.dismiss()
	}
	o.end()
}

// quit gives the application its ports back, and then rejects orders and releases the standbys: one of them takes over,
// or, after a reset, all end.
func (l *leader) quit() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.receiver.stop()
	l.ending = true
	for _, o := range l.owners {
		for s := range o.standbys {
			if l.cleared && !o.sidecar {
				s.dismiss()
			}
			s.close()
		}
	}
}
