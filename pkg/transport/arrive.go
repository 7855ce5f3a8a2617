package transport

import (
	"encoding/binary"
	"fmt"
)

// This file is what the other end does to a stream. The link's reader calls it, so nothing here waits.

// deliver takes a DATA frame: b is copied, or seg is kept.
func (s *Stream) deliver(b []byte, seg *segment) error {
	cost := len(b)
	if seg != nil {
		cost = seg.w
	}
	if s.datagrams {
		cost += datagramCost
		if seg != nil {
			cost -= 2 // its length is in seg
		}
	}
	s.mu.Lock()
	if s.readClosed {
		s.mu.Unlock()
		if seg != nil {
			seg.free()
		}
		if !s.datagrams {
			s.Reset() // as TCP answers data after close
		}
		return nil
	}
	defer s.mu.Unlock()
	if s.readEnded || cost > s.outstanding {
		return fmt.Errorf("%w: data beyond the window or after FIN", ErrProtocol)
	}
	s.outstanding -= cost
	switch {
	case seg != nil:
		s.queue.push(seg)
	case s.datagrams:
		s.queue.write(binary.BigEndian.AppendUint16(make([]byte, 0, 2), uint16(len(b))))
		s.queue.write(b)
	default:
		s.queue.write(b)
	}
	s.canRead.Broadcast()
	return nil
}

// onAnswer takes the other end's answer to our OPEN.
func (s *Stream) onAnswer(code Code, reason string) error {
	s.mu.Lock()
	if s.answered || !s.opened {
		s.mu.Unlock()
		return fmt.Errorf("%w: answer to nothing", ErrProtocol)
	}
	s.answered, s.answer = true, code.because(reason)
	s.canRead.Broadcast()
	s.mu.Unlock()
	if code != CodeOK {
		s.abort(s.answer)
	}
	return nil
}

// onFin takes the end of what the other end sends. Datagrams end in both directions at once.
func (s *Stream) onFin(code Code) {
	s.mu.Lock()
	s.readEnded, s.endCode = true, code
	s.canRead.Broadcast()
	s.mu.Unlock()
	if s.datagrams {
		err := code.Err()
		if err == nil {
			err = errWriteEnded
		}
		s.l.mu.Lock()
		s.stopWriting(err)
		s.l.mu.Unlock()
	}
	s.over(s.datagrams, true)
}

func (s *Stream) onWindow(more uint32) error {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	s.credit += int(more)
	if s.credit > 1<<30 {
		return fmt.Errorf("%w: window of %d bytes", ErrProtocol, s.credit)
	}
	s.canWrite.Signal()
	return nil
}

// stopWriting makes writes give err. Call with l.mu held.
func (s *Stream) stopWriting(err error) {
	if s.writeErr == nil {
		s.writeErr = err
	}
	s.canWrite.Broadcast()
}

// abort ends both halves with err, which came from the other end or the session.
func (s *Stream) abort(err error) {
	s.l.mu.Lock()
	s.stopWriting(err)
	s.l.mu.Unlock()
	s.mu.Lock()
	if s.readErr == nil && !s.readEnded {
		s.readErr = err
	}
	if !s.aborted && s.gone != nil {
		close(s.gone)
	}
	s.aborted = true
	s.canRead.Broadcast()
	s.mu.Unlock()
	s.over(true, true)
}

// over notes which halves have ended, and forgets the stream when both have.
func (s *Stream) over(sent, rcvd bool) {
	l := s.l
	l.streamsMu.Lock()
	s.sent, s.rcvd = s.sent || sent, s.rcvd || rcvd
	forget := s.sent && s.rcvd && l.streams[s.id] == s
	if forget {
		delete(l.streams, s.id)
		if !s.opened {
			l.incoming--
		}
	}
	l.streamsMu.Unlock()
	if forget {
		s.mu.Lock()
		s.l.session.unreserve(s.window - initialWindow)
		s.window = initialWindow
		s.mu.Unlock()
		l.session.streams.Add(-1)
		l.count.Add(-1)
	}
}
