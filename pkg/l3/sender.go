package l3

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"
)

// Lanes is how many lanes a session has: lane 0 for flows that send little, and the others for bulk.
const Lanes = 4

const (
	// DefaultLimit is as much as a flow's window usually is.
	DefaultLimit = 4 << 20
	// A queue of more than slack bytes takes nothing while its first frame has waited for maxWait: it is as long as
	// a slow path makes use of.
	slack   = 128 << 10
	maxWait = 200 * time.Millisecond

	// ackPause is how long a bare acknowledgement may wait for the next one after the last, and no frame else waits for
	// it. Each write crosses the API server, the kubelet and the container runtime, and costs them as much for one
	// acknowledgement as for ten. Seen with and without: eight downloads are 11 to 13 % faster, one is 0 to 7 % faster;
	// one upload is 6 to 8 % slower, eight are the same.
	ackPause = time.Millisecond

	minPause = 50 * time.Millisecond
	maxPause = 2 * time.Second
)

// SenderConfig says where a Sender writes to, and for whom.
type SenderConfig struct {
	// Open opens a lane. It is called when the lane is first needed, and again after it broke, after a pause. The
	// lane is closed when it breaks and when Run ends, perhaps twice, and while a Write waits, which that has to end. Each Write is
	// of whole frames, so that two lanes may be one stream if that keeps its Writes whole. When the lane has a method
	// Gone() <-chan struct{}, as a transport.Stream has, then the lane is broken when that is closed. When it has Marks, flows
	// keep their order when they leave it, however long it takes to arrive.
	Open func(ctx context.Context, lane int) (io.WriteCloser, error)
	// Eager has all lanes opened when Run begins, and again when they break, whether there are frames for them or
	// not: the end that opens streams has to, for the other end to have lanes to answer on.
	Eager bool
	// GSO says that the other end takes super-packets and partial checksums; else they are split and summed up here.
	GSO bool
	// Limit is how many bytes wait for a lane before frames are dropped; 0: DefaultLimit.
	Limit  int
	Logger *slog.Logger // nil: none
}

// Marks is what tells what of a lane has arrived at the other end, as a transport.Stream does.
type Marks interface {
	// Mark gives a mark behind everything that was written so far.
	Mark() uint64
	// Arrived reports whether the other end is known to have everything before the mark.
	Arrived(mark uint64) bool
}

// SenderStats counts since the Sender was made.
type SenderStats struct {
	Packets, Bytes uint64 // written, with virtio-net headers and lengths
	Dropped        uint64 // packets, because a queue was full, or waited for too long, or its lane broke
	Malformed      uint64 // packets that Send was given
	Broken         uint64 // how often a lane broke, or could not be opened
	Queued         int    // bytes that wait
}

// Sender queues frames for a session's lanes and writes them. All methods may be called concurrently.
type Sender struct {
	cfg   SenderConfig
	began time.Time

	mu       sync.Mutex
	ended    bool
	stats    SenderStats
	flows    flows
	lanes    [Lanes]lane
	barriers uint32 // so far
}

// lane is one lane's queue. It is guarded by Sender.mu.
type lane struct {
	list
	wake    chan struct{} // has room for one
	idle    bool          // the writer waits for wake
	acked   time.Duration // when the writer was last woken for bare acknowledgements
	hold    *time.Timer   // wakes it for those that wait; nil while Run does not run
	holding bool          // hold runs
	renewed bool          // Open is to be asked again
	// in and out count what was queued and what has left, as bytes; of the latter, arrived is known to have arrived, and
	// marked will have when mark has.
	in, out, marked, arrived uint64
	mark                     uint64
	marks                    Marks // of the stream that is written to; nil: it has none, and what has left counts as arrived

	writing bool
	began   time.Duration // when the Write that is under way began
	pace    time.Duration // how long one takes, of late
	moved   time.Duration // when the path last moved after it had stood still
}

// NewSender makes a Sender. It does nothing until Run; what is sent before waits.
func NewSender(cfg SenderConfig) *Sender {
	if cfg.Limit == 0 {
		cfg.Limit = DefaultLimit
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Sender{cfg: cfg, began: time.Now()}
	s.flows.seed = rand.Uint64()
	for i := range s.lanes {
		s.lanes[i].wake = make(chan struct{}, 1)
	}
	return s
}

// Send queues the frame, which it takes ownership of. It never blocks: what does not fit is dropped and counted.
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
	var l list
	if s.cfg.GSO {
		l = listOf(f, 1)
	} else if l, err = f.finish(); err != nil { // not after inspection
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
		n = s.choose(fl, l.size, now)
	}
	q := &s.lanes[n]
	if s.ended || q.size+l.size > s.cfg.Limit || q.late(now) {
		s.stats.Dropped += uint64(l.packets())
		s.mu.Unlock()
		l.release()
		return
	}
	q.queue(l, now)
	if fl != nil {
		fl.last = q.in
	}
	wake := q.idle && !(ack && q.holds(now))
	if wake {
		q.idle = false
	}
	s.mu.Unlock()
	if wake {
		q.signal()
	}
}

// stalled reports whether the lane's path stands still, rather than being slow: a Write takes much longer than those before. TCP
// is silent then but for what it repeats, ever less often, up to two minutes apart. What is lost of that, or of the first
// answers when the path moves again, costs a flow as long a pause again. Call with mu held.
func (l *lane) stalled(now time.Duration) bool {
	return l.writing && now-l.began > l.patience()
}

// patience is how long a Write may take on a path that moves. Call with mu held.
func (l *lane) patience() time.Duration { return max(maxWait, 4*l.pace) }

// late reports whether the queue is longer than the path makes use of. Call with mu held.
func (l *lane) late(now time.Duration) bool {
	return l.size > slack && now-max(l.head.queued, l.moved) > maxWait && !l.stalled(now)
}

// wrote notes that the Write that was under way has ended. Call with mu held.
func (l *lane) wrote(now time.Duration) {
	if !l.writing {
		return
	}
	if l.stalled(now) {
		l.moved = now
	}
	l.pace = max(min(now-l.began, l.patience()), l.pace/2)
	l.writing = false
}

// holds reports whether a bare acknowledgement, and those that came before it, wait a little. Call with mu held.
func (l *lane) holds(now time.Duration) bool {
	if l.hold == nil {
		return false
	}
	if l.holding {
		return true
	}
	if wait := l.acked + ackPause - now; wait > 0 {
		l.hold.Reset(wait)
		l.holding = true
		return true
	}
	l.acked = now
	return false
}

// unhold wakes the writer for the acknowledgements that were held, unless another frame has done so.
func (s *Sender) unhold(l *lane) {
	s.mu.Lock()
	l.holding = false
	wake := l.idle && l.head != nil
	if wake {
		l.idle = false
		l.acked = time.Since(s.began)
	}
	s.mu.Unlock()
	if wake {
		l.signal()
	}
}

// choose counts size bytes of the flow and gives the lane that they go to. Call with mu held.
func (s *Sender) choose(f *flow, size int, now time.Duration) int {
	bulk := bulkLane(f.hash)
	f.count = min(f.count+size, maxCount)
	switch {
	case !f.bulk && f.count > bulkBytes:
		// At once: it would never leave a lane that it fills.
		if !s.lanes[0].hasArrived(f.last) {
			s.bar(&s.lanes[bulk], now)
		}
		f.bulk = true
	case f.bulk && f.count < sparseBytes && s.lanes[bulk].hasArrived(f.last):
		f.bulk = false
	}
	if f.bulk {
		return bulk
	}
	return 0
}

// bar has what goes to a lane from now on wait, at the other end, for what has gone to lane 0. Call with mu held.
func (s *Sender) bar(l *lane, now time.Duration) {
	s.barriers++
	s.lanes[0].post(newBarrier(barrierPassed, s.barriers), now)
	l.post(newBarrier(barrierAwaited, s.barriers), now)
}

// queue puts m at the end of what waits. Call with mu held.
func (l *lane) queue(m list, now time.Duration) {
	l.in += uint64(m.size)
	l.join(m, now)
}

// post queues a frame of the Sender's own, and sees to it that it is written. Call with mu held.
func (l *lane) post(f *Frame, now time.Duration) {
	l.queue(listOf(f, 0), now)
	if l.idle {
		l.idle = false
		l.signal()
	}
}

// hasArrived reports whether everything up to a position has reached the other end. Call with mu held.
func (l *lane) hasArrived(position uint64) bool {
	if position > l.out {
		return false
	}
	if l.marks == nil || position <= l.arrived {
		return true
	}
	if l.marked <= l.arrived {
		l.mark, l.marked = l.marks.Mark(), l.out
	}
	if l.marks.Arrived(l.mark) {
		l.arrived = l.marked
	}
	return position <= l.arrived
}

// bulkLane spreads bulk flows over the lanes that are theirs. It uses other bits of the hash than flows.find.
func bulkLane(hash uint64) int { return 1 + int(hash>>32%(Lanes-1)) }

func (l *lane) signal() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// Renew has Open called again before the lane's next frame, without closing what it returned before, and without a
// pause: there is a better one, such as the stream of that number, where another stood in for it.
func (s *Sender) Renew(number int) {
	l := &s.lanes[number]
	s.mu.Lock()
	l.renewed = true
	s.mu.Unlock()
	l.signal()
}

// Stats may be called at any time.
func (s *Sender) Stats() SenderStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	stats := s.stats
	for i := range s.lanes {
		stats.Queued += s.lanes[i].size
	}
	return stats
}

// Run writes until ctx ends, and returns nil then. It is called once. What is sent later is dropped.
//
//	waiting ── first frame, or Eager ──▶ opening ──▶ open: frames are written
//	   ▲                                  │    ▲         │
//	   └──────────── pause ◀──────────────┴────│─────────┤ broken: what is queued is dropped
//	                                           └─────────┘ renewed
func (s *Sender) Run(ctx context.Context) error {
	s.mu.Lock()
	for i := range s.lanes {
		l := &s.lanes[i]
		l.hold = time.AfterFunc(time.Hour, func() { s.unhold(l) })
	}
	s.mu.Unlock()
	var wg sync.WaitGroup
	for i := range s.lanes {
		wg.Go(func() { s.serve(ctx, i) })
	}
	wg.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	for i := range s.lanes {
		s.lanes[i].hold.Stop()
		s.discard(&s.lanes[i])
	}
	return nil
}

// discard drops what the lane has queued. Call with mu held.
func (s *Sender) discard(l *lane) {
	s.stats.Dropped += uint64(l.packets())
	l.out += uint64(l.size)
	l.release()
}

var errRenewed = errors.New("renewed")
var errGone = errors.New("the other end has closed the lane")

// serve keeps one lane until ctx ends.
func (s *Sender) serve(ctx context.Context, number int) {
	l := &s.lanes[number]
	pause := minPause
	for {
		if !s.cfg.Eager && !s.needed(ctx, l) {
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
		s.discard(l)
		s.mu.Unlock()
		s.cfg.Logger.Debug("lane broke", "lane", number, "error", err)
		if time.Since(began) > maxPause {
			pause = minPause
		}
		if !s.sleep(ctx, l, pause) {
			return
		}
		pause = min(2*pause, maxPause)
	}
}

// open opens the lane and writes what is queued for it until it breaks.
func (s *Sender) open(ctx context.Context, number int) error {
	l := &s.lanes[number]
	s.mu.Lock()
	l.renewed = false // before Open finds what is there
	l.writing = false
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
	l.marks, _ = w.(Marks)
	l.arrived, l.marked = l.out, l.out // by another stream, or never
	if number == 0 && s.barriers > 0 { // the other end may wait for one that was lost
		l.post(newBarrier(barrierPassed, s.barriers), time.Since(s.began))
	}
	s.mu.Unlock()
	if err = s.write(ctx, l, w, gone); err != errRenewed {
		w.Close()
	}
	return err
}

// write writes what is queued.
func (s *Sender) write(ctx context.Context, l *lane, w io.Writer, gone <-chan struct{}) error {
	var packets, written int
	for {
		f, err := s.next(ctx, l, gone, packets, written)
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
			l.out += uint64(written)
			s.mu.Unlock()
			return err
		}
	}
}

// next waits for the frames that are to be written next. packets and written are what was written before.
func (s *Sender) next(ctx context.Context, l *lane, gone <-chan struct{}, packets, written int) (*Frame, error) {
	s.mu.Lock()
	s.stats.Packets += uint64(packets)
	s.stats.Bytes += uint64(written)
	l.out += uint64(written)
	now := time.Since(s.began)
	l.wrote(now)
	for {
		switch {
		case ctx.Err() != nil:
			s.mu.Unlock()
			return nil, ctx.Err()
		case l.renewed:
			s.mu.Unlock()
			return nil, errRenewed
		case l.head != nil:
			f := l.pop()
			l.writing, l.began = true, now
			s.mu.Unlock()
			return f, nil
		}
		l.idle = true
		s.mu.Unlock()
		select {
		case <-l.wake:
		case <-ctx.Done():
		case <-gone:
			return nil, errGone
		}
		s.mu.Lock()
		now = time.Since(s.began)
	}
}

// needed waits until there is something to write. It is false when ctx ended first.
func (s *Sender) needed(ctx context.Context, l *lane) bool {
	for {
		s.mu.Lock()
		queued := l.head != nil
		l.idle = !queued
		s.mu.Unlock()
		if ctx.Err() != nil {
			return false
		}
		if queued {
			return true
		}
		select {
		case <-l.wake:
		case <-ctx.Done():
			return false
		}
	}
}

// sleep waits for a pause of random length, or until the lane is renewed. It is false when ctx ended first.
func (s *Sender) sleep(ctx context.Context, l *lane, pause time.Duration) bool {
	timer := time.NewTimer(pause/2 + rand.N(pause/2))
	defer timer.Stop()
	for {
		s.mu.Lock()
		renewed := l.renewed
		s.mu.Unlock()
		if renewed {
			return true
		}
		select {
		case <-timer.C:
			return true
		case <-l.wake:
		case <-ctx.Done():
			return false
		}
	}
}
