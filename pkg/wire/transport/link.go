package transport

import (
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"kubevpn/pkg/wakeup"
)

// link is one resumable byte stream in each direction, over one conn after another, and the mux over it.
//
//	            attach                        conn fails, is silent, or is replaced
//	detached ───────────▶ attached ───────────────────────────────────────▶ detached
//	   │      (rewind to what the other end      (reader and sender park;       │
//	   │       says it has received)              nothing is forgotten)         │
//	   └──────────────────────────── session ends ──────────────────────────────┴──▶ closed
//
// Two goroutines serve it. The sender writes what replay holds to the conn, unless a stream's writer has pushed its
// few bytes by itself. The reader parses frames and never blocks on anything but the conn.
//
// Lock order: Stream.writers, handshake, mu, streams.mu, Session.mu, bulk.mu, delay.mu. A goroutine that holds one may
// take those to its right. Nobody holds another lock together with Stream.mu or Client.mu, and nobody holds mu
// during a conn's Read or Write.
type link struct {
	session *Session
	index   int
	log     *slog.Logger

	handshake sync.Mutex // server: held from a hello until its conn is attached

	mu      sync.Mutex
	closed  error // why the session has ended; nil before
	conn    *linkConn
	attempt uint32            // number of the newest conn
	conns   int               // number of conns so far
	past    [maxPaths]Traffic // bytes of earlier conns
	reading bool              // the reader is inside conn.Read
	writing bool              // a goroutine is inside conn.Write
	wrote   time.Time         // when the last Write ended

	out      replay
	charged  int    // bytes of out's memory that the session's budget counts
	owed     owed   // acknowledgements that the other end owes
	acks     acks   // acknowledgements that this end owes
	closeEnd uint64 // position behind our CLOSE; 0: none
	sched    scheduler
	flight   flight
	heart    heartbeat

	toSend  sync.Cond // signals the sender: bytes and a conn
	changed sync.Cond // broadcasts any other change: conn, reading, writing, out.sent, closed

	wanted wakeup.Value[path] // the transport that the prober chose; Client.keep moves the link to it
	renew  wakeup.Signal      // the conn is worn: Client.keep replaces it in the next pause

	unread  unread
	load    load
	streams streamTable
}

// streamTable finds the link's streams. It has a mutex of its own, because the reader looks up the stream of each
// frame: with link.mu instead, which writers hold while they copy, 64 KiB took 8 to 46 % longer (best of 14 runs).
type streamTable struct {
	mu     sync.Mutex
	byID   map[uint32]*Stream // nil once the link is closed
	nextID uint32
}

// owed describes the acknowledgement that the other end owes. link.mu guards it.
type owed struct {
	end   uint64    // position behind the last frame that it acknowledges within ackDelay
	since time.Time // when it last acknowledged something, or began to owe it
}

// acks counts the bytes that this end has received and acknowledged. link.mu guards all but armed.
type acks struct {
	received uint64 // bytes read from conns
	sent     uint64 // the count in the last acknowledgement
	timer    *time.Timer
	armed    atomic.Bool // timer runs
}

// unread is the memory that the link's streams hold for data that their users have not read.
type unread struct {
	kept  int          // bytes that the session's budget does not count yet; only the reader uses it
	full  bool         // the session may hold no more; only the reader uses it
	freed atomic.Int64 // counted bytes that streams have released since
}

// load is the part of a link's state that Session.choose and readers of streams read without its lock.
type load struct {
	up, born atomic.Bool  // attached now; attached before
	bulk     atomic.Bool  // both ends use it for bulk
	ran      atomic.Int64 // when it carried bulk last, in nanoseconds since the session began
	streams  atomic.Int64 // open streams
	unacked  atomic.Int64 // bytes
	incoming atomic.Int64 // when much arrived last, in nanoseconds since the session began
	rtt      atomic.Int64 // nanoseconds, the least of the last few pings; 0 unknown
}

// linkConn is the net.Conn that carries a link, and its counters. link.mu guards them.
type linkConn struct {
	net.Conn
	path path
	born time.Time
	last time.Time     // when the link last received something
	dead chan struct{} // closed when the link has let go of the conn
	err  error         // the reason; valid once dead is closed
	bulk int           // bytes sent
	worn bool          // by bulk; said to both ends

	Traffic
}

func newLink(s *Session, index int) *link {
	l := &link{session: s, index: index, log: s.log.With("link", index), flight: newFlight(),
		renew: wakeup.NewSignal()}
	l.streams.byID, l.streams.nextID = make(map[uint32]*Stream), 1
	if !s.client {
		l.streams.nextID = 2
	}
	l.toSend.L, l.changed.L = &l.mu, &l.mu
	l.acks.timer = time.AfterFunc(time.Hour, l.delayedAck)
	l.acks.timer.Stop()
	l.heart.timer = time.AfterFunc(time.Hour, l.onBeat)
	l.heart.timer.Stop()
	return l
}

// run starts the two goroutines of the link. They end with the session.
func (l *link) run() {
	l.session.wg.Go(l.send)
	l.session.wg.Go(func() {
		if err := newReceiver(l).run(); err != nil {
			l.session.fail(err)
		}
	})
}

// attach continues the link on conn, whose other end has received everything before peerReceived. Call quiesce first.
// If attach fails the caller still owns conn.
func (l *link) attach(conn net.Conn, path path, peerReceived uint64) (*linkConn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed != nil {
		return nil, l.closed
	}
	if err := l.out.rewind(peerReceived); err != nil {
		return nil, err
	}
	l.charge()
	now := time.Now()
	l.conn = &linkConn{Conn: conn, path: path, born: now, last: now, dead: make(chan struct{})}
	l.owed.since = now
	l.flight = newFlight()
	l.heart.rtts, l.heart.times = [4]time.Duration{}, [16]time.Time{}
	l.heart.probe = probe{}
	l.conns++
	l.load.born.Store(true)
	l.ping(now)
	l.heart.timer.Reset(l.session.tuning.Heartbeat)
	l.toSend.Signal()
	l.changed.Broadcast()
	l.dispatch()
	l.session.linkUp(l)
	return l.conn, nil
}

// quiesce detaches the conn, if there is one, and returns how many bytes were received. No goroutine reads or writes
// when it returns, so the number stays true until attach.
func (l *link) quiesce() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn != nil {
		l.lose(l.conn, errSuperseded)
	}
	for l.reading || l.writing {
		l.changed.Wait()
	}
	return l.acks.received
}

// lose detaches c if it is still the conn. Call with mu held.
func (l *link) lose(c *linkConn, err error) {
	if l.conn != c {
		return
	}
	l.conn = nil
	l.past[c.path].add(c.Traffic)
	c.err = err
	close(c.dead)
	l.heart.timer.Stop()
	// Close may block (a TLS alert into a black hole), so not with mu held. It ends Read and Write.
	l.session.wg.Go(func() {
		c.SetDeadline(time.Unix(1, 0)) // not every conn has deadlines; Close has the same effect
		c.Close()
	})
	l.session.linkDown(l, err)
}

// close ends the link for good, and its streams with err.
func (l *link) close(err error) {
	l.mu.Lock()
	l.closed = err
	if l.conn != nil {
		l.lose(l.conn, err)
	}
	l.out.drop()
	l.charge()
	l.acks.timer.Stop()
	l.toSend.Broadcast()
	l.changed.Broadcast()
	l.mu.Unlock()

	l.streams.mu.Lock()
	streams := l.streams.byID
	l.streams.byID = nil
	l.streams.mu.Unlock()
	ended := &endedError{cause: err}
	for _, s := range streams {
		s.abort(ended)
	}
}

// send is the sender goroutine. Each Write has all bytes that wait. Before a small Write it lets other goroutines run,
// so that their frames join it: a write crosses the API server, the kubelet and the container runtime, and costs them
// as much for one frame as for fifty. Measured at 2300 new connections a second: 0.75 writes per connection instead of
// 2.9, and a quarter more connections.
func (l *link) send() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		for l.closed == nil && (l.conn == nil || l.out.unsent() == 0 || l.writing) {
			l.toSend.Wait()
		}
		if l.closed != nil {
			return
		}
		if l.out.unsent() < maxGather {
			l.mu.Unlock()
			runtime.Gosched()
			l.mu.Lock()
		}
		if l.closed == nil && l.conn != nil && l.out.unsent() > 0 && !l.writing {
			l.write()
		}
	}
}

// write writes bytes that wait to the conn. Call it with mu held, with a conn and bytes, and while nobody else writes.
// It releases mu during the Write.
func (l *link) write() {
	c := l.conn
	b, chunk := l.out.take()
	l.departed(time.Now())
	l.writing = true
	l.dispatch()
	l.mu.Unlock()
	n, err := c.Write(b)
	now := time.Now()
	l.mu.Lock()
	c.Sent += uint64(n)
	l.wrote = now
	l.writing = false
	l.out.release(chunk)
	if err != nil {
		l.lose(c, fmt.Errorf("writing: %w", err))
	}
	l.changed.Broadcast()
}

// push sends what was appended: the caller writes it if it is little and the link has been quiet, otherwise the sender
// does. To wake the sender costs a lone message 25 of the 580 µs of a round trip; on a busy link the sender puts many
// messages into one write. Call with mu held; push may release it meanwhile.
func (l *link) push() {
	if l.closed != nil || l.conn == nil || l.writing || l.out.unsent() == 0 {
		return // attach, or the current writer, wakes the sender
	}
	if l.out.unsent() > maxPush || time.Since(l.wrote) < quiet {
		l.toSend.Signal()
		return
	}
	l.write()
	if l.out.unsent() > 0 {
		l.toSend.Signal()
	}
}

// Read returns the bytes of all conns as one stream. Only the reader calls it. It fails only when the session ends.
func (l *link) Read(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		for l.closed == nil && l.conn == nil {
			l.changed.Wait()
		}
		if l.closed != nil {
			return 0, l.closed
		}
		c := l.conn
		l.reading = true
		l.mu.Unlock()
		n, err := c.Read(p)
		l.mu.Lock()
		l.reading = false
		l.acks.received += uint64(n)
		c.Received += uint64(n)
		if n > 0 {
			c.last = time.Now()
		}
		if err != nil {
			l.lose(c, fmt.Errorf("reading: %w", err))
		}
		if l.conn != c {
			l.changed.Broadcast()
		}
		if n > 0 {
			return n, nil
		}
	}
}

// control sends a frame that does not wait for room: any but OPEN and DATA. Call with mu held.
func (l *link) control(kind byte, stream uint32, payload ...byte) {
	if l.closed != nil {
		return
	}
	l.frame(header{kind: kind, length: len(payload), stream: stream}, payload)
	if l.out.held() > replayBuffer+controlSlack {
		l.session.wg.Go(func() { l.session.fail(fmt.Errorf("%w: too many unread control frames", ErrProtocol)) })
	}
}

// frame appends a frame and wakes the sender. Call with mu held.
func (l *link) frame(h header, payload []byte) {
	l.append(h, payload)
	l.toSend.Signal()
}

// append appends a frame. The caller calls push. Call with mu held.
func (l *link) append(h header, payload ...[]byte) {
	var b [headerLen]byte
	putHeader(&b, h)
	due := h.kind != frameAck && h.kind != framePing && h.kind != framePong
	if due && l.out.acked >= l.owed.end {
		l.owed.since = time.Now()
		if l.conn != nil && l.delay().lossy(l.owed.since) {
			l.heart.timer.Reset(l.tail())
		}
	}
	l.out.append(b[:])
	for _, b := range payload {
		l.out.append(b)
	}
	if due {
		l.owed.end = l.out.end
	}
	l.charge()
	l.load.unacked.Store(int64(l.out.held()))
}

// free notes that streams have released n bytes of memory.
func (l *link) free(n int) {
	if n > 0 {
		l.unread.freed.Add(int64(n))
	}
}

// charge counts the memory of the replay buffer in the session's budget, except for small changes. Call with mu held.
func (l *link) charge() {
	if n := l.out.memory - l.charged; n > accountEvery || -n > accountEvery {
		l.session.bytes.add(int64(n))
		l.charged += n
	}
}

// farewell sends CLOSE.
func (l *link) farewell() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.control(frameClose, 0)
	l.closeEnd = l.out.end
}

// flushed waits until everything is sent, no conn is left, or the deadline has passed.
func (l *link) flushed(deadline time.Time) {
	timer := time.AfterFunc(time.Until(deadline), func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.changed.Broadcast()
	})
	defer timer.Stop()
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.closed == nil && l.conn != nil && (l.out.unsent() > 0 || l.writing) && time.Now().Before(deadline) {
		l.changed.Wait()
	}
}
