package transport

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"
)

// path is one of the two transports by which conns reach the manager.
type path int

const (
	fallback  path = iota // ClientConfig.Dial: a session begins on it, and falls back to it
	preferred             // ClientConfig.Preferred
	paths
)

// String is for logs.
func (p path) String() string { return [...]string{"fallback", "preferred"}[p] }

// Traffic counts bytes.
type Traffic struct{ Sent, Received uint64 }

type traffic Traffic

func (t *traffic) add(c *linkConn) {
	t.Sent += c.sent
	t.Received += c.received
}

// PreferredState is the state of the transport of ClientConfig.Preferred.
type PreferredState int

const (
	PreferredTrying  PreferredState = iota // the prober dials and measures it, beside the session
	PreferredInUse                         // the links use it, or move to it
	PreferredStandby                       // it works, but is slower than the fallback
	PreferredFailing                       // it does not work, for PreferredStatus.Reason
)

// String returns "trying", "in use", "standby" or "failing".
func (s PreferredState) String() string {
	return [...]string{"trying", "in use", "standby", "failing"}[s]
}

// PreferredStatus describes both transports.
type PreferredStatus struct {
	State     PreferredState
	Reason    error // why the preferred transport fails; nil otherwise
	Since     time.Time
	Fallback  Measure // zero before the first measurement
	Preferred Measure
}

// Measure is the speed of a transport, measured on an otherwise idle link.
type Measure struct {
	RTT  time.Duration // the least of a few pings
	Echo float64       // bytes a second that went there and back, the most of a few times
}

const (
	// The prober repeats a measurement while it is quick: a busy processor makes a transport look slower than it is,
	// never faster. A single measurement was off by up to three times while a laptop connected.
	pings        = 5
	echoBytes    = 256 << 10
	measureAgain = 100 * time.Millisecond // repeat until this long after the first began
	measureMost  = 8                      // repetitions
	measureTime  = 3 * time.Second        // the timeout for one transport

	// A link is stuck when its bytes are not acknowledged for stallTime, or four round trips. Its transport has failed
	// if the prober, on the other transport, still gets answers.
	stallTime  = 500 * time.Millisecond
	guardEvery = 100 * time.Millisecond

	// The prober tries a transport that failed or was slower again after a backoff that doubles, a third of it random.
	// The backoff starts again from its minimum once the preferred transport was in use for goodTime.
	retryMin  = time.Second
	retryMax  = time.Minute
	slowerMin = 10 * time.Second
	slowerMax = 5 * time.Minute
	goodTime  = time.Minute
)

var errStuck = errors.New("its bytes are not acknowledged, while the fallback transport works")

// prober measures both transports, decides whether the links use the preferred one, and watches it while they do. It
// has a link of its own, which carries no streams while another link is up.
//
//	          ┌─────────── backoff ◀── standby ◀── slower ──┐
//	          ▼                                             │
//	trying: measure fallback, then preferred, on the prober's link ── not slower ─▶ in use: the links move to preferred,
//	          ▲            │ dial fails                                               the prober's to fallback
//	          │            ▼                                                          │
//	          └─ backoff ◀─ failing ◀── links move back to fallback ◀── a conn is lost, or its bytes are not acknowledged
//
// A link resumes where its last conn ended, so no stream notices that its link has moved.
type prober struct {
	client  *Client
	session *Session
	link    *link
	broken  chan error // capacity 1: why the preferred transport failed
	// Pauses before the next attempt, after a failure and after a slower measurement.
	failedPause, slowerPause pause

	mu     sync.Mutex
	status PreferredStatus
}

// newProber creates the session's prober and its link. Call it before the session has any other link.
func (c *Client) newProber(s *Session) *prober {
	most := retryMax
	if c.cfg.Forced {
		most = retryMin // the session may use nothing else
	}
	return &prober{client: c, session: s, link: s.link(c.cfg.Links), broken: make(chan error, 1),
		failedPause: pause{min: retryMin, max: most}, slowerPause: pause{min: slowerMin, max: slowerMax}}
}

func (l *link) wantedPath() path {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.wanted
}

// moveTo asks Client.keep to move the link to p.
func (l *link) moveTo(p path) {
	l.mu.Lock()
	l.wanted = p
	l.mu.Unlock()
	l.move.Raise()
}

func (l *link) attachedTo(c *linkConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.conn == c
}

// fail reports a failure of the preferred transport that happened outside the prober. s may be nil.
func (s *prober) fail(err error) {
	if s == nil {
		return
	}
	select {
	case s.broken <- err:
	default:
	}
}

func (s *prober) set(change func(*PreferredStatus)) {
	s.mu.Lock()
	before := s.status
	change(&s.status)
	now := s.status
	if now.State != before.State {
		s.status.Since, now.Since = time.Now(), time.Now()
	}
	s.mu.Unlock()
	s.client.cfg.OnPreferred(now)
}

// run returns when ctx ends.
func (s *prober) run(ctx context.Context) {
	for ctx.Err() == nil {
		s.set(func(st *PreferredStatus) { st.State = PreferredTrying })
		good, err := s.try(ctx)
		if err == nil && good {
			began := time.Now()
			err = s.usePreferred(ctx)
			if time.Since(began) > goodTime {
				s.failedPause.reset()
				s.slowerPause.reset()
			}
		}
		if ctx.Err() != nil {
			return
		}
		var pause time.Duration
		if err != nil {
			pause = s.failedPause.use()
			s.set(func(st *PreferredStatus) { st.State, st.Reason = PreferredFailing, err })
			s.session.log.Info("preferred transport fails", "reason", err, "pause", pause)
		} else {
			pause = s.slowerPause.use()
			s.set(func(st *PreferredStatus) { st.State, st.Reason = PreferredStandby, nil })
		}
		s.leave()
		s.sleep(ctx, pause)
	}
}

// leave closes the prober's conn.
func (s *prober) leave() {
	s.link.mu.Lock()
	defer s.link.mu.Unlock()
	if s.link.conn != nil {
		s.link.lose(s.link.conn, errSuperseded)
	}
}

// sleep waits for a jittered pause, or until Client.Probe is called.
func (s *prober) sleep(ctx context.Context, pause time.Duration) {
	woken := s.client.woken.Next()
	timer := time.NewTimer(jittered(pause))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-woken:
	case <-ctx.Done():
	}
}

// try measures both transports with the prober's link. good means that the session should use the preferred one.
func (s *prober) try(ctx context.Context) (good bool, err error) {
	select {
	case <-s.broken: // a failure before this attempt
	default:
	}
	var got [paths]Measure
	for p := range paths {
		if _, err := s.client.connect(ctx, s.session, s.link, p); err != nil {
			return false, err
		}
		if p == fallback && s.client.cfg.Forced {
			continue // the fallback only carries what the dial of the preferred transport asks the manager for
		}
		if got[p], err = s.measure(ctx); err != nil {
			return false, fmt.Errorf("measure: %w", err)
		}
	}
	s.session.log.Info("transports measured", "fallback", got[fallback], "preferred", got[preferred])
	s.set(func(st *PreferredStatus) { st.Fallback, st.Preferred = got[fallback], got[preferred] })
	return s.client.cfg.Forced || got[preferred].atLeast(got[fallback]), nil
}

// atLeast reports whether a ping and an echo take no longer with m than with o. A tenth longer still counts as equal:
// of two equal transports the preferred one wins, which costs the cluster less. It compares the sum, because round trip
// and rate disagree when the session uses all the bandwidth: queues are longest where most bytes get through.
func (m Measure) atLeast(o Measure) bool { return 10*m.time() <= 11*o.time() }

func (m Measure) time() time.Duration {
	if m.Echo == 0 {
		return measureTime // nothing came back in time
	}
	return m.RTT + time.Duration(echoBytes/m.Echo*float64(time.Second))
}

// measure measures the transport that the prober's link is on.
func (s *prober) measure(ctx context.Context) (Measure, error) {
	ctx, cancel := context.WithTimeout(ctx, measureTime)
	defer cancel()
	var best Measure
	began := time.Now()
	for n := 0; n == 0 || n < measureMost && time.Since(began) < measureAgain; n++ {
		for range pings {
			rtt, err := s.link.roundTrip(ctx)
			if err != nil {
				return Measure{}, err
			}
			if best.RTT == 0 || rtt < best.RTT {
				best.RTT = rtt
			}
		}
		echo, err := s.echo(ctx)
		if err != nil {
			return Measure{}, err
		}
		best.Echo = max(best.Echo, echo)
	}
	return best, nil
}

// roundTrip sends a ping and waits for its pong.
func (l *link) roundTrip(ctx context.Context) (time.Duration, error) {
	stop := context.AfterFunc(ctx, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.changed.Broadcast()
	})
	defer stop()
	l.mu.Lock()
	defer l.mu.Unlock()
	began, c := time.Now(), l.conn
	l.ping(began)
	for seq := l.heart.pingSeq; l.heart.pongSeq < seq; l.changed.Wait() {
		switch {
		case l.closed != nil:
			return 0, l.closed
		case c == nil:
			return 0, errNoConn
		case l.conn != c:
			return 0, cmp.Or(c.err, errNoConn)
		case ctx.Err() != nil:
			return 0, context.Cause(ctx)
		}
	}
	return time.Since(began), nil
}

var errNoConn = errors.New("the link has no conn")

// echo sends echoBytes to the manager and back, and returns the rate in bytes per second.
func (s *prober) echo(ctx context.Context) (float64, error) {
	st, err := s.session.openOn(ctx, s.link, Request{Proto: ProtoMeter}, false)
	if err == nil {
		st, err = s.session.opened(ctx, st)
	}
	if err != nil {
		return 0, err
	}
	defer st.Reset()
	stop := context.AfterFunc(ctx, func() { st.Reset() })
	defer stop()
	began := time.Now()
	written := make(chan error, 1)
	go func() {
		_, err := st.Write(make([]byte, echoBytes))
		written <- err
	}()
	n, err := io.CopyN(io.Discard, st, echoBytes)
	took := time.Since(began)
	if err != nil {
		st.Reset()
	}
	// A slow transport does not echo everything in time.
	if err := cmp.Or(err, <-written); err != nil && ctx.Err() == nil {
		return 0, err
	}
	return float64(n) / took.Seconds(), nil
}

// meter answers echo at the manager.
func meter(in *Incoming) {
	st, err := in.Accept()
	if err != nil {
		return // the session has ended, or the opener gave up
	}
	defer st.Reset()
	if _, err := io.CopyN(st, st, echoBytes); err != nil {
		return
	}
	st.CloseWrite()
	io.Copy(io.Discard, st) // until the other end has read it, and resets
}

// usePreferred moves the links to the preferred transport and the prober's link to the fallback. It returns when the
// preferred transport fails, with the reason, after it has asked the links to move back.
func (s *prober) usePreferred(ctx context.Context) error {
	s.set(func(st *PreferredStatus) { st.State, st.Reason = PreferredInUse, nil })
	links := s.workers()
	for _, l := range links {
		l.moveTo(preferred)
	}
	err := s.guard(ctx, links)
	if ctx.Err() == nil && !s.client.cfg.Forced {
		for _, l := range links {
			l.moveTo(fallback)
		}
	}
	return err
}

// workers returns the links that carry streams.
func (s *prober) workers() []*link {
	var links []*link
	for i := range s.client.cfg.Links {
		if l := s.session.link(i); l != nil {
			links = append(links, l)
		}
	}
	return links
}

// guard watches the links on the preferred transport until it fails. Meanwhile it keeps the prober's link on the
// fallback.
func (s *prober) guard(ctx context.Context, links []*link) error {
	ctx, cancel := context.WithCancel(ctx)
	var standby sync.WaitGroup
	defer standby.Wait()
	defer cancel()
	standby.Go(func() { s.standBy(ctx) })
	tick := time.NewTicker(guardEvery)
	defer tick.Stop()
	for {
		select {
		case err := <-s.broken:
			return err
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			if slices.ContainsFunc(links, (*link).stuck) && s.answers(ctx) &&
				slices.ContainsFunc(links, (*link).stuck) {
				return errStuck
			}
		}
	}
}

// standBy keeps the prober's link on the fallback until ctx ends.
func (s *prober) standBy(ctx context.Context) {
	pause := s.client.newBackoff()
	for ctx.Err() == nil {
		ca, err := s.client.connect(ctx, s.session, s.link, fallback)
		if err != nil {
			s.session.log.Debug("the prober has no conn", "error", err)
			pause.sleep(ctx)
			continue
		}
		pause.reset()
		select {
		case <-ca.dead:
			pause.sleep(ctx)
		case <-ctx.Done():
		}
	}
}

// onPreferred reports whether the prober's link still uses the preferred transport.
func (s *prober) onPreferred() bool {
	s.link.mu.Lock()
	defer s.link.mu.Unlock()
	return s.link.conn != nil && s.link.conn.path == preferred
}

// answers reports whether the prober's link, on the fallback, gets a pong within stallTime.
func (s *prober) answers(ctx context.Context) bool {
	if s.onPreferred() {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, stallTime)
	defer cancel()
	_, err := s.link.roundTrip(ctx)
	return err == nil
}

// stuck reports whether the link's conn uses the preferred transport and its bytes are not acknowledged.
func (l *link) stuck() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil || l.conn.path != preferred || l.out.acked >= l.owed.end {
		return false
	}
	latest := l.owed.since
	if l.conn.last.After(latest) {
		latest = l.conn.last
	}
	return time.Since(latest) > max(stallTime, 4*time.Duration(l.load.rtt.Load()))
}
