package transport

import (
	"encoding/binary"
	"fmt"
)

// The link's reader calls the functions of this file for frames of the other end, so none of them blocks.

// deliver handles a DATA or STRIPE frame that link l has received: it copies b, or keeps seg. at is the offset of a
// STRIPE frame, which always has a seg, and nil for DATA.
func (s *Stream) deliver(l *link, b []byte, seg *segment, at *uint64) error {
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
		seg.free()
		if !s.datagrams {
			s.Reset() // TCP also answers data after close with a reset
		}
		return nil
	}
	if s.readEnded || cost > s.outstanding || !s.datagrams && !s.opened && !s.answered {
		s.mu.Unlock()
		return fmt.Errorf("%w: data beyond the window, after FIN or before ANSWER", ErrProtocol)
	}
	if l.unread.full {
		l.account() // much may have been read since
	}
	if l.unread.full && s.queue.grows(len(b)+2, seg) {
		s.mu.Unlock()
		seg.free()
		s.l.session.overBudget("stream reset: too much data of this session is unread", s.request)
		s.Reset()
		return nil
	}
	held := s.queue.held + s.early.held
	s.outstanding -= cost
	if at != nil {
		s.early.add(*at, seg)
	} else {
		s.enqueue(b, seg)
		s.arrived += uint64(cost)
	}
	complete, err := s.join()
	l.unread.kept += s.queue.held + s.early.held - held
	if l.unread.kept >= accountEvery {
		l.account()
	}
	s.canRead.Broadcast()
	s.mu.Unlock()
	if complete {
		s.onFin(CodeOK)
	}
	return err
}

// enqueue makes the payload of a DATA frame readable. Call with mu held.
func (s *Stream) enqueue(b []byte, seg *segment) {
	if seg != nil {
		s.queue.push(seg)
		return
	}
	if s.datagrams {
		s.queue.write(binary.BigEndian.AppendUint16(make([]byte, 0, 2), uint16(len(b))))
	}
	s.queue.write(b)
}

// account counts the memory of the link's unread data in the session's budget. Only the reader calls it, and seldom:
// streams are read on other processors, and each count would move a cache line between them.
func (l *link) account() {
	if n := int64(l.unread.kept) - l.unread.freed.Swap(0); n != 0 {
		l.session.bytes.add(n)
	}
	l.unread.kept, l.unread.full = 0, !l.session.bytes.fits(accountEvery)
}

// onAnswer handles the answer to our OPEN.
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

// onFin handles FIN. Datagrams end in both directions at once.
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

// onStripedFin handles the FIN of a striped stream, which may overtake its data.
func (s *Stream) onStripedFin(length uint64) error {
	s.mu.Lock()
	if s.ending || s.readEnded || s.datagrams {
		s.mu.Unlock()
		return fmt.Errorf("%w: a second FIN, or the length of datagrams", ErrProtocol)
	}
	s.ending, s.end = true, length
	complete, err := s.join()
	s.mu.Unlock()
	if complete {
		s.onFin(CodeOK)
	}
	return err
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

// stopWriting makes writes return err. Call with l.mu held.
func (s *Stream) stopWriting(err error) {
	if s.writeErr == nil {
		s.writeErr = err
	}
	s.wakeWriter()
}

// wakeWriter makes a blocked Write look whether it must end. Call with l.mu held.
func (s *Stream) wakeWriter() {
	s.canWrite.Broadcast()
	if s.burst.wake != nil {
		s.burst.wake.Raise()
	}
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
	s.l.free(s.early.drop()) // what precedes it will not come
	s.canRead.Broadcast()
	s.mu.Unlock()
	s.over(true, true)
}

// over notes which halves have ended, and removes the stream when both have.
func (s *Stream) over(sent, rcvd bool) {
	l := s.l
	l.streams.mu.Lock()
	s.sent, s.rcvd = s.sent || sent, s.rcvd || rcvd
	forget := s.sent && s.rcvd && l.streams.byID[s.id] == s
	if forget {
		delete(l.streams.byID, s.id)
		s.freePlace()
	}
	l.streams.mu.Unlock()
	if forget {
		s.mu.Lock()
		s.l.session.grown.Add(int64(initialWindow - s.window))
		s.window = initialWindow
		s.mu.Unlock()
		l.session.streams.Add(-1)
		l.load.streams.Add(-1)
	}
}

// finish notes that the stream's user has closed it.
func (s *Stream) finish() {
	s.l.streams.mu.Lock()
	defer s.l.streams.mu.Unlock()
	s.finished = true
	s.freePlace()
}

// freePlace releases the stream's place in the budget once both ends have finished with it: after a reset by the other
// end its user still holds resources. Call with l.streams.mu held.
func (s *Stream) freePlace() {
	if s.placed && s.finished && s.sent && s.rcvd {
		s.placed = false
		s.l.session.places.add(-1)
	}
}
