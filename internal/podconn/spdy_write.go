package podconn

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/moby/spdystream/spdy"
)

// Write sends p as one DATA frame, or as several of maxData bytes.
func (c *podConn) Write(p []byte) (int, error) {
	c.writeMu.Lock()
	defer c.unlockWrite()
	if c.finished {
		return 0, &net.OpError{Op: "write", Net: "port-forward", Addr: c.peer, Err: syscall.EPIPE}
	}
	written := 0
	for written < len(p) {
		chunk := p[written:min(len(p), written+maxData)]
		if err := c.writeData(chunk, 0); err != nil {
			return written, err
		}
		written += len(chunk)
	}
	return written, nil
}

// CloseWrite ends the laptop's direction; Read goes on. Container runtimes differ in how long they then keep
// the other direction open: containerd closes it after a second.
func (c *podConn) CloseWrite() error {
	c.writeMu.Lock()
	defer c.unlockWrite()
	if c.finished {
		return nil
	}
	c.finished = true
	return c.writeData(nil, flagFIN)
}

// Close ends the stream and the connection beneath it. It does not wait for the peer.
func (c *podConn) Close() error {
	if c.closed.Swap(true) {
		return nil
	}
	c.pingTime.Stop()
	// The farewell spares the API server and the kubelet from logging a broken connection. A Write that
	// holds the lock is stuck, or about to be: closing raw ends it.
	if c.writeMu.TryLock() {
		c.raw.SetWriteDeadline(time.Now().Add(closeTimeout))
		c.farewell()
		c.writeMu.Unlock()
	}
	return c.raw.Close()
}

func (c *podConn) farewell() {
	buf := c.grow(32)
	buf = appendControl(buf, spdy.TypeRstStream, dataStream, uint32(spdy.Cancel))
	buf = appendControl(buf, spdy.TypeGoAway, 0, uint32(spdy.GoAwayOK))
	if c.link.writeFrame(buf) != nil {
		return // the connection is gone already
	}
	if ws, ok := c.link.(*webSocket); ok {
		buf = binary.BigEndian.AppendUint16(c.grow(2), closeNormal)
		_ = ws.write(opClose, buf) // likewise
	}
}

// grow returns the frame buffer, headroom long, with room for n bytes more. The caller holds writeMu.
func (c *podConn) grow(n int) []byte {
	c.buf = slices.Grow(c.buf[:0], headroom+n)
	return c.buf[:headroom]
}

func (c *podConn) writeData(p []byte, flags byte) error {
	buf := c.grow(spdyHeader + len(p))
	buf = binary.BigEndian.AppendUint32(buf, dataStream)
	buf = binary.BigEndian.AppendUint32(buf, uint32(flags)<<24|uint32(len(p)))
	return c.send(append(buf, p...))
}

// send writes one frame or more. The caller holds writeMu.
func (c *podConn) send(buf []byte) error {
	if c.closed.Load() {
		return net.ErrClosed
	}
	if failed := c.failed.Load(); failed != nil {
		return *failed
	}
	if c.batch != nil {
		c.batch.Hold()
	}
	err := c.link.writeFrame(buf)
	if c.batch != nil {
		if e := c.batch.Release(); err == nil {
			err = e
		}
	}
	if err == nil {
		return nil
	}
	if c.closed.Load() {
		err = net.ErrClosed
	} else if errors.Is(err, os.ErrDeadlineExceeded) {
		err = &net.OpError{Op: "write", Net: "port-forward", Addr: c.peer, Err: os.ErrDeadlineExceeded}
	}
	c.failed.CompareAndSwap(nil, &err) // part of a frame may be out: nothing can follow it
	return err
}

// unlockWrite releases the link, after the answers that Read has come to owe meanwhile.
func (c *podConn) unlockWrite() {
	for {
		c.writeMu.Unlock()
		if !c.owes() || !c.writeMu.TryLock() {
			return
		}
		c.payAnswers()
	}
}

func (c *podConn) owes() bool { return len(c.pings) > 0 || c.pong.Load() != nil }

// payAnswers writes the answers to the peer's pings. The caller holds writeMu, so nobody else receives from pings. An
// error shows in the next Read or Write.
func (c *podConn) payAnswers() {
	if n := len(c.pings); n > 0 {
		buf := c.grow(n * 12)
		for range n {
			buf = appendControl(buf, spdy.TypePing, <-c.pings)
		}
		_ = c.send(buf)
	}
	pong := c.pong.Swap(nil)
	if ws, ok := c.link.(*webSocket); ok && pong != nil && !c.closed.Load() {
		_ = ws.write(opPong, append(c.grow(len(*pong)), *pong...))
	}
}

// owePing notes that the peer's SPDY ping wants an answer, and gives it unless a Write holds the link: that
// Write then does. So Read never waits for Write. A peer that pings faster than Write ends gets no more answers.
func (c *podConn) owePing(id uint32) {
	select {
	case c.pings <- id:
	default:
	}
	c.tryAnswer()
}

// owePong is owePing for a WebSocket ping. Only the latest needs an answer (RFC 6455, 5.5.3).
func (c *podConn) owePong(payload []byte) {
	payload = slices.Clone(payload)
	c.pong.Store(&payload)
	c.tryAnswer()
}

func (c *podConn) tryAnswer() {
	if c.writeMu.TryLock() {
		c.payAnswers()
		c.unlockWrite()
	}
}

// ping sends a PING every pingPeriod. A link on which a Write is waiting is not idle and needs none.
func (c *podConn) ping() {
	if c.closed.Load() {
		return
	}
	if c.writeMu.TryLock() {
		err := c.send(appendControl(c.grow(12), spdy.TypePing, c.pingID))
		c.pingID += 2
		c.unlockWrite()
		if err != nil {
			return
		}
	}
	c.pingTime.Reset(pingPeriod)
	if c.closed.Load() { // Close came in between
		c.pingTime.Stop()
	}
}

// appendControl appends a control frame whose payload is words.
func appendControl(buf []byte, kind spdy.ControlFrameType, words ...uint32) []byte {
	buf = binary.BigEndian.AppendUint16(buf, controlBit<<8|spdyVersion)
	buf = binary.BigEndian.AppendUint16(buf, uint16(kind))
	buf = binary.BigEndian.AppendUint32(buf, uint32(4*len(words)))
	for _, w := range words {
		buf = binary.BigEndian.AppendUint32(buf, w)
	}
	return buf
}

// LocalAddr is the laptop's end of the TCP connection towards the API server.
func (c *podConn) LocalAddr() net.Addr { return c.raw.LocalAddr() }

// RemoteAddr is the pod's port.
func (c *podConn) RemoteAddr() net.Addr { return c.peer }

// SetDeadline sets both deadlines.
func (c *podConn) SetDeadline(t time.Time) error { return c.raw.SetDeadline(t) }

// SetReadDeadline bounds Reads, those that are waiting too. After it has passed, Read works again once it is
// moved.
func (c *podConn) SetReadDeadline(t time.Time) error { return c.raw.SetReadDeadline(t) }

// SetWriteDeadline bounds Writes, those that are waiting too. A Write that it cut leaves the connection
// unusable: part of a TLS record may be out.
func (c *podConn) SetWriteDeadline(t time.Time) error { return c.raw.SetWriteDeadline(t) }
