package interceptor

import (
	"bytes"
	"time"

	"golang.org/x/net/http2"
)

// Heads that have begun and not ended, and TLS handshakes, are not visible to the application yet. So its own limits
// do not apply, and these do: in time, and in the memory of all of them. Beyond it the interceptor closes connections,
// as authlistener.Bound says; honest clients hold little memory, for a short time.
const (
	headTimeout = time.Minute // from the first byte to the last; nginx has the same
	maxHeads    = 32 << 20    // bytes

	connCost  = 32 << 10 // bytes of a connection and its goroutines
	lineCost  = 80       // bytes that a header takes besides its text
	fieldCost = 40       // bytes that a byte of HPACK takes at most, up to 3 * maxHead
)

// headCost returns the bytes that net/http takes for a part of an HTTP/1 head.
func headCost(b []byte) int { return len(b) + lineCost*bytes.Count(b, []byte("\n")) }

// frames finds the heads in a client's HTTP/2 frames (RFC 9113, 4.1 and 6.10).
type frames struct {
	begin []byte // the first 9 bytes of a frame, so far
	frame http2.FrameHeader
	left  int // bytes of frame that are to come
	size  int // bytes of a head that has not ended
}

// follow reads what the client sends next.
func (f *frames) follow(b []byte) {
	for len(b) > 0 {
		if f.left == 0 {
			n := min(9-len(f.begin), len(b))
			f.begin, b = append(f.begin, b[:n]...), b[n:]
			if len(f.begin) < 9 {
				return
			}
			f.frame, _ = http2.ReadFrameHeader(bytes.NewReader(f.begin)) // bytes.Reader returns no error
			f.begin, f.left = f.begin[:0], int(f.frame.Length)
		}
		n := min(f.left, len(b))
		f.left, b = f.left-n, b[n:]
		if f.frame.Type == http2.FrameHeaders || f.frame.Type == http2.FrameContinuation {
			f.size += n
		}
		if f.left == 0 && f.frame.Flags.Has(http2.FlagHeadersEndHeaders) {
			f.size = 0
		}
	}
}

// countFrames counts a head that is not whole after these bytes, and limits its time.
func (c *clientConn) countFrames(b []byte) {
	before := c.frames.size
	c.frames.follow(b)
	size := c.frames.size
	if size > 0 {
		c.head.SetCost(connCost + min(size*fieldCost, 3*maxHead))
	}
	switch {
	case size > 0 && before == 0:
		c.Conn.SetReadDeadline(time.Now().Add(headTimeout))
	case size == 0 && before > 0:
		c.Conn.SetReadDeadline(time.Time{})
	}
}
