package transport

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// Stream carries bytes in both directions, each with its own end. It is a net.Conn. Reads and writes may be
// concurrent. It holds buffers only for data that has arrived and was not read.
//
//	              CloseWrite: FIN ▶                     ◀ FIN
//	open ─────────────────────────▶ half-closed ───────────────▶ ended
//	  │            (or ◀ FIN)           (or CloseWrite)
//	  │
//	  └── Reset: RESET ▶ | ◀ RESET | session ended ──▶ ended, with an error
//
// A half-closed stream lives as long as its session. Data that arrived before a FIN or RESET can still be read.
type Stream struct {
	l         *link
	id        uint32
	request   Request
	opened    bool // by this end
	datagrams bool

	writers sync.Mutex // one Write at a time

	// The sending half, guarded by l.mu.
	canWrite      sync.Cond
	credit        int    // bytes that the other end's window still allows
	written       uint64 // bytes of the user
	blocked       bool   // a write waits for credit
	writeEnded    bool   // FIN was sent
	writeErr      error  // reset, or the session ended
	writeDeadline deadline
	turn          turn
	striped       bool // some bytes have a STRIPE frame: all that follow need one
	burst         burst

	// The receiving half.
	mu           sync.Mutex
	canRead      sync.Cond
	queue        queue
	early        pieces // what has arrived before the bytes that precede it
	arrived      uint64 // bytes that queue has received
	end          uint64 // bytes of the whole stream, if ending
	ending       bool   // FIN was received, of a striped stream, perhaps before its last bytes
	taken        uint64 // bytes that the user has read
	outstanding  int    // bytes that the other end may still send
	window       int    // the sum to which topUp raises queue and outstanding
	toppedUp     time.Time
	readEnded    bool // FIN was received
	endCode      Code // from the FIN; datagrams only
	readErr      error
	readClosed   bool // Close was called
	readDeadline deadline
	answered     bool // the OPEN was answered, by either end
	answer       error
	aborted      bool          // by the other end or the session
	gone         chan struct{} // made by Gone; closed by abort

	// Guarded by l.streams.mu.
	sent, rcvd bool      // the sending and the receiving half have ended
	placed     bool      // counts among the streams that the other end has opened
	finished   bool      // the user has closed the stream
	closedAt   time.Time // Close was called, and the other end's FIN was not received
}

func newStream(l *link, id uint32, r Request, datagrams, opened bool) *Stream {
	s := &Stream{
		l: l, id: id, request: r, datagrams: datagrams, opened: opened,
		credit: initialWindow, outstanding: initialWindow, window: initialWindow,
		toppedUp: time.Now(),
	}
	s.canWrite.L, s.canRead.L = &l.mu, &s.mu
	return s
}

// LocalAddr returns the request's source at the end that opened the stream, and its destination at the other end.
func (s *Stream) LocalAddr() net.Addr {
	if s.opened {
		return s.request.netAddr(s.request.Src)
	}
	return s.request.netAddr(s.request.Dst)
}

// RemoteAddr returns the request's destination at the end that opened the stream, and its source at the other end.
func (s *Stream) RemoteAddr() net.Addr {
	if s.opened {
		return s.request.netAddr(s.request.Dst)
	}
	return s.request.netAddr(s.request.Src)
}

// writeError returns why Write must fail, or nil. Call with l.mu held.
func (s *Stream) writeError() error {
	switch {
	case s.writeErr != nil:
		return s.writeErr
	case s.writeEnded:
		return errWriteEnded
	case s.writeDeadline.passed():
		return os.ErrDeadlineExceeded
	}
	return nil
}

// Write blocks while the other end's window is used up or the link is congested or stalled. It returns an error that is
// syscall.ECONNRESET after the other end's reset, and syscall.EPIPE after CloseWrite or Close.
func (s *Stream) Write(p []byte) (int, error) {
	s.writers.Lock()
	defer s.writers.Unlock()
	l := s.l
	l.mu.Lock()
	defer l.mu.Unlock()
	err := s.writeError()
	total, isBulk := 0, false
	if l.far() && s.request.Proto != ProtoIP {
		isBulk = s.burst.next(time.Now(), len(p))
		defer func() { s.burst.last = time.Now() }()
	}
	for len(p) > 0 && err == nil {
		if s.credit == 0 {
			if err = s.writeError(); err == nil {
				s.awaitCredit()
			}
			continue
		}
		var n int
		n, err = s.writeSome(p[:min(len(p), s.credit)], isBulk)
		total += n
		p = p[n:]
	}
	return total, err
}

// writeSome writes the beginning of p, for which there is credit. Call with writers and l.mu held; it may release l.mu
// meanwhile.
func (s *Stream) writeSome(p []byte, isBulk bool) (int, error) {
	if isBulk {
		if n := s.writeBulk(p); n > 0 {
			return n, nil
		}
	}
	if err := s.writeError(); err != nil { // nothing follows FIN
		return 0, err
	}
	l, want := s.l, len(p)
	if s.striped {
		want = min(want, maxPayload-stripeLen)
	}
	n, err := l.await(context.Background(), s, want, false)
	if err != nil {
		return 0, err
	}
	if s.striped {
		l.stripe(s, s.written, p[:n])
	} else {
		l.append(header{kind: frameData, length: n, stream: s.id}, p[:n])
	}
	s.spend(n)
	s.push()
	return n, nil
}

// spend counts n bytes that were, or will be, sent. Call with l.mu held.
func (s *Stream) spend(n int) {
	s.credit -= n
	s.written += uint64(n)
}

// awaitCredit waits for one event, which may be another one than more credit. Call with l.mu held.
func (s *Stream) awaitCredit() {
	s.blocked = true
	s.canWrite.Wait()
	s.blocked = false
}

// push is link.push, unless the stream has a deadline, which the conn's Write would not observe. Call with l.mu held.
func (s *Stream) push() {
	if !s.writeDeadline.at.IsZero() {
		s.l.toSend.Signal()
		return
	}
	s.l.push()
}

// Mark returns a mark for Arrived, behind everything that was written so far, but not behind bulk that was striped: the
// stream is one of whole IP packets or of datagrams, or its path is not far.
func (s *Stream) Mark() uint64 {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	return s.l.owed.end // what is behind it has no acknowledgement of its own
}

// Arrived reports whether the other end has acknowledged everything before the mark. It does so within ackDelay.
func (s *Stream) Arrived(mark uint64) bool {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	return s.l.out.acked >= mark
}

// CloseWrite sends FIN: the other end's Read returns io.EOF after everything written so far. Reads continue. CloseWrite
// does not block; a Write in progress fails.
func (s *Stream) CloseWrite() error {
	l := s.l
	l.mu.Lock()
	err, ended := s.writeErr, s.writeEnded
	s.endWriting(CodeOK)
	l.mu.Unlock()
	if err == nil && !ended {
		s.over(true, false)
	}
	return err
}

// endWriting sends FIN, with c if it is not CodeOK. It does nothing after a FIN or a reset. Call with l.mu held.
func (s *Stream) endWriting(c Code) {
	if s.writeErr != nil || s.writeEnded {
		return
	}
	s.writeEnded = true
	var payload []byte
	switch {
	case s.striped:
		payload = binary.BigEndian.AppendUint64(nil, s.written)
	case c != CodeOK:
		payload = []byte{byte(c)}
	}
	s.l.control(frameFin, s.id, payload...)
	s.wakeWriter()
}

// Reset ends both directions at once. The other end can still read what reached it before. It does not block.
func (s *Stream) Reset() error {
	l := s.l
	l.mu.Lock()
	if s.writeErr == nil && l.stream(s.id) == s {
		l.control(frameReset, s.id)
	}
	s.stopWriting(errLocalReset)
	l.mu.Unlock()
	return s.discard(errLocalReset)
}

// discard ends both halves for the stream's user, once the other end was told. It drops unread data; later reads return
// err.
func (s *Stream) discard(err error) error {
	s.mu.Lock()
	s.l.free(s.queue.held + s.early.drop())
	s.queue.drop()
	s.closeReading(err)
	s.mu.Unlock()
	s.over(true, true)
	s.finish()
	return nil
}

// closeReading makes later reads return err. Data that arrives later is answered with RESET. Call with mu held.
func (s *Stream) closeReading(err error) {
	if s.readErr == nil {
		s.readErr = err
	}
	s.readClosed = true
	s.canRead.Broadcast()
}

// Close ends the stream as close(2) ends a TCP connection: written data still arrives, followed by FIN. But if data is
// unread, or arrives later, the other end gets a reset. Close does not block.
func (s *Stream) Close() error {
	s.mu.Lock()
	unread := s.queue.size > 0
	if !unread { // before mu is released, or data that arrives then would be lost without a reset
		s.closeReading(errClosed)
	}
	s.mu.Unlock()
	if unread {
		return s.Reset()
	}
	l := s.l
	l.mu.Lock()
	s.endWriting(CodeOK)
	l.mu.Unlock()
	l.streams.mu.Lock()
	if s.closedAt.IsZero() {
		s.closedAt = time.Now()
	}
	l.streams.mu.Unlock()
	s.over(true, false)
	s.finish()
	return nil
}

// readError returns why a read fails, or nil if there is data or it must wait. Call with mu held.
func (s *Stream) readError() error {
	switch {
	case s.readClosed && s.readErr != nil:
		return s.readErr
	case s.readDeadline.passed():
		return os.ErrDeadlineExceeded
	case s.queue.size > 0:
		return nil
	case s.readEnded:
		return io.EOF
	}
	return s.readErr
}

// waitData waits until there is data. Call with mu held.
func (s *Stream) waitData() error {
	for {
		if err := s.readError(); err != nil {
			return err
		}
		if s.queue.size > 0 {
			return nil
		}
		s.canRead.Wait()
	}
}

// Gone returns a channel that is closed when the other end has reset the stream or the session has ended, for callers
// that do not read: they have read the other end's FIN, or wait elsewhere.
func (s *Stream) Gone() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone == nil {
		s.gone = make(chan struct{})
		if s.aborted {
			close(s.gone)
		}
	}
	return s.gone
}

// Wait blocks until Read would not block, and returns Read's error. Callers that allocate a buffer only afterwards hold
// none while a flow is idle.
func (s *Stream) Wait() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waitData()
}

// Read returns io.EOF after the other end's CloseWrite, an error that is syscall.ECONNRESET after its Reset or the end
// of the session, and an error that is net.ErrClosed after Close or Reset of this end.
func (s *Stream) Read(p []byte) (int, error) {
	s.mu.Lock()
	if len(p) == 0 {
		defer s.mu.Unlock()
		if s.readErr != nil && s.readClosed {
			return 0, s.readErr
		}
		return 0, nil
	}
	if err := s.waitData(); err != nil {
		s.mu.Unlock()
		return 0, err
	}
	held := s.queue.held
	n := s.queue.read(p)
	s.l.free(held - s.queue.held)
	s.consumed(n)
	return n, nil
}

// consumed counts n bytes that the user has read, and opens the other end's window. Call with mu held; it releases mu.
func (s *Stream) consumed(n int) {
	s.taken += uint64(n)
	more := s.topUp()
	s.mu.Unlock()
	s.sendWindow(more)
}

// WriteTo writes the received chunks to w without copying them, until the other end's FIN, when it returns nil, or an
// error. It holds no buffer while it waits.
func (s *Stream) WriteTo(w io.Writer) (int64, error) {
	var total int64
	for {
		s.mu.Lock()
		if err := s.waitData(); err != nil {
			s.mu.Unlock()
			if err == io.EOF {
				err = nil
			}
			return total, err
		}
		seg := s.queue.pop()
		s.mu.Unlock()
		n, err := w.Write(seg.buf[seg.r:seg.w])
		total += int64(n)
		if err == nil && n < seg.w-seg.r {
			err = io.ErrShortWrite
		}
		s.l.free(len(seg.buf))
		seg.free()
		// The window opens only now: until w has accepted the data it counts as unread.
		s.mu.Lock()
		s.consumed(n)
		if err != nil {
			return total, err
		}
	}
}

// topUp returns by how much to open the other end's window, or 0 while that is not worth a frame. A window that was
// used up within four round trips, or holePause on a far path, is too small for the path, and doubles. Senders of
// datagrams drop some while the window is used up, so it also doubles if it is used up faster than a busy program may
// take to open it. Call with mu held.
func (s *Stream) topUp() int {
	if s.readEnded || s.readErr != nil {
		return 0
	}
	free := s.window - s.queue.size - s.early.size - s.outstanding
	if free < s.window/2 {
		return 0
	}
	now := time.Now()
	soon := 4 * time.Duration(s.l.load.rtt.Load())
	if soon > 4*nearby {
		soon = max(soon, holePause)
	}
	if s.datagrams {
		soon = max(soon, datagramPause)
	}
	if now.Sub(s.toppedUp) < soon {
		if grow := min(s.window, maxWindow-s.window); grow > 0 && !s.l.session.bytes.tight() &&
			s.l.session.reserve(grow) {
			s.window += grow
			free += grow
		}
	}
	s.toppedUp = now
	s.outstanding += free
	return free
}

func (s *Stream) sendWindow(more int) {
	if more == 0 {
		return
	}
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], uint32(more))
	s.l.mu.Lock()
	s.l.control(frameWindow, s.id, b[:]...)
	s.l.mu.Unlock()
}

// SetDeadline sets both deadlines, as for a net.Conn. Calls beyond a deadline return os.ErrDeadlineExceeded.
func (s *Stream) SetDeadline(t time.Time) error {
	s.SetReadDeadline(t)
	return s.SetWriteDeadline(t)
}

// SetReadDeadline bounds Read, Wait and WriteTo.
func (s *Stream) SetReadDeadline(t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.readDeadline.set(t, &s.mu, s.canRead.Broadcast)
	return nil
}

// SetWriteDeadline bounds Write.
func (s *Stream) SetWriteDeadline(t time.Time) error {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	s.writeDeadline.set(t, &s.l.mu, s.wakeWriter)
	return nil
}
