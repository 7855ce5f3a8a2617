package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
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

const (
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

// fail reports a failure of a preferred transport that happened outside the prober. pr may be nil.
func (pr *prober) fail(p path, err error) {
	if pr == nil {
		return
	}
	pr.mu.Lock()
	pr.failures[p] = err
	pr.mu.Unlock()
	pr.broken.Raise()
}

// failure returns the latest failure of p since forget.
func (pr *prober) failure(p path) error {
	pr.mu.Lock()
	defer pr.mu.Unlock()
	return pr.failures[p]
}

// forget drops a failure of p that happened before this attempt.
func (pr *prober) forget(p path) {
	pr.mu.Lock()
	defer pr.mu.Unlock()
	pr.failures[p] = nil
}

// set changes the status of p, which is not the fallback.
func (pr *prober) set(p path, change func(*PreferredStatus)) {
	pr.update(func(all *ProberStatus) {
		st := &all.Preferred[p-1]
		before := st.State
		if change(st); st.State != before {
			st.Since = time.Now()
		}
	})
}

func (pr *prober) update(change func(*ProberStatus)) {
	pr.mu.Lock()
	pr.status.Preferred = slices.Clone(pr.status.Preferred)
	change(&pr.status)
	now := pr.status
	pr.mu.Unlock()
	pr.client.cfg.OnPreferred(now)
}

// run returns when ctx ends.
func (pr *prober) run(ctx context.Context) {
	for ctx.Err() == nil {
		if pr.current == fallback {
			if best := pr.round(ctx); best != fallback {
				pr.use(best)
			} else {
				pr.leave()
				pr.sleep(ctx)
			}
			continue
		}
		better, err := pr.guard(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			pr.use(better)
		default:
			pr.giveUp(err)
		}
	}
}

// use moves the links to p.
func (pr *prober) use(p path) {
	pr.current, pr.began = p, time.Now()
	pr.set(p, func(st *PreferredStatus) { st.State, st.Reason = PreferredInUse, nil })
	for _, l := range pr.workers() {
		l.wanted.Update(func(wanted *path) { *wanted = p })
	}
}

// giveUp moves the links back to the fallback, because the transport in use has failed.
func (pr *prober) giveUp(err error) {
	p := pr.current
	if !pr.client.cfg.Forced {
		for _, l := range pr.workers() {
			l.giveUp(p)
		}
	}
	if r := &pr.retries[p]; time.Since(pr.began) > goodTime {
		r.failed.reset()
		r.slower.reset()
	}
	pr.current = fallback
	pr.failed(p, err)
	for _, other := range pr.all {
		if pr.stateOf(other) == PreferredStandby {
			pr.retries[other].due = time.Now()
		}
	}
}

func (pr *prober) stateOf(p path) PreferredState {
	pr.mu.Lock()
	defer pr.mu.Unlock()
	return pr.status.Preferred[p-1].State
}

// failed notes that p does not work.
func (pr *prober) failed(p path, err error) {
	pause := jittered(pr.retries[p].failed.use())
	pr.retries[p].due = time.Now().Add(pause)
	pr.set(p, func(st *PreferredStatus) { st.State, st.Reason = PreferredFailing, err })
	pr.session.log.Info("transport fails", "path", p, "reason", err, "pause", pause)
}

// leave closes the prober's conn.
func (pr *prober) leave() {
	pr.link.mu.Lock()
	defer pr.link.mu.Unlock()
	if pr.link.conn != nil {
		pr.link.lose(pr.link.conn, errSuperseded)
	}
}

// candidates returns the transports to try beside the one in use.
func (pr *prober) candidates() []path {
	if pr.current == fallback {
		return pr.all
	}
	return pr.all[:pr.current-1]
}

// due returns the candidates whose time has come.
func (pr *prober) due() (now []path) {
	for _, p := range pr.candidates() {
		if !time.Now().Before(pr.retries[p].due) {
			now = append(now, p)
		}
	}
	return now
}

// untilDue returns a timer for the next candidate that is due. If there is none, it never fires.
func (pr *prober) untilDue() *time.Timer {
	next := time.Duration(math.MaxInt64)
	for _, p := range pr.candidates() {
		next = min(next, time.Until(pr.retries[p].due))
	}
	return time.NewTimer(next)
}

// allDue makes all transports due, because they may work by now. None is due sooner than retryMin after the last
// attempt, because the manager can cause calls of Client.Retry.
func (pr *prober) allDue() {
	for i := range pr.retries {
		r := &pr.retries[i]
		r.due = r.tried.Add(retryMin)
		r.failed.reset() // if it does not work yet, it may soon
	}
}

// sleep waits until a transport is due, or until Client.Probe or Client.Retry is called.
func (pr *prober) sleep(ctx context.Context) {
	woken := pr.client.woken.Next()
	timer := pr.untilDue()
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-woken:
		pr.allDue()
	case <-ctx.Done():
	}
}

// round tries the transports that are due, and returns the one that the session should use.
func (pr *prober) round(ctx context.Context) path {
	got := map[path]Measure{}
	due := pr.due()
	if len(due) == 0 {
		return pr.current
	}
	for _, p := range due {
		pr.retries[p].tried = time.Now()
		pr.set(p, func(st *PreferredStatus) { st.State = PreferredTrying })
	}
	if pr.current == fallback { // dials of preferred transports may send requests over it
		m, err := pr.try(ctx, fallback)
		for _, p := range due {
			if err != nil && ctx.Err() == nil {
				pr.failed(p, err)
			}
		}
		if err != nil {
			return pr.current
		}
		got[fallback] = m
	}
	for _, p := range due {
		pr.forget(p)
		m, err := pr.try(ctx, p)
		switch {
		case ctx.Err() != nil:
			return pr.current
		case err != nil:
			pr.failed(p, err)
		default:
			got[p] = m
		}
	}
	if _, measured := got[pr.current]; !measured && len(got) > 0 {
		m, err := pr.try(ctx, pr.current)
		if err != nil { // guard learns the cause
			m = Measure{}
		}
		got[pr.current] = m
	}
	pr.update(func(st *ProberStatus) {
		for p, m := range got {
			if p == fallback {
				st.Fallback = m
			} else {
				st.Preferred[p-1].Measure = m
			}
		}
	})
	return pr.best(got)
}

// best returns the first choice among the transports that are about as fast as the fastest. The others stand by.
func (pr *prober) best(got map[path]Measure) path {
	best := pr.current
	if len(got) > 1 {
		pr.session.log.Info("transports measured", "by", got)
		best = fallback
		for _, p := range pr.all {
			if m, ok := got[p]; ok && (pr.client.cfg.Forced || m.atLeast(fastest(got))) {
				best = p
				break
			}
		}
	}
	for p := range got {
		if p != best && p != fallback {
			pr.retries[p].due = time.Now().Add(jittered(pr.retries[p].slower.use()))
			pr.set(p, func(st *PreferredStatus) { st.State, st.Reason = PreferredStandby, nil })
		}
	}
	return best
}

// try moves the prober's link to p and measures it. If the user forces a transport, the fallback is not measured.
func (pr *prober) try(ctx context.Context, p path) (Measure, error) {
	if _, err := pr.client.connect(ctx, pr.session, pr.link, p); err != nil {
		return Measure{}, err
	}
	if p == fallback && pr.client.cfg.Forced {
		return Measure{}, nil
	}
	m, err := pr.measure(ctx)
	if err != nil {
		return Measure{}, fmt.Errorf("measure: %w", err)
	}
	return m, nil
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
func (pr *prober) workers() []*link {
	var links []*link
	for i := range pr.client.cfg.Links {
		if l := pr.session.link(i); l != nil {
			links = append(links, l)
		}
	}
	return links
}

// guard watches the links on the transport in use until it fails, or until standBy finds a better one.
func (pr *prober) guard(ctx context.Context) (better path, err error) {
	links := pr.workers()
	ctx, cancel := context.WithCancel(ctx)
	found := make(chan path, 1)
	var standby sync.WaitGroup
	defer standby.Wait()
	defer cancel()
	standby.Go(func() { pr.standBy(ctx, found) })
	tick := time.NewTicker(guardEvery)
	defer tick.Stop()
	for {
		select {
		case <-pr.broken:
			if err := pr.failure(pr.current); err != nil {
				return 0, err
			}
		case better := <-found:
			return better, nil
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-tick.C:
			if slices.ContainsFunc(links, (*link).stuck) && pr.answers(ctx) &&
				slices.ContainsFunc(links, (*link).stuck) {
				return 0, errStuck
			}
		}
	}
}

// standBy keeps the prober's link on the fallback until ctx ends, or until it has found a better transport than the one
// in use.
func (pr *prober) standBy(ctx context.Context, found chan<- path) {
	pause := pr.client.newBackoff()
	for ctx.Err() == nil {
		woken := pr.client.woken.Next()
		conn, err := pr.onFallback(ctx)
		if err != nil {
			pr.session.log.Debug("the prober has no conn", "error", err)
			pause.sleep(ctx)
			continue
		}
		pause.reset()
		timer := pr.untilDue()
		select {
		case <-conn.dead:
			pause.sleep(ctx)
		case <-woken:
			pr.allDue()
		case <-timer.C:
			if best := pr.round(ctx); best != pr.current {
				found <- best
				return
			}
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// onFallback returns the conn of the prober's link on the fallback, after it has moved the link there if need be.
func (pr *prober) onFallback(ctx context.Context) (*linkConn, error) {
	pr.link.mu.Lock()
	conn := pr.link.conn
	pr.link.mu.Unlock()
	if conn != nil && conn.path == fallback {
		return conn, nil
	}
	return pr.client.connect(ctx, pr.session, pr.link, fallback)
}

// answers reports whether the prober's link is on the fallback and gets a pong within stallTime.
func (pr *prober) answers(ctx context.Context) bool {
	pr.link.mu.Lock()
	elsewhere := pr.link.conn != nil && pr.link.conn.path != fallback
	pr.link.mu.Unlock()
	if elsewhere {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, stallTime)
	defer cancel()
	_, err := pr.link.roundTrip(ctx)
	return err == nil
}
