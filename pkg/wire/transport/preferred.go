package transport

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
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

	// A try ends with an echo: a path may carry handshakes, and lose packets that are larger.
	echoBytes = 16 << 10
	echoTime  = 3 * time.Second
)

var (
	errStuck  = errors.New("its bytes are not acknowledged, while the fallback transport works")
	errNoEcho = fmt.Errorf("%d bytes did not return in %v", echoBytes, echoTime)
)

// prober tries the preferred transports, with a link of its own, and lets the links use the first that works. It then
// watches that one. The spare link carries no streams while another link is up.
//
//	         ┌──────────────── backoff ◀────────────────┐
//	         ▼                                          │
//	try: the spare link moves there, and an echo returns ── no ─▶ failing ◀── links move back to the fallback
//	         │ yes                                                               ▲
//	         ├─ none before it works ─▶ in use: the links move to it, ───────────┘ a conn is lost, or its bytes are
//	         └─ else ─▶ standby         the spare link to the fallback             not acknowledged
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

	failures wakeup.Value[[maxPaths]error] // the latest reports of Client.keep, none from before a try

	// Only run's goroutine uses these.
	current path   // that the links use
	trying  path   // that the spare link tries; fallback: none
	pinged  uint64 // the spare link's ping since links are stuck; 0: none
	retries [maxPaths]retry
	status  []PreferredStatus // immutable
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

// move asks Client.keep to move the link from one transport to another, unless it is asked to use a third one.
func (l *link) move(from, to path) {
	l.wanted.Update(func(wanted *path) {
		if *wanted == from {
			*wanted = to
		}
	})
}

// current returns the link's conn, or nil.
func (l *link) current() *linkConn {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.conn
}

// isSpare reports whether l is the prober's link.
func (s *Session) isSpare(l *link) bool { return s.prober != nil && l == s.prober.spare }

// report notes that a preferred transport has failed. With nil, it drops what was noted.
func (pr *prober) report(p path, err error) {
	pr.failures.Update(func(all *[maxPaths]error) { all[p] = err })
	pr.news.Raise()
}

// set changes the status of p, which is not the fallback.
func (pr *prober) set(p path, state PreferredState, reason error) {
	pr.status = slices.Clone(pr.status)
	st := &pr.status[p-1]
	if st.Reason = reason; st.State != state {
		st.State, st.Since = state, time.Now()
	}
	pr.client.cfg.OnPreferred(pr.status)
}

// run returns when ctx ends.
func (pr *prober) run(ctx context.Context) {
	for ctx.Err() == nil {
		woken := pr.client.woken.Next()
		pr.judge(ctx)
		pr.guard()
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
		pr.report(p, nil)
		pr.trying = p
		pr.spare.move(fallback, p)
		break
	}
	return next
}

// judge ends a try that has a result.
func (pr *prober) judge(ctx context.Context) {
	p, err := pr.trying, pr.failures.Load()[pr.trying]
	switch conn := pr.spare.current(); {
	case p == fallback:
		return
	case conn != nil && conn.path == p:
		err = pr.echo(ctx)
		err = cmp.Or(pr.failures.Load()[p], err) // a stream continues on the fallback when its conn is lost
	case err == nil:
		return
	}
	if ctx.Err() != nil {
		return
	}
	pr.trying = fallback
	pr.spare.move(p, fallback)
	switch {
	case err != nil:
		pr.failed(p, err)
	case pr.current != fallback && pr.current < p:
		pr.set(p, PreferredStandby, nil)
	default:
		pr.use(p)
	}
}

// echo sends bytes to the manager and back over the spare link.
func (pr *prober) echo(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, echoTime, errNoEcho)
	defer cancel()
	st, err := pr.session.openOn(ctx, pr.spare, Request{Proto: ProtoMeter}, false)
	if err == nil {
		st, err = pr.session.opened(ctx, st)
	}
	if err != nil {
		return err
	}
	defer st.Reset()
	defer context.AfterFunc(ctx, func() { st.Reset() })()
	if _, err = st.Write(make([]byte, echoBytes)); err == nil {
		_, err = io.CopyN(io.Discard, st, echoBytes)
	}
	return cmp.Or(context.Cause(ctx), err)
}

// use moves the links to p.
func (pr *prober) use(p path) {
	worse := pr.current
	if worse != fallback {
		pr.set(worse, PreferredStandby, nil)
	}
	pr.current, pr.pinged = p, 0
	pr.report(p, nil)
	pr.set(p, PreferredInUse, nil)
	for _, l := range pr.workers() {
		l.move(fallback, p) // where lost has moved it
		l.move(worse, p)
	}
}

// guard moves the links back to the fallback if the transport in use has failed.
func (pr *prober) guard() {
	p := pr.current
	if p == fallback {
		return
	}
	err, links := pr.failures.Load()[p], pr.workers()
	switch {
	case !slices.ContainsFunc(links, (*link).stuck):
		pr.pinged = 0
	case pr.pinged == 0:
		pr.pinged = pr.spare.pingFallback()
	case err == nil && pr.spare.answered(pr.pinged):
		err = errStuck
	}
	if err == nil {
		return
	}
	if !pr.client.cfg.Forced {
		for _, l := range links {
			l.move(p, fallback)
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
	pause := pr.retries[p].pause.use()
	pr.retries[p].due = time.Now().Add(pause)
	pr.set(p, PreferredFailing, err)
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
