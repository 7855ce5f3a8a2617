package transport

import (
	"container/heap"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"kubevpn/pkg/wakeup"
)

// On a far path the bulk of a stream of bytes is striped: its frames say where they belong, so that they can take any
// of the session's bulk links. A lost packet holds up what is behind it on its own conn only, a conn that its
// congestion control slows down carries less than the others, and what is small never waits behind bulk: link 0 carries
// the beginning of each stream, and streams that are not bulk.
//
//	                    ┌─ link 0 ── OPEN, control, first 64 KiB of each burst ─┐
//	stream ─▶ Write ────┤                                                       ├─▶ pieces, by offset ─▶ Read
//	                    └─ links 1, 2, 3 ── STRIPE: link, stream, offset, bytes ┘

const (
	burstBytes = 64 << 10               // more than this without a pause is bulk
	burstPause = 100 * time.Millisecond // a pause in a stream's writes; what follows is not bulk at first

	stripeLen = 1 + 8 // what precedes the bytes in a STRIPE frame: link, offset
)

// bulk shares the session's bulk links among the streams that wait to send bulk, as a scheduler shares one link.
type bulk struct {
	mu      sync.Mutex
	sched   scheduler
	waiting atomic.Int32 // len(sched.waiting)
}

// burst is what a stream needs to send bulk. Stream.writers guards the first two fields.
type burst struct {
	bytes int       // written without a pause
	last  time.Time // end of the last Write

	turn turn // in bulk, whose mutex guards it
	wake wakeup.Signal
}

// next counts a Write and reports whether it is bulk.
func (b *burst) next(now time.Time, n int) bool {
	if now.Sub(b.last) > burstPause {
		b.bytes = 0
	}
	b.bytes += n
	return b.bytes > burstBytes
}

// probeLine pings over a link that carries no bulk. It does not wait for that link's lock.
func (s *Session) probeLine() {
	s.wg.Go(func() {
		s.mu.Lock()
		l := s.links[0]
		s.mu.Unlock()
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.conn != nil {
			l.ping(time.Now())
		}
	})
}

// A conn that carries little after bulk becomes slow for long where packets are lost: its congestion control forgets
// the rate (BBR's filter keeps ten round trips, and a retransmission of a lone packet is a sample), and it probes for
// more slowly, unlike that of a conn that has carried no bulk yet. So the client replaces such a conn in the next
// pause.
const (
	bulkPause = time.Second     // which ends a run of bulk
	wornBytes = 128 << 10       // of bulk over one conn, at which it counts
	freshConn = 5 * time.Second // a conn that is younger is not replaced
)

// wear notes that the link has sent n bytes of bulk. The end that sends knows whether packets are lost, and tells the
// other end. Call with mu held.
func (l *link) wear(n int) {
	now, c := time.Now(), l.conn
	l.ran(now)
	if c == nil || c.worn {
		return
	}
	if c.bulk += n; c.bulk >= wornBytes && l.far() && l.delay().lossy(now) {
		c.worn = true
		l.renew.Raise()
		l.control(framePing, 0, twoNumbers(wornPing, l.acks.received)...)
	}
}

// ran notes that the link carries bulk now.
func (l *link) ran(now time.Time) { l.load.ran.Store(int64(now.Sub(l.session.since))) }

// untilRenewal returns how long the link's conn, which is worn, stays at least.
func (l *link) untilRenewal(conn *linkConn) time.Duration {
	paused := time.Since(l.session.since) - time.Duration(l.load.ran.Load())
	return max(bulkPause-paused, freshConn-time.Since(conn.born))
}

// far reports whether the link's conn uses a far path. Call with mu held.
func (l *link) far() bool { return l.conn != nil && l.delay().far.Load() }

// bulkLinks appends the bulk links that are attached.
func (s *Session) bulkLinks(links []*link) []*link {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.links {
		if l != nil && l.load.bulk.Load() && l.load.up.Load() {
			links = append(links, l)
		}
	}
	return links
}

// awaitBulk waits until a bulk link has room for up to want bytes of s, and reserves it. It returns nil if no bulk link
// is attached, or writing must end. Call with writers held, and without l.mu.
func (s *Stream) awaitBulk(want int) (*link, int) {
	b, t := &s.l.session.bulk, &s.burst.turn
	b.mu.Lock()
	t.stream, t.want, t.granted, t.link = s, want, 0, nil
	t.start = max(b.sched.now, t.finish)
	heap.Push(&b.sched.waiting, t)
	b.waiting.Add(1)
	b.mu.Unlock()
	var buf [8]*link
	for {
		links := s.l.session.bulkLinks(buf[:0])
		for _, l := range links {
			l.mu.Lock()
			l.dispatch()
			l.mu.Unlock()
		}
		s.l.mu.Lock()
		ended := s.writeError() != nil
		s.l.mu.Unlock()
		b.mu.Lock()
		granted := t.link != nil
		if !granted && (ended || len(links) == 0) {
			heap.Remove(&b.sched.waiting, t.place)
			b.waiting.Add(-1)
		}
		b.mu.Unlock()
		switch {
		case granted:
			return t.link, t.granted
		case ended, len(links) == 0:
			return nil, 0
		}
		<-s.burst.wake
	}
}

// grant gives the link's room to streams that wait to send bulk. Call with l.mu held.
func (b *bulk) grant(l *link) {
	if b.waiting.Load() == 0 || !l.load.bulk.Load() || l.conn == nil || len(l.sched.waiting) > 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for len(b.sched.waiting) > 0 && l.room() {
		b.waiting.Add(-1)
		b.sched.next(l).stream.burst.wake.Raise()
	}
}

// wakeAll makes the waiting streams look whether a bulk link is left.
func (b *bulk) wakeAll() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range b.sched.waiting {
		t.stream.burst.wake.Raise()
	}
}

// writeBulk writes the beginning of p over a bulk link. It returns 0 if it cannot. Call with writers and l.mu held; it
// releases l.mu meanwhile.
func (s *Stream) writeBulk(p []byte) int {
	if s.burst.wake == nil {
		s.burst.wake = wakeup.NewSignal()
	}
	s.l.mu.Unlock()
	l, n := s.awaitBulk(min(len(p), maxPayload-stripeLen))
	s.l.mu.Lock()
	if l == nil {
		return 0
	}
	// From here on the bytes count: a FIN that is sent meanwhile says that they come.
	at, ended := s.written, s.writeError() != nil
	if !ended {
		s.spend(n)
		s.striped = true
	}
	s.l.mu.Unlock()
	l.mu.Lock()
	l.sched.reserved -= n
	if ended {
		l.dispatch()
	} else {
		l.stripe(s, at, p[:n])
		l.toSend.Signal()
	}
	l.mu.Unlock()
	s.l.mu.Lock()
	if ended {
		return 0
	}
	return n
}

// stripe appends a STRIPE frame with bytes of s. Call with l.mu held.
func (l *link) stripe(s *Stream, at uint64, p []byte) {
	l.wear(len(p))
	var b [stripeLen]byte
	b[0] = byte(s.l.index)
	binary.BigEndian.PutUint64(b[1:], at)
	l.append(header{kind: frameStripe, length: stripeLen + len(p), stream: s.id}, b[:], p)
}

// piece is a part of a stream that has arrived before what precedes it.
type piece struct {
	at  uint64
	seg *segment
}

// pieces is a heap: the piece with the lowest offset is the first. Stream.mu guards it.
type pieces struct {
	heap []piece
	size int // bytes
	held int // bytes of memory
}

func (p *pieces) Len() int           { return len(p.heap) }
func (p *pieces) Less(i, j int) bool { return p.heap[i].at < p.heap[j].at }
func (p *pieces) Swap(i, j int)      { p.heap[i], p.heap[j] = p.heap[j], p.heap[i] }
func (p *pieces) Push(x any)         { p.heap = append(p.heap, x.(piece)) }
func (p *pieces) Pop() any {
	last := p.heap[len(p.heap)-1]
	p.heap[len(p.heap)-1] = piece{}
	p.heap = p.heap[:len(p.heap)-1]
	return last
}

func (p *pieces) add(at uint64, seg *segment) {
	heap.Push(p, piece{at, seg})
	p.size += seg.w
	p.held += len(seg.buf)
}

// take removes the first piece, if it begins at or before an offset. The caller owns it.
func (p *pieces) take(at uint64) (piece, bool) {
	if len(p.heap) == 0 || p.heap[0].at > at {
		return piece{}, false
	}
	first := heap.Pop(p).(piece)
	p.size -= first.seg.w
	p.held -= len(first.seg.buf)
	if len(p.heap) == 0 {
		p.heap = nil
	}
	return first, true
}

// drop frees all pieces, and returns their memory in bytes.
func (p *pieces) drop() int {
	held := p.held
	for _, one := range p.heap {
		one.seg.free()
	}
	*p = pieces{}
	return held
}

// stripedStream returns the stream of a STRIPE frame, or nil if it has ended.
func (s *Session) stripedStream(index int, id uint32) *Stream {
	s.mu.Lock()
	var l *link
	if index < len(s.links) {
		l = s.links[index]
	}
	s.mu.Unlock()
	if l == nil {
		return nil
	}
	return l.stream(id)
}

// join makes the pieces that follow what has arrived readable, and reports whether the stream is now complete. Call
// with mu held.
func (s *Stream) join() (complete bool, err error) {
	for {
		next, any := s.early.take(s.arrived)
		if !any {
			break
		}
		if next.at < s.arrived {
			next.seg.free()
			return false, fmt.Errorf("%w: bytes of a stream arrived twice", ErrProtocol)
		}
		s.arrived += uint64(next.seg.w)
		s.queue.push(next.seg)
	}
	if s.ending && s.arrived+uint64(s.early.size) > s.end {
		return false, fmt.Errorf("%w: data behind FIN", ErrProtocol)
	}
	return s.ending && s.arrived == s.end, nil
}
