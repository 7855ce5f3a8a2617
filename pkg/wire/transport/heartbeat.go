package transport

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"time"
)

// leastRTO is the least time after which Linux repeats a lone packet (TCP_RTO_MIN).
const leastRTO = 200 * time.Millisecond

// heartbeat is the state of the pings that detect a dead conn. link.mu guards it.
type heartbeat struct {
	timer            *time.Timer   // runs while the link is attached
	times            [16]time.Time // of the last pings, by number; zero: of an earlier conn
	pingSeq, pongSeq uint64
	probe            probe
	rtts             [4]time.Duration
}

// probe is a ping of Client.Probe.
type probe struct {
	deadline time.Time     // when to look for the pong; zero: there is no probe
	timeout  time.Duration // how long the conn may receive nothing
	seq      uint64        // of the ping
}

// ping asks the other end for a pong. Call with mu held.
func (l *link) ping(now time.Time) {
	l.heart.pingSeq++
	l.heart.times[l.heart.pingSeq%16] = now
	l.acks.sent = l.acks.received
	l.control(framePing, 0, twoNumbers(l.heart.pingSeq, l.acks.received)...)
}

func twoNumbers(a, b uint64) []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(make([]byte, 0, 16), a), b)
}

// onPing answers a ping. The client heeds wornPing.
func (l *link) onPing(seq, acked uint64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.acks.sent = l.acks.received
	l.control(framePong, 0, twoNumbers(seq, l.acks.received)...)
	if seq == wornPing {
		l.renew.Raise()
	}
	return l.acked(acked)
}

// onPong measures the round trip, unless the pong answers a ping of an earlier conn.
func (l *link) onPong(seq, acked uint64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.heart.pongSeq = max(l.heart.pongSeq, seq)
	if at := l.heart.times[seq%16]; l.heart.pingSeq-seq < 16 && !at.IsZero() {
		rtt := max(time.Since(at), 1)
		if l.conn != nil && !l.load.bulk.Load() {
			l.delay().probed(rtt, at)
		}
		copy(l.heart.rtts[1:], l.heart.rtts[:])
		l.heart.rtts[0] = rtt
		least := l.heart.rtts[0]
		for _, d := range l.heart.rtts[1:] {
			least = lesser(d, least)
		}
		l.load.rtt.Store(int64(least))
		if l.conn != nil {
			l.session.rtts[l.conn.path].Store(int64(least))
		}
	}
	return l.acked(acked)
}

func (l *link) onAck(count uint64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.acked(count)
}

// acked releases the bytes that the other end has received. Call with mu held.
func (l *link) acked(count uint64) error {
	if l.closed != nil {
		return l.closed
	}
	before := l.out.acked
	if err := l.out.ack(count); err != nil {
		return err
	}
	l.charge()
	if l.out.acked > before {
		now := time.Now()
		late := now.Sub(l.owed.since) > 2*time.Duration(l.load.rtt.Load())+leastRTO
		if late && before < l.owed.end && l.far() && !l.load.bulk.Load() && l.delay().still(now) {
			l.delay().lost.Store(now.UnixNano())
		}
		l.owed.since = now
		if l.conn != nil {
			l.landed(now)
		}
	}
	l.load.unacked.Store(int64(l.out.held()))
	if l.closeEnd > 0 && l.out.acked >= l.closeEnd {
		l.session.settled.Raise() // ends the wait of Close
	}
	l.dispatch()
	return nil
}

// onBeat watches the conn while there is one: it pings after Tuning.Heartbeat of silence, and drops the conn after
// Tuning.DeadAfter. Every six heartbeats it pings in any case, to measure the round trip.
func (l *link) onBeat() {
	t := &l.session.tuning
	l.mu.Lock()
	c := l.conn
	if c == nil || l.closed != nil {
		l.mu.Unlock()
		return
	}
	now := time.Now()
	silent := now.Sub(c.last)
	if l.heart.probe.fails(c, now, l.heart.pongSeq) || silent >= t.DeadAfter {
		l.lose(c, fmt.Errorf("%w for %s", errConnSilent, silent.Round(time.Millisecond)))
		l.mu.Unlock()
		return
	}
	pinged := now.Sub(l.heart.times[l.heart.pingSeq%16])
	if silent >= t.Heartbeat && pinged >= t.Heartbeat || pinged >= 6*t.Heartbeat {
		l.ping(now)
	}
	next := t.DeadAfter - silent
	if silent < t.Heartbeat {
		next = t.Heartbeat - silent
	}
	if !l.heart.probe.deadline.IsZero() {
		next = min(next, l.heart.probe.deadline.Sub(now))
	}
	if l.out.acked < l.owed.end && l.delay().lossy(now) {
		if late := now.Sub(l.owed.since); late < l.tail() {
			next = min(next, l.tail()-late)
		} else {
			l.ping(now)
			next = min(next, late)
		}
	}
	l.heart.timer.Reset(min(next, t.Heartbeat))
	l.mu.Unlock()
	l.sweep(now)
}

// tail returns the time without an acknowledgement after which the link pings, again after twice that time, and so on,
// on a path that loses packets. When the last packet of a burst is lost, no other follows that would tell the sender
// so: TCP waits for 200 ms and two round trips (RFC 8985, tail loss probe; the least RTO of Linux). Call with mu held.
func (l *link) tail() time.Duration { return max(time.Duration(l.load.rtt.Load())/4, pauseTime) }

// The timeout of a probe is four round trips, but at least probeMin. Before a round trip is measured, it is
// probeUnknown.
const (
	probeMin     = 300 * time.Millisecond
	probeUnknown = time.Second
)

var errAddressGone = errors.New("this machine no longer has the conn's local address")

// probe drops the conn if gone returns true for its local address, or if it does not answer in time. A probe that runs
// keeps its deadline, so that frequent changes of the network do not postpone it.
func (l *link) probe(gone func(net.Addr) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.conn == nil:
		return
	case gone(l.conn.LocalAddr()):
		l.lose(l.conn, errAddressGone)
		return
	case !l.heart.probe.deadline.IsZero():
		return
	}
	timeout := probeUnknown
	if rtt := time.Duration(l.load.rtt.Load()); rtt > 0 {
		timeout = max(4*rtt, probeMin)
	}
	now := time.Now()
	l.ping(now)
	l.heart.probe = probe{now.Add(timeout), timeout, l.heart.pingSeq}
	l.heart.timer.Reset(min(timeout, l.session.tuning.Heartbeat))
}

// fails reports whether the probe has failed: its ping is unanswered, and c has received nothing for the timeout. While
// c receives data, fails extends the deadline, because the pong may wait behind the data.
func (p *probe) fails(c *linkConn, now time.Time, ponged uint64) bool {
	if p.deadline.IsZero() || now.Before(p.deadline) {
		return false
	}
	due := c.last.Add(p.timeout)
	if ponged >= p.seq || !now.Before(due) {
		p.deadline = time.Time{}
		return ponged < p.seq
	}
	p.deadline = due
	return false
}

// wantAck acknowledges what was received after ackDelay.
func (l *link) wantAck() {
	if !l.acks.armed.Swap(true) {
		l.acks.timer.Reset(ackDelay)
	}
}

func (l *link) delayedAck() {
	l.acks.armed.Store(false)
	l.sendAck()
}

// sendAck acknowledges everything received. Without a conn the next handshake does so.
func (l *link) sendAck() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil || l.acks.sent == l.acks.received {
		return
	}
	l.acks.sent = l.acks.received
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], l.acks.received)
	l.control(frameAck, 0, b[:]...)
}

// pingFallback sends a ping over the fallback and returns its number; 0: the link is elsewhere.
func (l *link) pingFallback() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil || l.conn.path != fallback {
		return 0
	}
	l.ping(time.Now())
	return l.heart.pingSeq
}

// answered reports whether a ping, or a later one, was answered.
func (l *link) answered(ping uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.heart.pongSeq >= ping
}

// stuck reports whether the link's conn uses a preferred transport and its bytes are not acknowledged.
func (l *link) stuck() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil || l.conn.path == fallback || l.out.acked >= l.owed.end {
		return false
	}
	latest := l.owed.since
	if l.conn.last.After(latest) {
		latest = l.conn.last
	}
	return time.Since(latest) > max(stallTime, 4*time.Duration(l.load.rtt.Load()))
}
