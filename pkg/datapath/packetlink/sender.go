package packetlink

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/wakeup"
)

// Streams is the number of packet streams of a session: stream 0 is for flows that send little, the others are for
// bulk.
const Streams = 4

const (
	// DefaultLimit is the usual size of a flow's TCP window, in bytes.
	DefaultLimit = 4 << 20
	// A queue of more than slack bytes drops new frames while its first frame has waited for maxWait: a longer queue
	// would not make a slow path faster.
	slack   = 128 << 10
	maxWait = 200 * time.Millisecond

	// ackPause is how long a bare acknowledgement may wait after the previous one, unless another frame is queued. Each
	// write crosses the API server, the kubelet and the container runtime, and costs them as much for one
	// acknowledgement as for ten. Measured with and without: eight downloads are 11 to 13 % faster, one is 0 to 7 %
	// faster; one upload is 6 to 8 % slower, eight are the same.
	//
	// Datagrams of a bulk flow wait as long, up to gatherBytes. At 500 Mb/s and 1200 bytes, one write then carries 14
	// instead of 2.
	ackPause    = time.Millisecond
	gatherBytes = 16 << 10

	minPause = 50 * time.Millisecond
	maxPause = 2 * time.Second
)

// SenderConfig configures a Sender.
type SenderConfig struct {
	// Open opens a packet stream. The Sender calls it when the stream is first needed and, after a pause, when it
	// broke.
	//
	// The Sender closes the stream when it breaks and when Run ends, possibly twice; Close must end a Write that
	// blocks. Each Write consists of whole frames, so Open may return one stream for two numbers if Writes to it do not
	// mix. If the stream has a method Gone() <-chan struct{}, like transport.Stream, it is broken once that is closed.
	// If it implements Marks, flows that leave it keep their order however long their frames take to arrive.
	Open func(ctx context.Context, stream int) (io.WriteCloser, error)
	// Eager makes Run open all streams at once, and again when they break, without waiting for frames. The end that
	// opens streams sets it, so that the other end has streams to send on.
	Eager bool
	// GSO reports that the other end accepts super-packets and partial checksums; otherwise the Sender completes them.
	GSO bool
	// Limit is the number of bytes that a queue holds before it drops frames; 0 means DefaultLimit.
	Limit  int
	Logger *slog.Logger // nil discards
}

// Marks tells which bytes of a packet stream have arrived at the other end. transport.Stream implements it.
type Marks interface {
	// Mark returns a mark behind everything that was written so far.
	Mark() uint64
	// Arrived reports whether the other end has acknowledged everything before the mark.
	Arrived(mark uint64) bool
}

// SenderStats counts since NewSender.
type SenderStats struct {
	Packets, Bytes uint64 // written, with virtio-net headers and lengths
	Dropped        uint64 // packets, because a queue was full or too old, or its stream broke
	Malformed      uint64 // packets that Send rejected
	Broken         uint64 // how often a stream broke or could not be opened
	Queued         int    // bytes in all queues
}

// Sender queues frames for a session's packet streams and writes them. All methods may be called concurrently.
type Sender struct {
	cfg   SenderConfig
	began time.Time

	mu       sync.Mutex
	ended    bool
	stats    SenderStats
	flows    flows
	queues   [Streams]sendQueue
	barriers uint32 // so far
}

// sendQueue is the queue of one packet stream. Sender.mu guards it.
type sendQueue struct {
	list
	wake    wakeup.Signal
	idle    bool          // the writer waits for wake
	acked   time.Duration // when the writer was last woken for frames that may wait
	hold    *time.Timer   // wakes the writer for frames that wait; nil before Run
	holding bool          // hold runs
	renewed bool          // Renew was called: the next step is Open
	// Positions in bytes: in is behind the bytes that were queued, out behind those that have left the queue. The other
	// end has received all bytes before arrived, and once mark has arrived, all bytes before marked.
	in, out, marked, arrived uint64
	mark                     uint64
	marks                    Marks // of the open stream; nil if none: bytes that left the queue count as arrived

	writing bool
	began   time.Duration // when the current Write began
	pace    time.Duration // how long recent Writes took
	moved   time.Duration // when the path last moved after a stall
}

// NewSender creates a Sender. It writes nothing before Run; frames that are sent earlier wait.
func NewSender(cfg SenderConfig) *Sender {
	if cfg.Limit == 0 {
		cfg.Limit = DefaultLimit
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Sender{cfg: cfg, began: time.Now()}
	s.flows.seed = rand.Uint64()
	for i := range s.queues {
		s.queues[i].wake = wakeup.NewSignal()
	}
	return s
}

// Send queues the frame and takes ownership of it. It never blocks: it drops and counts what does not fit.
func (s *Sender) Send(f *Frame) {
	h, err := f.Header()
	if err != nil {
		f.Release()
		s.mu.Lock()
		s.stats.Malformed++
		s.mu.Unlock()
		return
	}
	hash, hashed := s.flows.hash(&h, f.Packet())
	ack := isAck(&h, f.Packet())
	var batch list
	if s.cfg.GSO {
		batch = listOf(f, 1)
	} else if batch, err = f.finish(); err != nil { // not after inspection
		f.Release()
		s.mu.Lock()
		s.stats.Malformed++
		s.mu.Unlock()
		return
	}

	now := time.Since(s.began)
	s.mu.Lock()
	n := 0
	var fl *flow
	if hashed && !s.ended {
		fl = s.flows.find(hash, now)
		n = s.choose(fl, batch.size, now)
	}
	q := &s.queues[n]
	if s.ended || q.size+batch.size > s.cfg.Limit || q.late(now) {
		s.stats.Dropped += uint64(batch.packets())
		s.mu.Unlock()
		batch.release()
		return
	}
	q.queue(batch, now)
	if fl != nil {
		fl.last = q.in
	}
	gather := ack || n > 0 && h.Proto == packet.ProtoUDP && q.size < gatherBytes
	wake := q.idle && !(gather && q.holds(now))
	if wake {
		q.idle = false
	}
	s.mu.Unlock()
	if wake {
		q.wake.Raise()
	}
}

// stalled reports whether the stream's path is stalled rather than slow: a Write takes much longer than those before.
// TCP then only retransmits, less and less often, up to two minutes apart. If one of those segments is lost, or one of
// the first answers when the path moves again, the flow pauses for as long again. Call with mu held.
func (q *sendQueue) stalled(now time.Duration) bool {
	return q.writing && now-q.began > q.stallAfter()
}

// stallAfter is how long a Write may take before its path counts as stalled. Call with mu held.
func (q *sendQueue) stallAfter() time.Duration { return max(maxWait, 4*q.pace) }

// late reports whether the queue is longer than the path needs. Call with mu held.
func (q *sendQueue) late(now time.Duration) bool {
	return q.size > slack && now-max(q.head.queued, q.moved) > maxWait && !q.stalled(now)
}

// wrote notes that the current Write has ended. Call with mu held.
func (q *sendQueue) wrote(now time.Duration) {
	if !q.writing {
		return
	}
	if q.stalled(now) {
		q.moved = now
	}
	q.pace = max(min(now-q.began, q.stallAfter()), q.pace/2)
	q.writing = false
}

// holds reports whether a bare acknowledgement or a bulk datagram waits for others. Call with mu held.
func (q *sendQueue) holds(now time.Duration) bool {
	if q.hold == nil {
		return false
	}
	if q.holding {
		return true
	}
	if wait := q.acked + ackPause - now; wait > 0 {
		q.hold.Reset(wait)
		q.holding = true
		return true
	}
	q.acked = now
	return false
}

// unhold wakes the writer for frames that waited, unless another frame has done so.
func (s *Sender) unhold(q *sendQueue) {
	s.mu.Lock()
	q.holding = false
	wake := q.idle && q.head != nil
	if wake {
		q.idle = false
		q.acked = time.Since(s.began)
	}
	s.mu.Unlock()
	if wake {
		q.wake.Raise()
	}
}

// choose counts size bytes of the flow and returns the number of the stream that they go to. Call with mu held.
func (s *Sender) choose(f *flow, size int, now time.Duration) int {
	bulk := bulkStream(f.hash)
	f.count = min(f.count+size, maxCount)
	switch {
	case !f.bulk && f.count > bulkBytes:
		// A barrier, because waiting for arrival would never end: the flow always has frames in stream 0.
		if !s.queues[0].hasArrived(f.last) {
			s.bar(&s.queues[bulk], now)
		}
		f.bulk = true
	case f.bulk && f.count < sparseBytes && s.queues[bulk].hasArrived(f.last):
		f.bulk = false
	}
	if f.bulk {
		return bulk
	}
	return 0
}

// bar makes the other end deliver later frames of q only after all earlier frames of stream 0. Call with mu held.
func (s *Sender) bar(q *sendQueue, now time.Duration) {
	s.barriers++
	s.queues[0].post(newBarrier(barrierPassed, s.barriers), now)
	q.post(newBarrier(barrierAwaited, s.barriers), now)
}

// queue appends m. Call with mu held.
func (q *sendQueue) queue(m list, now time.Duration) {
	q.in += uint64(m.size)
	q.join(m, now)
}

// post queues a frame of the Sender's own and wakes the writer. Call with mu held.
func (q *sendQueue) post(f *Frame, now time.Duration) {
	q.queue(listOf(f, 0), now)
	if q.idle {
		q.idle = false
		q.wake.Raise()
	}
}

// hasArrived reports whether everything before a position has arrived at the other end. Call with mu held.
func (q *sendQueue) hasArrived(position uint64) bool {
	if position > q.out {
		return false
	}
	if q.marks == nil || position <= q.arrived {
		return true
	}
	if q.marked <= q.arrived {
		q.mark, q.marked = q.marks.Mark(), q.out
	}
	if q.marks.Arrived(q.mark) {
		q.arrived = q.marked
	}
	return position <= q.arrived
}

// bulkStream returns the number of the bulk stream for a hash. It uses other bits than flows.find.
func bulkStream(hash uint64) int { return 1 + int(hash>>32%(Streams-1)) }

// Renew makes the Sender call Open before the stream's next frame, without a pause and without closing what Open
// returned before. Call it when there is a better stream, such as the stream of that number after Open returned a
// substitute.
func (s *Sender) Renew(number int) {
	q := &s.queues[number]
	s.mu.Lock()
	q.renewed = true
	s.mu.Unlock()
	q.wake.Raise()
}

// Stats may be called at any time.
func (s *Sender) Stats() SenderStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	stats := s.stats
	for i := range s.queues {
		stats.Queued += s.queues[i].size
	}
	return stats
}

// Run writes frames until ctx ends. Call it once. Send drops frames after that.
//
//	waiting ── first frame, or Eager ──▶ opening ──▶ open: frames are written
//	   ▲                                  │    ▲         │
//	   └──────────── pause ◀──────────────┴────│─────────┤ broken: the queue is dropped
//	                                           └─────────┘ renewed
func (s *Sender) Run(ctx context.Context) {
	s.mu.Lock()
	for i := range s.queues {
		q := &s.queues[i]
		q.hold = time.AfterFunc(time.Hour, func() { s.unhold(q) })
	}
	s.mu.Unlock()
	var wg sync.WaitGroup
	for i := range s.queues {
		wg.Go(func() { s.serve(ctx, i) })
	}
	wg.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	for i := range s.queues {
		s.queues[i].hold.Stop()
		s.discard(&s.queues[i])
	}
}

// discard drops the frames in a queue. Call with mu held.
func (s *Sender) discard(q *sendQueue) {
	s.stats.Dropped += uint64(q.packets())
	q.out += uint64(q.size)
	q.release()
}

var errRenewed = errors.New("renewed")
var errGone = errors.New("the other end has closed the packet stream")

// serve keeps one packet stream open until ctx ends.
func (s *Sender) serve(ctx context.Context, number int) {
	q := &s.queues[number]
	pause := minPause
	for {
		if !s.cfg.Eager && !s.needed(ctx, q) {
			return
		}
		began := time.Now()
		err := s.open(ctx, number)
		if ctx.Err() != nil {
			return
		}
		if err == errRenewed {
			continue
		}
		s.mu.Lock()
		s.stats.Broken++
		s.discard(q)
		s.mu.Unlock()
		s.cfg.Logger.Debug("packet stream broke", "stream", number, "error", err)
		if time.Since(began) > maxPause {
			pause = minPause
		}
		if !s.sleep(ctx, q, pause) {
			return
		}
		pause = min(2*pause, maxPause)
	}
}

// open opens the stream and writes what is queued for it until it breaks.
func (s *Sender) open(ctx context.Context, number int) error {
	q := &s.queues[number]
	s.mu.Lock()
	q.renewed = false // before Open, so that a Renew during Open has an effect
	q.writing = false
	s.mu.Unlock()
	w, err := s.cfg.Open(ctx, number)
	if err != nil {
		return err
	}
	var gone <-chan struct{}
	if g, ok := w.(interface{ Gone() <-chan struct{} }); ok {
		gone = g.Gone()
	}
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		w.Close()
		close(closed)
	})
	defer func() {
		if !stop() {
			<-closed
		}
	}()
	s.mu.Lock()
	q.marks, _ = w.(Marks)
	q.arrived, q.marked = q.out, q.out // frames on an earlier stream have arrived or are lost
	if number == 0 && s.barriers > 0 { // the other end may await a barrier that was lost
		q.post(newBarrier(barrierPassed, s.barriers), time.Since(s.began))
	}
	s.mu.Unlock()
	if err = s.write(ctx, q, w, gone); err != errRenewed {
		w.Close()
	}
	return err
}

// write writes queued frames until an error.
func (s *Sender) write(ctx context.Context, q *sendQueue, w io.Writer, gone <-chan struct{}) error {
	var packets, written int
	for {
		f, err := s.next(ctx, q, gone, packets, written)
		if err != nil {
			return err
		}
		packets, written = f.packets, f.end
		n, err := w.Write(f.buf[:f.end])
		f.Release()
		if err == nil && n < written {
			err = io.ErrShortWrite
		}
		if err != nil {
			s.mu.Lock()
			s.stats.Dropped += uint64(packets)
			q.out += uint64(written)
			s.mu.Unlock()
			return err
		}
	}
}

// next waits for the frames to write next. packets and written count those of the previous Write.
func (s *Sender) next(ctx context.Context, q *sendQueue, gone <-chan struct{}, packets, written int) (*Frame, error) {
	s.mu.Lock()
	s.stats.Packets += uint64(packets)
	s.stats.Bytes += uint64(written)
	q.out += uint64(written)
	now := time.Since(s.began)
	q.wrote(now)
	for {
		switch {
		case ctx.Err() != nil:
			s.mu.Unlock()
			return nil, ctx.Err()
		case q.renewed:
			s.mu.Unlock()
			return nil, errRenewed
		case q.head != nil:
			f := q.pop()
			q.writing, q.began = true, now
			s.mu.Unlock()
			return f, nil
		}
		q.idle = true
		s.mu.Unlock()
		select {
		case <-q.wake:
		case <-ctx.Done():
		case <-gone:
			return nil, errGone
		}
		s.mu.Lock()
		now = time.Since(s.began)
	}
}

// needed waits until there is something to write. It returns false if ctx ended first.
func (s *Sender) needed(ctx context.Context, q *sendQueue) bool {
	for {
		s.mu.Lock()
		queued := q.head != nil
		q.idle = !queued
		s.mu.Unlock()
		if ctx.Err() != nil {
			return false
		}
		if queued {
			return true
		}
		select {
		case <-q.wake:
		case <-ctx.Done():
			return false
		}
	}
}

// sleep waits for a jittered pause, or until Renew. It returns false if ctx ended first.
func (s *Sender) sleep(ctx context.Context, q *sendQueue, pause time.Duration) bool {
	timer := time.NewTimer(pause/2 + rand.N(pause/2))
	defer timer.Stop()
	for {
		s.mu.Lock()
		renewed := q.renewed
		s.mu.Unlock()
		if renewed {
			return true
		}
		select {
		case <-timer.C:
			return true
		case <-q.wake:
		case <-ctx.Done():
			return false
		}
	}
}
