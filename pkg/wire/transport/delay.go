package transport

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// delay measures the path that the links of a session share: its round trip without a queue of their own, from which
// they calculate their limits. The base is the least round trip of the last two drains and of the time since the first
// of them. In a drain all links at once send so little that their queue empties, for about one round trip (as BBR does;
// Cardwell and others 2016). A queue that remains comes from others.
//
// Where packets are lost, each hole holds up the bytes behind it for a round trip and more, and few bytes of bulk show
// the path. Pings over link 0, which carries none, probe it while bulk is sent: two in each round trip.
//
//	     start       clear                       until
//	───────┼───────────┼───────────────────────────┼────▶
//	       │ the queue │ what is sent now shows    │ and the first acknowledgement
//	       │ drains    │ the path as it is         │ of what is sent now ends the drain
type delay struct {
	far   atomic.Bool           // base is at least nearby
	lost  atomic.Int64          // when a lost packet was noticed, in Unix nanoseconds
	drain atomic.Pointer[drain] // the drain in progress

	mu       sync.Mutex
	base     time.Duration // 0: unknown
	previous time.Duration // the least round trip of the last drain and since
	shown    time.Duration // the least round trip in the drain in progress
	last     time.Time     // when the last drain began
	drains   int

	probes       [8]time.Duration // round trips, the latest first; 0: there are fewer since bulk began
	asked, heard time.Time        // when the last probe was sent, and when one was answered
}

const (
	nearby      = 2 * time.Millisecond // below this base links have no limit: little fits in flight
	leastTarget = 10 * time.Millisecond
	mostTarget  = 25 * time.Millisecond
	drainEvery  = 2 * time.Second
	lossTime    = time.Minute            // for which a path counts as lossy after a loss
	probePause  = 200 * time.Millisecond // or four round trips: without an answer of a probe
	drainSlack  = 10 * time.Millisecond  // for what delays acknowledgements
)

// drain is never changed.
type drain struct {
	clear, until time.Time
	base, rtt    time.Duration // without and with the queue
}

// target returns the queue that links may have.
func target(base time.Duration) time.Duration { return min(max(leastTarget, base/4), mostTarget) }

// reset forgets all measurements, for a new path, which is far if the old one was, until it is measured.
func (d *delay) reset() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.base, d.previous, d.shown, d.probes = 0, 0, 0, [8]time.Duration{}
	d.lost.Store(0)
	d.drain.Store(nil)
}

// sample records the round trip of bytes that were sent at a time. held reports that lost packets may have held up the
// bytes, and that probes show the path.
func (d *delay) sample(rtt time.Duration, sent time.Time, held bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.base, d.previous = lesser(d.base, rtt), lesser(d.previous, rtt)
	if now := d.drain.Load(); now != nil {
		switch {
		case sent.Before(now.clear):
		case held:
		case sent.Before(now.until):
			d.shown = lesser(d.shown, rtt)
		default:
			if d.shown > 0 {
				d.base, d.previous = min(d.previous, d.shown), d.shown
				d.drains++
			}
			d.drain.Store(nil)
		}
	}
	d.far.Store(d.base >= nearby)
}

// probed records the round trip of a ping of a link that is not for bulk: that of the line, with the queue there, but
// without the buffers before it, and seldom behind a lost packet.
func (d *delay) probed(rtt time.Duration, sent time.Time) {
	d.sample(rtt, sent, false)
	d.mu.Lock()
	defer d.mu.Unlock()
	copy(d.probes[1:], d.probes[:])
	d.probes[0], d.heard = rtt, time.Now()
}

// line returns the round trips that three and five of the last eight probes did not exceed, or 0 if they are unknown:
// lost packets delay less than half of the probes, and a queue most of them. Call with mu held.
func (d *delay) line(now time.Time) (three, five time.Duration) {
	switch {
	case now.Sub(d.heard) > max(4*d.base, probePause): // they wait behind a lost packet
		return 0, 0
	case d.probes[len(d.probes)-1] == 0:
		return d.probes[0], 0
	}
	sorted := d.probes
	slices.Sort(sorted[:])
	return sorted[2], sorted[4]
}

// lossy reports whether the path has lost packets lately.
func (d *delay) lossy(now time.Time) bool { return now.UnixNano()-d.lost.Load() < int64(lossTime) }

// still reports whether there was no bulk lately, whose queue may have dropped a packet.
func (d *delay) still(now time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return now.Sub(d.asked) > bulkPause
}

// ask reports whether it is time for another probe.
func (d *delay) ask(now time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if now.Sub(d.asked) < max(d.base/2, pauseTime) {
		return false
	}
	if now.Sub(d.asked) > bulkPause {
		d.probes = [8]time.Duration{}
	}
	d.asked = now
	return true
}

func lesser(known, new time.Duration) time.Duration {
	if known == 0 {
		return new
	}
	return min(known, new)
}

// begin begins a drain, unless one runs or the last one began less than pause ago. rtt is the round trip now, and the
// bytes in flight need the time inFlight to arrive.
func (d *delay) begin(rtt, inFlight, pause time.Duration, now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.drain.Load() != nil || now.Sub(d.last) < pause {
		return
	}
	d.last, d.shown = now, 0
	d.drain.Store(&drain{now.Add(inFlight - d.base), now.Add(inFlight + drainSlack), d.base, rtt})
}

// delay returns the delay of the conn's path. Call with mu held and a conn.
func (l *link) delay() *delay { return &l.session.delays[l.conn.path] }
