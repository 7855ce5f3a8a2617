package transport

import (
	"context"
	"errors"
	"fmt"
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

// Traffic describes what crossed the conns of one transport.
type Traffic struct {
	Sent, Received uint64        // bytes
	RTT            time.Duration // the least of the last few heartbeats of a link; 0: unknown
}

func (t *Traffic) add(o Traffic) {
	t.Sent += o.Sent
	t.Received += o.Received
}

// PreferredState is the state of a transport of ClientConfig.Preferred.
type PreferredState int

const (
	PreferredTrying  PreferredState = iota // the prober has not tried it to the end yet
	PreferredInUse                         // the links use it, or move to it
	PreferredStandby                       // it works, but one before it is in use, or was until a moment ago
	PreferredFailing                       // it does not work, for PreferredStatus.Reason
)

// String returns "trying", "in use", "standby" or "failing".
func (s PreferredState) String() string {
	return [...]string{"trying", "in use", "standby", "failing"}[s]
}

// PreferredStatus describes one transport of ClientConfig.Preferred.
type PreferredStatus struct {
	State  PreferredState
	Reason error // why it fails; nil otherwise
	Since  time.Time
}

const (
	// A link is stuck when its bytes are not acknowledged for stallTime, or four round trips. Its transport has failed
	// if the spare link, on the fallback, still gets answers.
	stallTime  = 500 * time.Millisecond
	guardEvery = 100 * time.Millisecond

	// The prober tries a transport that failed again after a backoff that doubles, a third of it random. The backoff
	// starts again from its minimum if the transport was in use for goodTime.
	retryMin = time.Second
	retryMax = time.Minute
	goodTime = time.Minute

	tryTime = 3 * time.Second // the timeout of the ping that ends a try
)

var (
	errStuck  = errors.New("its bytes are not acknowledged, while the fallback transport works")
	errSilent = errors.New("a ping was not answered in time")
)

// prober tries the preferred transports, with a link of its own, and lets the links use the first that works. It then
// watches that one. The spare link carries no streams while another link is up.
//
//	         ┌──────────────── backoff ◀────────────────┐
//	         ▼                                          │
//	try: the spare link moves there, and a ping is answered ── no ─▶ failing ◀── links move back to the fallback
//	         │ yes                                                                   ▲
//	         ├─ none before it works ─▶ in use: the links move to it,  ──────────────┘ a conn is lost, or its bytes are
//	         └─ else ─▶ standby         the spare link back to the fallback            not acknowledged
//
// While a preferred transport is in use, the prober tries those before it in ClientConfig.Preferred again, and of the
// others each once. When it fails, those on standby are tried at once.
//
// A link resumes where its last conn ended, so no stream notices that its link has moved. Client.keep moves the links,
// the spare one too, to the transport that they are wanted on.
type prober struct {
	client  *Client
	session *Session
	spare   *link
	news    wakeup.Signal // failures has changed, or the spare link has another conn

	// Only run's goroutine uses these.
	current path // that the links use
	trying  path // that the spare link tries; fallback: none
	retries [maxPaths]retry
	status  []PreferredStatus // immutable

	mu       sync.Mutex
	failures [maxPaths]error // reported by Client.keep, since forget
}

// retry says when to try a transport.
type retry struct {
	tried, due time.Time
	pause      pause // before the next try, after a failure
}

// newProber creates the session's prober and its link. Call it before the session has any other link.
func (c *Client) newProber(s *Session) *prober {
	most := retryMax
	if c.cfg.Forced {
		most = retryMin // the session may use nothing else
	}
	p := &prober{client: c, session: s, spare: s.link(c.cfg.Links), news: wakeup.NewSignal(),
		status: make([]PreferredStatus, len(c.cfg.Preferred))}
	for i := range p.retries {
		p.retries[i].pause = pause{min: retryMin, max: most}
	}
	return p
}

// want asks Client.keep to move the link to p.
func (l *link) want(p path) {
	l.wanted.Update(func(wanted *path) { *wanted = p })
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

// on reports whether the link has a conn over p.
func (l *link) on(p path) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.conn != nil && l.conn.path == p
}

// isSpare reports whether l is the prober's link.
func (s *Session) isSpare(l *link) bool { return s.prober != nil && l == s.prober.spare }

// fail reports a failure of a preferred transport.
func (pr *prober) fail(p path, err error) {
	pr.mu.Lock()
	pr.failures[p] = err
	pr.mu.Unlock()
	pr.news.Raise()
}

// failure returns the latest failure of p since forget.
func (pr *prober) failure(p path) error {
	pr.mu.Lock()
	defer pr.mu.Unlock()
	return pr.failures[p]
}

// forget drops earlier failures of p.
func (pr *prober) forget(p path) {
	pr.mu.Lock()
	defer pr.mu.Unlock()
	pr.failures[p] = nil
}

// set changes the status of p, which is not the fallback.
func (pr *prober) set(p path, change func(*PreferredStatus)) {
	pr.status = slices.Clone(pr.status)
	st := &pr.status[p-1]
	before := st.State
	if change(st); st.State != before || st.Since.IsZero() {
		st.Since = time.Now()
	}
	pr.client.cfg.OnPreferred(pr.status)
}

// run returns when ctx ends.
func (pr *prober) run(ctx context.Context) {
	for ctx.Err() == nil {
		woken := pr.client.woken.Next()
		pr.judge(ctx)
		pr.guard(ctx)
		timer := time.NewTimer(pr.begin())
		select {
		case <-woken:
			pr.allDue()
		case <-pr.news:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// begin begins to try the first transport that is due, unless a try runs. It returns when to look again at the latest.
func (pr *prober) begin() time.Duration {
	next := time.Duration(math.MaxInt64)
	if pr.current != fallback {
		next = guardEvery
	}
	// A dial may ask the manager for something over the spare link.
	if pr.trying != fallback || pr.spare.load.born.Load() && !pr.spare.load.up.Load() {
		return next
	}
	for i, st := range pr.status {
		p, r := path(i+1), &pr.retries[i+1]
		if pr.current != fallback && p >= pr.current && st.State != PreferredTrying {
			continue
		}
		if wait := time.Until(r.due); wait > 0 {
			next = min(next, wait)
			continue
		}
		r.tried = time.Now()
		pr.forget(p)
		pr.trying = p
		pr.spare.want(p)
		break
	}
	return next
}

// judge ends a try that has a result.
func (pr *prober) judge(ctx context.Context) {
	p, err := pr.trying, pr.failure(pr.trying)
	switch {
	case p == fallback:
		return
	case pr.spare.on(p):
		bounded, cancel := context.WithTimeoutCause(ctx, tryTime, errSilent)
		err = pr.spare.roundTrip(bounded)
		cancel()
	case err == nil:
		return
	}
	if ctx.Err() != nil {
		return
	}
	pr.trying = fallback
	pr.spare.want(fallback)
	switch {
	case err != nil:
		pr.failed(p, err)
	case pr.current != fallback && pr.current < p:
		pr.set(p, func(st *PreferredStatus) { *st = PreferredStatus{State: PreferredStandby} })
	default:
		pr.use(p)
	}
}

// use moves the links to p.
func (pr *prober) use(p path) {
	if worse := pr.current; worse != fallback {
		pr.set(worse, func(st *PreferredStatus) { st.State = PreferredStandby })
	}
	pr.current = p
	pr.forget(p)
	pr.set(p, func(st *PreferredStatus) { *st = PreferredStatus{State: PreferredInUse} })
	for _, l := range pr.workers() {
		l.want(p)
	}
}

// guard moves the links back to the fallback if the transport in use has failed.
func (pr *prober) guard(ctx context.Context) {
	p := pr.current
	if p == fallback {
		return
	}
	err, links := pr.failure(p), pr.workers()
	if err == nil && slices.ContainsFunc(links, (*link).stuck) && pr.answers(ctx) &&
		slices.ContainsFunc(links, (*link).stuck) {
		err = errStuck
	}
	if err == nil || ctx.Err() != nil {
		return
	}
	if !pr.client.cfg.Forced {
		for _, l := range links {
			l.giveUp(p)
		}
	}
	if time.Since(pr.status[p-1].Since) > goodTime {
		pr.retries[p].pause.reset()
	}
	pr.current = fallback
	pr.failed(p, err)
}

// failed notes that p does not work.
func (pr *prober) failed(p path, err error) {
	pause := jittered(pr.retries[p].pause.use())
	pr.retries[p].due = time.Now().Add(pause)
	pr.set(p, func(st *PreferredStatus) { st.State, st.Reason = PreferredFailing, err })
	pr.session.log.Info("transport fails", "path", p, "reason", err, "pause", pause)
}

// allDue makes all transports due, because they may work by now. None is due sooner than retryMin after the last try,
// because the manager can cause calls of Client.Retry.
func (pr *prober) allDue() {
	for i := range pr.retries {
		r := &pr.retries[i]
		r.due = r.tried.Add(retryMin)
		r.pause.reset() // if it does not work yet, it may soon
	}
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

// answers reports whether the spare link is on the fallback and gets a pong within stallTime.
func (pr *prober) answers(ctx context.Context) bool {
	if !pr.spare.on(fallback) {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, stallTime)
	defer cancel()
	return pr.spare.roundTrip(ctx) == nil
}
