package transport

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// Incoming is a stream that the other end wants to open. It must be answered once: Accept, AcceptPackets or
// Reject. It may be answered from any goroutine, at any time.
type Incoming struct {
	Request
	s        *Stream
	answered atomic.Bool
}

// Datagrams tells whether AcceptPackets is due rather than Accept.
func (in *Incoming) Datagrams() bool { return in.s.datagrams }

// Done is closed when the other end no longer waits: it gave up, or the session ended. A dial on its behalf can
// then be abandoned.
func (in *Incoming) Done() <-chan struct{} { return in.s.Gone() }

// Accept answers CodeOK and gives the stream. The caller must end it.
func (in *Incoming) Accept() (*Stream, error) {
	if in.s.datagrams {
		return nil, fmt.Errorf("accepting %s: it is a stream of datagrams", in.Request)
	}
	if err := in.reply(CodeOK, ""); err != nil {
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
		return nil, err
	}
	// An opener that has ended the stream already sent all it had, and waits for nothing.
	return &Packets{in.s}, nil
}

// Reject answers with c, which must not be CodeOK: the other end's Open gives c's error.
func (in *Incoming) Reject(c Code) error { return in.reject(c, "") }

// RejectError answers with CodeOf(err) and err's text, cut to 512 bytes.
func (in *Incoming) RejectError(err error) error { return in.reject(CodeOf(err), err.Error()) }

func (in *Incoming) reject(c Code, reason string) error {
	if c == CodeOK {
		c = CodeFailed
	}
	if err := in.reply(c, reason); err != nil {
		return err
	}
	s := in.s
	s.l.mu.Lock()
	s.stopWriting(errClosed)
	s.l.mu.Unlock()
	s.stopReading(errClosed)
	s.over(true, true)
	return nil
}

func (in *Incoming) reply(c Code, reason string) error {
	if in.answered.Swap(true) {
		return fmt.Errorf("answering %s: it was answered before", in.Request)
	}
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

// stream finds a live stream.
func (l *link) stream(id uint32) *Stream {
	l.streamsMu.Lock()
	defer l.streamsMu.Unlock()
	return l.streams[id]
}

func (l *link) tracks(s *Stream) bool { return l.stream(s.id) == s }

// newOutgoing registers a stream that we open.
func (l *link) newOutgoing(r Request, datagrams bool) (*Stream, error) {
	l.streamsMu.Lock()
	defer l.streamsMu.Unlock()
	if l.streams == nil {
		return nil, l.session.Err()
	}
	// Numbers come round after two thousand million streams; those still in use are passed over.
	for l.nextID == 0 || l.streams[l.nextID] != nil {
		l.nextID += 2
	}
	s := newStream(l, l.nextID, r, datagrams, true)
	l.nextID += 2
	l.streams[s.id] = s
	l.count.Add(1)
	l.session.streams.Add(1)
	return s, nil
}

// onOpen takes the other end's OPEN.
func (l *link) onOpen(id uint32, payload []byte) error {
	r, datagrams, err := parseRequest(payload)
	if err != nil {
		return err
	}
	s := newStream(l, id, r, datagrams, false)
	l.streamsMu.Lock()
	switch {
	case l.streams == nil:
		l.streamsMu.Unlock()
		return l.session.Err()
	case id%2 == l.nextID%2 || l.streams[id] != nil:
		l.streamsMu.Unlock()
		return fmt.Errorf("%w: stream %d opened twice, or with our number", ErrProtocol, id)
	case l.incoming >= l.session.tuning.MaxStreams:
		l.streamsMu.Unlock()
		l.mu.Lock()
		l.control(frameReset, id)
		l.mu.Unlock()
		return nil
	}
	l.incoming++
	l.streams[id] = s
	l.streamsMu.Unlock()
	l.count.Add(1)
	l.session.streams.Add(1)
	in := &Incoming{Request: r, s: s}
	if r.Proto == ProtoMeter && !datagrams {
		l.session.wg.Go(func() { meter(in) })
		return nil
	}
	l.session.push(in)
	return nil
}

// sweep resets streams that were closed here a while ago and whose other end goes on without sending anything.
func (l *link) sweep(now time.Time) {
	var old []*Stream
	l.streamsMu.Lock()
	for _, s := range l.streams {
		if !s.closedAt.IsZero() && now.Sub(s.closedAt) >= l.session.tuning.Linger {
			old = append(old, s)
		}
	}
	l.streamsMu.Unlock()
	for _, s := range old {
		s.Reset()
	}
}
