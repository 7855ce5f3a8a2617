package transport

import (
	"context"
	"io"
	"net"
	"time"
)

// Packets is a stream of datagrams. ReadPacket at the other end returns the datagrams of WritePacket in order, and none
// is lost while the session exists. The stream ends in both directions at once, with a Code. Reads and writes may be
// concurrent.
type Packets struct{ s *Stream }

// Stats returns a snapshot.
func (p *Packets) Stats() StreamStats { return p.s.Stats() }

// WritePacket sends b as one datagram, which may be empty. It blocks while the window is used up or the link is
// stalled. It returns ErrPacketTooLarge for more than MaxPacket bytes, and the code's error after the other end's
// CloseWithCode.
func (p *Packets) WritePacket(b []byte) error {
	if len(b) > MaxPacket {
		return ErrPacketTooLarge
	}
	s, l := p.s, p.s.l
	cost := len(b) + datagramCost
	s.writers.Lock()
	defer s.writers.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	for s.credit < cost {
		if err := s.writeError(); err != nil {
			return err
		}
		s.awaitCredit()
	}
	if err := s.writeError(); err != nil {
		return err
	}
	if _, err := l.await(context.Background(), s, cost, true); err != nil {
		return err
	}
	l.append(header{kind: frameData, length: len(b), stream: s.id}, b)
	s.credit -= cost
	s.written += uint64(len(b))
	s.push()
	return nil
}

// TryWritePackets writes datagrams that b holds one behind the other, each of which has size bytes, except that the
// last may be shorter. It stops where WritePacket would block, and returns how many it has written. Its errors are
// those of WritePacket.
func (p *Packets) TryWritePackets(b []byte, size int) (n int, err error) {
	if min(len(b), size) > MaxPacket {
		return 0, ErrPacketTooLarge
	}
	s, l := p.s, p.s.l
	if !s.writers.TryLock() {
		return 0, nil
	}
	defer s.writers.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := s.writeError(); err != nil {
		return 0, err
	}
	for ; len(b) > 0 || n == 0; n++ {
		length := min(len(b), size)
		cost := length + datagramCost
		if s.credit < cost || len(l.sched.waiting) > 0 || !l.room() {
			break
		}
		if _, err = l.await(context.Background(), s, cost, true); err != nil { // it does not wait
			break
		}
		l.append(header{kind: frameData, length: length, stream: s.id}, b[:length])
		s.credit -= cost
		s.written += uint64(length)
		b = b[length:]
	}
	if n > 0 {
		s.push()
	}
	return n, err
}

// ReadPacket reads one datagram into b. If b is too small the rest is lost and the error is io.ErrShortBuffer. At the
// end of the stream ReadPacket returns io.EOF after the other end's Close, the code's error after CloseWithCode or a
// rejection, and an error that is syscall.ECONNRESET when the session ends.
func (p *Packets) ReadPacket(b []byte) (int, error) {
	var size [1]int
	_, err := p.ReadPackets(b, size[:])
	return size[0], err
}

// ReadPackets reads the datagrams that have arrived, and waits for the first one. It reads as many as fit into b, where
// they are one behind the other, and into sizes, and returns their number. Otherwise it is like ReadPacket:
// io.ErrShortBuffer means that the rest of the only one is lost.
func (p *Packets) ReadPackets(b []byte, sizes []int) (int, error) {
	s := p.s
	s.mu.Lock()
	if err := p.wait(); err != nil {
		s.mu.Unlock()
		return 0, err
	}
	held := s.queue.held
	n, short := s.queue.datagrams(b, sizes)
	total := 0
	for _, size := range sizes[:n] {
		total += size
	}
	s.l.free(held - s.queue.held)
	s.consumed(total)
	if short {
		return n, io.ErrShortBuffer
	}
	return n, nil
}

// Wait blocks until ReadPacket would not block, and returns ReadPacket's error. A caller needs no buffer meanwhile.
func (p *Packets) Wait() error {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	return p.wait()
}

func (p *Packets) wait() error {
	err := p.s.waitData()
	if err == io.EOF && p.s.endCode != CodeOK {
		err = p.s.endCode.Err()
	}
	return err
}

// SetReadDeadline makes ReadPacket and Wait return os.ErrDeadlineExceeded at t.
func (p *Packets) SetReadDeadline(t time.Time) error { return p.s.SetReadDeadline(t) }

// SetWriteDeadline makes WritePacket return os.ErrDeadlineExceeded at t.
func (p *Packets) SetWriteDeadline(t time.Time) error { return p.s.SetWriteDeadline(t) }

// SetDeadline sets both deadlines.
func (p *Packets) SetDeadline(t time.Time) error { return p.s.SetDeadline(t) }

// Read is ReadPacket. With Write, Packets are a net.Conn like a connected UDP socket.
func (p *Packets) Read(b []byte) (int, error) { return p.ReadPacket(b) }

// Write is WritePacket.
func (p *Packets) Write(b []byte) (int, error) {
	if err := p.WritePacket(b); err != nil {
		return 0, err
	}
	return len(b), nil
}

// LocalAddr returns the address of this end, as Stream.LocalAddr does.
func (p *Packets) LocalAddr() net.Addr { return p.s.LocalAddr() }

// RemoteAddr returns the address of the other end, as Stream.RemoteAddr does.
func (p *Packets) RemoteAddr() net.Addr { return p.s.RemoteAddr() }

// Close ends the stream in both directions. The other end reads the datagrams that were sent, then io.EOF. Close does
// not block.
func (p *Packets) Close() error { return p.CloseWithCode(CodeOK) }

// CloseWithCode is Close, but the other end then reads c's error instead of io.EOF. Only the first close has an effect.
func (p *Packets) CloseWithCode(c Code) error {
	s, l := p.s, p.s.l
	l.mu.Lock()
	s.endWriting(c)
	l.mu.Unlock()
	return s.discard(errClosed)
}
