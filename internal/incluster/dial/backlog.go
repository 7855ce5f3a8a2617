package dial

import (
	"encoding/binary"
	"slices"
	"sync"
	"time"
)

const (
	// backlogLimit bounds the bytes of datagrams that wait for a laptop's stream. Beyond backlogSlack, the backlog also
	// drops new datagrams while its first one has waited for backlogWait: a longer backlog would not make a slow path
	// faster.
	backlogLimit = 8 << 20
	backlogSlack = 128 << 10
	backlogWait  = 200 * time.Millisecond
)

// backlog holds the datagrams of a flow that wait for the laptop's stream. A socket's receive buffer holds only a few
// milliseconds of a fast flow, and the stream blocks for longer while other programs on the path are busy.
//
//	socket ─ receive ─ put ─┬─ TryWritePackets ───────────────▶ stream
//	                        └─ else: buffers ─ drain ─ WritePacket ▶     (drain runs only while datagrams wait)
type backlog struct {
	laptop  packets
	buffers *buffers
	drained sync.WaitGroup // drain has ended

	mu       sync.Mutex
	waiting  []waiting
	size     int // bytes
	draining bool
	err      error // of WritePacket
}

// waiting is a buffer of datagrams, each behind its length in two bytes.
type waiting struct {
	*buffer
	end   int
	since time.Time // when the first datagram arrived
}

const lengthLen = 2

// put writes the datagrams in p, in the form of datagrams, queues them or drops them. It returns the error with which
// drain failed to write an earlier datagram.
func (q *backlog) put(p []byte, size int) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err != nil {
		return q.err
	}
	if !q.draining {
		n, err := q.laptop.TryWritePackets(p, size)
		if err != nil {
			return err
		}
		if n*size >= len(p) && n > 0 {
			return nil
		}
		p = p[n*size:]
	}
	for one := range each(p, size) {
		q.add(one)
	}
	if !q.draining && len(q.waiting) > 0 {
		q.draining = true
		q.drained.Go(q.drain)
	}
	return nil
}

// add queues one datagram, or drops it. Call with mu held.
func (q *backlog) add(p []byte) {
	need, now := lengthLen+len(p), time.Now()
	if q.size+need > backlogLimit || q.size > backlogSlack && now.Sub(q.waiting[0].since) > backlogWait {
		return
	}
	if n := len(q.waiting); n == 0 || q.waiting[n-1].end+need > len(q.waiting[n-1].data) {
		b := q.buffers.take()
		if need > len(b.data) {
			q.buffers.give(b)
			return
		}
		q.waiting = append(q.waiting, waiting{buffer: b, since: now})
	}
	w := &q.waiting[len(q.waiting)-1]
	binary.BigEndian.PutUint16(w.data[w.end:], uint16(len(p)))
	w.end += lengthLen + copy(w.data[w.end+lengthLen:], p)
	q.size += need
}

// drain writes to the stream until nothing waits.
func (q *backlog) drain() {
	for {
		q.mu.Lock()
		if len(q.waiting) == 0 {
			q.draining = false
			q.mu.Unlock()
			return
		}
		w := q.waiting[0]
		q.waiting = slices.Delete(q.waiting, 0, 1)
		q.size -= w.end
		failed := q.err != nil
		q.mu.Unlock()
		if !failed {
			q.write(w.data[:w.end])
		}
		q.buffers.give(w.buffer)
	}
}

// write writes the datagrams of a buffer.
func (q *backlog) write(p []byte) {
	for len(p) > 0 {
		end := lengthLen + int(binary.BigEndian.Uint16(p))
		if err := q.laptop.WritePacket(p[lengthLen:end]); err != nil {
			q.mu.Lock()
			q.err = err
			q.mu.Unlock()
			return
		}
		p = p[end:]
	}
}
