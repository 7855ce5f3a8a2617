package transport

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kubevpn/pkg/wakeup"
)

// Session carries streams in both directions between two ends, over a few links. It outlives its conns. Its methods may
// be called concurrently.
type Session struct {
	identity
	tuning Tuning
	log    *slog.Logger
	since  time.Time

	wg      sync.WaitGroup // goroutines of the session
	done    chan struct{}
	ready   chan struct{} // closed when the first link is attached
	streams atomic.Int64
	grown   atomic.Int64  // bytes of windows beyond initialWindow
	places  share         // part of the budget's streams
	bytes   share         // part of the budget's bytes
	over    atomic.Bool   // overBudget has logged
	prober  *prober       // the client's, if ClientConfig.Preferred is set
	next    atomic.Uint32 // for choose
	bulk    bulk
	delays  [maxPaths]delay
	rtts    [maxPaths]atomic.Int64 // nanoseconds, as load.rtt of the link that measured last

	events  wakeup.Signal // links came or went (client)
	settled wakeup.Signal // the other end has acknowledged CLOSE, or no link is left

	mu         sync.Mutex // the last in the lock order, see link
	links      []*link    // nil if not created yet (server)
	err        error      // why the session has ended; nil before
	up         int        // links that are attached
	lastLoss   error
	grace      time.Duration // server: the life of a session without attached links
	graceTimer *time.Timer   // server: ends the session after grace
	arrived    []*Incoming   // waiting for Accept
	arrival    wakeup.Signal

	// Of a server with ServerConfig.Admission:
	admit    func(user string) error
	pending  *time.Timer // ends a session that is not admitted
	user     *user       // nil while it is pending; guarded by Server.mu, as userName
	userName string
}

// identity is the ID of a session, the secret that proves a hello's right to it, and the side of this end.
type identity struct {
	id     SessionID
	token  token
	client bool
}

// newIdentity returns the identity of a client's new session. crypto/rand.Read never fails: it ends the program rather
// than return weak bytes.
func newIdentity() identity {
	who := identity{client: true}
	rand.Read(who.id[:])
	rand.Read(who.token[:])
	return who
}

func newSession(who identity, links int, b *Budget, t Tuning, log *slog.Logger) *Session {
	s := &Session{
		identity: who, tuning: t, since: time.Now(), places: share{pool: &b.streams}, bytes: share{pool: &b.bytes},
		log:  log.With("session", who.id.String()[:8]),
		done: make(chan struct{}), ready: make(chan struct{}),
		links: make([]*link, links), arrival: wakeup.NewSignal(), events: wakeup.NewSignal(),
		settled: wakeup.NewSignal(),
	}
	s.places.join(new(atomic.Int64))
	s.bytes.join(new(atomic.Int64))
	return s
}

// ID returns the session's ID, which is the same at both ends.
func (s *Session) ID() SessionID { return s.id }

// Done is closed when the session has ended.
func (s *Session) Done() <-chan struct{} { return s.done }

// Err returns why the session ended, wrapping ErrSessionLost, ErrSessionClosed or ErrProtocol. It is nil before.
func (s *Session) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Close ends the session at both ends and resets its streams. It waits, at most a second, until the other end has
// acknowledged CLOSE on one link: the proxies of a port-forward drop data in flight when a conn is closed, and the
// other end would keep the session for its grace period. A Client that still runs creates a new session.
func (s *Session) Close() error {
	select {
	case <-s.settled: // it may be raised from an earlier time without links
	default:
	}
	if links := s.attached(); len(links) > 0 {
		for _, l := range links {
			l.farewell()
		}
		timeout := time.NewTimer(farewellTime)
		defer timeout.Stop()
		select {
		case <-s.settled:
		case <-s.done:
		case <-timeout.C:
		}
	}
	s.fail(ErrSessionClosed)
	return nil
}

// fail ends the session at this end.
func (s *Session) fail(err error) { s.end(err, false) }

// end ends the session at this end. If detached is set, it does nothing while a link is attached.
func (s *Session) end(err error, detached bool) {
	s.mu.Lock()
	if s.err != nil || detached && s.up > 0 {
		s.mu.Unlock()
		return
	}
	s.err = err
	if s.graceTimer != nil {
		s.graceTimer.Stop()
	}
	links := slices.Clone(s.links)
	s.mu.Unlock()
	for _, l := range links {
		if l != nil {
			l.close(err)
		}
	}
	close(s.done)
}

// link returns link i, and creates it if needed. It returns nil once the session has ended.
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
	links := slices.Clone(s.links)
	s.mu.Unlock()
	var up []*link
	for _, l := range links {
		if l != nil && l.load.up.Load() {
			up = append(up, l)
		}
	}
	return up
}

// linkUp and linkDown note that a link was attached or detached. Call with link.mu held.
func (s *Session) linkUp(l *link) {
	l.load.up.Store(true)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.up == 0 {
		for i := range s.delays {
			s.delays[i].reset() // the network may be another one
		}
	}
	s.up++
	if !wakeup.IsClosed(s.ready) {
		close(s.ready)
	}
	if s.graceTimer != nil {
		s.graceTimer.Stop()
	}
	s.events.Raise()
}

func (s *Session) linkDown(l *link, err error) {
	l.load.up.Store(false)
	s.lessUp(err)
	s.bulk.wakeAll()
}

// lessUp notes that one link less is attached. err is the reason; nil: the last one stands.
func (s *Session) lessUp(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.up--
	s.lastLoss = cmp.Or(err, s.lastLoss)
	if s.up == 0 {
		s.settled.Raise()
		if s.graceTimer != nil && s.err == nil {
			s.graceTimer.Reset(s.grace)
		}
	}
	s.events.Raise()
}

// keepUp counts a link that moves from one conn to the next as attached until done is called: a move takes a round trip
// and is no reconnection.
func (s *Session) keepUp(l *link) (done func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil {
		return func() {}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.up++
	return func() { s.lessUp(nil) }
}

// Attached reports whether a conn connects the two ends now. After the other end has died, a server keeps the session
// detached for ServerConfig.Grace.
func (s *Session) Attached() bool {
	up, _ := s.state()
	return up > 0
}

// state returns how many links are attached, and why the last one was detached.
func (s *Session) state() (up int, lastLoss error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.up, s.lastLoss
}

// isFar reports whether the path of the session's conns is far, as far as is known.
func (s *Session) isFar() bool {
	for i := range s.delays {
		if s.delays[i].far.Load() {
			return true
		}
	}
	return false
}

// choose returns the link for a new stream. It prefers attached links to detached ones, then the other links to the
// prober's, then quiet links to busy ones, on a far path links that are not for bulk (but whole IP packets are bulk),
// then the link with the fewest streams. Equal links take turns.
func (s *Session) choose(p Proto) (*link, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return nil, s.err
	}
	var best *link
	var bestScore int64
	first, far := int(s.next.Add(1)), s.isFar()
	for i := range s.links {
		l := s.links[(first+i)%len(s.links)]
		if l == nil || !l.load.born.Load() {
			continue
		}
		score := l.load.streams.Load()
		if far && l.load.bulk.Load() != (p == ProtoIP) {
			score += 1 << 35
		}
		if l.busy() {
			score += 1 << 40
		}
		if s.isSpare(l) {
			score += 1 << 45
		}
		if !l.load.up.Load() {
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

// Open opens a stream of bytes (TCP, control) and waits until the other end accepts it. If the other end rejects it,
// Open returns the error of the Code. If ctx ends first, Open resets the stream.
func (s *Session) Open(ctx context.Context, r Request) (*Stream, error) {
	st, err := s.open(ctx, r, false)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", r, err)
	}
	return s.opened(ctx, st)
}

// opened waits for the answer to OPEN.
func (s *Session) opened(ctx context.Context, st *Stream) (*Stream, error) {
	stop := st.wakeOn(ctx)
	defer stop()
	st.mu.Lock()
	for !st.answered && st.readErr == nil && ctx.Err() == nil {
		st.canRead.Wait()
	}
	accepted, err := st.answered && st.answer == nil, cmp.Or(st.answer, st.readErr)
	st.mu.Unlock()
	if accepted {
		return st, nil
	}
	if err == nil {
		st.Reset()
		err = context.Cause(ctx)
	}
	return nil, fmt.Errorf("opening %s: %w", st.request, err)
}

// wakeOn wakes goroutines that wait on the stream when ctx ends.
func (st *Stream) wakeOn(ctx context.Context) func() bool {
	return context.AfterFunc(ctx, func() {
		st.mu.Lock()
		st.canRead.Broadcast()
		st.mu.Unlock()
		st.l.mu.Lock()
		st.wakeWriter()
		st.l.mu.Unlock()
	})
}

// OpenPackets opens a stream of datagrams (UDP, echo). It does not wait for the other end: ReadPacket returns a
// rejection. It blocks only while the link is congested or stalled.
func (s *Session) OpenPackets(ctx context.Context, r Request) (*Packets, error) {
	st, err := s.open(ctx, r, true)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", r, err)
	}
	return &Packets{st}, nil
}

// open sends OPEN on one of the links.
func (s *Session) open(ctx context.Context, r Request, datagrams bool) (*Stream, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	// The dial of a preferred transport requests its ticket over the spare link, because all other links may wait
	// for that dial.
	if s.prober != nil && r.Proto == ProtoTicket && s.prober.spare.load.born.Load() {
		return s.openOn(ctx, s.prober.spare, r, datagrams)
	}
	l, err := s.choose(r.Proto)
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
		st.over(true, true) // OPEN was not sent
		return nil, err
	}
	return st, nil
}

// push passes an incoming stream to Accept. It never blocks, because readers call it.
func (s *Session) push(in *Incoming) {
	s.mu.Lock()
	s.arrived = append(s.arrived, in)
	s.mu.Unlock()
	s.arrival.Raise()
}

// Accept returns the next stream that the other end wants to open. The caller may answer it at any time. Accept fails
// with the cause of ctx or the session's error.
func (s *Session) Accept(ctx context.Context) (*Incoming, error) {
	for {
		s.mu.Lock()
		if len(s.arrived) > 0 {
			in := s.arrived[0]
			s.arrived[0] = nil
			if s.arrived = s.arrived[1:]; len(s.arrived) > 0 {
				s.arrival.Raise() // another Accept may be waiting
			} else {
				s.arrived = nil
			}
			s.mu.Unlock()
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

// reserve takes n bytes of windowMemory, if there are as many. The caller returns them to grown.
func (s *Session) reserve(n int) bool {
	if s.grown.Add(int64(n)) <= windowMemory {
		return true
	}
	s.grown.Add(-int64(n))
	return false
}

// Hold counts n bytes that the caller keeps on behalf of the other end, such as a buffer that waits to be written. It
// returns false, and counts nothing, once the session has used a quarter of its part of the budget, so that such bytes
// alone never prevent new streams. Release undoes it.
func (s *Session) Hold(n int) bool {
	if !s.bytes.fits(3*s.bytes.held() + int64(n)) {
		return false
	}
	s.bytes.add(int64(n))
	return true
}

// Release undoes Hold.
func (s *Session) Release(n int) { s.bytes.add(-int64(n)) }

// overBudget logs once that the session has exceeded its budget.
func (s *Session) overBudget(what string, r Request) {
	if !s.over.Swap(true) {
		s.log.Warn(what, "request", r, "streams", s.places.held(), "bytes", s.bytes.held())
	}
}

// settle returns the session's part of the budget when the session has ended.
func (s *Session) settle() {
	s.places.settle()
	s.bytes.settle()
}

// busy reports whether the link carries much in either direction, so that new streams go to another.
func (l *link) busy() bool {
	const much, lately = 64 << 10, 250 * time.Millisecond
	incoming := l.load.incoming.Load()
	return l.load.unacked.Load() > much ||
		incoming > 0 && time.Since(l.session.since)-time.Duration(incoming) < lately
}

// SessionStats is a snapshot of a session.
type SessionStats struct {
	Streams int // open
	Links   []LinkStats
	// The conns of ClientConfig.Dial and of each of ClientConfig.Preferred, without handshakes.
	Fallback  Traffic
	Preferred [maxPaths - 1]Traffic
}

// LinkStats is a snapshot of one link.
type LinkStats struct {
	Up       bool
	RTT      time.Duration // the least of the last few heartbeats; 0 unknown
	Sent     uint64        // bytes, frames included, replays not
	Received uint64
	Unacked  int // bytes held for a replay
	Streams  int
	Conns    int // so far
}

// Stats returns a snapshot, without links that were never attached.
func (s *Session) Stats() SessionStats {
	s.mu.Lock()
	links := slices.Clone(s.links)
	s.mu.Unlock()
	st := SessionStats{Streams: int(s.streams.Load())}
	var total [maxPaths]Traffic
	for p := range total {
		total[p].RTT = time.Duration(s.rtts[p].Load())
	}
	for _, l := range links {
		if l == nil || !l.load.born.Load() {
			continue
		}
		l.mu.Lock()
		for p := range total {
			total[p].add(l.past[p])
		}
		if l.conn != nil {
			total[l.conn.path].add(l.conn.Traffic)
		}
		st.Links = append(st.Links, LinkStats{
			Up: l.conn != nil, RTT: time.Duration(l.load.rtt.Load()), Sent: l.out.end, Received: l.acks.received,
			Unacked: l.out.held(), Streams: int(l.load.streams.Load()), Conns: l.conns,
		})
		l.mu.Unlock()
	}
	st.Fallback = total[fallback]
	copy(st.Preferred[:], total[1:])
	return st
}
