package podconn

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/moby/spdystream/spdy"

	"kubevpn/pkg/wire/nonblock"
)

// podConn is one port-forward: a connection to a port of a pod, as a net.Conn. It speaks as much SPDY/3.1 as
// the Kubernetes port-forward protocol needs, over one upgraded connection of its own:
//
//	laptop                                    API server ═ kubelet ═ container runtime
//	  SYN_STREAM 1 (error, port), FIN ──────▶   one write for all three;
//	  SYN_STREAM 3 (data, port)       ──────▶   no wait between them
//	                                  ◀──────   SYN_REPLY 1, SYN_REPLY 3: connected as far as the runtime
//	  DATA 3                          ◀─────▶   the bytes
//	                                  ◀──────   DATA 1, FIN: the pod's port refused, or broke: becomes Read's error
//	  DATA 3 FIN                      ──────▶   CloseWrite
//	                                  ◀──────   DATA 3 FIN: Read gives io.EOF
//	  PING every ten seconds, RST_STREAM 3 + GOAWAY on Close
//
// It exists because the spdystream library hands every frame through three goroutines and a new buffer, and
// writes each in three pieces, each of which becomes a WebSocket message and a TLS record of its own. Here
// Read parses frames in the caller's goroutine, straight into the caller's buffer, and Write is one
// frame, one message, one call of the TLS layer. There is no goroutine to leak; nothing is read ahead of the
// caller, so backpressure reaches the API server's TCP connection.
//
// One Read and one Write may run at the same time, with anything else. A Read whose deadline passed can be
// repeated. A Write whose deadline passed leaves the connection unusable, as with crypto/tls.
//
// Lock order: readMu before writeMu. Read holds readMu, and takes writeMu only if it is free (TryLock), to answer
// pings: a Read never waits for a Write. No one who holds writeMu takes readMu. Close and ping take writeMu only if it
// is free, too.
type podConn struct {
	link  link
	raw   net.Conn // beneath TLS: deadlines, addresses, the final close
	peer  podAddr
	batch *nonblock.Batch // raw, where writes can be held back; else nil

	readMu  sync.Mutex // guards the fields up to writeMu
	frame   spdyFrame
	replied [4]bool // SYN_REPLY has come, by stream
	refusal []byte  // what the error stream said
	anyData bool    // bytes have come from the pod
	ended   [4]bool // FIN has come, by stream
	readErr error   // sticky

	writeMu  sync.Mutex // guards link's writes, buf, finished and pingID
	buf      []byte     // a frame being written, after headroom bytes
	finished bool       // FIN sent on the data stream

	failed   atomic.Pointer[error] // what ended the connection, for Write
	closed   atomic.Bool
	pingTime *time.Timer
	pingID   uint32

	// Answers that Read owes the peer while a Write holds the link. Who releases writeMu sends them.
	pings chan uint32            // to SPDY pings, by ID
	pong  atomic.Pointer[[]byte] // to the latest WebSocket ping: its payload; nil: none
}

// link carries SPDY frames: a webSocket, or the upgraded connection itself.
type link interface {
	io.Reader
	// writeFrame sends buf[headroom:] with one Write and may overwrite all of buf.
	writeFrame(buf []byte) error
}

// rawLink is SPDY straight on the upgraded connection.
type rawLink struct{ io.ReadWriter }

func (l rawLink) writeFrame(buf []byte) error {
	_, err := l.Write(buf[headroom:])
	return err
}

const (
	errorStream = 1
	dataStream  = 3

	spdyHeader  = 8
	controlBit  = 0x80
	spdyVersion = 3
	flagFIN     = 0x01

	// maxData is the most that one DATA frame carries. The container runtime allocates a frame whole.
	maxData = 256 << 10
	// maxRefusal is how much of the error stream's text is kept.
	maxRefusal = 4 << 10
	// maxOwedPings bounds the answers kept for a peer that pings faster than we can write.
	maxOwedPings = 16
	// pingPeriod is what client-go uses for SPDY over WebSocket: it keeps load balancers from closing an
	// idle connection.
	pingPeriod = 10 * time.Second
	// closeTimeout bounds the farewell that Close writes.
	closeTimeout = 200 * time.Millisecond
)

var errSPDY = errors.New("SPDY protocol error")

// spdyFrame is where Read is in the frame that is arriving.
type spdyFrame struct {
	head  [spdyHeader]byte
	headN int // bytes of head that have come; the frame is open when all have

	left  int     // payload bytes still to come
	note  [8]byte // first payload bytes of a control frame
	noteN int
}

func (f *spdyFrame) control() bool  { return f.head[0]&controlBit != 0 }
func (f *spdyFrame) kind() uint16   { return binary.BigEndian.Uint16(f.head[2:]) }
func (f *spdyFrame) stream() uint32 { return binary.BigEndian.Uint32(f.head[:]) & 0x7fffffff }
func (f *spdyFrame) fin() bool      { return f.head[4]&flagFIN != 0 }

// openPort speaks the opening of the protocol on l and returns when the container runtime has accepted both
// streams. When it fails, or ctx ends first, the caller closes raw.
func openPort(ctx context.Context, l link, raw net.Conn, peer podAddr) (*podConn, error) {
	c := &podConn{link: l, raw: raw, peer: peer, pingID: 1, pings: make(chan uint32, maxOwedPings)}
	if ws, ok := l.(*webSocket); ok {
		ws.pong = c.owePong
	}
	c.batch, _ = raw.(*nonblock.Batch)
	stop := context.AfterFunc(ctx, func() { raw.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	opening, err := openingFrames(peer.port)
	if err != nil {
		return nil, err
	}
	if err := l.writeFrame(opening); err != nil {
		return nil, dialError(ctx, err)
	}
	// Both replies are waited for: spdystream in the runtime would wait for ever to answer a stream of a
	// connection that was closed before the reply. A pod that speaks first may come between them.
	for !(c.replied[dataStream] && c.replied[errorStream]) && !c.inData() && c.readErr == nil {
		if err := c.advance(); err != nil {
			return nil, dialError(ctx, err)
		}
	}
	if !stop() {
		return nil, context.Cause(ctx)
	}
	c.pingTime = time.AfterFunc(time.Hour, c.ping)
	c.pingTime.Reset(pingPeriod) // ping itself uses pingTime
	return c, nil
}

func dialError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// openingFrames returns, after headroom, SYN_STREAM and FIN of the error stream, then SYN_STREAM of the data
// stream.
func openingFrames(port uint16) ([]byte, error) {
	return (&portCaller{port: port}).opening(errorStream, dataStream)
}

// Read gives the pod's bytes, io.EOF after its FIN, a *RefusedError when the error stream says why there are
// none, syscall.ECONNRESET after a reset, net.ErrClosed after Close, os.ErrDeadlineExceeded at the deadline.
func (c *podConn) Read(p []byte) (int, error) {
	c.readMu.Lock()
	defer c.readMu.Unlock()
	if len(p) == 0 {
		return 0, nil
	}
	for c.readErr == nil {
		if c.inData() {
			n, err := c.link.Read(p[:min(len(p), c.frame.left)])
			c.frame.left -= n
			if n > 0 {
				c.anyData = true
				return n, nil
			}
			if err != nil {
				return 0, c.readFailed(err)
			}
			continue
		}
		if err := c.advance(); err != nil {
			return 0, c.readFailed(err)
		}
	}
	return 0, c.readErr
}

// readFailed makes err sticky unless it is a timeout.
func (c *podConn) readFailed(err error) error {
	if c.closed.Load() {
		return net.ErrClosed
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return &net.OpError{Op: "read", Net: "port-forward", Addr: c.peer, Err: os.ErrDeadlineExceeded}
	}
	if err == io.EOF && c.readErr == nil && !c.ended[dataStream] { // the link ended without the stream's FIN
		err = io.ErrUnexpectedEOF
	}
	c.readErr = err
	if err != io.EOF { // after the pod's FIN, the other direction lives on
		c.failed.CompareAndSwap(nil, &err)
	}
	return err
}

// inData reports whether the bytes that come next are the pod's.
func (c *podConn) inData() bool {
	f := &c.frame
	return f.headN == spdyHeader && !f.control() && f.stream() == dataStream && f.left > 0
}

// advance consumes what comes next up to the pod's bytes: at most one frame. What it returns ends the stream.
func (c *podConn) advance() error {
	f := &c.frame
	for f.headN < spdyHeader {
		n, err := c.link.Read(f.head[f.headN:])
		f.headN += n
		if err != nil && f.headN < spdyHeader {
			return err
		}
		if f.headN == spdyHeader {
			f.left = int(binary.BigEndian.Uint32(f.head[4:]) & 0xffffff)
		}
	}
	if c.inData() {
		return nil
	}
	for f.left > 0 {
		if err := c.consume(); err != nil {
			return err
		}
	}
	done := *f
	*f = spdyFrame{}
	if done.control() {
		return c.handleControl(&done)
	}
	return c.handleEnd(&done)
}

// consume reads some payload of a frame that is not the pod's data.
func (c *podConn) consume() error {
	f := &c.frame
	var scratch [512]byte
	n, err := c.link.Read(scratch[:min(len(scratch), f.left)])
	f.left -= n
	got := scratch[:n]
	switch {
	case f.control():
		f.noteN += copy(f.note[f.noteN:], got)
	case f.stream() == errorStream:
		c.refusal = append(c.refusal, got[:min(n, maxRefusal-len(c.refusal))]...)
	}
	if n > 0 {
		return nil
	}
	return err
}

func (c *podConn) handleEnd(f *spdyFrame) error {
	if !f.fin() || f.stream() >= uint32(len(c.ended)) {
		return nil
	}
	return c.finish(f.stream())
}

// finish notes that a stream has ended. containerd ends the data stream before it says on the error stream
// why; so an end before any byte waits for the error stream's.
func (c *podConn) finish(stream uint32) error {
	c.ended[stream] = true
	switch {
	case stream == errorStream && len(c.refusal) > 0:
		return c.refused()
	case c.ended[dataStream] && (c.anyData || c.ended[errorStream]):
		return c.end(io.EOF)
	}
	return nil
}

func (c *podConn) handleControl(f *spdyFrame) error {
	stream := binary.BigEndian.Uint32(f.note[:]) & 0x7fffffff
	switch spdy.ControlFrameType(f.kind()) {
	case spdy.TypeSynReply:
		if f.noteN < 4 {
			return fmt.Errorf("%w: SYN_REPLY of %d bytes", errSPDY, f.noteN)
		}
		if stream < uint32(len(c.replied)) {
			c.replied[stream] = true
		}
		if stream == dataStream && f.fin() {
			c.ended[stream], c.anyData = true, true
			c.readErr = io.EOF
		}
	case spdy.TypeRstStream:
		switch {
		case f.noteN < 8:
			return fmt.Errorf("%w: RST_STREAM of %d bytes", errSPDY, f.noteN)
		case stream == errorStream:
			return c.finish(stream)
		case stream == dataStream && len(c.refusal) > 0:
			return c.refused()
		case stream == dataStream:
			return c.end(&net.OpError{Op: "read", Net: "port-forward", Addr: c.peer, Err: syscall.ECONNRESET})
		}
	case spdy.TypePing:
		if f.noteN < 4 {
			return fmt.Errorf("%w: PING of %d bytes", errSPDY, f.noteN)
		}
		if stream%2 == 0 { // the peer's; ours are odd
			c.owePing(stream)
		}
	case spdy.TypeGoAway:
		return c.end(io.ErrUnexpectedEOF)
	}
	return nil // HEADERS, SETTINGS, WINDOW_UPDATE say nothing to us
}

func (c *podConn) refused() error {
	return c.end(&RefusedError{Pod: c.peer.pod, Port: c.peer.port, Message: strings.TrimSpace(string(c.refusal))})
}

// end makes err what every later Read gives.
func (c *podConn) end(err error) error {
	c.readErr = err
	return err
}

// RefusedError is the error that the container runtime sent when it could not connect, or when the connection broke.
// errors.Is matches syscall.ECONNREFUSED and syscall.ECONNRESET by its text.
type RefusedError struct {
	Pod     string
	Port    uint16
	Message string // the container runtime's
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("port %d of pod %s: %s", e.Port, e.Pod, e.Message)
}

// Is matches by the runtime's words: only text crosses the API server.
func (e *RefusedError) Is(target error) bool {
	switch target {
	case syscall.ECONNREFUSED:
		return strings.Contains(e.Message, "connection refused")
	case syscall.ECONNRESET:
		return strings.Contains(e.Message, "connection reset by peer")
	}
	return false
}

// podAddr is a pod's port as a net.Addr.
type podAddr struct {
	pod  string // namespace/name
	port uint16
}

func (a podAddr) Network() string { return "port-forward" }
func (a podAddr) String() string  { return a.pod + ":" + strconv.Itoa(int(a.port)) }
