package transport

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

// Session is what two ends share: streams in both directions over a few links. It outlives its carrier
// connections. Its methods may be called concurrently.
type Session struct {
	id     SessionID
	token  token
	client bool
	tuning Tuning
	log    *slog.Logger
	since  time.Time

	wg      sync.WaitGroup // goroutines of the session
	done    chan struct{}
	ready   chan struct{} // closed when the first link is attached
	streams atomic.Int64
	grown   atomic.Int64  // bytes of windows beyond initialWindow
	scout   *scout        // the client's, if it has a shortcut
	next    atomic.Uint32 // for choose

	events chan struct{} // capacity 1: links came or went (client)
	heard  chan struct{} // capacity 1: the other end has acknowledged CLOSE, or no link is left

	mu       sync.Mutex // taken inside link.mu, never around it
	links    []*link    // nil where there is none yet (server)
	err      error      // once ended
	up       int        // links that are attached
	lastLoss error
	grace    *time.Timer   // server: ends a session without links
	patience time.Duration // after so long
	arrived  []*Incoming   // waiting for Accept
	arrival  chan struct{}
}

func newSession(id SessionID, tok token, client bool, links int, t Tuning, log *slog.Logger) *Session {
	return &Session{
		id: id, token: tok, client: client, tuning: t, since: time.Now(),
		log:  log.With("session", id.String()[:8]),
		done: make(chan struct{}), ready: make(chan struct{}),
		links: make([]*link, links), arrival: make(chan struct{}, 1), events: make(chan struct{}, 1), heard: make(chan struct{}, 1),
	}
}

// ID names the session in logs, the same at both ends.
func (s *Session) ID() SessionID { return s.id }

// Done is closed when the session has ended.
func (s *Session) Done() <-chan struct{} { return s.done }

// Err tells why the session ended: ErrSessionLost, ErrSessionClosed, or ErrProtocol, wrapped. It is nil before.
func (s *Session) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Close ends the session at both ends. It waits, at most a second, until the other end has acknowledged that on one
// link: what is on its way when a carrier is closed need not arrive (a port-forward's proxies drop it), and the other
// end would keep the session for its grace. Streams are reset. A Client that still runs makes a new session.
func (s *Session) Close() error {
	select {
	case <-s.heard: // links that came and went before
	default:
	}
	if links := s.attached(); len(links) > 0 {
		for _, l := range links {
			l.farewell()
		}
		patience := time.NewTimer(farewellTime)
		defer patience.Stop()
		select {
		case <-s.heard:
		case <-s.done:
		case <-patience.C:
		}
	}
	s.fail(ErrSessionClosed)
	return nil
}

// hears tells Close that there is nothing to wait for any more.
func (s *Session) hears() {
	select {
	case s.heard <- struct{}{}:
	default:
	}
}

// fail ends the session here.
func (s *Session) fail(err error) {
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return
	}
	s.err = err
	if s.grace != nil {
		s.grace.Stop()
	}
	links := append([]*link(nil), s.links...)
	s.mu.Unlock()
	for _, l := range links {
		if l != nil {
			l.close(err)
		}
	}
	close(s.done)
}

// link gives link i, making it if need be, or nil once the session has ended.
func (s *Session) link(i int) *link {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return nil
	}
	if s.links[i] == nil {
		s.links[i] = newLink(s, i)
		s.links[i].run()
	}
	return s.links[i]
}

func (s *Session) attached() []*link {
	s.mu.Lock()
	links := append([]*link(nil), s.links...)
	s.mu.Unlock()
	var up []*link
	for _, l := range links {
		if l != nil && l.up.Load() {
			up = append(up, l)
		}
	}
	return up
}

// linkUp and linkDown are called with the link's lock held.
func (s *Session) linkUp(l *link) {
	l.up.Store(true)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.up++
	select {
	case <-s.ready:
	default:
		close(s.ready)
	}
	if s.grace != nil {
		s.grace.Stop()
	}
	s.notify()
}

func (s *Session) linkDown(l *link, err error) {
	l.up.Store(false)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.up--
	s.lastLoss = err
	if s.up == 0 {
		s.hears()
	}
	if s.up == 0 && s.grace != nil && s.err == nil {
		s.grace.Reset(s.patience)
	}
	s.notify()
}

// keepUp has a link that moves from one carrier to the next count as attached between them, until done is called: it takes
// a round trip, and the session does not reconnect.
func (s *Session) keepUp(l *link) (done func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.carrier == nil {
		return func() {}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.up++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.up--
		if s.up == 0 {
			s.hears()
		}
		s.notify()
	}
}

func (s *Session) notify() {
	select {
	case s.events <- struct{}{}:
	default:
	}
}

// Attached reports whether a carrier connects this end to the other one now. A session whose other end has died stays,
// detached, for the server's grace.
func (s *Session) Attached() bool {
	up, _ := s.state()
	return up > 0
}

// state tells how many links are up, and why the last one went down.
func (s *Session) state() (up int, lastLoss error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.up, s.lastLoss
}

// choose picks the link for a new stream: attached before stalled, the scout last, then quiet before busy, then the
// one with fewest streams, ties in turn.
func (s *Session) choose() (*link, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return nil, s.err
	}
	var best *link
	var bestScore int64
	first := int(s.next.Add(1))
	for i := range s.links {
		l := s.links[(first+i)%len(s.links)]
		if l == nil || !l.born.Load() {
			continue
		}
		score := l.count.Load()
		if l.backlog.Load() > busy {
			score += 1 << 40
		}
		if s.scout != nil && l == s.scout.link {
			score += 1 << 45
		}
		if !l.up.Load() {
			score += 1 << 50
		}
		if best == nil || score < bestScore {
			best, bestScore = l, score
		}
	}
	if best == nil {
		return nil, errors.New("session has no link yet")
	}
	return best, nil
}

// Open opens a stream of bytes (TCP, control) and waits for the other end to accept it. A rejection is the
// error of its Code. When ctx ends first, the other end is told so.
func (s *Session) Open(ctx context.Context, r Request) (*Stream, error) {
	st, err := s.open(ctx, r, false)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", r, err)
	}
	return s.opened(ctx, st)
}

// opened waits for the answer to an OPEN.
func (s *Session) opened(ctx context.Context, st *Stream) (*Stream, error) {
	r := st.request
	stop := st.wakeOn(ctx)
	defer stop()
	st.mu.Lock()
	for !st.answered && st.readErr == nil && ctx.Err() == nil {
		st.canRead.Wait()
	}
	answered, answer, readErr := st.answered, st.answer, st.readErr
	st.mu.Unlock()
	switch {
	case answered && answer == nil:
		return st, nil
	case answered:
		return nil, fmt.Errorf("opening %s: %w", r, answer)
	case readErr != nil:
		return nil, fmt.Errorf("opening %s: %w", r, readErr)
	}
	st.Reset()
	return nil, fmt.Errorf("opening %s: %w", r, context.Cause(ctx))
}

// wakeOn lets ctx interrupt the stream's waits.
func (st *Stream) wakeOn(ctx context.Context) func() bool {
	return context.AfterFunc(ctx, func() {
		st.mu.Lock()
		st.canRead.Broadcast()
		st.mu.Unlock()
		st.l.mu.Lock()
		st.canWrite.Broadcast()
		st.l.mu.Unlock()
	})
}

// OpenPackets opens a stream of datagrams (UDP, echo). It does not wait for the other end: a rejection is what
// ReadPacket gives. It blocks only while the link is congested or stalled.
func (s *Session) OpenPackets(ctx context.Context, r Request) (*Packets, error) {
	st, err := s.open(ctx, r, true)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", r, err)
	}
	return &Packets{st}, nil
}

// open sends OPEN when it is its turn.
func (s *Session) open(ctx context.Context, r Request, datagrams bool) (*Stream, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	// What the shortcut's dial asks for goes by the scout's link: the others may all be waiting for the answer.
	if s.scout != nil && r.Proto == ProtoTicket && s.scout.link.born.Load() {
		return s.openOn(ctx, s.scout.link, r, datagrams)
	}
	l, err := s.choose()
	if err != nil {
		return nil, err
	}
	return s.openOn(ctx, l, r, datagrams)
}

func (s *Session) openOn(ctx context.Context, l *link, r Request, datagrams bool) (*Stream, error) {
	st, err := l.newOutgoing(r, datagrams)
	if err != nil {
		return nil, err
	}
	payload := appendRequest(make([]byte, 0, maxRequest), r, datagrams)
	l.mu.Lock()
	if len(l.sched.waiting) > 0 || !l.room() {
		l.mu.Unlock()
		stop := st.wakeOn(ctx)
		defer stop()
		l.mu.Lock()
	}
	_, err = l.await(ctx, st, headerLen+len(payload), true)
	if err == nil {
		l.frame(header{kind: frameOpen, length: len(payload), stream: st.id}, payload)
	}
	l.mu.Unlock()
	if err != nil {
		st.over(true, true) // the other end never heard of it
		return nil, err
	}
	return st, nil
}

// push hands an incoming stream to Accept. Called by readers, so it never blocks.
func (s *Session) push(in *Incoming) {
	s.mu.Lock()
	s.arrived = append(s.arrived, in)
	s.mu.Unlock()
	select {
	case s.arrival <- struct{}{}:
	default:
	}
}

// Accept gives the next stream that the other end wants to open. The caller answers it, in its own time. It
// ends with ctx's cause or the session's error.
func (s *Session) Accept(ctx context.Context) (*Incoming, error) {
	for {
		s.mu.Lock()
		if len(s.arrived) > 0 {
			in := s.arrived[0]
			s.arrived[0] = nil
			s.arrived = s.arrived[1:]
			more := len(s.arrived) > 0
			if !more {
				s.arrived = nil
			}
			s.mu.Unlock()
			if more {
				select { // another Accept may be waiting
				case s.arrival <- struct{}{}:
				default:
				}
			}
			return in, nil
		}
		err := s.err
		s.mu.Unlock()
		if err != nil {
			return nil, err
		}
		select {
		case <-s.arrival:
		case <-s.done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// reserve takes n bytes from what windows may grow by.
func (s *Session) reserve(n int) bool {
	if s.grown.Add(int64(n)) <= int64(s.tuning.WindowMemory) {
		return true
	}
	s.grown.Add(-int64(n))
	return false
}

// busy is a link's backlog beyond which new streams go to another.
const busy = 256 << 10

func (s *Session) unreserve(n int) { s.grown.Add(-int64(n)) }

// SessionStats is a snapshot of a session.
type SessionStats struct {
	ID      SessionID
	Since   time.Time
	Streams int // open
	Links   []LinkStats
	// What carriers have carried over ClientConfig's Dial and its Shortcut, in bytes, handshakes not counted.
	Base, Shortcut Traffic
}

// LinkStats is a snapshot of one link.
type LinkStats struct {
	Up       bool
	RTT      time.Duration // the least of the last few heartbeats; 0 unknown
	Sent     uint64        // bytes, frames included, replays not
	Received uint64
	Unacked  int // bytes held for a replay
	Streams  int
	Carriers int // connections so far
}

// Stats gives a snapshot. Links that never came up are left out.
func (s *Session) Stats() SessionStats {
	s.mu.Lock()
	links := append([]*link(nil), s.links...)
	s.mu.Unlock()
	st := SessionStats{ID: s.id, Since: s.since, Streams: int(s.streams.Load())}
	var carried [paths]traffic
	for _, l := range links {
		if l == nil || !l.born.Load() {
			continue
		}
		l.mu.Lock()
		for p := range paths {
			carried[p].Sent += l.carried[p].Sent
			carried[p].Received += l.carried[p].Received
		}
		if l.carrier != nil {
			carried[l.carrier.path].add(l.carrier)
		}
		st.Links = append(st.Links, LinkStats{
			Up: l.carrier != nil, RTT: time.Duration(l.rtt.Load()), Sent: l.out.end, Received: l.received,
			Unacked: l.out.held(), Streams: int(l.count.Load()), Carriers: l.carriers,
		})
		l.mu.Unlock()
	}
	st.Base, st.Shortcut = Traffic(carried[base]), Traffic(carried[shortcut])
	return st
}
