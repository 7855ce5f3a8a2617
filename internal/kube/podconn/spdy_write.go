package podconn

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/moby/spdystream/spdy"
	corev1 "k8s.io/api/core/v1"
)

// opener opens the streams of one port-forward: at first, and again after the port has refused. Attempt n has the
// streams 4n+errorStream and 4n+dataStream.
type opener struct {
	port    uint16
	tries   uint32
	headers *spdy.Framer // writes to out; the headers of all streams share its compression context
	out     bytes.Buffer
}

// next returns 4n for the next attempt n and, after headroom, SYN_STREAM and FIN of its error stream and SYN_STREAM of
// its data stream.
func (o *opener) next() (base uint32, opening []byte, err error) {
	o.out.Reset()
	o.out.Write(make([]byte, headroom))
	if o.headers == nil {
		if o.headers, err = spdy.NewFramer(&o.out, nil); err != nil {
			return 0, nil, fmt.Errorf("compressing SPDY headers: %w", err)
		}
	}
	headers := func(kind string) http.Header {
		return http.Header{
			corev1.StreamType:                 {kind},
			corev1.PortHeader:                 {strconv.Itoa(int(o.port))},
			corev1.PortForwardRequestIDHeader: {strconv.FormatUint(uint64(o.tries), 10)},
		}
	}
	base = 4 * o.tries
	errorID, dataID := spdy.StreamId(base+errorStream), spdy.StreamId(base+dataStream)
	for _, f := range []spdy.Frame{
		&spdy.SynStreamFrame{StreamId: errorID, Headers: headers(corev1.StreamTypeError)},
		&spdy.DataFrame{StreamId: errorID, Flags: spdy.DataFlagFin},
		&spdy.SynStreamFrame{StreamId: dataID, Headers: headers(corev1.StreamTypeData)},
	} {
		if err := o.headers.WriteFrame(f); err != nil {
			return 0, nil, fmt.Errorf("building the SPDY opening: %w", err)
		}
	}
	o.tries++
	return base, o.out.Bytes(), nil
}

// Write sends p in DATA frames of at most maxData bytes.
func (c *podConn) Write(p []byte) (int, error) {
	c.writeMu.Lock()
	defer c.unlockWrite()
	if c.finished {
		return 0, &net.OpError{Op: "write", Net: c.peer.Network(), Addr: c.peer, Err: syscall.EPIPE}
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

// CloseWrite ends the laptop's direction. The container runtime decides how long the other direction then stays open:
// containerd closes it after a second.
func (c *podConn) CloseWrite() error {
	c.writeMu.Lock()
	defer c.unlockWrite()
	if c.finished {
		return nil
	}
	c.finished = true
	return c.writeData(nil, flagFIN)
}

// Close closes the stream and the connection beneath it. It does not wait for the peer, nor for a Write.
func (c *podConn) Close() error {
	if c.closed.Swap(true) {
		return nil
	}
	c.pingTimer.Stop()
	// Without the last frames, the API server and the kubelet would log a broken connection.
	if c.writeMu.TryLock() {
		c.raw.SetWriteDeadline(time.Now().Add(closeTimeout))
		c.sendClose()
		c.writeMu.Unlock()
	}
	return c.raw.Close()
}

// sendClose ends the stream, the SPDY connection and the WebSocket. The caller holds writeMu. Errors do not matter:
// the connection closes next.
func (c *podConn) sendClose() {
	buf := c.grow(32)
	buf = appendControl(buf, spdy.TypeRstStream, c.base+dataStream, uint32(spdy.Cancel))
	buf = appendControl(buf, spdy.TypeGoAway, 0, uint32(spdy.GoAwayOK))
	if c.link.writeFrame(buf) != nil {
		return
	}
	if ws, ok := c.link.(*webSocket); ok {
		buf = binary.BigEndian.AppendUint16(c.grow(2), closeNormal)
		_ = ws.write(opClose, buf)
	}
}

// grow returns the frame buffer, headroom long, with room for n bytes more. The caller holds writeMu.
func (c *podConn) grow(n int) []byte {
	c.buf = slices.Grow(c.buf[:0], headroom+n)
	return c.buf[:headroom]
}

func (c *podConn) writeData(p []byte, flags byte) error {
	buf := c.grow(spdyHeader + len(p))
	buf = binary.BigEndian.AppendUint32(buf, c.base+dataStream)
	buf = binary.BigEndian.AppendUint32(buf, uint32(flags)<<24|uint32(len(p)))
	return c.send(append(buf, p...))
}

// send writes one or more frames. The caller holds writeMu.
func (c *podConn) send(buf []byte) error {
	if c.closed.Load() {
		return net.ErrClosed
	}
	if failed := c.failed.Load(); failed != nil {
		return *failed
	}
	c.raw.Hold()
	err := c.link.writeFrame(buf)
	if e := c.raw.Release(); err == nil {
		err = e
	}
	if err == nil {
		return nil
	}
	if c.closed.Load() {
		err = net.ErrClosed
	} else if errors.Is(err, os.ErrDeadlineExceeded) {
		err = &net.OpError{Op: "write", Net: c.peer.Network(), Addr: c.peer, Err: os.ErrDeadlineExceeded}
	}
	c.failed.CompareAndSwap(nil, &err) // part of a frame may have been sent, so nothing can follow it
	return err
}

// unlockWrite sends the answers that Read has queued meanwhile, and unlocks writeMu.
func (c *podConn) unlockWrite() {
	for {
		c.writeMu.Unlock()
		if !c.owes() || !c.writeMu.TryLock() {
			return
		}
		c.sendAnswers()
	}
}

func (c *podConn) owes() bool { return len(c.pings) > 0 || c.pong.Load() != nil }

// sendAnswers answers the peer's pings. The caller holds writeMu, so nobody else receives from pings. The next Read or
// Write returns an error.
func (c *podConn) sendAnswers() {
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

// owePing queues the answer to a SPDY ping, and sends it unless a Write holds the link; that Write then sends it. It
// drops the answer if maxOwedPings are queued.
func (c *podConn) owePing(id uint32) {
	select {
	case c.pings <- id:
	default:
	}
	c.tryAnswer()
}

// owePong is owePing for a WebSocket ping. Only the latest one needs an answer (RFC 6455, section 5.5.3).
func (c *podConn) owePong(payload []byte) {
	payload = slices.Clone(payload)
	c.pong.Store(&payload)
	c.tryAnswer()
}

func (c *podConn) tryAnswer() {
	if c.writeMu.TryLock() {
		c.sendAnswers()
		c.unlockWrite()
	}
}

// ping sends a PING every pingPeriod, unless a Write is in progress: the connection is not idle then.
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
	c.pingTimer.Reset(pingPeriod)
	if c.closed.Load() { // Close may have stopped the timer before Reset
		c.pingTimer.Stop()
	}
}

// appendControl appends a control frame with the words as its payload.
func appendControl(buf []byte, kind spdy.ControlFrameType, words ...uint32) []byte {
	buf = binary.BigEndian.AppendUint16(buf, controlBit<<8|spdyVersion)
	buf = binary.BigEndian.AppendUint16(buf, uint16(kind))
	buf = binary.BigEndian.AppendUint32(buf, uint32(4*len(words)))
	for _, w := range words {
		buf = binary.BigEndian.AppendUint32(buf, w)
	}
	return buf
}

// LocalAddr returns the address of the TCP connection to the API server.
func (c *podConn) LocalAddr() net.Addr { return c.raw.LocalAddr() }

// RemoteAddr returns the pod's port.
func (c *podConn) RemoteAddr() net.Addr { return c.peer }

// SetDeadline implements net.Conn.
func (c *podConn) SetDeadline(t time.Time) error { return c.raw.SetDeadline(t) }

// SetReadDeadline implements net.Conn. After a timeout, Read works again with a later deadline.
func (c *podConn) SetReadDeadline(t time.Time) error { return c.raw.SetReadDeadline(t) }

// SetWriteDeadline implements net.Conn. A Write that times out leaves the connection unusable, because a part of a TLS
// record may have been sent.
func (c *podConn) SetWriteDeadline(t time.Time) error { return c.raw.SetWriteDeadline(t) }
