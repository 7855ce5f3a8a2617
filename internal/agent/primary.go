package agent

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/version"
	"kubevpn/pkg/door"
	"kubevpn/pkg/interceptor"
	"kubevpn/pkg/transport"
)

const (
	// beat is how often is looked who is there, and what was counted. What must be known at once, is asked for at once.
	beat = 500 * time.Millisecond
	// patience is for how long an owner's claims are held while it is away, and an owner without any is remembered.
	patience = time.Minute

	maxNameBytes   = 256
	canaryPatience = time.Minute
	maxCanaries    = 1024
)

// stranger is why somebody is turned away whose key is not an owner's.
const stranger door.Reason = "not the key of an owner"

// errEnding refuses orders to a primary that is on its way out.
var errEnding = api.Errorf(api.ExitLost, "this agent is ending")

// owner is who gives orders: one daemon of one user on one laptop.
type owner struct {
	hash, name string
	home       bool   // of this very agent: known as long as it lives
	stays      bool   // it has a sidecar: known as long as that lives, which would only be started again if it ended
	carriers   *queue // to its own transport.Server, so that no session has carriers of two owners
	end        func() // ends that
	standbys   map[*standby]struct{}
	links      map[*link]struct{}
	restSince  time.Time // since when it has neither a claim nor a carrier, as far as was seen; zero: it has
}

// attached reports whether one of the owner's laptops answers.
func (o *owner) attached() bool {
	for l := range o.links {
		if !l.taker.Away() {
			return true
		}
	}
	return false
}

// primary is the agent of a pod that does the work. Everything that changes is changed with mu held.
type primary struct {
	greeting api.AgentGreeting
	log      *slog.Logger
	door     *door.Door
	plane    *plane
	stays    bool          // a sidecar: it does not end by itself
	arrived  func()        // called when the agent's own owner has come
	reset    chan struct{} // closed by the order to reset
	table    atomic.Pointer[table]

	live context.Context // what is below runs until it ends
	work sync.WaitGroup

	mu       sync.Mutex
	owners   map[string]*owner // by hash
	claims   []*claim
	dirty    bool // the plane is not yet as claims would have it
	notes    map[port][]string
	canaries map[string]time.Time // until when
	ending   bool
	cleared  bool          // by a reset, after which standbys end as well
	changed  chan struct{} // closed when what laptops are told has changed
}

// newPrimary takes over the listener for carriers. live ends what it starts.
func newPrimary(live context.Context, carriers net.Listener, number uint16, log *slog.Logger) (*primary, error) {
	certificate, hash, err := newKey()
	if err != nil {
		return nil, err
	}
	p := &primary{
		greeting: api.AgentGreeting{Protocol: api.Protocol, Version: version.String(), Port: number, Key: hash},
		log:      log, live: live, reset: make(chan struct{}),
		owners: make(map[string]*owner), notes: make(map[port][]string), canaries: make(map[string]time.Time), changed: make(chan struct{}),
	}
	p.table.Store(new(table))
	config := tlsConfig(certificate, func(hash string) bool { return p.owner(hash) != nil })
	p.door = door.New(door.Config{
		Name: "agent's port", Listener: carriers, Logger: log,
		Admit: func(conn net.Conn) (net.Conn, door.Reason, error) {
			c, why, err := door.Shake(conn, config)
			if errors.Is(err, errStranger) {
				why = stranger
			}
			if why != "" {
				return nil, why, err
			}
			return c, "", nil
		},
	})
	return p, nil
}

// dispatch hands carriers to their owners until the door is closed.
func (p *primary) dispatch() {
	for {
		conn, err := p.door.Accept()
		if err != nil {
			return // closed
		}
		o := p.owner(keyHash(conn.(*door.Conn).ConnectionState()))
		if o == nil || !o.carriers.put(conn) { // forgotten a moment ago
			p.door.Count(stranger, conn.RemoteAddr())
			conn.Close()
		}
	}
}

func (p *primary) owner(hash string) *owner {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.owners[hash]
}

// register makes an owner known, or gives the one that is. Call with mu held.
func (p *primary) register(hash, name string) (*owner, error) {
	if raw, err := base64.RawURLEncoding.Strict().DecodeString(hash); err != nil || len(raw) != 32 {
		return nil, api.Errorf(api.ExitUsage, "%q is not the hash of a key", hash)
	}
	if len(name) > maxNameBytes {
		return nil, api.Errorf(api.ExitUsage, "the owner's name has more than %d bytes", maxNameBytes)
	}
	if o := p.owners[hash]; o != nil {
		o.restSince = time.Time{} // its minute begins anew
		return o, nil
	}
	if len(p.owners) >= maxOwners {
		return nil, api.Errorf(api.ExitConflict, "the agent has %d owners already", maxOwners)
	}
	ctx, cancel := context.WithCancel(p.live)
	o := &owner{
		hash: hash, name: name, carriers: newQueue(p.door.Addr()), end: cancel,
		standbys: make(map[*standby]struct{}), links: make(map[*link]struct{}),
	}
	server := transport.NewServer(transport.ServerConfig{
		OnSession: func(ctx context.Context, s *transport.Session) { p.serve(ctx, o, s) },
		Grace:     patience, MaxSessions: 64, MaxLinks: 4, MaxHandshakes: 16,
		Tuning: transport.Tuning{Heartbeat: time.Second, DeadAfter: 3 * time.Second},
		Logger: p.log.With("owner", name),
	})
	p.work.Go(func() {
		if err := server.Serve(ctx, o.carriers); err != nil {
			p.log.Error("serving an owner", "owner", name, "err", err)
		}
	})
	p.owners[hash] = o
	p.log.Info("owner", "name", name, "hash", hash)
	return o, nil
}

// serve is one session of an owner, from its beginning to its end.
func (p *primary) serve(ctx context.Context, o *owner, s *transport.Session) {
	l := &link{primary: p, owner: o, session: s, taker: taker{s}, log: p.log.With("owner", o.name)}
	p.mu.Lock()
	o.links[l] = struct{}{}
	p.notify()
	p.mu.Unlock()
	if o.home {
		p.arrived()
	}
	l.serve(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(o.links, l)
	p.notify()
	if errors.Is(s.Err(), transport.ErrSessionClosed) { // it said farewell
		p.release(func(c *claim) bool { return c.by == l.taker })
	}
}

// claim grants an order, or says why not.
func (p *primary) claim(o *api.ClaimOrder, l *link) error {
	p.plane.await() // not with the lock
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ending {
		return errEnding
	}
	c, err := newClaim(o, l.owner, l.taker, time.Now())
	if err != nil {
		return err
	}
	claims := make([]*claim, 0, len(p.claims)+1)
	own := 0
	for _, other := range p.claims {
		if other.owner == c.owner && other.id == c.id {
			c.since, c.stats = other.since, other.stats
			continue
		}
		if both := c.excludes(other); len(both) > 0 {
			// The same laptop with another key, or by another session: its daemon was killed, and has not come back as what it was.
			if !other.by.Away() || other.owner != c.owner && (other.owner.name == "" || other.owner.name != c.owner.name) {
				return conflict(c, other, both)
			}
			p.log.Info("released: the same laptop claims it anew", "claim", other.id, "owner", other.owner.name)
			continue
		}
		if other.owner == c.owner {
			own++
		}
		claims = append(claims, other)
	}
	if own >= maxOwnClaims {
		return api.Errorf(api.ExitConflict, "%s has %d claims already", c.owner.name, own)
	}
	claims = append(claims, c)
	if err := p.plane.set(wanted(claims)); err != nil {
		return err
	}
	p.publish(claims)
	p.log.Info("claim", "claim", c.id, "owner", c.owner.name, "match", c.match, "ports", c.ports, "mirror", c.mirror)
	if o.Flush {
		p.flush(c)
	}
	return nil
}

// flush ends the application's connections on the claim's ports. Where that is impossible the claim is as good, for new ones.
func (p *primary) flush(c *claim) {
	var ports []port
	for _, at := range c.ports {
		ports = append(ports, portOf(at))
	}
	n, err := p.plane.flush(ports)
	if err != nil {
		p.log.Warn("ending the connections that were open", "claim", c.id, "err", err)
		for _, at := range ports {
			p.addNote(at, fmt.Sprintf("connections that were open before stay with the application: %v", err))
		}
		return
	}
	p.log.Info("ended the connections that were open", "claim", c.id, "connections", n)
}

// release drops claims. Call with mu held.
func (p *primary) release(which func(*claim) bool) {
	rest := slices.DeleteFunc(slices.Clone(p.claims), which)
	if len(rest) == len(p.claims) {
		return
	}
	for _, c := range p.claims {
		if which(c) {
			p.log.Info("released", "claim", c.id, "owner", c.owner.name, "requests", c.stats.Requests())
		}
	}
	p.publish(rest)
	p.settle()
}

// settle makes the plane what claims would have it. If that fails, requests come here all the same and are passed on to the
// application, and it is tried again. Call with mu held.
func (p *primary) settle() {
	err := p.plane.set(wanted(p.claims))
	p.dirty = err != nil
	if err != nil {
		p.log.Error("removing redirects", "err", err)
	}
}

// publish makes claims those by which requests are judged. Call with mu held.
func (p *primary) publish(claims []*claim) {
	p.claims = claims
	t := newTable(claims)
	p.table.Store(&t)
	for at := range p.notes {
		if _, claimed := t[at]; !claimed {
			delete(p.notes, at)
		}
	}
	p.notify()
}

// wanted are the ports of claims, each with where a sidecar listens for it.
func wanted(claims []*claim) map[port]uint16 {
	want := make(map[port]uint16)
	for _, c := range claims {
		for _, at := range c.ports {
			want[portOf(at)] = at.Listen
		}
	}
	return want
}

// judges gives the claims of a port, in their order. It is what the interceptor asks for each request.
func (p *primary) judges(protocol string, number uint16) []interceptor.Claim {
	return (*p.table.Load())[port{protocol, number}]
}

// notify tells laptops what has changed. Call with mu held.
func (p *primary) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// state is what a laptop is told, and a channel that is closed when it is no longer true. over is why it has to go.
func (p *primary) state(to *link) (state *api.AgentState, over *api.Error, changed <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	state = &api.AgentState{Claims: make([]api.Claim, 0, len(p.claims)), Source: p.plane.source()}
	for _, c := range p.claims {
		state.Claims = append(state.Claims, c.describe(to.owner, p.notes))
	}
	return state, to.over, p.changed
}

// note keeps what was seen of a port for the laptops that have claimed it.
func (p *primary) note(protocol string, number uint16, text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.addNote(port{protocol, number}, text)
}

// addNote is note with mu held.
func (p *primary) addNote(at port, text string) {
	text = text[:min(len(text), maxNoteBytes)]
	if _, claimed := (*p.table.Load())[at]; !claimed || len(p.notes[at]) >= maxPortsNotes || slices.Contains(p.notes[at], text) {
		return
	}
	p.notes[at] = append(p.notes[at], text)
	p.notify()
}

// expect has a canary known for a while.
func (p *primary) expect(c *api.Canary) error {
	if len(c.Preface) != api.CanaryLength || string(c.Preface[:len(api.CanaryPrefix)]) != api.CanaryPrefix {
		return api.Errorf(api.ExitUsage, "a canary has %d bytes, of which the first are %q", api.CanaryLength, api.CanaryPrefix)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ending {
		return errEnding
	}
	if len(p.canaries) >= maxCanaries {
		return api.Errorf(api.ExitConflict, "the agent expects %d canaries already", maxCanaries)
	}
	p.canaries[string(c.Preface)] = time.Now().Add(canaryPatience)
	return nil
}

// expects reports whether a canary is known. It may come more than once: a mesh may try again.
func (p *primary) expects(preface []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	until, ok := p.canaries[string(preface)]
	return ok && time.Now().Before(until)
}

// clear is a reset: nobody has anything here any more, and the agents end, unless they are sidecars.
func (p *primary) clear(by *owner) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ending {
		return
	}
	p.log.Info("reset", "by", by.name)
	p.release(func(*claim) bool { return true })
	over := api.Errorf(api.ExitIntercept, "%s has removed all intercepts of this pod", cmp.Or(by.name, "another laptop"))
	for _, o := range p.owners {
		for l := range o.links {
			l.over = over
		}
	}
	p.notify()
	if !p.stays {
		p.ending, p.cleared = true, true
		close(p.reset)
	}
}

// watch waits until the primary has to end: ctx does, somebody resets it, or it is alone.
func (p *primary) watch(ctx context.Context) (why string) {
	ticker := time.NewTicker(beat)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return "asked to"
		case <-p.reset:
			return "reset"
		}
		if p.tick(time.Now()) && !p.stays {
			return "nobody is left"
		}
	}
}

// tick sees who went away, who came back and whose minute is over. It reports whether the primary is alone; then it is
// ending.
func (p *primary) tick(now time.Time) (alone bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	changed := false
	for _, c := range p.claims {
		away := c.by.Away() // a clone that has no pod is still its laptop's
		if away != !c.awaySince.IsZero() {
			changed = true
			p.log.Info("laptop", "owner", c.owner.name, "claim", c.id, "away", away)
			c.awaySince = time.Time{}
			if away {
				c.awaySince = now
			}
		}
		changed = c.count() || changed
	}
	if changed {
		p.notify()
	}
	p.release(func(c *claim) bool { return !c.awaySince.IsZero() && now.Sub(c.awaySince) >= patience })
	if p.dirty {
		p.settle()
	}
	for preface, until := range p.canaries {
		if now.After(until) {
			delete(p.canaries, preface)
		}
	}
	claiming := make(map[*owner]bool)
	for _, c := range p.claims {
		claiming[c.owner] = true
	}
	resting := 0
	for _, o := range p.owners {
		switch {
		case claiming[o] || o.attached():
			o.restSince = time.Time{}
		case o.restSince.IsZero():
			o.restSince = now
		case now.Sub(o.restSince) < patience:
		case o.home:
			resting++
		case o.stays && len(o.standbys) > 0:
		default:
			p.forget(o)
		}
	}
	alone = resting == len(p.owners) && p.plane.idle()
	p.ending = p.ending || alone && !p.stays
	return alone
}

// forget ends what there is of an owner. Call with mu held.
func (p *primary) forget(o *owner) {
	p.log.Info("forgotten", "owner", o.name, "hash", o.hash)
	delete(p.owners, o.hash)
	for s := range o.standbys {
		s.dismiss()
	}
	o.end()
}

// quit gives the application its ports back, before anything else. It has the primary take no more orders, and lets its
// standbys go: to take over, or to their end after a reset.
func (p *primary) quit() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.plane.stop()
	p.ending = true
	for _, o := range p.owners {
		for s := range o.standbys {
			if p.cleared && !o.stays {
				s.dismiss()
			}
			s.close()
		}
	}
}

// queue is a net.Listener of connections that are there already.
type queue struct {
	addr  net.Addr
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newQueue(addr net.Addr) *queue {
	return &queue{addr: addr, conns: make(chan net.Conn), done: make(chan struct{})}
}

// put hands a connection over, unless the queue is closed.
func (q *queue) put(conn net.Conn) bool {
	select {
	case q.conns <- conn:
		return true
	case <-q.done:
		return false
	}
}

func (q *queue) Accept() (net.Conn, error) {
	select {
	case conn := <-q.conns:
		return conn, nil
	case <-q.done:
		return nil, net.ErrClosed
	}
}

func (q *queue) Close() error {
	q.once.Do(func() { close(q.done) })
	return nil
}

func (q *queue) Addr() net.Addr { return q.addr }
