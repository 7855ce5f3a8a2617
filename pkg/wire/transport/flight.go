package transport

import "time"

// flight bounds the bytes of a link in flight: sent, and not acknowledged by the other end. Without a bound they fill
// whatever buffers lie between the ends: the API server's send buffer has megabytes, and a small message waits behind
// them for half a second.
//
//	a round trip:  ├────── base ──────┼── queue ──┼── held up ──┤      base: the path without a queue of ours (delay)
//
// Every few round trips in which writers had to wait for it, the limit follows the queue (FAST TCP; Wei, Jin, Low,
// Hegde 2006):
//
//	limit = limit · (1 + (base + target) / round trip) / 2 + 4 KiB
//
// So the queue settles at the target, however many links share the line, and at what the 4 KiB add, which is much only
// on slow lines. A link begins with 64 KiB and doubles that in each round trip, until the rate has stopped growing: for
// two rounds if there is a queue, as a conn's own slow start also makes bytes wait, and for six if there is none,
// unless the path is lossy. It does so again when there was no queue for some time.
//
// Four things must not shrink the limit to nothing:
//
//   - Lost packets, and pauses of the path: they hold up what is behind them, and that is no queue. Where a span has
//     round trips that are much longer than others, and most probes show no queue, the path is lossy for a while: bulk
//     links take the queue from probes, and their limit is between the best recent rate times the base (as in BBR,
//     draft-ietf-ccwg-bbr), and that rate times the round trip with what is held up. Where most probes show the same
//     queue, it is the queue that drops packets: then the limit is at most the rate times the round trip.
//   - A queue that others on the line cause. A drain (see delay) shows whether the queue is the session's own. Between
//     two drains the limit shrinks at most by half.
//   - A path that becomes longer. The next two drains show it, and the startup begins again.
//
// link.mu guards it.
type flight struct {
	limit   int
	least   int           // the limit may not fall below it before the next drain
	startup bool          // the limit doubles
	drains  int           // of delay, as far as this link knows
	base    time.Duration // after those drains
	span    span
	empty   int // consecutive spans without a queue
	flat    int // consecutive rounds of the startup without a higher rate

	marks  []mark // of some writes, the oldest first
	round  round
	rate   float64 // bytes a second, the most of the startup's rounds
	recent float64 // bytes a second, of the last spans
}

// mark is the position behind a write, and when it began.
type mark struct {
	end uint64
	at  time.Time
}

// round is what a link sees from a write until its acknowledgement.
type round struct {
	end     uint64 // it is over when this is acknowledged
	began   time.Time
	from    time.Time     // when what was not acknowledged as it began was sent first
	acked   uint64        // when it began
	rtt     time.Duration // the least so far
	most    time.Duration // the longest
	limited bool          // a writer has waited for the limit
}

// span is the time in which a link looks for the shortest round trip before it changes the limit. It is longer than
// the pauses of a radio or a busy processor, after which much arrives at once: they are no queue. A drain interrupts a
// span without ending it. Otherwise the drains of links with short rounds would end all spans of a link with long ones.
type span struct {
	rounds int
	took   time.Duration // by its rounds
	acked  uint64        // bytes, in its rounds
	rtt    time.Duration // the least
	most   time.Duration // the longest
}

// add adds a round that took the time took and acknowledged acked bytes. It reports whether the span is long enough.
func (s *span) add(r round, took time.Duration, acked uint64) bool {
	s.rounds++
	s.took += took
	s.acked += acked
	s.rtt, s.most = lesser(s.rtt, r.rtt), max(s.most, r.most)
	return s.rounds >= spanRounds && s.took >= spanTime
}

const (
	firstFlight  = 64 << 10
	leastFlight  = 16 << 10
	flightGrowth = 4 << 10 // growth of each link's limit in each round trip, so that newer links get an equal part
	marksPerRTT  = 16
	flatRounds   = 2 // without a higher rate, after which the startup ends if there is a queue
	emptyRounds  = 6 // if there is none
	emptySpans   = 2 // after which it begins again
	spanRounds   = 3
	spanTime     = 250 * time.Millisecond
	pauseTime    = 10 * time.Millisecond // without an acknowledgement, until it counts as late
	mostHoles    = 4                     // round trips for which lost packets hold up others
)

func newFlight() flight { return flight{limit: firstFlight, least: leastFlight, startup: true} }

// restart begins the startup again, from the limit as it is.
func (f *flight) restart() { f.startup, f.rate, f.flat, f.empty, f.span = true, 0, 0, 0, span{} }

// inFlight returns how many bytes the link may have in flight. Call with mu held.
func (l *link) inFlight() int {
	if l.conn == nil || !l.delay().far.Load() {
		return replayBuffer
	}
	limit := l.flight.limit
	if d := l.delay().drain.Load(); d != nil && time.Now().Before(d.until) {
		part := min(float64(limit)/d.rtt.Seconds(), l.flight.recent) * d.base.Seconds()
		limit = min(limit, max(int(0.9*part), leastFlight))
	}
	return min(limit, replayBuffer)
}

// full reports whether the bytes held are as many as may be in flight. Call with mu held.
func (l *link) full(held int) bool {
	limit := l.inFlight()
	if held < limit {
		return false
	}
	l.flight.round.limited = true
	return true
}

// departed notes a write that began at a time. Call with mu held.
func (l *link) departed(at time.Time) {
	f := &l.flight
	if f.round.end == 0 {
		f.begin(l, at)
	}
	n := len(f.marks)
	if n == 0 || l.out.sent-f.marks[n-1].end >= uint64(l.inFlight()/marksPerRTT) {
		f.marks = append(f.marks, mark{l.out.sent, at})
	}
}

// landed notes an acknowledgement. Call with mu held and a conn.
func (l *link) landed(now time.Time) {
	f := &l.flight
	var newest mark
	n := 0
	for ; n < len(f.marks) && f.marks[n].end <= l.out.acked; n++ {
		newest = f.marks[n]
	}
	if n == 0 {
		return
	}
	f.round.most = max(f.round.most, now.Sub(f.marks[0].at))
	f.marks = append(f.marks[:0], f.marks[n:]...)
	rtt := now.Sub(newest.at)
	l.delay().sample(rtt, newest.at, l.load.bulk.Load())
	f.round.rtt = lesser(f.round.rtt, rtt)
	if l.load.bulk.Load() && l.far() && l.delay().ask(now) {
		l.session.probeLine()
	}
	if l.out.acked < f.round.end {
		return
	}
	if f.round.limited && l.delay().far.Load() {
		// What a lost packet has held up arrives at once, but was not sent at once (as BBR's delivery rate).
		l.adapt(now, max(now.Sub(f.round.began), newest.at.Sub(f.round.from)))
	}
	f.round = round{}
	if l.out.unsent() > 0 || l.out.acked < l.out.sent {
		f.begin(l, now)
	}
}

// begin begins a round of the link.
func (f *flight) begin(l *link, now time.Time) {
	f.round = round{end: l.out.sent, began: now, from: now, acked: l.out.acked}
	if len(f.marks) > 0 {
		f.round.from = f.marks[0].at
	}
}

// adapt changes the limit at the end of a round in which it was used up, and whose bytes took a time to be sent or
// acknowledged. Call with mu held and a conn.
func (l *link) adapt(now time.Time, took time.Duration) {
	f, d := &l.flight, l.delay()
	d.mu.Lock()
	base := d.base
	line, usual := d.line(now)
	newest := d.probes[0]
	latest := lesser(d.probes[2], lesser(d.probes[1], newest))
	drains, draining, since := d.drains, d.drain.Load() != nil, now.Sub(d.last)
	d.mu.Unlock()
	if draining {
		return
	}
	if f.drains != drains { // much of this round was sent in the drain
		if longer := f.base > 0 && base > f.base*5/4; longer {
			f.restart()
		}
		f.base, f.drains, f.least = base, drains, max(f.limit/2, leastFlight)
		return
	}
	goal := base + target(base)
	if f.startup {
		took = max(took, base)
		// No queue grows, and a conn's slow start takes two round trips.
		if usual > 0 && usual <= goal && newest < goal-target(base)/2 && f.round.most > base*5/2 {
			d.lost.Store(now.UnixNano())
		}
		_, holes := l.delays(f.round.rtt, f.round.most, base, latest, false)
		l.double(lesser(latest, f.round.rtt) >= goal, goal, holes, took)
		return
	}
	if !f.span.add(f.round, took, l.out.acked-f.round.acked) {
		return
	}
	held, own := d.judge(f.span, base, line, usual, now)
	rtt, holes := l.delays(f.span.rtt, f.span.most, base, line, held)
	rate := float64(f.span.acked) / f.span.took.Seconds()
	f.recent = max(rate, 0.8*f.recent+0.2*rate)
	f.span = span{}
	queue := rtt - base
	if f.empty++; queue > target(base)/2 {
		f.empty = 0
	}
	if f.empty == emptySpans { // the line has become faster, or the startup has ended early
		f.restart()
		return
	}
	grown := 2 * flightGrowth * rtt / time.Duration(f.limit) // queue beyond the target; on slow lines it is long
	f.limit = (f.limit+int(float64(f.limit)*goal.Seconds()/rtt.Seconds()))/2 + flightGrowth
	if l.load.bulk.Load() && (own || rtt <= goal) { // what is more waits elsewhere
		f.limit = min(f.limit, int(f.recent*(max(rtt, goal)+holes).Seconds())+flightGrowth)
		f.limit = max(f.limit, int(f.recent*base.Seconds()))
	}
	f.limit = min(max(f.limit, f.least), replayBuffer)
	if since > max(drainEvery, 12*base) && queue > target(base)/2 || rtt-grown > goal+target(base) && since > 6*rtt {
		inFlight := time.Duration(float64(f.limit) / f.recent * float64(time.Second)) // with what waits behind holes
		d.begin(rtt, min(max(rtt, inFlight), rtt+mostHoles*base), 6*rtt, now)
	}
}

// judge notes what has held up bytes of the span, if any were held up: a queue of the session's own that is full and
// drops packets, or else the path. line and usual are those of delay.line.
func (d *delay) judge(s span, base, line, usual time.Duration, now time.Time) (held, own bool) {
	goal := base + target(base)
	switch {
	case usual == 0 || s.most-s.rtt <= base*3/4:
		return false, false
	case line > goal && usual-line < base/6: // in pauses of the path probes differ more
		d.lost.Store(0)
		return false, true
	case usual <= goal:
		d.lost.Store(now.UnixNano())
	}
	return true, false
}

// delays returns the round trip with the queue, and for how much longer lost packets hold up what is behind them: 0
// unless the path is lossy or, by held, has held up bytes. least and most are round trips of the link's bytes, and line
// that of probes, or 0.
func (l *link) delays(least, most, base, line time.Duration, held bool) (rtt, holes time.Duration) {
	lossy := l.load.bulk.Load() && l.delay().lossy(time.Now())
	if lossy {
		least = lesser(line, least)
	}
	if (lossy || held) && most-least > base/2 {
		holes = min(most-least, mostHoles*base)
	}
	return least, holes
}

// double adapts the limit during the startup. queued reports a queue, goal is the round trip with the queue that may
// be, holes is that of delays, and took is the time of the round.
func (l *link) double(queued bool, goal, holes, took time.Duration) {
	f := &l.flight
	rate := float64(l.out.acked-f.round.acked) / took.Seconds()
	if f.flat++; rate > 1.25*f.rate {
		f.flat = 0
	}
	f.rate = max(f.rate, rate)
	f.recent = f.rate
	switch {
	case f.flat == 0, !queued && (f.flat < emptyRounds || l.delay().lossy(time.Now())):
		most := min(replayBuffer, int(2*f.rate*(goal+holes).Seconds())) // a conn's slow start doubles the rate
		f.limit = max(f.limit, min(2*f.limit, most))
	case f.flat >= flatRounds:
		f.startup, f.flat = false, 0
		f.limit = min(max(int(f.rate*(goal+holes).Seconds()), leastFlight), f.limit)
		f.least = max(f.limit/2, leastFlight)
	}
}
