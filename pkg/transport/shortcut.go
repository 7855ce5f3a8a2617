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

// path is one of the ways by which carriers reach the manager.
type path int

const (
	base     path = iota // ClientConfig.Dial: a session begins on it, and falls back to it
	shortcut             // ClientConfig.Shortcut
	paths
)

// String is for logs.
func (p path) String() string { return [...]string{"base", "shortcut"}[p] }

// Traffic counts bytes.
type Traffic struct{ Sent, Received uint64 }

type traffic Traffic

func (t *traffic) add(c *carrier) {
	t.Sent += c.sent
	t.Received += c.received
}

// ShortcutState is what became of ClientConfig.Shortcut.
type ShortcutState int

const (
	ShortcutTrying  ShortcutState = iota // it is dialled and measured, beside the session
	ShortcutTaken                        // the links are on it, or move there
	ShortcutPassed                       // it works, and does worse than the other path
	ShortcutFailing                      // it does not work; Reason says why
)

// String gives "trying", "taken", "passed" or "failing".
func (s ShortcutState) String() string {
	return [...]string{"trying", "taken", "passed", "failing"}[s]
}

// ShortcutStatus tells what is known of both paths.
type ShortcutStatus struct {
	State    ShortcutState
	Reason   error // why it is failing; nil otherwise
	Since    time.Time
	Base     Measure // zero before it was measured
	Shortcut Measure
}

// Measure is what a path can do, as seen on an otherwise idle link.
type Measure struct {
	RTT  time.Duration // the least of a few pings
	Echo float64       // bytes a second that went there and back, the most of a few times
}

const (
	// A path is measured once, and again while that is quick: a processor that is busy with something else shows a path
	// as worse than it is, never as better. A single measurement was off by up to three times while a laptop connected.
	pings        = 5
	echoBytes    = 256 << 10
	measureAgain = 100 * time.Millisecond // since the first began
	measureMost  = 8
	measureTime  = 3 * time.Second // bounds it all, of one path

	// A link whose bytes were not acknowledged for stallTime, or four round trips, is stuck, and so is its path,
	// provided that the scout, on the other path, still has answers.
	stallTime  = 500 * time.Millisecond
	guardEvery = 100 * time.Millisecond

	// A shortcut that failed or does worse is tried again after a pause that doubles, a third of it random. It begins anew with one that
	// was good for goodTime.
	retryMin = time.Second
	retryMax = time.Minute
	passMin  = 10 * time.Second
	passMax  = 5 * time.Minute
	goodTime = time.Minute
)

var errStuck = errors.New("its bytes are not acknowledged, while the other path works")

// scout finds out whether the shortcut is worth taking, and watches it while it is taken. It has a link of its own,
// which carries no streams while another link is up.
//
//	          ┌───────────────────────── pause ◀──── worse ────┐
//	          ▼                                                │
//	trying: scout's link on base, measured; on shortcut, measured ── no worse ─▶ taken: all links move to the shortcut,
//	          ▲                │ cannot be dialled                               the scout's to base
//	          │                ▼                                                     │
//	          └── pause ◀── failing ◀── links move back to base ◀── a carrier is lost, or its bytes are not acknowledged
//
// As a link goes on where its last carrier ended, no stream notices that its link has moved.
type scout struct {
	client  *Client
	session *Session
	link    *link
	broken  chan error // room for one: the shortcut has failed somewhere
	failed  pause
	passed  pause

	mu     sync.Mutex
	status ShortcutStatus
}

// newScout makes the session's scout, before anything else is done with the session.
func (c *Client) newScout(s *Session) *scout {
	most := retryMax
	if c.cfg.Forced {
		most = retryMin // there is nothing else to go by
	}
	return &scout{client: c, session: s, link: s.link(c.cfg.Links), broken: make(chan error, 1),
		failed: pause{min: retryMin, max: most}, passed: pause{min: passMin, max: passMax}}
}

func (l *link) wants() path {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.wished
}

// wish has keep move the link to p.
func (l *link) wish(p path) {
	l.mu.Lock()
	l.wished = p
	l.mu.Unlock()
	select {
	case l.move <- struct{}{}:
	default:
	}
}

func (l *link) attachedTo(c *carrier) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.carrier == c
}

// fail is told of every failure of the shortcut outside the scout. s may be nil.
func (s *scout) fail(err error) {
	if s == nil {
		return
	}
	select {
	case s.broken <- err:
	default:
	}
}

func (s *scout) set(change func(*ShortcutStatus)) {
	s.mu.Lock()
	before := s.status
	change(&s.status)
	now := s.status
	if now.State != before.State {
		s.status.Since, now.Since = time.Now(), time.Now()
	}
	s.mu.Unlock()
	s.client.cfg.OnShortcut(now)
}

// run returns when ctx ends.
func (s *scout) run(ctx context.Context) {
	for ctx.Err() == nil {
		s.set(func(st *ShortcutStatus) { st.State = ShortcutTrying })
		good, err := s.try(ctx)
		if err == nil && good {
			began := time.Now()
			err = s.take(ctx)
			if time.Since(began) > goodTime {
				s.failed.reset()
				s.passed.reset()
			}
		}
		if ctx.Err() != nil {
			return
		}
		var pause time.Duration
		if err != nil {
			pause = s.failed.use()
			s.set(func(st *ShortcutStatus) { st.State, st.Reason = ShortcutFailing, err })
			s.session.log.Info("shortcut fails", "reason", err, "pause", pause)
		} else {
			pause = s.passed.use()
			s.set(func(st *ShortcutStatus) { st.State, st.Reason = ShortcutPassed, nil })
		}
		s.leave()
		s.sleep(ctx, pause)
	}
}

// leave gives up the scout's carrier.
func (s *scout) leave() {
	s.link.mu.Lock()
	defer s.link.mu.Unlock()
	if s.link.carrier != nil {
		s.link.lose(s.link.carrier, errSuperseded)
	}
}

// sleep ends early when the network has changed.
func (s *scout) sleep(ctx context.Context, pause time.Duration) {
	s.client.mu.Lock()
	woken := s.client.woken
	s.client.mu.Unlock()
	timer := time.NewTimer(jittered(pause))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-woken:
	case <-ctx.Done():
	}
}

// try measures both paths with the scout's link.
func (s *scout) try(ctx context.Context) (good bool, err error) {
	select {
	case <-s.broken: // of before
	default:
	}
	var got [paths]Measure
	for p := range paths {
		if _, err := s.client.connect(ctx, s.session, s.link, p); err != nil {
			return false, err
		}
		if p == base && s.client.cfg.Forced {
			continue // it is there for what the shortcut's dial may have to ask the manager, when all else is lost
		}
		if got[p], err = s.measure(ctx); err != nil {
			return false, fmt.Errorf("measuring: %w", err)
		}
	}
	s.session.log.Info("paths measured", "base", got[base], "shortcut", got[shortcut])
	s.set(func(st *ShortcutStatus) { st.Base, st.Shortcut = got[base], got[shortcut] })
	return s.client.cfg.Forced || got[shortcut].atLeast(got[base]), nil
}

// atLeast reports whether a ping and an echo take no longer by m than by o. A tenth longer counts as no longer: of two that do
// as well the shortcut is taken, which costs the cluster less. One figure is compared, because beside a session that takes all
// there is the two do not agree: queues are longest where most gets through.
func (m Measure) atLeast(o Measure) bool { return 10*m.time() <= 11*o.time() }

func (m Measure) time() time.Duration {
	if m.Echo == 0 {
		return measureTime // nothing had come back by then
	}
	return m.RTT + time.Duration(echoBytes/m.Echo*float64(time.Second))
}

// measure says what the path that the scout's link is on can do.
func (s *scout) measure(ctx context.Context) (Measure, error) {
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

// roundTrip pings, and waits for the answer.
func (l *link) roundTrip(ctx context.Context) (time.Duration, error) {
	stop := context.AfterFunc(ctx, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.changed.Broadcast()
	})
	defer stop()
	l.mu.Lock()
	defer l.mu.Unlock()
	began, c := time.Now(), l.carrier
	l.ping(began)
	for seq := l.pingSeq; l.pongSeq < seq; l.changed.Wait() {
		switch {
		case l.closed != nil:
			return 0, l.closed
		case c == nil:
			return 0, errNoCarrier
		case l.carrier != c:
			return 0, cmp.Or(c.err, errNoCarrier)
		case ctx.Err() != nil:
			return 0, context.Cause(ctx)
		}
	}
	return time.Since(began), nil
}

var errNoCarrier = errors.New("the link has no carrier")

// echo sends some bytes to the manager and back.
func (s *scout) echo(ctx context.Context) (float64, error) {
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
	if err := cmp.Or(err, <-written); err != nil && ctx.Err() == nil { // a path may be too slow for all of it
		return 0, err
	}
	return float64(n) / took.Seconds(), nil
}

// meter is the other end of echo.
func meter(in *Incoming) {
	st, err := in.Accept()
	if err != nil {
		return // the session has ended, or the other end does not wait any more
	}
	defer st.Reset()
	if _, err := io.CopyN(st, st, echoBytes); err != nil {
		return
	}
	st.CloseWrite()
	io.Copy(io.Discard, st) // until the other end has read it, and resets
}

// take moves the links to the shortcut and the scout to base, and returns why the shortcut is to be left again. The
// links are on their way back then.
func (s *scout) take(ctx context.Context) error {
	s.set(func(st *ShortcutStatus) { st.State, st.Reason = ShortcutTaken, nil })
	links := s.workers()
	for _, l := range links {
		l.wish(shortcut)
	}
	err := s.guard(ctx, links)
	if ctx.Err() == nil && !s.client.cfg.Forced {
		for _, l := range links {
			l.wish(base)
		}
	}
	return err
}

// workers are the links that streams are on.
func (s *scout) workers() []*link {
	var links []*link
	for i := range s.client.cfg.Links {
		if l := s.session.link(i); l != nil {
			links = append(links, l)
		}
	}
	return links
}

// guard watches the links on the shortcut until it fails, and keeps the scout on base meanwhile.
func (s *scout) guard(ctx context.Context, links []*link) error {
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
			if slices.ContainsFunc(links, (*link).stuck) && s.answers(ctx) && slices.ContainsFunc(links, (*link).stuck) {
				return errStuck
			}
		}
	}
}

// standBy keeps the scout's link on base until ctx ends.
func (s *scout) standBy(ctx context.Context) {
	pause := s.client.newBackoff()
	for ctx.Err() == nil {
		ca, err := s.client.connect(ctx, s.session, s.link, base)
		if err != nil {
			s.session.log.Debug("the scout has no carrier", "error", err)
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

// onShortcut reports whether the scout's link is still there where it was measured.
func (s *scout) onShortcut() bool {
	s.link.mu.Lock()
	defer s.link.mu.Unlock()
	return s.link.carrier != nil && s.link.carrier.path == shortcut
}

// answers reports whether the scout gets answers on base.
func (s *scout) answers(ctx context.Context) bool {
	if s.onShortcut() {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, stallTime)
	defer cancel()
	_, err := s.link.roundTrip(ctx)
	return err == nil
}

// stuck reports whether the link's carrier is on the shortcut and what was written to it is not acknowledged.
func (l *link) stuck() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.carrier == nil || l.carrier.path != shortcut || l.out.acked >= l.due {
		return false
	}
	latest := l.progress
	if l.carrier.last.After(latest) {
		latest = l.carrier.last
	}
	return time.Since(latest) > max(stallTime, 4*time.Duration(l.rtt.Load()))
}
