package transport

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"time"
)

// readBuffer is the size of a link's buffer for small frames. Larger payloads bypass it.
const readBuffer = 4 << 10

// smallPayload is the longest payload that shares a segment with others. Each longer one has its own.
const smallPayload = 1 << 10

// receiver parses the frames of a link's other end. It runs in one goroutine and never waits for a stream's user,
// because the stream's window bounds the data that it may receive.
type receiver struct {
	l     *link
	r     *bufio.Reader
	since int       // bytes since acknowledge last called sendAck
	acked time.Time // when acknowledge last called sendAck
	small [1 + maxReason]byte
}

func newReceiver(l *link) *receiver { return &receiver{l: l, r: bufio.NewReaderSize(l, readBuffer)} }

// run returns when the session has ended or the other end has violated the protocol.
func (r *receiver) run() error {
	var b [headerLen]byte
	for {
		if _, err := io.ReadFull(r.r, b[:]); err != nil {
			return err
		}
		h, err := parseHeader(&b)
		if err != nil {
			return err
		}
		if err := r.frame(h); err != nil {
			return err
		}
		r.acknowledge(h)
	}
}

// acknowledge acknowledges what was received, at once or soon. It does not acknowledge ACKs, pings and pongs, or two
// idle ends would never be silent.
func (r *receiver) acknowledge(h header) {
	r.since += headerLen + h.length
	switch {
	case r.since >= ackEvery, r.since >= ackSome && time.Since(r.acked) >= ackPause:
		r.since, r.acked = 0, time.Now()
		r.l.load.incoming.Store(int64(r.acked.Sub(r.l.session.since)))
		r.l.sendAck()
	case h.kind != frameAck && h.kind != framePing && h.kind != framePong:
		r.l.wantAck()
	}
}

func (r *receiver) frame(h header) error {
	l := r.l
	switch h.kind {
	case frameData:
		return r.data(h)
	case frameStripe:
		return r.stripe(h)
	}
	l.account()
	p := r.small[:h.length]
	if _, err := io.ReadFull(r.r, p); err != nil {
		return err
	}
	switch h.kind {
	case frameOpen:
		return l.onOpen(h.stream, p)
	case frameAck:
		return l.onAck(binary.BigEndian.Uint64(p))
	case framePing:
		return l.onPing(binary.BigEndian.Uint64(p), binary.BigEndian.Uint64(p[8:]))
	case framePong:
		return l.onPong(binary.BigEndian.Uint64(p), binary.BigEndian.Uint64(p[8:]))
	case frameClose:
		l.sendAck() // the other end waits for it
		l.flushed(time.Now().Add(farewellTime))
		return fmt.Errorf("by the other end: %w", ErrSessionClosed)
	}
	s := l.stream(h.stream)
	if s == nil {
		return nil // the stream ended here, and the other end does not know yet
	}
	switch h.kind {
	case frameAnswer:
		return s.onAnswer(Code(p[0]), string(p[1:]))
	case frameFin:
		switch len(p) {
		case 0:
			s.onFin(CodeOK)
		case 1:
			s.onFin(Code(p[0]))
		case 8:
			return s.onStripedFin(binary.BigEndian.Uint64(p))
		default:
			return fmt.Errorf("%w: FIN of %d bytes", ErrProtocol, len(p))
		}
	case frameReset:
		s.abort(errPeerReset)
	case frameWindow:
		return s.onWindow(binary.BigEndian.Uint32(p))
	}
	return nil
}

// data delivers a DATA frame.
func (r *receiver) data(h header) error {
	s := r.l.stream(h.stream)
	if s != nil && s.datagrams && h.length > MaxPacket {
		return fmt.Errorf("%w: datagram of %d bytes", ErrProtocol, h.length)
	}
	if s == nil {
		_, err := r.r.Discard(h.length)
		return err
	}
	if h.length <= smallPayload {
		b, err := r.r.Peek(h.length)
		if err != nil {
			return err
		}
		if err := s.deliver(r.l, b, nil, nil); err != nil {
			return err
		}
		_, err = r.r.Discard(h.length)
		return err
	}
	return r.segment(s, h.length, nil)
}

// segment delivers the next n bytes in a segment of their own. at is as for deliver.
func (r *receiver) segment(s *Stream, n int, at *uint64) error {
	prefix := 0
	if s.datagrams {
		prefix = 2
	}
	seg := newSegment(prefix + n)
	seg.w = prefix + n
	if s.datagrams {
		binary.BigEndian.PutUint16(seg.buf, uint16(n))
	}
	if _, err := io.ReadFull(r.r, seg.buf[prefix:seg.w]); err != nil {
		seg.free()
		return err
	}
	return s.deliver(r.l, nil, seg, at)
}

// stripe delivers a STRIPE frame.
func (r *receiver) stripe(h header) error {
	p := r.small[:stripeLen]
	if _, err := io.ReadFull(r.r, p); err != nil {
		return err
	}
	s, at, n := r.l.session.stripedStream(int(p[0]), h.stream), binary.BigEndian.Uint64(p[1:]), h.length-stripeLen
	if s == nil {
		_, err := r.r.Discard(n)
		return err
	}
	r.l.ran(time.Now())
	if s.datagrams {
		return fmt.Errorf("%w: datagrams are striped", ErrProtocol)
	}
	return r.segment(s, n, &at)
}
