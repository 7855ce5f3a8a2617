package transport

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"kubevpn/pkg/wakeup"
)

// State is the state of a Client.
type State int

const (
	StateConnecting   State = iota // there is no session
	StateConnected                 // there is a session with at least one link
	StateReconnecting              // all links of the session are down; its streams wait
)

// String returns "connecting", "connected" or "reconnecting".
func (s State) String() string {
	return [...]string{"connecting", "connected", "reconnecting"}[s]
}

// ClientConfig configures a Client. Only Dial is required.
type ClientConfig struct {
	// Dial opens a new conn to the manager. It is called from several goroutines, with a context that ends after
	// DialTimeout. The conn's Close must end its Read and Write; it need not support deadlines.
	Dial func(ctx context.Context) (net.Conn, error)

	// Preferred holds at most three functions that dial the manager over other transports, the best first. They may
	// fail, and may work only at times. Once a session is up, its links use the first that works, and Dial while none
	// does (see preferred.go).
	Preferred []func(ctx context.Context) (net.Conn, error)
	// Forced makes the session use only the one of Preferred. Its links wait for it when it fails.
	Forced bool
	// OnPreferred is called whenever the status of a transport changes, with that of all. It must not change them, and
	// must not block. Calls do not overlap.
	OnPreferred func([]PreferredStatus)

	Links       int           // conns of a session; 4, at most 254
	DialTimeout time.Duration // 15 s
	BackoffMin  time.Duration // pause after a failed attempt, doubling; 100 ms
	BackoffMax  time.Duration // longest pause; 2 s. A third of each pause is random.

	// OnSession is called for every new session, in its own goroutine. ctx ends with the session. Returning does
	// not end the session. Run waits for it.
	OnSession func(ctx context.Context, s *Session)

	// OnState is called at every change, and in StateConnecting and StateReconnecting again for each failed
	// attempt, with the reason (nil at the very beginning). Calls do not overlap. It must not block.
	OnState func(State, error)

	// Budget bounds the memory that sessions hold on behalf of the manager. nil allows 256 MiB and no streams that the
	// manager opens: the client resets them at once. So a client that does not call Session.Accept needs no Budget.
	Budget *Budget

	Tuning Tuning
	Logger *slog.Logger // nil discards
}

// Client keeps a session with the manager. Its methods may be called concurrently.
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
	session *Session // nil while connecting
	dials   map[*attempt]struct{}

	kick  wakeup.Broadcast // sent by refresh: pauses end
	woken wakeup.Broadcast // sent by Probe and Retry
}

// attempt is a dial in progress.
type attempt struct {
	began time.Time
	stop  context.CancelCauseFunc
}

// NewClient returns a Client that does nothing before Run.
func NewClient(cfg ClientConfig) *Client {
	cfg.Links = min(cmp.Or(cfg.Links, 4), 254)
	cfg.DialTimeout = cmp.Or(cfg.DialTimeout, 15*time.Second)
	cfg.BackoffMin = cmp.Or(cfg.BackoffMin, 100*time.Millisecond)
	cfg.BackoffMax = max(cmp.Or(cfg.BackoffMax, 2*time.Second), cfg.BackoffMin)
	cfg.Tuning = cfg.Tuning.withDefaults()
	cfg.Budget = cmp.Or(cfg.Budget, NewBudget(0, 256<<20))
	if cfg.OnSession == nil {
		cfg.OnSession = func(context.Context, *Session) {}
	}
	if cfg.OnState == nil {
		cfg.OnState = func(State, error) {}
	}
	if cfg.OnPreferred == nil {
		cfg.OnPreferred = func([]PreferredStatus) {}
	}
	cfg.Logger = cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler))
	cfg.Preferred = cfg.Preferred[:min(len(cfg.Preferred), maxPaths-1)]
	return &Client{cfg: cfg, log: cfg.Logger, dials: make(map[*attempt]struct{})}
}

// Probe replaces the conns that no longer work: at once those for whose local address gone returns true, and those that
// do not answer a ping and receive nothing for a few round trips. It ends pauses between attempts and restarts all
// attempts: their packets may be lost, and TCP's own backoff may be long by now. Call it when the machine has woken up
// or its network has changed. Probe calls gone with locks held; it must not block.
func (c *Client) Probe(gone func(local net.Addr) bool) {
	c.refresh(0)
	c.woken.Send()
	c.mu.Lock()
	s := c.session
	c.mu.Unlock()
	if s == nil {
		return
	}
	for _, l := range s.attached() {
		l.probe(gone)
	}
}

// Retry ends the pauses after which the client tries preferred transports again. Call it when one may work by now.
func (c *Client) Retry() { c.woken.Send() }

// freshDial is the age of attempts that the success of another one does not restart.
const freshDial = time.Second

var errStale = errors.New("restarted: the network has changed")

// refresh ends pauses between attempts and restarts attempts that are older than age.
func (c *Client) refresh(age time.Duration) {
	c.kick.Send()
	c.mu.Lock()
	defer c.mu.Unlock()
	for a := range c.dials {
		if time.Since(a.began) > age {
			a.stop(errStale)
		}
	}
}

// Run keeps a session up until ctx ends; it then closes the session and returns nil. It returns an error only if a
// retry is useless: ErrVersion.
func (c *Client) Run(ctx context.Context) error {
	c.cfg.OnState(StateConnecting, nil)
	pause := pause{min: c.cfg.BackoffMin, max: c.cfg.BackoffMax}
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
		c.sleep(ctx, &pause)
	}
}

// runSession creates a session and serves it until it ends. It returns the reason.
func (c *Client) runSession(ctx context.Context) error {
	links := c.cfg.Links
	if len(c.cfg.Preferred) > 0 {
		links++ // the prober's
	}
	s := newSession(newIdentity(), links, c.cfg.Budget, c.cfg.Tuning, c.log)
	defer s.settle()
	defer s.wg.Wait()
	defer s.fail(ErrSessionClosed)
	if len(c.cfg.Preferred) > 0 {
		s.prober = c.newProber(s)
	}
	var err error
	first := make([]*linkConn, links) // of the links; nil: not dialed yet
	if first[0], err = c.connect(ctx, s, s.link(0), fallback); err != nil {
		c.log.Debug("session not established", "error", err)
		return err
	}
	s.log.Info("session established")

	sctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for i := range links {
		wg.Go(func() { c.keep(sctx, s, i, first[i]) })
	}
	if s.prober != nil {
		wg.Go(func() { s.prober.run(sctx) })
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

// watch reports the session's state to OnState until the session or ctx ends.
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

// keep keeps link i attached until the session or ctx ends, over the transport that the prober chose.
func (c *Client) keep(ctx context.Context, s *Session, i int, conn *linkConn) {
	l := s.link(i)
	if l == nil {
		return
	}
	pause := pause{min: c.cfg.BackoffMin, max: c.cfg.BackoffMax}
	for {
		if conn != nil {
			l.awaitChange(ctx, conn)
			if ctx.Err() != nil || s.Err() != nil {
				return
			}
			if l.current() == conn {
				l.log.Info("changing the conn", "from", conn.path, "to", l.wanted.Load())
			} else {
				c.lost(s, l, conn)
				if time.Since(conn.born) > time.Second {
					pause.reset() // no pause before the first attempt
				} else {
					c.sleep(ctx, &pause)
				}
			}
		}
		path := l.wanted.Load()
		next, err := c.connect(ctx, s, l, path)
		switch {
		case err == nil:
			conn = next
			l.log.Info("conn attached", "path", path)
			if s.isSpare(l) {
				s.prober.news.Raise()
			}
			continue
		case ctx.Err() != nil || s.Err() != nil:
			return
		case errors.Is(err, ErrServerFull) && !l.load.born.Load() && !s.isSpare(l):
			l.log.Info("doing without this link", "reason", err)
			return
		case isFatal(err) && path == fallback:
			s.fail(err)
			return
		}
		l.log.Debug("conn not established", "path", path, "error", err)
		if path != fallback {
			s.prober.report(path, err)
		}
		if conn == nil || l.current() != conn {
			conn = nil
			s.failed(err)
		}
		c.sleep(ctx, &pause)
	}
}

// awaitChange returns when conn is lost, when the link needs a new one or has to move to another transport, or when the
// session or ctx ends.
func (l *link) awaitChange(ctx context.Context, conn *linkConn) {
	var after <-chan time.Time // nil: the conn is not worn
	for {
		wanted, changed := l.wanted.Get()
		if wanted != conn.path {
			return
		}
		select {
		case <-conn.dead:
			return
		case <-changed:
		case <-l.renew:
			after = time.After(l.untilRenewal(conn))
		case <-after:
			wait := l.untilRenewal(conn)
			if wait <= 0 {
				return
			}
			after = time.After(wait)
		case <-ctx.Done():
			return
		case <-l.session.done:
			return
		}
	}
}

// isFatal reports whether the manager's answer ends the session.
func isFatal(err error) bool {
	return errors.Is(err, ErrSessionLost) || errors.Is(err, ErrRefused) || errors.Is(err, ErrVersion) ||
		errors.Is(err, ErrProtocol)
}

// lost logs the loss of a conn. If it used a preferred transport, lost moves the link to the fallback at once.
func (c *Client) lost(s *Session, l *link, conn *linkConn) {
	l.log.Info("conn lost", "path", conn.path, "reason", conn.err)
	if conn.path == fallback || errors.Is(conn.err, errSuperseded) {
		return
	}
	if !c.cfg.Forced {
		l.move(conn.path, fallback)
	}
	s.prober.report(conn.path, conn.err)
}

// failed records a failed attempt for OnState.
func (s *Session) failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lastLoss = err
	s.events.Raise()
}

// connect dials a conn and attaches it to the link. Its success restarts attempts for other links that have taken much
// longer.
func (c *Client) connect(ctx context.Context, s *Session, l *link, path path) (*linkConn, error) {
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
		l.log.Debug("dial restarted", "after", time.Since(a.began))
	}
}

// attempt dials one conn. The link keeps its current conn until the new one is open.
func (c *Client) attempt(ctx context.Context, s *Session, l *link, path path) (*linkConn, error) {
	dial := c.cfg.Dial
	if path != fallback {
		dial = c.cfg.Preferred[path-1]
	}
	dctx, cancel := context.WithTimeout(ctx, c.cfg.DialTimeout)
	conn, err := dial(dctx)
	cancel()
	if err != nil {
		return nil, fmt.Errorf("dial the traffic manager: %w", err)
	}
	defer s.keepUp(l)()
	received := l.quiesce()
	l.mu.Lock()
	l.attempt++
	h := hello{Session: s.id, Token: s.token, Link: uint8(l.index), Attempt: l.attempt, Received: received}
	if !l.load.born.Load() {
		h.Flags = flagFirst
	}
	l.mu.Unlock()
	if l.index > 0 && l.index < c.cfg.Links {
		h.Flags |= flagBulk
	}
	r, err := shake(ctx, conn, h)
	if err == nil {
		l.load.bulk.Store(h.Flags&r.Flags&flagBulk != 0)
		var ca *linkConn
		if ca, err = l.attach(conn, path, r.Received); err == nil {
			return ca, nil
		}
	}
	conn.Close()
	return nil, err
}

// shake performs the handshake. The timeout and ctx close conn, because not every conn has deadlines.
func shake(ctx context.Context, conn net.Conn, h hello) (reply, error) {
	hctx, cancel := context.WithTimeout(ctx, handshakeTime)
	defer cancel()
	stop := context.AfterFunc(hctx, func() { conn.Close() })
	r, err := func() (reply, error) {
		if _, err := conn.Write(marshalHandshake(h)); err != nil {
			return reply{}, fmt.Errorf("writing hello: %w", err)
		}
		r, err := readHandshake[reply](conn)
		if err != nil {
			return r, err
		}
		return r, r.Status.err()
	}()
	if !stop() {
		return r, fmt.Errorf("handshake with the traffic manager: %w", context.Cause(hctx))
	}
	return r, err
}

// sleep waits for a pause between attempts. refresh ends it, and the next one is the shortest: what failed may work by
// now.
func (c *Client) sleep(ctx context.Context, p *pause) {
	timer := time.NewTimer(p.use())
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.kick.Next():
		p.reset()
	case <-ctx.Done():
	}
}

// pause is a duration that doubles with each use, from min to max.
type pause struct{ next, min, max time.Duration }

// use returns the duration, a third of it random.
func (p *pause) use() time.Duration {
	now := max(p.next, p.min)
	p.next = min(2*now, p.max)
	return now - now/3 + rand.N(now/3+1)
}

func (p *pause) reset() { p.next = 0 }
