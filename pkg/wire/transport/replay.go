package transport

import (
	"fmt"
	"slices"
	"sync"
)

// replay holds the outgoing bytes of a link that the other end has not acknowledged, so that a new conn can continue
// where the old one broke. Positions count bytes since the link began:
//
//	     acked            sent             end
//	-------+----------------+---------------+
//	 gone  | sent           | not sent yet  |
//
// Pooled chunks hold the bytes and return to the pool once they are acknowledged: an idle link holds nothing, or one
// small chunk. link.mu guards it.
type replay struct {
	chunks           []*chunk
	acked, sent, end uint64
	memory           int // bytes that chunks hold
}

// chunk holds the bytes [seq, seq+n) in buf[:n].
type chunk struct {
	buf  []byte
	n    int
	seq  uint64
	pins int  // conn writes that still read buf
	gone bool // acknowledged; the last release returns it to the pool
}

const (
	smallChunk = 2 << 10
	largeChunk = 64 << 10
)

var (
	smallChunks = sync.Pool{New: func() any { return &chunk{buf: make([]byte, smallChunk)} }}
	largeChunks = sync.Pool{New: func() any { return &chunk{buf: make([]byte, largeChunk)} }}
)

func (r *replay) held() int   { return int(r.end - r.acked) }
func (r *replay) unsent() int { return int(r.end - r.sent) }

// grow adds a chunk. A trickle on an idle link gets a small one, anything else a large one.
func (r *replay) grow(need int) *chunk {
	pool := &largeChunks
	if len(r.chunks) == 0 && need <= smallChunk/4 {
		pool = &smallChunks
	}
	c := pool.Get().(*chunk)
	c.n, c.seq, c.pins, c.gone = 0, r.end, 0, false
	r.chunks = append(r.chunks, c)
	r.memory += len(c.buf)
	return c
}

// append copies b to the end.
func (r *replay) append(b []byte) {
	for len(b) > 0 {
		var c *chunk
		if n := len(r.chunks); n > 0 && r.chunks[n-1].n < len(r.chunks[n-1].buf) {
			c = r.chunks[n-1]
		} else {
			c = r.grow(len(b))
		}
		n := copy(c.buf[c.n:], b)
		c.n += n
		r.end += uint64(n)
		b = b[n:]
	}
}

// take returns the next contiguous unsent bytes and counts them as sent. It pins the chunk: call release after the
// write.
func (r *replay) take() ([]byte, *chunk) {
	for i := len(r.chunks) - 1; i >= 0; i-- {
		c := r.chunks[i]
		if c.seq > r.sent {
			continue
		}
		b := c.buf[r.sent-c.seq : c.n]
		r.sent += uint64(len(b))
		c.pins++
		return b, c
	}
	return nil, nil
}

// release undoes take's pin.
func (r *replay) release(c *chunk) {
	c.pins--
	c.recycle()
}

func (c *chunk) recycle() {
	switch {
	case !c.gone || c.pins > 0:
	case len(c.buf) == smallChunk:
		smallChunks.Put(c)
	default:
		largeChunks.Put(c)
	}
}

// ack drops everything before to, which the other end has received.
func (r *replay) ack(to uint64) error {
	if to > r.sent {
		return fmt.Errorf("%w: %d bytes acknowledged, %d sent", ErrProtocol, to, r.sent)
	}
	if to <= r.acked {
		return nil // a newer count overtook this one, as after a replay
	}
	r.acked = to
	k := 0
	for k < len(r.chunks) && r.chunks[k].seq+uint64(r.chunks[k].n) <= to {
		r.memory -= len(r.chunks[k].buf)
		r.chunks[k].gone = true
		r.chunks[k].recycle()
		k++
	}
	r.chunks = slices.Delete(r.chunks, 0, k)
	return nil
}

// rewind prepares for a new conn whose other end has received everything before to.
func (r *replay) rewind(to uint64) error {
	if to < r.acked {
		return fmt.Errorf("%w: the other end requests acknowledged bytes %d to %d", ErrProtocol, to, r.acked)
	}
	if err := r.ack(to); err != nil {
		return err
	}
	r.sent = to
	return nil
}

// drop drops everything.
func (r *replay) drop() {
	for _, c := range r.chunks {
		c.gone = true
		c.recycle()
	}
	r.chunks, r.memory = nil, 0
	r.acked, r.sent = r.end, r.end
}
