package transport

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"kubevpn/pkg/wakeup"
)

// path is a transport by which conns reach the manager: fallback, or 1 plus an index of ClientConfig.Preferred.
type path int

const (
	fallback path = 0 // ClientConfig.Dial: a session begins on it, and falls back to it

	maxPaths = 4 // fallback and the most that ClientConfig.Preferred may contain
)

// String is for logs.
func (p path) String() string {
	if p == fallback {
		return "fallback"
	}
	return fmt.Sprintf("preferred %d", int(p))
}

// Traffic counts bytes.
type Traffic struct{ Sent, Received uint64 }

type traffic Traffic

func (t *traffic) add(c *linkConn) {
	t.Sent += c.sent
	t.Received += c.received
}

// PreferredState is the state of a transport of ClientConfig.Preferred.
type PreferredState int

const (
	PreferredTrying  PreferredState = iota // the prober dials and measures it, beside the session
	PreferredInUse                         // the links use it, or move to it
	PreferredStandby                       // it works, but another one is better
	PreferredFailing                       // it does not work, for PreferredStatus.Reason
)

// String returns "trying", "in use", "standby" or "failing".
func (s PreferredState) String() string {
	return [...]string{"trying", "in use", "standby", "failing"}[s]
}

// PreferredStatus describes one transport of ClientConfig.Preferred.
type PreferredStatus struct {
	State   PreferredState
	Reason  error // why it fails; nil otherwise
	Since   time.Time
	Measure Measure // zero before the first measurement
}

// ProberStatus describes all transports.
type ProberStatus struct {
	Fallback  Measure           // zero before the first measurement
	Preferred []PreferredStatus // in the order of ClientConfig.Preferred; immutable
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
	// if the prober, on the fallback, still gets answers.
	stallTime  = 500 * time.Millisecond
	guardEvery = 100 * time.Millisecond

	// The prober tries a transport that failed or was slower again after a backoff that doubles, a third of it random.
	// The backoff starts again from its minimum once the transport was in use for goodTime.
	retryMin  = time.Second
	retryMax  = time.Minute
	slowerMin = 10 * time.Second
	slowerMax = 5 * time.Minute
	goodTime  = time.Minute
)

var errStuck = errors.New("its bytes are not acknowledged, while the fallback transport works")

// prober measures the transports, decides which one the links use, and watches it if it is a preferred one. It has a
// link of its own, which carries no streams while another link is up.
//
//	           ┌─────────── backoff ◀── standby ◀── slower ──┐
//	           ▼                                             │
//	trying: measure the one in use, then others that are due, on the prober's link ── best ─▶ in use: the links move to
//	           ▲            │ dial fails                                                it, the prober's to fallback
//	           │            ▼                                                          │
//	           └─ backoff ◀─ failing ◀── links move back to fallback ◀── a conn is lost, or its bytes are not acknowledged
//
// While a preferred transport is in use, the prober tries only those before it in ClientConfig.Preferred. When it
// fails, all that worked are due at once.
//
// A link resumes where its last conn ended, so no stream notices that its link has moved.
type prober struct {
	client  *Client
	session *Session
	link    *link
	all     []path        // the paths of ClientConfig.Preferred
	broken  wakeup.Signal // failures has changed

	// One goroutine at a time uses these: run's, or standBy's while run waits for it.
	current path
	began   time.Time // when current came into use
	retries [maxPaths]retry

	mu       sync.Mutex
	status   ProberStatus
	failures [maxPaths]error // reported by Client.keep, since forget
}

// retry says when to try a transport.
type retry struct {
	tried, due     time.Time
	failed, slower pause // before the next attempt, after a failure and after a slower measurement
}

// newProber creates the session's prober and its link. Call it before the session has any other link.
func (c *Client) newProber(s *Session) *prober {
	most := retryMax
	if c.cfg.Forced {
		most = retryMin // the session may use nothing else
	}
	p := &prober{client: c, session: s, link: s.link(c.cfg.Links), broken: wakeup.NewSignal()}
	p.status.Preferred = make([]PreferredStatus, len(c.cfg.Preferred))
	for i := range c.cfg.Preferred {
		at := path(i + 1)
		p.all = append(p.all, at)
		p.retries[at] = retry{failed: pause{min: retryMin, max: most}, slower: pause{min: slowerMin, max: slowerMax}}
	}
	return p
}

// giveUp asks Client.keep to move the link to the fallback if it was asked to use p.
func (l *link) giveUp(p path) {
	l.wanted.Update(func(wanted *path) {
		if *wanted == p {
			*wanted = fallback
		}
	})
}

func (l *link) attachedTo(c *linkConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.conn == c
}

// fail reports a failure of a preferred transport that happened outside the prober. s may be nil.
func (s *prober) fail(p path, err error) {
	if s == nil {
		return
	}
	s.mu.Lock()
	s.failures[p] = err
	s.mu.Unlock()
	s.broken.Raise()
}

// failure returns the latest failure of p since forget.
func (s *prober) failure(p path) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failures[p]
}

// forget drops a failure of p that happened before this attempt.
func (s *prober) forget(p path) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failures[p] = nil
}

// set changes the status of p, which is not the fallback.
func (s *prober) set(p path, change func(*PreferredStatus)) {
	s.update(func(all *ProberStatus) {
		st := &all.Preferred[p-1]
		before := st.State
		if change(st); st.State != before {
			st.Since = time.Now()
		}
	})
}

func (s *prober) update(change func(*ProberStatus)) {
	s.mu.Lock()
	s.status.Preferred = slices.Clone(s.status.Preferred)
	change(&s.status)
	now := s.status
	s.mu.Unlock()
	s.client.cfg.OnPreferred(now)
}

// run returns when ctx ends.
func (s *prober) run(ctx context.Context) {
	for ctx.Err() == nil {
		if s.current == fallback {
			if best := s.round(ctx); best != fallback {
				s.use(best)
			} else {
				s.leave()
				s.sleep(ctx)
			}
			continue
		}
		better, err := s.guard(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			s.use(better)
		default:
			s.giveUp(err)
		}
	}
}

// use moves the links to p.
func (s *prober) use(p path) {
	s.current, s.began = p, time.Now()
	s.set(p, func(st *PreferredStatus) { st.State, st.Reason = PreferredInUse, nil })
	for _, l := range s.workers() {
		l.wanted.Update(func(wanted *path) { *wanted = p })
	}
}

// giveUp moves the links back to the fallback, because the transport in use has failed.
func (s *prober) giveUp(err error) {
	p := s.current
	if !s.client.cfg.Forced {
		for _, l := range s.workers() {
			l.giveUp(p)
		}
	}
	if r := &s.retries[p]; time.Since(s.began) > goodTime {
		r.failed.reset()
		r.slower.reset()
	}
	s.current = fallback
	s.failed(p, err)
	for _, other := range s.all {
		if s.stateOf(other) == PreferredStandby {
			s.retries[other].due = time.Now()
		}
	}
}

func (s *prober) stateOf(p path) PreferredState {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status.Preferred[p-1].State
}

// failed notes that p does not work.
func (s *prober) failed(p path, err error) {
	pause := jittered(s.retries[p].failed.use())
	s.retries[p].due = time.Now().Add(pause)
	s.set(p, func(st *PreferredStatus) { st.State, st.Reason = PreferredFailing, err })
	s.session.log.Info("transport fails", "path", p, "reason", err, "pause", pause)
}

// leave closes the prober's conn.
func (s *prober) leave() {
	s.link.mu.Lock()
	defer s.link.mu.Unlock()
	if s.link.conn != nil {
		s.link.lose(s.link.conn, errSuperseded)
	}
}

// candidates returns the transports to try beside the one in use.
func (s *prober) candidates() []path {
	if s.current == fallback {
		return s.all
	}
	return s.all[:s.current-1]
}

// due returns the candidates whose time has come.
func (s *prober) due() (now []path) {
	for _, p := range s.candidates() {
		if !time.Now().Before(s.retries[p].due) {
			now = append(now, p)
		}
	}
	return now
}

// untilDue returns a timer for the next candidate that is due. If there is none, it never fires.
func (s *prober) untilDue() *time.Timer {
	next := time.Duration(math.MaxInt64)
	for _, p := range s.candidates() {
		next = min(next, time.Until(s.retries[p].due))
	}
	return time.NewTimer(next)
}

// allDue makes all transports due, because they may work by now. None is due sooner than retryMin after the last
// attempt, because the manager can cause calls of Client.Retry.
func (s *prober) allDue() {
	for i := range s.retries {
		r := &s.retries[i]
		r.due = r.tried.Add(retryMin)
		r.failed.reset() // if it does not work yet, it may soon
	}
}

// sleep waits until a transport is due, or until Client.Probe or Client.Retry is called.
func (s *prober) sleep(ctx context.Context) {
	woken := s.client.woken.Next()
	timer := s.untilDue()
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-woken:
		s.allDue()
	case <-ctx.Done():
	}
}

// round tries the transports that are due, and returns the one that the session should use.
func (s *prober) round(ctx context.Context) path {
	got := map[path]Measure{}
	due := s.due()
	if len(due) == 0 {
		return s.current
	}
	for _, p := range due {
		s.retries[p].tried = time.Now()
		s.set(p, func(st *PreferredStatus) { st.State = PreferredTrying })
	}
	if s.current == fallback { // dials of preferred transports may send requests over it
		m, err := s.try(ctx, fallback)
		for _, p := range due {
			if err != nil && ctx.Err() == nil {
				s.failed(p, err)
			}
		}
		if err != nil {
			return s.current
		}
		got[fallback] = m
	}
	for _, p := range due {
		s.forget(p)
		m, err := s.try(ctx, p)
		switch {
		case ctx.Err() != nil:
			return s.current
		case err != nil:
			s.failed(p, err)
		default:
			got[p] = m
		}
	}
	if _, measured := got[s.current]; !measured && len(got) > 0 {
		m, err := s.try(ctx, s.current)
		if err != nil { // guard learns the cause
			m = Measure{}
		}
		got[s.current] = m
	}
	s.update(func(st *ProberStatus) {
		for p, m := range got {
			if p == fallback {
				st.Fallback = m
			} else {
				st.Preferred[p-1].Measure = m
			}
		}
	})
	return s.best(got)
}

// best returns the first choice among the transports that are about as fast as the fastest. The others stand by.
func (s *prober) best(got map[path]Measure) path {
	best := s.current
	if len(got) > 1 {
		s.session.log.Info("transports measured", "by", got)
		best = fallback
		for _, p := range s.all {
			if m, ok := got[p]; ok && (s.client.cfg.Forced || m.atLeast(fastest(got))) {
				best = p
				break
			}
		}
	}
	for p := range got {
		if p != best && p != fallback {
			s.retries[p].due = time.Now().Add(jittered(s.retries[p].slower.use()))
			s.set(p, func(st *PreferredStatus) { st.State, st.Reason = PreferredStandby, nil })
		}
	}
	return best
}

// fastest returns the measurement with the shortest time.
func fastest(got map[path]Measure) Measure {
	return slices.MinFunc(slices.Collect(maps.Values(got)), func(a, b Measure) int {
		return cmp.Compare(a.time(), b.time())
	})
}

// try moves the prober's link to p and measures it. If the user forces a transport, the fallback is not measured.
func (s *prober) try(ctx context.Context, p path) (Measure, error) {
	if _, err := s.client.connect(ctx, s.session, s.link, p); err != nil {
		return Measure{}, err
	}
	if p == fallback && s.client.cfg.Forced {
		return Measure{}, nil
	}
	m, err := s.measure(ctx)
	if err != nil {
		return Measure{}, fmt.Errorf("measure: %w", err)
	}
	return m, nil
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

// guard watches the links on the transport in use until it fails, or until standBy finds a better one.
func (s *prober) guard(ctx context.Context) (better path, err error) {
	links := s.workers()
	ctx, cancel := context.WithCancel(ctx)
	found := make(chan path, 1)
	var standby sync.WaitGroup
	defer standby.Wait()
	defer cancel()
	standby.Go(func() { s.standBy(ctx, found) })
	tick := time.NewTicker(guardEvery)
	defer tick.Stop()
	for {
		select {
		case <-s.broken:
			if err := s.failure(s.current); err != nil {
				return 0, err
			}
		case better := <-found:
			return better, nil
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-tick.C:
			if slices.ContainsFunc(links, (*link).stuck) && s.answers(ctx) &&
				slices.ContainsFunc(links, (*link).stuck) {
				return 0, errStuck
			}
		}
	}
}

// standBy keeps the prober's link on the fallback until ctx ends, or until it has found a better transport than the one
// in use.
func (s *prober) standBy(ctx context.Context, found chan<- path) {
	pause := s.client.newBackoff()
	for ctx.Err() == nil {
		woken := s.client.woken.Next()
		conn, err := s.onFallback(ctx)
		if err != nil {
			s.session.log.Debug("the prober has no conn", "error", err)
			pause.sleep(ctx)
			continue
		}
		pause.reset()
		timer := s.untilDue()
		select {
		case <-conn.dead:
			pause.sleep(ctx)
		case <-woken:
			s.allDue()
		case <-timer.C:
			if best := s.round(ctx); best != s.current {
				found <- best
				return
			}
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// onFallback returns the conn of the prober's link on the fallback, after it has moved the link there if need be.
func (s *prober) onFallback(ctx context.Context) (*linkConn, error) {
	s.link.mu.Lock()
	conn := s.link.conn
	s.link.mu.Unlock()
	if conn != nil && conn.path == fallback {
		return conn, nil
	}
	return s.client.connect(ctx, s.session, s.link, fallback)
}

// answers reports whether the prober's link is on the fallback and gets a pong within stallTime.
func (s *prober) answers(ctx context.Context) bool {
	s.link.mu.Lock()
	elsewhere := s.link.conn != nil && s.link.conn.path != fallback
	s.link.mu.Unlock()
	if elsewhere {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, stallTime)
	defer cancel()
	_, err := s.link.roundTrip(ctx)
	return err == nil
}

// stuck reports whether the link's conn uses a preferred transport and its bytes are not acknowledged.
func (l *link) stuck() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil || l.conn.path == fallback || l.out.acked >= l.owed.end {
		return false
	}
	latest := l.owed.since
	if l.conn.last.After(latest) {
		latest = l.conn.last
	}
	return time.Since(latest) > max(stallTime, 4*time.Duration(l.load.rtt.Load()))
}
