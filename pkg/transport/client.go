package transport

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

// State tells how a client is doing.
type State int

const (
	StateConnecting   State = iota // there is no session
	StateConnected                 // there is a session with at least one link
	StateReconnecting              // there is a session whose links are all down; its streams wait
)

// String gives "connecting", "connected" or "reconnecting".
func (s State) String() string {
	return [...]string{"connecting", "connected", "reconnecting"}[s]
}

// ClientConfig says how the laptop reaches the traffic manager. Only Dial is required.
type ClientConfig struct {
	// Dial gives a new carrier connection to the manager. It is called from several goroutines, with a context
	// that ends after DialTimeout. The connection's Close must end its Read and Write; deadlines are not needed.
	Dial func(ctx context.Context) (net.Conn, error)

	// Shortcut is another path to the manager, which may do better than Dial's, or not work at all, and come and go.
	// Once a session is up it is tried, measured and, unless it does worse, taken (see shortcut.go). nil: there is none.
	Shortcut func(ctx context.Context) (net.Conn, error)
	// Forced has the shortcut taken whatever was measured, and its links wait for it when it fails.
	Forced bool
	// OnShortcut is called whenever the state of the shortcut has changed. Calls do not overlap. It must not block.
	OnShortcut func(ShortcutStatus)

	Links       int           // carrier connections of a session; 4, at most 254
	DialTimeout time.Duration // 15 s
	BackoffMin  time.Duration // pause after a failed attempt, doubling; 100 ms
	BackoffMax  time.Duration // up to this; 2 s. A third of each pause is random.

	// OnSession is called for every new session, in its own goroutine. ctx ends with the session. Returning does
	// not end the session. Run waits for it.
	OnSession func(ctx context.Context, s *Session)

	// OnState is called at every change, and in StateConnecting and StateReconnecting again for each failed
	// attempt, with the reason (nil at the very beginning). Calls do not overlap. It must not block.
	OnState func(State, error)

	Tuning Tuning
	Logger *slog.Logger // nothing is logged if nil
}

// Client keeps a session with the manager.
//
//	                 ┌───────── dial or handshake failed: pause ─────────┐
//	                 ▼                                                    │
//	Run ──▶ Connecting ──▶ first link attached: OnSession ──▶ Connected ──┼─▶ all links down: Reconnecting
//	                 ▲                                            ▲       │            │
//	                 │                                            └───────┼── attached ┤
//	                 └──────────── session lost or closed ────────────────┴────────────┘
type Client struct {
	cfg ClientConfig
	log *slog.Logger

	mu      sync.Mutex
	session *Session
	kick    chan struct{} // closed by refresh: pauses end
	woken   chan struct{} // closed by Probe
	dials   map[*attempt]struct{}
}

// attempt is a carrier that is being dialled.
type attempt struct {
	began time.Time
	stop  context.CancelCauseFunc
}

// NewClient does no I/O.
func NewClient(cfg ClientConfig) *Client {
	if cfg.Links <= 0 {
		cfg.Links = 4
	}
	cfg.Links = min(cfg.Links, 254)
	cfg.DialTimeout = orDefault(cfg.DialTimeout, 15*time.Second)
	cfg.BackoffMin = orDefault(cfg.BackoffMin, 100*time.Millisecond)
	cfg.BackoffMax = max(orDefault(cfg.BackoffMax, 2*time.Second), cfg.BackoffMin)
	cfg.Tuning = cfg.Tuning.withDefaults()
	if cfg.OnSession == nil {
		cfg.OnSession = func(context.Context, *Session) {}
	}
	if cfg.OnState == nil {
		cfg.OnState = func(State, error) {}
	}
	if cfg.OnShortcut == nil {
		cfg.OnShortcut = func(ShortcutStatus) {}
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return &Client{cfg: cfg, log: cfg.Logger, kick: make(chan struct{}), woken: make(chan struct{}), dials: make(map[*attempt]struct{})}
}

func orDefault(d, v time.Duration) time.Duration {
	if d <= 0 {
		return v
	}
	return d
}

// Session gives the current session, or nil while connecting.
func (c *Client) Session() *Session {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.session
}

// Probe asks for signs of life on all links now: one that gives none within timeout is dialled again. Pauses
// between attempts end, and attempts of more than a second begin anew. Call it when the machine has woken up or its
// network has changed.
func (c *Client) Probe(timeout time.Duration) {
	c.refresh(freshDial)
	c.mu.Lock()
	close(c.woken)
	c.woken = make(chan struct{})
	c.mu.Unlock()
	s := c.Session()
	if s == nil {
		return
	}
	for _, l := range s.attached() {
		l.probe(timeout)
	}
}

// freshDial is how long an attempt is left alone, whatever happened meanwhile.
const freshDial = time.Second

var errStale = errors.New("begun anew: the network has changed")

// refresh ends pauses between attempts, and has attempts that are older than age begin anew: what they sent may have
// gone where nothing was heard of it, and TCP's own pauses before it sends again are long by now.
func (c *Client) refresh(age time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.kick)
	c.kick = make(chan struct{})
	for a := range c.dials {
		if time.Since(a.began) > age {
			a.stop(errStale)
		}
	}
}

// Run keeps a session up until ctx ends, which closes the session and gives nil. It gives an error only where
// trying again is useless: ErrVersion.
func (c *Client) Run(ctx context.Context) error {
	c.cfg.OnState(StateConnecting, nil)
	pause := c.newBackoff()
	for {
		began := time.Now()
		err := c.runSession(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, ErrVersion) {
			return err
		}
		if time.Since(began) > time.Second+c.cfg.BackoffMax {
			pause.reset()
		}
		c.cfg.OnState(StateConnecting, err)
		pause.sleep(ctx)
	}
}

// runSession makes a session and serves it until it ends. Its error is why.
func (c *Client) runSession(ctx context.Context) error {
	var id SessionID
	var tok token
	randomise(id[:])
	randomise(tok[:])
	links := c.cfg.Links
	if c.cfg.Shortcut != nil {
		links++ // the scout
	}
	s := newSession(id, tok, true, links, c.cfg.Tuning, c.log)
	defer s.wg.Wait()
	defer s.fail(ErrSessionClosed)
	if c.cfg.Shortcut != nil {
		s.scout = c.newScout(s)
	}
	first, err := c.connect(ctx, s, s.link(0), base)
	if err != nil {
		c.log.Debug("session not established", "error", err)
		return err
	}
	s.log.Info("session established")

	sctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for i := range c.cfg.Links {
		wg.Go(func() {
			if i == 0 {
				c.keep(sctx, s, 0, first)
			} else {
				c.keep(sctx, s, i, nil)
			}
		})
	}
	if s.scout != nil {
		wg.Go(func() { s.scout.run(sctx) })
	}
	c.setSession(s)
	defer c.setSession(nil)
	wg.Go(func() { c.cfg.OnSession(sctx, s) })
	c.watch(ctx, s)
	cancel()
	if ctx.Err() != nil {
		s.Close()
	}
	s.log.Info("session ended", "reason", s.Err())
	return s.Err()
}

func (c *Client) setSession(s *Session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.session = s
}

// watch reports the session's state until it or ctx ends.
func (c *Client) watch(ctx context.Context, s *Session) {
	state := StateConnected
	c.cfg.OnState(state, nil)
	for {
		select {
		case <-s.events:
		case <-s.done:
			return
		case <-ctx.Done():
			return
		}
		if s.Err() != nil {
			return
		}
		up, err := s.state()
		switch {
		case up > 0 && state != StateConnected:
			state = StateConnected
			c.cfg.OnState(state, nil)
		case up == 0:
			state = StateReconnecting
			c.cfg.OnState(state, err)
		}
	}
}

// keep keeps link i attached until the session or ctx ends, over the path that the scout wants it on.
func (c *Client) keep(ctx context.Context, s *Session, i int, carrier *carrier) {
	l := s.link(i)
	if l == nil {
		return
	}
	pause := c.newBackoff()
	for {
		if carrier != nil {
			if l.wants() == carrier.path {
				select {
				case <-carrier.dead:
				case <-l.move:
					continue
				case <-ctx.Done():
					return
				case <-s.done:
					return
				}
			}
			if s.Err() != nil {
				return
			}
			if l.attachedTo(carrier) {
				l.log.Info("moving", "from", carrier.path, "to", l.wants())
			} else {
				l.log.Info("carrier lost", "path", carrier.path, "reason", carrier.err)
				c.lost(s, l, carrier)
				if time.Since(carrier.born) > time.Second {
					pause.reset() // the first attempt at once
				} else {
					pause.sleep(ctx)
				}
			}
		}
		path := l.wants()
		mctx, stop := moving(ctx, l, carrier)
		next, err := c.connect(mctx, s, l, path)
		abandoned := mctx.Err() != nil
		stop()
		switch {
		case err == nil:
			carrier = next
			l.log.Info("carrier attached", "path", path)
			continue
		case ctx.Err() != nil || s.Err() != nil:
			return
		case errors.Is(err, ErrServerFull) && !l.born.Load():
			l.log.Info("doing without this link", "reason", err)
			return
		case isFatal(err) && path == base:
			s.fail(err)
			return
		}
		l.log.Debug("carrier not established", "path", path, "error", err)
		if path == shortcut && !abandoned {
			s.scout.fail(err)
		}
		if carrier == nil || !l.attachedTo(carrier) {
			carrier = nil
			s.failed(err)
		}
		pause.sleep(ctx)
	}
}

// moving gives the context of an attempt: one to move from a carrier is given up when that is lost, or is to stay.
func moving(ctx context.Context, l *link, from *carrier) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	if from == nil || !l.attachedTo(from) {
		return ctx, cancel
	}
	go func() {
		defer cancel()
		for {
			select {
			case <-l.move:
				if l.wants() == from.path {
					return
				}
			case <-from.dead:
				if !errors.Is(from.err, errSuperseded) {
					return
				}
				<-ctx.Done() // by the attempt itself
				return
			case <-ctx.Done():
				return
			}
		}
	}()
	return ctx, cancel
}

// isFatal reports whether the manager's answer means that the session cannot go on.
func isFatal(err error) bool {
	return errors.Is(err, ErrSessionLost) || errors.Is(err, ErrRefused) || errors.Is(err, ErrVersion) || errors.Is(err, ErrProtocol)
}

// lost tells the scout of a carrier that was lost on the shortcut, and has its link go back at once.
func (c *Client) lost(s *Session, l *link, carrier *carrier) {
	if carrier.path != shortcut || errors.Is(carrier.err, errSuperseded) {
		return
	}
	if !c.cfg.Forced {
		l.wish(base)
	}
	s.scout.fail(carrier.err)
}

// failed notes a failed attempt, for OnState.
func (s *Session) failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lastLoss = err
	s.notify()
}

// connect dials a carrier and attaches it to the link. That it could be done is news to the attempts for other links,
// if they have taken much longer.
func (c *Client) connect(ctx context.Context, s *Session, l *link, path path) (*carrier, error) {
	for {
		actx, stop := context.WithCancelCause(ctx)
		a := &attempt{began: time.Now(), stop: stop}
		c.mu.Lock()
		c.dials[a] = struct{}{}
		c.mu.Unlock()
		ca, err := c.attempt(actx, s, l, path)
		c.mu.Lock()
		delete(c.dials, a)
		c.mu.Unlock()
		stale := context.Cause(actx) == errStale
		stop(nil)
		switch {
		case err == nil:
			c.refresh(max(freshDial, 2*time.Since(a.began)))
			return ca, nil
		case !stale:
			return nil, err
		}
		l.log.Debug("carrier is dialled anew", "after", time.Since(a.began))
	}
}

// attempt dials one carrier. Until it is there the link keeps the one that it has.
func (c *Client) attempt(ctx context.Context, s *Session, l *link, path path) (*carrier, error) {
	dial := c.cfg.Dial
	if path == shortcut {
		dial = c.cfg.Shortcut
	}
	dctx, cancel := context.WithTimeout(ctx, c.cfg.DialTimeout)
	conn, err := dial(dctx)
	cancel()
	if err != nil {
		return nil, fmt.Errorf("dialling the traffic manager: %w", err)
	}
	defer s.keepUp(l)()
	received := l.quiesce()
	l.mu.Lock()
	l.attempt++
	h := hello{session: s.id, token: s.token, link: uint8(l.index), first: !l.born.Load(), attempt: l.attempt, received: received}
	l.mu.Unlock()
	r, err := c.shake(ctx, conn, h)
	if err == nil {
		var ca *carrier
		if ca, err = l.attach(conn, path, r.received); err == nil {
			return ca, nil
		}
	}
	conn.Close()
	return nil, err
}

// shake performs the handshake. Timeout and ctx close conn, as not every carrier has deadlines.
func (c *Client) shake(ctx context.Context, conn net.Conn, h hello) (reply, error) {
	hctx, cancel := context.WithTimeout(ctx, c.cfg.Tuning.Handshake)
	defer cancel()
	stop := context.AfterFunc(hctx, func() { conn.Close() })
	r, err := func() (reply, error) {
		if _, err := conn.Write(h.marshal()); err != nil {
			return reply{}, fmt.Errorf("writing hello: %w", err)
		}
		r, err := readReply(conn)
		if err != nil {
			return r, err
		}
		return r, r.status.err()
	}()
	if !stop() {
		return r, fmt.Errorf("handshake with the traffic manager: %w", context.Cause(hctx))
	}
	return r, err
}

// backoff is the pause between attempts: BackoffMin, doubling up to BackoffMax, a third of it random.
type backoff struct {
	client *Client
	pause  pause
}

func (c *Client) newBackoff() *backoff {
	return &backoff{client: c, pause: pause{min: c.cfg.BackoffMin, max: c.cfg.BackoffMax}}
}

func (b *backoff) reset() { b.pause.reset() }

func (b *backoff) sleep(ctx context.Context) {
	timer := time.NewTimer(jittered(b.pause.use()))
	defer timer.Stop()
	b.client.mu.Lock()
	kick := b.client.kick
	b.client.mu.Unlock()
	select {
	case <-timer.C:
	case <-kick:
	case <-ctx.Done():
	}
}

// pause doubles each time that it is used.
type pause struct{ next, min, max time.Duration }

func (p *pause) use() time.Duration {
	now := max(p.next, p.min)
	p.next = min(2*now, p.max)
	return now
}

func (p *pause) reset() { p.next = 0 }

// jittered is d, a third of it random.
func jittered(d time.Duration) time.Duration { return d - d/3 + rand.N(d/3+1) }
