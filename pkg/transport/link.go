package transport

import (
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// link is one resumable byte stream in each direction, over one carrier after another, and the mux over it.
//
//	            attach                        carrier fails, is silent, or is replaced
//	detached ───────────▶ attached ───────────────────────────────────────▶ detached
//	   │      (rewind to what the other end      (reader and sender park;       │
//	   │       says it has received)              nothing is forgotten)         │
//	   └──────────────────────────── session ends ──────────────────────────────┴──▶ closed
//
// Two goroutines serve it: the sender writes what replay holds to the carrier, unless a stream's writer has pushed its
// few bytes by itself; the reader parses frames and never blocks on anything but the carrier.
type link struct {
	session *Session
	index   int
	log     *slog.Logger

	mu       sync.Mutex
	closed   error // set when the session has ended
	carrier  *carrier
	attempt  uint32 // of the newest carrier
	carriers int    // so far
	out      replay
	received uint64 // bytes read from carriers
	ackSent  uint64 // the last count that we acknowledged
	closeEnd uint64 // position behind our CLOSE; 0: none
	sched    scheduler
	reading  bool      // the reader is inside carrier.Read
	writing  bool      // someone is inside carrier.Write
	wrote    time.Time // when it last ended

	toSend   sync.Cond // the sender waits: bytes and a carrier
	readable sync.Cond // the reader waits: a carrier
	changed  sync.Cond // reading, writing or out.sent changed

	carried [paths]traffic // by carriers that are gone

	wished path          // where the scout wants the carrier to be
	move   chan struct{} // room for one: it has changed

	due      uint64      // position behind the last frame that the other end acknowledges soon
	progress time.Time   // when it last acknowledged something, or began to owe it
	beat     *time.Timer // heartbeat; runs while attached
	lastPing time.Time
	pingSeq  uint64
	pongSeq  uint64
	suspect  time.Time // a probe's deadline
	rtts     [4]time.Duration

	ackTimer *time.Timer
	ackArmed atomic.Bool
	rtt      atomic.Int64 // nanoseconds, the least of the last few pings; 0 unknown

	// For choosing a link without taking its lock.
	up, born atomic.Bool  // attached; has ever been
	count    atomic.Int64 // streams
	backlog  atomic.Int64 // bytes that are not acknowledged

	handshake sync.Mutex // one handshake at a time (server)

	streamsMu sync.Mutex
	streams   map[uint32]*Stream
	incoming  int // of streams, those that the other end opened
	nextID    uint32
}

// carrier is one connection beneath a link.
type carrier struct {
	conn net.Conn
	path path
	born time.Time
	last time.Time     // something was received
	dead chan struct{} // closed when the link has let go of it
	err  error         // why; valid once dead is closed

	sent, received uint64 // bytes
}

func newLink(s *Session, index int) *link {
	l := &link{session: s, index: index, log: s.log.With("link", index), streams: make(map[uint32]*Stream), nextID: 1, move: make(chan struct{}, 1)}
	if !s.client {
		l.nextID = 2
	}
	l.toSend.L, l.readable.L, l.changed.L = &l.mu, &l.mu, &l.mu
	l.ackTimer = time.AfterFunc(time.Hour, l.delayedAck)
	l.ackTimer.Stop()
	l.beat = time.AfterFunc(time.Hour, l.onBeat)
	l.beat.Stop()
	return l
}

// run serves the link until the session ends.
func (l *link) run() {
	l.session.wg.Go(l.send)
	l.session.wg.Go(func() {
		if err := newReceiver(l).run(); err != nil {
			l.session.fail(err)
		}
	})
}

// attach continues the link on conn, whose other end has received everything before peerReceived. The link
// must have been quiesced. The caller keeps conn if it fails.
func (l *link) attach(conn net.Conn, path path, peerReceived uint64) (*carrier, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed != nil {
		return nil, l.closed
	}
	if err := l.out.rewind(peerReceived); err != nil {
		return nil, err
	}
	now := time.Now()
	l.carrier = &carrier{conn: conn, path: path, born: now, last: now, dead: make(chan struct{})}
	l.progress = now
	l.rtts = [4]time.Duration{}
	l.suspect = time.Time{}
	l.carriers++
	l.born.Store(true)
	l.ping(now)
	l.beat.Reset(l.session.tuning.Heartbeat)
	l.toSend.Signal()
	l.readable.Signal()
	l.dispatch()
	l.session.linkUp(l)
	return l.carrier, nil
}

// quiesce lets go of the carrier, if there is one, and tells how many bytes were received. Nobody reads or
// writes when it returns, so the number stays true until attach.
func (l *link) quiesce() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.carrier != nil {
		l.lose(l.carrier, errSuperseded)
	}
	for l.reading || l.writing {
		l.changed.Wait()
	}
	return l.received
}

// lose detaches c if it is still the carrier. Call with mu held.
func (l *link) lose(c *carrier, err error) {
	if l.carrier != c {
		return
	}
	l.carrier = nil
	l.carried[c.path].add(c)
	c.err = err
	close(c.dead)
	l.beat.Stop()
	// Close may take its time (a TLS alert into a black hole), and must not hold mu. It unblocks Read and Write.
	l.session.wg.Go(func() {
		c.conn.SetDeadline(time.Unix(1, 0)) // not every carrier can; Close does the same
		c.conn.Close()
	})
	l.session.linkDown(l, err)
}

// close ends the link for good, and its streams with err.
func (l *link) close(err error) {
	l.mu.Lock()
	l.closed = err
	if l.carrier != nil {
		l.lose(l.carrier, err)
	}
	l.out.drop()
	l.ackTimer.Stop()
	l.toSend.Broadcast()
	l.readable.Broadcast()
	l.changed.Broadcast()
	l.mu.Unlock()

	l.streamsMu.Lock()
	streams := l.streams
	l.streams = nil
	l.streamsMu.Unlock()
	ended := &endedError{cause: err}
	for _, s := range streams {
		s.abort(ended)
	}
}

// send is the sender goroutine: one carrier write after another, each as large as the bytes that wait. Before each it
// lets every other goroutine run that can: what they append goes along. A write crosses the API server, the kubelet
// and the container runtime, each of which spends on it as much for a frame as for fifty. Measured at 2300 new
// connections a second: 0.75 writes for each instead of 2.9, and a quarter more connections.
func (l *link) send() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		for l.closed == nil && (l.carrier == nil || l.out.unsent() == 0 || l.writing) {
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
		if l.closed == nil && l.carrier != nil && l.out.unsent() > 0 && !l.writing {
			l.write()
		}
	}
}

// write makes one carrier write of bytes that wait. Call with mu held, with a carrier, bytes, and no write under way;
// mu is free while it writes, and held again on return.
func (l *link) write() {
	c := l.carrier
	b, chunk := l.out.take()
	l.writing = true
	l.dispatch()
	l.mu.Unlock()
	n, err := c.conn.Write(b)
	now := time.Now()
	l.mu.Lock()
	c.sent += uint64(n)
	l.wrote = now
	l.writing = false
	l.out.release(chunk)
	if err != nil {
		l.lose(c, fmt.Errorf("writing: %w", err))
	}
	l.changed.Broadcast()
}

// push sees to it that what was appended is sent: by the caller if it is little and the link has been quiet, else by
// the sender. Waking the sender costs a lone message more than writing it: 25 of 580 µs of a round trip. On a busy link
// the sender puts many messages into one write. Call with mu held; it may be free meanwhile.
func (l *link) push() {
	if l.closed != nil || l.carrier == nil || l.writing || l.out.unsent() == 0 {
		return // attach, or whoever is writing, sees to it
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

// Read is the reader's view: the bytes of all carriers as one stream. It ends with the session only.
func (l *link) Read(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		for l.closed == nil && l.carrier == nil {
			l.readable.Wait()
		}
		if l.closed != nil {
			return 0, l.closed
		}
		c := l.carrier
		l.reading = true
		l.mu.Unlock()
		n, err := c.conn.Read(p)
		l.mu.Lock()
		l.reading = false
		l.received += uint64(n)
		c.received += uint64(n)
		if n > 0 {
			c.last = time.Now()
		}
		if err != nil {
			l.lose(c, fmt.Errorf("reading: %w", err))
		}
		if l.carrier != c {
			l.changed.Broadcast()
		}
		if n > 0 {
			return n, nil
		}
	}
}

// control appends a frame that must not wait: everything but OPEN and DATA. Call with mu held.
func (l *link) control(kind byte, stream uint32, payload ...byte) {
	if l.closed != nil {
		return
	}
	l.frame(header{kind: kind, length: len(payload), stream: stream}, payload)
	if l.out.held() > l.session.tuning.ReplayBuffer+controlSlack {
		l.session.wg.Go(func() { l.session.fail(fmt.Errorf("%w: too many unread control frames", ErrProtocol)) })
	}
}

// frame appends a frame for the sender. Call with mu held.
func (l *link) frame(h header, payload []byte) {
	l.append(h, payload)
	l.toSend.Signal()
}

// append appends a frame, which the caller pushes. Call with mu held.
func (l *link) append(h header, payload []byte) {
	var b [headerLen]byte
	putHeader(&b, h)
	due := h.kind != frameAck && h.kind != framePing && h.kind != framePong
	if due && l.out.acked >= l.due {
		l.progress = time.Now()
	}
	l.out.append(b[:])
	l.out.append(payload)
	if due {
		l.due = l.out.end
	}
	l.backlog.Store(int64(l.out.held()))
}

// farewell sends CLOSE.
func (l *link) farewell() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.control(frameClose, 0)
	l.closeEnd = l.out.end
}

// flushed waits until everything is sent, the carrier is lost, or the deadline has passed.
func (l *link) flushed(deadline time.Time) {
	timer := time.AfterFunc(time.Until(deadline), func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.changed.Broadcast()
	})
	defer timer.Stop()
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.closed == nil && l.carrier != nil && (l.out.unsent() > 0 || l.writing) && time.Now().Before(deadline) {
		l.changed.Wait()
	}
}
