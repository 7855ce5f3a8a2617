package l3

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
)

// ErrFrame ends a lane: its bytes are no frames, and where the next one begins cannot be known.
var ErrFrame = errors.New("malformed frame on a lane")

// waiter is a lane that can say when there is something to read, so that no buffer is held until then.
type waiter interface{ Wait() error }

// Receive parses frames from a lane until it ends, and hands each to deliver, who owns it. number is the lane's, and barriers
// those of its Sender. Packets or headers that [Check] does not let pass are dropped and counted. The error is nil when the
// lane ended behind a frame, [ErrFrame], io.ErrUnexpectedEOF, or the lane's own.
func Receive(lane io.Reader, number int, barriers *Barriers, deliver func(*Frame), malformed *atomic.Uint64) error {
	r := receiver{lane: lane, number: number, barriers: barriers, deliver: deliver, malformed: malformed}
	r.waiter, _ = lane.(waiter)
	if number == 0 {
		barriers.begin()
		defer barriers.end()
	}
	for {
		f, err := r.read()
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
	lane      io.Reader
	waiter    waiter // nil when the lane is none
	number    int
	barriers  *Barriers
	deliver   func(*Frame)
	malformed *atomic.Uint64
	// prefix is as much of the next frame's length as was read along with the last one: have bytes.
	prefix [prefixLen]byte
	have   int
}

// frameLen gives the length of the frame whose bytes b begins with.
func frameLen(b []byte) (int, error) {
	n := binary.BigEndian.Uint32(b)
	if n < minFrame || n > maxFrame {
		return 0, fmt.Errorf("%w: length %d", ErrFrame, n)
	}
	return int(n), nil
}

// read reads once from the lane, and until the end of the last frame of which that gave the beginning. It returns a
// buffer that it has no use for, or nil.
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

	n, err := r.lane.Read(f.buf[r.have:])
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
			// The frame stays where it is, as it is more than what is behind it.
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

// rest reads what is missing of a frame of n bytes, have bytes of which, with its length, are in f, and up to as many
// bytes behind it as the length of the next one has. It takes f.
func (r *receiver) rest(f *Frame, have, n int) error {
	size := prefixLen + n
	read, err := io.ReadAtLeast(r.lane, f.buf[have:size+prefixLen], size-have)
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
	r.deliver(f)
}

// barrier does what a barrier asks for, if b is one. That lane 0 waits for itself can be when it stands in for another.
func (r *receiver) barrier(b []byte) bool {
	kind, number, ok := parseBarrier(b)
	switch {
	case !ok:
		return false
	case r.number == 0 && kind == barrierPassed:
		r.barriers.pass(number)
	case r.number != 0 && kind == barrierAwaited:
		r.barriers.await(number)
	}
	return true
}

// ended is the lane's error between two frames.
func (r *receiver) ended(err error) error {
	if err == io.EOF && r.have > 0 {
		return io.ErrUnexpectedEOF
	}
	return err
}
