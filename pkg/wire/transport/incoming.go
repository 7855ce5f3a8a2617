package transport

import (
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"
)

// Incoming is a stream that the other end wants to open. Answer it once, from any goroutine and at any time: with
// Accept, AcceptPackets or Reject.
type Incoming struct {
	Request
	s        *Stream
	answered atomic.Bool
}

// Datagrams reports whether the stream needs AcceptPackets instead of Accept.
func (in *Incoming) Datagrams() bool { return in.s.datagrams }

// Done returns a channel that is closed when the other end has given up or the session has ended. The caller can then
// abandon a dial on its behalf.
func (in *Incoming) Done() <-chan struct{} { return in.s.Gone() }

// Accept answers CodeOK and returns the stream. The caller must close it.
func (in *Incoming) Accept() (*Stream, error) {
	if in.s.datagrams {
		return nil, fmt.Errorf("accepting %s: it is a stream of datagrams", in.Request)
	}
	if err := in.reply(CodeOK, ""); err != nil {
		in.s.finish()
		return nil, err
	}
	return in.s, nil
}

// AcceptPackets is Accept for datagrams. The caller must close it.
func (in *Incoming) AcceptPackets() (*Packets, error) {
	if !in.s.datagrams {
		return nil, fmt.Errorf("accepting %s: it is not a stream of datagrams", in.Request)
	}
	if err := in.reply(CodeOK, ""); err != nil && !errors.Is(err, errWriteEnded) {
		in.s.finish()
		return nil, err
	}
	// An opener that has ended the stream needs no answer, and its datagrams can still be read.
	return &Packets{in.s}, nil
}

// Reject answers with c, which must not be CodeOK: the other end's Open returns c's error.
func (in *Incoming) Reject(c Code) error { return in.reject(c, "") }

// RejectError answers with CodeOf(err) and err's text, cut to 512 bytes.
func (in *Incoming) RejectError(err error) error { return in.reject(CodeOf(err), err.Error()) }

func (in *Incoming) reject(c Code, reason string) error {
	if c == CodeOK {
		c = CodeFailed
	}
	s := in.s
	if err := in.reply(c, reason); err != nil {
		s.finish()
		return err
	}
	s.l.mu.Lock()
	s.stopWriting(errClosed)
	s.l.mu.Unlock()
	return s.discard(errClosed)
}

func (in *Incoming) reply(c Code, reason string) error {
	if in.answered.Swap(true) {
		return fmt.Errorf("answering %s: it was answered before", in.Request)
	}
	in.s.mu.Lock()
	in.s.answered = c == CodeOK
	in.s.mu.Unlock()
	l := in.s.l
	l.mu.Lock()
	defer l.mu.Unlock()
	if in.s.writeErr != nil {
		return fmt.Errorf("answering %s: %w", in.Request, in.s.writeErr)
	}
	payload := append(make([]byte, 0, 64), byte(c))
	l.control(frameAnswer, in.s.id, append(payload, reason[:min(len(reason), maxReason)]...)...)
	return nil
}

// stream returns an open stream by its number, or nil.
func (l *link) stream(id uint32) *Stream {
	l.streams.mu.Lock()
	defer l.streams.mu.Unlock()
	return l.streams.byID[id]
}

// newOutgoing registers a stream that this end opens.
func (l *link) newOutgoing(r Request, datagrams bool) (*Stream, error) {
	l.streams.mu.Lock()
	defer l.streams.mu.Unlock()
	if l.streams.byID == nil {
		return nil, l.session.Err()
	}
	// Numbers wrap after two thousand million streams; skip those in use.
	for l.streams.nextID == 0 || l.streams.byID[l.streams.nextID] != nil {
		l.streams.nextID += 2
	}
	s := newStream(l, l.streams.nextID, r, datagrams, true)
	l.streams.nextID += 2
	l.streams.byID[s.id] = s
	l.load.streams.Add(1)
	l.session.streams.Add(1)
	return s, nil
}

// onOpen handles the other end's OPEN.
func (l *link) onOpen(id uint32, payload []byte) error {
	r, datagrams, err := parseRequest(payload)
	if err != nil {
		return err
	}
	l.streams.mu.Lock()
	switch {
	case l.streams.byID == nil:
		l.streams.mu.Unlock()
		return l.session.Err()
	case id%2 == l.streams.nextID%2 || l.streams.byID[id] != nil:
		l.streams.mu.Unlock()
		return fmt.Errorf("%w: stream %d opened twice, or with our number", ErrProtocol, id)
	case l.session.bytes.tight() || !l.session.places.take(1):
		l.streams.mu.Unlock()
		l.session.overBudget("stream refused: this session has too many streams or too much unread data", r)
		l.mu.Lock()
		l.control(frameReset, id)
		l.mu.Unlock()
		return nil
	}
	s := newStream(l, id, r, datagrams, false)
	s.placed = true
	l.streams.byID[id] = s
	l.streams.mu.Unlock()
	l.load.streams.Add(1)
	l.session.streams.Add(1)
	in := &Incoming{Request: r, s: s}
	if r.Proto == ProtoMeter && !datagrams {
		l.session.wg.Go(func() { meter(in) })
		return nil
	}
	l.session.push(in)
	return nil
}

// meter sends back the first 256 KiB: as much as laptops before kubevpn ranked its transports send to measure them.
func meter(in *Incoming) {
	st, err := in.Accept()
	if err != nil {
		return // the session has ended, or the opener gave up
	}
	defer st.Reset()
	if _, err := io.CopyN(st, st, 256<<10); err != nil {
		return
	}
	st.CloseWrite()
	io.Copy(io.Discard, st) // until the other end has read it, and resets
}

// sweep resets streams that were closed here Tuning.Linger ago and whose other end sent no FIN.
func (l *link) sweep(now time.Time) {
	var old []*Stream
	l.streams.mu.Lock()
	for _, s := range l.streams.byID {
		if !s.closedAt.IsZero() && now.Sub(s.closedAt) >= l.session.tuning.Linger {
			old = append(old, s)
		}
	}
	l.streams.mu.Unlock()
	for _, s := range old {
		s.Reset()
	}
}
