package transport

import (
	"encoding/binary"
	"math/bits"
	"sync"
)

// queue holds the bytes that a stream has received and its user has not read, as a list of pooled segments. It is empty
// on an idle stream. Stream.mu guards it.
type queue struct {
	head, tail *segment
	size       int // bytes to read
	held       int // bytes of memory
}

// segment holds bytes in buf[r:w].
type segment struct {
	next *segment
	buf  []byte
	r, w int
}

const (
	minSegmentBits = 11 // 2 KiB
	maxSegmentBits = 16 // 64 KiB
)

// segments are pools of segments by size: 2, 4 ... 64 KiB.
var segments [maxSegmentBits - minSegmentBits + 1]sync.Pool

// newSegment returns a segment for at least n bytes; n is at most 64 KiB.
func newSegment(n int) *segment {
	class := max(bits.Len(uint(n-1)), minSegmentBits) - minSegmentBits
	if s, ok := segments[class].Get().(*segment); ok {
		return s
	}
	return &segment{buf: make([]byte, 1<<(class+minSegmentBits))}
}

// free returns s to its pool. It does nothing if s is nil.
func (s *segment) free() {
	if s == nil {
		return
	}
	s.next, s.r, s.w = nil, 0, 0
	segments[bits.Len(uint(len(s.buf)-1))-minSegmentBits].Put(s)
}

// push takes ownership of s.
func (q *queue) push(s *segment) {
	if q.tail == nil {
		q.head = s
	} else {
		q.tail.next = s
	}
	q.tail = s
	q.size += s.w - s.r
	q.held += len(s.buf)
}

// write copies b to the end. Small writes share the last segment.
func (q *queue) write(b []byte) {
	if t := q.tail; t != nil && len(t.buf)-t.w >= len(b) {
		t.w += copy(t.buf[t.w:], b)
		q.size += len(b)
		return
	}
	s := newSegment(max(len(b), 1))
	s.w = copy(s.buf, b)
	q.push(s)
}

// grows reports whether held grows with n bytes that are written, or with seg.
func (q *queue) grows(n int, seg *segment) bool {
	return seg != nil || q.tail == nil || len(q.tail.buf)-q.tail.w < n
}

// pop removes and returns the first segment, which the caller must free.
func (q *queue) pop() *segment {
	s := q.head
	q.head, s.next = s.next, nil
	if q.head == nil {
		q.tail = nil
	}
	q.size -= s.w - s.r
	q.held -= len(s.buf)
	return s
}

// read moves up to len(b) bytes out.
func (q *queue) read(b []byte) int {
	total := 0
	for total < len(b) && q.head != nil {
		n := copy(b[total:], q.head.buf[q.head.r:q.head.w])
		total += n
		q.skipHead(n)
	}
	return total
}

// datagrams moves whole datagrams out, each behind its length, as long as there are any and they fit, and returns their
// number. The first one need not fit: then short is true, and the rest of it is dropped.
func (q *queue) datagrams(b []byte, sizes []int) (n int, short bool) {
	for n < len(sizes) && q.size > 0 {
		// write and push keep the two bytes of the length together.
		length := int(binary.BigEndian.Uint16(q.head.buf[q.head.r:]))
		if length > len(b) && n > 0 {
			break
		}
		q.skip(2)
		sizes[n] = q.read(b[:min(len(b), length)])
		if sizes[n] < length {
			q.skip(length - sizes[n])
			return 1, true
		}
		b = b[length:]
		n++
	}
	return n, false
}

// skip drops n bytes.
func (q *queue) skip(n int) {
	for n > 0 && q.head != nil {
		k := min(n, q.head.w-q.head.r)
		n -= k
		q.skipHead(k)
	}
}

func (q *queue) skipHead(n int) {
	q.head.r += n
	q.size -= n
	if q.head.r == q.head.w {
		q.pop().free()
	}
}

// drop frees everything.
func (q *queue) drop() {
	for q.head != nil {
		q.pop().free()
	}
}
