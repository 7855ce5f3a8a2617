package packetlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
)

// ErrFrame ends a packet stream whose bytes are not frames: the start of the next frame is unknown.
var ErrFrame = errors.New("malformed frame on a packet stream")

// waiter is a packet stream that can wait for data without a buffer, like transport.Stream.
type waiter interface{ Wait() error }

// A Deliverer takes the frames that Receive has parsed.
type Deliverer interface {
	// Deliver takes a frame, which it owns then. It may keep it until Flush.
	Deliver(*Frame)
	// Receive calls Flush after frames, before it waits for the next one.
	Flush()
}

// DeliverFunc is a Deliverer that keeps no frame.
type DeliverFunc func(*Frame)

// Deliver calls the function.
func (d DeliverFunc) Deliver(f *Frame) { d(f) }

// Flush does nothing.
func (d DeliverFunc) Flush() {}

// Receive parses frames from a packet stream until it ends, and passes each to the Deliverer. number is the stream's
// number. All streams of one Sender share barriers. Receive drops and counts packets and headers that [Check] rejects.
// It returns nil if the stream ended behind a frame, and otherwise [ErrFrame], io.ErrUnexpectedEOF or the stream's
// error.
func Receive(stream io.Reader, number int, barriers *Barriers, to Deliverer, malformed *atomic.Uint64) error {
	r := receiver{stream: stream, number: number, barriers: barriers, to: to, malformed: malformed}
	r.waiter, _ = stream.(waiter)
	if number == 0 {
		barriers.begin()
		defer barriers.end()
	}
	for {
		f, err := r.read()
		to.Flush()
		if f != nil {
			f.Release()
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

type receiver struct {
	stream    io.Reader
	waiter    waiter // nil if the stream is not a waiter
	number    int
	barriers  *Barriers
	to        Deliverer
	malformed *atomic.Uint64
	// prefix holds the bytes of the next frame's length that were read with the last frame: have bytes.
	prefix [prefixLen]byte
	have   int
}

// frameLen returns the length of the frame at the start of b.
func frameLen(b []byte) (int, error) {
	n := binary.BigEndian.Uint32(b)
	if n < minFrame || n > maxFrame {
		return 0, fmt.Errorf("%w: length %d", ErrFrame, n)
	}
	return int(n), nil
}

// read reads once from the stream, and then the rest of the last frame that this Read has begun. It returns a buffer
// that it did not use, or nil.
//
//	known to be large:  │ length │ virtio-net header, packet        │ length of the next │
//	                    │ prefix │ read into its Frame ────────────────────────────────▶ │
//
//	else:               │ frame │ frame │ beginning of a │ rest │ length of the next │
//	                    │ one Read, up to 64 KiB         │ read into its Frame ─────▶ │
func (r *receiver) read() (*Frame, error) {
	if r.waiter != nil {
		if err := r.waiter.Wait(); err != nil {
			return nil, r.ended(err)
		}
	}
	f := NewFrame()
	copy(f.buf[:], r.prefix[:r.have])
	if r.have == prefixLen {
		n, err := frameLen(r.prefix[:])
		if err != nil {
			return f, err
		}
		if n >= largeFrame {
			return nil, r.rest(f, prefixLen, n)
		}
	}

	n, err := r.stream.Read(f.buf[r.have:])
	if n == 0 {
		return f, r.ended(err)
	}
	// An error that came with bytes comes again without them.
	at, end := 0, r.have+n
	r.have = 0
	for end-at >= prefixLen {
		n, err := frameLen(f.buf[at:])
		if err != nil {
			return f, err
		}
		size := prefixLen + n
		behind := end - at - size
		switch {
		case behind < 0 && at == 0:
			return nil, r.rest(f, end, n)
		case behind < 0:
			g := NewFrame()
			return f, r.rest(g, copy(g.buf[:], f.buf[at:end]), n)
		case behind == 0 && at == 0:
			r.done(f, n)
			return nil, nil
		case behind < size && at == 0:
			// The frame stays in place, because the bytes behind it are fewer.
			g := NewFrame()
			end = copy(g.buf[:], f.buf[size:end])
			r.done(f, n)
			f = g
		default:
			g := NewFrame()
			copy(g.buf[:], f.buf[at:at+size])
			r.done(g, n)
			at += size
		}
	}
	r.have = copy(r.prefix[:], f.buf[at:end])
	return f, nil
}

// rest reads the rest of a frame of n bytes, of which f has the first have bytes, including the length, and up to
// prefixLen bytes behind it. It owns f.
func (r *receiver) rest(f *Frame, have, n int) error {
	r.to.Flush() // the rest may take a while
	size := prefixLen + n
	read, err := io.ReadAtLeast(r.stream, f.buf[have:size+prefixLen], size-have)
	if err != nil {
		f.Release()
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	r.have = copy(r.prefix[:], f.buf[size:have+read])
	r.done(f, n)
	return nil
}

// done delivers the frame of n bytes in f.
func (r *receiver) done(f *Frame, n int) {
	f.SetLen(n)
	h, err := Check(f.Bytes())
	if err != nil {
		if !r.barrier(f.Bytes()) {
			r.malformed.Add(1)
		}
		f.Release()
		return
	}
	f.header, f.inspected = h, true
	r.to.Deliver(f)
}

// barrier handles b if it is a barrier, and reports whether it is. Stream 0 ignores barriers to await: it gets them
// when it is the substitute for another stream.
func (r *receiver) barrier(b []byte) bool {
	kind, number, ok := parseBarrier(b)
	switch {
	case !ok:
		return false
	case r.number == 0 && kind == barrierPassed:
		r.barriers.pass(number)
	case r.number != 0 && kind == barrierAwaited:
		r.to.Flush()
		r.barriers.await(number)
	}
	return true
}

// ended maps the stream's error between two frames.
func (r *receiver) ended(err error) error {
	if err == io.EOF && r.have > 0 {
		return io.ErrUnexpectedEOF
	}
	return err
}
