package transport

import (
	"encoding/binary"
	"fmt"
	"time"
)

// ping asks for a sign of life. Call with mu held.
func (l *link) ping(now time.Time) {
	l.pingSeq++
	l.lastPing = now
	l.ackSent = l.received
	l.control(framePing, 0, twoNumbers(l.pingSeq, l.received)...)
}

func twoNumbers(a, b uint64) []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(make([]byte, 0, 16), a), b)
}

// onPing answers a ping.
func (l *link) onPing(seq, acked uint64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ackSent = l.received
	l.control(framePong, 0, twoNumbers(seq, l.received)...)
	return l.acked(acked)
}

// onPong measures the round trip. A pong of an older ping, as after a replay, says nothing.
func (l *link) onPong(seq, acked uint64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pongSeq = max(l.pongSeq, seq)
	l.changed.Broadcast()
	if seq == l.pingSeq {
		copy(l.rtts[1:], l.rtts[:])
		l.rtts[0] = max(time.Since(l.lastPing), 1)
		least := l.rtts[0]
		for _, d := range l.rtts[1:] {
			if d > 0 {
				least = min(least, d)
			}
		}
		l.rtt.Store(int64(least))
	}
	return l.acked(acked)
}

func (l *link) onAck(count uint64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.acked(count)
}

// acked frees what the other end has. Call with mu held.
func (l *link) acked(count uint64) error {
	if l.closed != nil {
		return l.closed
	}
	before := l.out.acked
	if err := l.out.ack(count); err != nil {
		return err
	}
	if l.out.acked > before {
		l.progress = time.Now()
	}
	l.backlog.Store(int64(l.out.held()))
	if l.closeEnd > 0 && l.out.acked >= l.closeEnd {
		l.session.hears()
	}
	l.dispatch()
	return nil
}

// onBeat keeps watch over the carrier while there is one: it pings after a while of silence, and gives the
// carrier up after a longer one. Now and then it pings in any case, to know the round trip.
func (l *link) onBeat() {
	t := &l.session.tuning
	l.mu.Lock()
	c := l.carrier
	if c == nil || l.closed != nil {
		l.mu.Unlock()
		return
	}
	now := time.Now()
	silent := now.Sub(c.last)
	probed := !l.suspect.IsZero() && !now.Before(l.suspect)
	if probed {
		if c.last.Before(l.lastPing) {
			silent = max(silent, t.DeadAfter)
		}
		l.suspect = time.Time{}
	}
	if silent >= t.DeadAfter {
		l.lose(c, fmt.Errorf("%w for %s", errCarrierSilent, silent.Round(time.Millisecond)))
		l.mu.Unlock()
		return
	}
	if silent >= t.Heartbeat && now.Sub(l.lastPing) >= t.Heartbeat || now.Sub(l.lastPing) >= 6*t.Heartbeat {
		l.ping(now)
	}
	next := t.DeadAfter - silent
	if silent < t.Heartbeat {
		next = t.Heartbeat - silent
	}
	if !l.suspect.IsZero() {
		next = min(next, l.suspect.Sub(now))
	}
	l.beat.Reset(min(next, t.Heartbeat))
	l.mu.Unlock()
	l.sweep(now)
}

// probe gives the carrier up unless something is received within timeout from now.
func (l *link) probe(timeout time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.carrier == nil {
		return
	}
	now := time.Now()
	l.suspect = now.Add(timeout)
	l.ping(now)
	l.beat.Reset(min(timeout, l.session.tuning.Heartbeat))
}

// wantAck makes sure that what was received is acknowledged soon.
func (l *link) wantAck() {
	if !l.ackArmed.Swap(true) {
		l.ackTimer.Reset(l.session.tuning.AckDelay)
	}
}

func (l *link) delayedAck() {
	l.ackArmed.Store(false)
	l.sendAck()
}

// sendAck acknowledges everything received. Without a carrier it is left to the next handshake.
func (l *link) sendAck() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.carrier == nil || l.ackSent == l.received {
		return
	}
	l.ackSent = l.received
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], l.received)
	l.control(frameAck, 0, b[:]...)
}
