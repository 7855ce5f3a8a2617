package packetlink

import (
	"encoding/binary"
	"sync"
	"time"

	"kubevpn/pkg/datapath/packet"
)

const (
	prefixLen = 4
	// minFrame and maxFrame bound the length before a frame.
	minFrame = packet.VirtioLen + 1
	maxFrame = packet.VirtioLen + 65535
)

// Frame is one packet behind its virtio-net header, in a pooled buffer with room for the length before it. It has one
// owner at a time, which uses it from one goroutine and either releases it or passes it on.
type Frame struct {
	// buf holds frames as they go over a packet stream, each behind its length, up to end. Only a Frame in a sendQueue
	// holds more than one. Behind the longest frame is room for the length of the next, which Receive reads with it.
	buf [prefixLen + maxFrame + prefixLen]byte
	end int

	header    packet.Header // of the packet, if inspected
	inspected bool

	// Set while the Frame is in a sendQueue.
	packets int
	queued  time.Duration // when the first of them was queued
	next    *Frame
}

var frames = sync.Pool{New: func() any { return new(Frame) }}

// NewFrame returns a frame without a packet from the pool.
func NewFrame() *Frame {
	f := frames.Get().(*Frame)
	f.end, f.inspected, f.packets, f.next = prefixLen, false, 0, nil
	return f
}

// Release returns the frame to the pool. Do not use it afterwards.
func (f *Frame) Release() { frames.Put(f) }

// Buffer returns room for a virtio-net header and a packet of 65535 bytes. Fill it, then call SetLen. Its content is
// undefined before.
func (f *Frame) Buffer() []byte {
	return f.buf[prefixLen : prefixLen+maxFrame : prefixLen+maxFrame]
}

// SetLen makes the first n bytes of Buffer, a virtio-net header and a packet, the frame's new content.
func (f *Frame) SetLen(n int) {
	binary.BigEndian.PutUint32(f.buf[:], uint32(n))
	f.end = prefixLen + n
	f.inspected = false
}

// Bytes returns the virtio-net header and the packet.
func (f *Frame) Bytes() []byte { return f.buf[prefixLen:f.end:f.end] }

// Packet returns the packet without its virtio-net header.
func (f *Frame) Packet() []byte { return f.buf[prefixLen+packet.VirtioLen : f.end : f.end] }

// Header returns the packet's header. For a frame of [Receive], and after the first call, it is known. Otherwise the
// packet comes from this machine, and Header first rewrites the virtio-net header so that it says exactly what the
// packet's headers say, as [Check] at the other end requires. The errors are those of Check.
func (f *Frame) Header() (packet.Header, error) {
	if !f.inspected {
		if err := f.inspect(); err != nil {
			return packet.Header{}, err
		}
	}
	return f.header, nil
}

// inspect normalizes what Linux produces and Check does not accept from another machine:
//   - hdr_len of a forwarded super-packet is the length of its first buffer, payload included
//   - a super-packet whose checksum a network card has verified has no partial checksum
//   - checksums may be missing in places that only the kernel knows
//   - there may be padding behind the packet
func (f *Frame) inspect() error {
	if f.end < prefixLen+minFrame {
		return packet.ErrTruncated
	}
	b := f.Bytes()
	v, err := packet.ParseVirtio(b)
	if err != nil {
		return err
	}
	p := b[packet.VirtioLen:]
	h, err := packet.Parse(p)
	if err != nil {
		return err
	}
	p = p[:h.Len]

	start := uint16(h.HeaderLen)
	offset, known := packet.ChecksumOffset(h.Proto)
	headers, whole := packet.TransportLen(h.Proto, p[h.HeaderLen:])
	partial := v.Flags&packet.VirtioNeedsChecksum != 0
	exact := known && whole && !h.IsFragment()
	switch {
	case v.GSOType != packet.GSONone:
		if !exact || h.Proto != packet.ProtoTCP {
			return packet.ErrVirtio
		}
		if !partial {
			sum := packet.PseudoHeader(packet.ProtoTCP, h.Src, h.Dst, len(p)-h.HeaderLen)
			binary.BigEndian.PutUint16(p[h.HeaderLen+offset:], sum)
		}
		v.Flags = packet.VirtioNeedsChecksum
		v.HeaderLen, v.ChecksumStart, v.ChecksumOffset = start+uint16(headers), start, uint16(offset)
		if len(p)-h.HeaderLen-headers <= int(v.GSOSize) { // one segment is no super-packet: Linux may drop it
			v.GSOType, v.GSOSize, v.HeaderLen = packet.GSONone, 0, 0
		}
	case partial && exact && v.ChecksumStart == start && int(v.ChecksumOffset) == offset:
		v = packet.Virtio{Flags: packet.VirtioNeedsChecksum, ChecksumStart: v.ChecksumStart,
			ChecksumOffset: v.ChecksumOffset}
	case partial:
		if int(v.ChecksumStart) < h.HeaderLen || int(v.ChecksumStart)+int(v.ChecksumOffset)+2 > len(p) {
			return packet.ErrVirtio
		}
		packet.CompleteChecksum(&v, p)
		v = packet.Virtio{}
	default:
		v = packet.Virtio{Flags: v.Flags & packet.VirtioDataValid}
	}
	v.Put(b)
	if err := check(&v, &h, len(p)); err != nil {
		return err
	}
	f.SetLen(packet.VirtioLen + len(p))
	f.header, f.inspected = h, true
	return nil
}

// finish completes the checksum and splits the super-packet, for an end that cannot do so. It returns the resulting
// packets as a list of frames, and owns f. f was inspected.
func (f *Frame) finish() (list, error) {
	b := f.Bytes()
	v, err := packet.ParseVirtio(b)
	if err != nil {
		return list{}, err
	}
	p := b[packet.VirtioLen:]
	if v.GSOType != packet.GSONone {
		return f.split(&v)
	}
	if v.Flags&packet.VirtioNeedsChecksum != 0 {
		packet.CompleteChecksum(&v, p)
	}
	clear(b[:packet.VirtioLen])
	return listOf(f, 1), nil
}

func (f *Frame) split(v *packet.Virtio) (list, error) {
	segments, err := packet.Split(v, &f.header, f.Packet())
	if err != nil {
		return list{}, err
	}
	var l list
	var g *Frame
	for n := segments.Len(); n > 0; n = segments.Len() {
		size := prefixLen + packet.VirtioLen + n
		if g == nil || g.end+size > len(g.buf) {
			g = NewFrame()
			g.end = 0
			l.push(g)
		}
		b := g.buf[g.end : g.end+size]
		binary.BigEndian.PutUint32(b, uint32(packet.VirtioLen+n))
		clear(b[prefixLen : prefixLen+packet.VirtioLen])
		segments.Put(b[prefixLen+packet.VirtioLen:])
		g.end += size
		g.packets++
		l.size += size
	}
	f.Release()
	return l, nil
}

// list is a queue of Frames, each of which may hold several frames.
type list struct {
	head, tail *Frame
	size       int // in bytes
}

// listOf returns a list of f alone, which holds that many packets.
func listOf(f *Frame, packets int) list {
	f.packets = packets
	return list{head: f, tail: f, size: f.end}
}

// push appends f. The caller adds its size.
func (l *list) push(f *Frame) {
	if l.tail == nil {
		l.head = f
	} else {
		l.tail.next = f
	}
	l.tail = f
}

// pop removes and returns the first Frame.
func (l *list) pop() *Frame {
	f := l.head
	l.head, f.next = f.next, nil
	if l.head == nil {
		l.tail = nil
	}
	l.size -= f.end
	return f
}

// packets counts the packets in all frames.
func (l *list) packets() int {
	n := 0
	for f := l.head; f != nil; f = f.next {
		n += f.packets
	}
	return n
}

// release releases all frames.
func (l *list) release() {
	for l.head != nil {
		l.pop().Release()
	}
}

// largeFrame is the size from which a frame is not copied behind others: the copy would cost more than a Write.
const largeFrame = 16 << 10

// join appends the frames of m. It copies those that fit into the last buffer.
func (l *list) join(m list, now time.Duration) {
	for m.head != nil {
		f := m.pop()
		l.size += f.end
		if t := l.tail; t != nil && f.end < largeFrame && t.end+f.end <= len(t.buf) {
			t.end += copy(t.buf[t.end:], f.buf[:f.end])
			t.packets += f.packets
			f.Release()
			continue
		}
		f.queued = now
		l.push(f)
	}
}
