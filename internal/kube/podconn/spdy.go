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

// podConn is one port-forward: a net.Conn to a port of a pod. It speaks as much SPDY/3.1 as the Kubernetes
// port-forward protocol needs, over an upgraded connection of its own:
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
// The spdystream library passes every frame through three goroutines and a new buffer, and writes each in three pieces,
// each of which becomes a WebSocket message and a TLS record. podConn instead parses frames in the goroutine that calls
// Read, into the caller's buffer, and writes a frame as one message in one call of the TLS layer. It starts no
// goroutine and reads nothing ahead of the caller, so backpressure reaches the API server's TCP connection.
//
// Only one goroutine may call Read at a time. All other methods are safe for concurrent use, also with Read. A Read
// whose deadline passed can be repeated. A Write whose deadline passed leaves the connection unusable, as in
// crypto/tls.
//
// A method that must not wait for a Write (Read, Close, ping) takes writeMu only if it is free.
type podConn struct {
	link link
	raw  *nonblock.Batch // the connection beneath TLS
	peer podAddr

	frame spdyFrame // Read uses it
	attempt

	writeMu  sync.Mutex // guards link's writes, buf, finished, pingID and, with Read's goroutine, base
	buf      []byte     // the frame that is being written, after headroom bytes
	finished bool       // FIN was sent on the data stream
	pingID   uint32     // of the next PING

	failed    atomic.Pointer[error] // ended the connection; Write returns it
	closed    atomic.Bool
	pingTimer *time.Timer

	// Read owes these answers to the peer while a Write holds the link. The goroutine that unlocks writeMu sends them.
	pings chan uint32            // IDs of SPDY pings
	pong  atomic.Pointer[[]byte] // the payload of the latest WebSocket ping; nil: none
}

// attempt is what Read knows of the streams that open has opened.
type attempt struct {
	base    uint32  // an opener's; added to errorStream and dataStream
	replied [4]bool // by stream: SYN_REPLY has arrived
	refusal []byte  // the text of the error stream
	anyData bool    // the pod has sent bytes
	ended   [4]bool // by stream: FIN or RST_STREAM has arrived
	readErr error   // sticky
}

// over reports whether the peer has ended a stream. If the other one has not ended yet, its end is ignored later.
func (a *attempt) over() bool { return a.ended[dataStream] || a.ended[errorStream] }

// link carries SPDY frames: a webSocket, or the upgraded connection itself.
type link interface {
	io.Reader
	// writeFrame sends buf[headroom:] with one Write and may overwrite all of buf.
	writeFrame(buf []byte) error
}

// rawLink carries SPDY frames without a WebSocket.
type rawLink struct {
	io.Reader
	io.Writer
}

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

	// maxData limits the payload of a DATA frame, in bytes. The container runtime allocates whole frames.
	maxData = 256 << 10
	// maxRefusal limits the text that podConn keeps of the error stream, in bytes.
	maxRefusal = 4 << 10
	// maxOwedPings limits the answers that podConn queues for a peer that pings faster than podConn writes.
	maxOwedPings = 16
	// pingPeriod keeps load balancers from closing an idle connection. client-go has the same for SPDY over WebSocket.
	pingPeriod = 10 * time.Second
	// closeTimeout limits the time in which Close writes its last frames.
	closeTimeout = 200 * time.Millisecond
)

var errSPDY = errors.New("SPDY protocol error")

// spdyFrame is the frame that is arriving, as far as Read has read it.
type spdyFrame struct {
	head  [spdyHeader]byte
	headN int // bytes of head that have arrived

	left  int     // payload bytes that have not arrived
	note  [8]byte // the first payload bytes of a control frame
	noteN int
}

func (f *spdyFrame) control() bool  { return f.head[0]&controlBit != 0 }
func (f *spdyFrame) kind() uint16   { return binary.BigEndian.Uint16(f.head[2:]) }
func (f *spdyFrame) stream() uint32 { return binary.BigEndian.Uint32(f.head[:]) & 0x7fffffff }
func (f *spdyFrame) fin() bool      { return f.head[4]&flagFIN != 0 }

// openPort returns the podConn of l after open. If openPort fails, the caller closes raw.
func openPort(ctx context.Context, l link, raw *nonblock.Batch, peer podAddr, o *opener) (*podConn, error) {
	c := &podConn{link: l, raw: raw, peer: peer, pingID: 1, pings: make(chan uint32, maxOwedPings)}
	if ws, ok := l.(*webSocket); ok {
		ws.pong = c.owePong
	}
	if err := c.open(ctx, o); err != nil {
		return nil, err
	}
	c.pingTimer = time.AfterFunc(time.Hour, c.ping)
	c.pingTimer.Reset(pingPeriod) // ping itself uses pingTimer
	return c, nil
}

// open opens both streams, in place of those before. It returns when the container runtime has accepted them, or has
// ended them already: Read returns the cause.
func (c *podConn) open(ctx context.Context, o *opener) error {
	stop := context.AfterFunc(ctx, func() { c.raw.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	base, opening, err := o.next()
	if err != nil {
		return err
	}
	c.writeMu.Lock()
	c.attempt = attempt{base: base}
	c.failed.Store(nil)
	err = c.send(opening)
	c.unlockWrite()
	// spdystream in the runtime blocks forever if the connection closes before both replies. The pod's first bytes may
	// arrive between them.
	for err == nil && !(c.replied[dataStream] && c.replied[errorStream]) && !c.inData() && c.readErr == nil {
		err = c.advance()
	}
	if !stop() {
		return context.Cause(ctx)
	}
	if c.over() {
		return nil
	}
	return err
}

// Read implements net.Conn. Only one goroutine may call it at a time. It returns io.EOF after the pod's FIN, a
// *RefusedError if the error stream has one, syscall.ECONNRESET after a reset, net.ErrClosed after Close, and
// os.ErrDeadlineExceeded after the deadline.
func (c *podConn) Read(p []byte) (int, error) {
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
		return &net.OpError{Op: "read", Net: c.peer.Network(), Addr: c.peer, Err: os.ErrDeadlineExceeded}
	}
	if err == io.EOF && c.readErr == nil && !c.ended[dataStream] { // the link ended without the stream's FIN
		err = io.ErrUnexpectedEOF
	}
	return c.end(err)
}

// inData reports whether the next bytes are payload of the data stream.
func (c *podConn) inData() bool {
	f := &c.frame
	return f.headN == spdyHeader && !f.control() && f.stream()-c.base == dataStream && f.left > 0
}

// advance reads at most one frame, up to the payload of the data stream. An error ends the stream.
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
	if stream := done.stream() - c.base; done.fin() && stream < uint32(len(c.ended)) {
		return c.finish(stream)
	}
	return nil
}

// consume reads some payload of a frame of another stream, or of a control frame.
func (c *podConn) consume() error {
	f := &c.frame
	var scratch [512]byte
	n, err := c.link.Read(scratch[:min(len(scratch), f.left)])
	f.left -= n
	got := scratch[:n]
	switch {
	case f.control():
		f.noteN += copy(f.note[f.noteN:], got)
	case f.stream()-c.base == errorStream:
		c.refusal = append(c.refusal, got[:min(n, maxRefusal-len(c.refusal))]...)
	}
	if n > 0 {
		return nil
	}
	return err
}

// finish records the end of a stream. containerd ends the data stream before it sends the cause on the error stream. So
// if the data stream ends without a byte, Read waits for the end of the error stream.
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
	id := binary.BigEndian.Uint32(f.note[:]) & 0x7fffffff
	stream := id - c.base
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
		case stream == dataStream:
			c.ended[stream] = true
			if len(c.refusal) > 0 {
				return c.refused()
			}
			return c.end(&net.OpError{Op: "read", Net: c.peer.Network(), Addr: c.peer, Err: syscall.ECONNRESET})
		}
	case spdy.TypePing:
		if f.noteN < 4 {
			return fmt.Errorf("%w: PING of %d bytes", errSPDY, f.noteN)
		}
		if id%2 == 0 { // the peer's; ours are odd
			c.owePing(id)
		}
	case spdy.TypeGoAway:
		return c.end(io.ErrUnexpectedEOF)
	}
	return nil // HEADERS, SETTINGS and WINDOW_UPDATE do not matter
}

func (c *podConn) refused() error {
	return c.end(&RefusedError{Pod: c.peer.pod, Port: c.peer.port, Message: strings.TrimSpace(string(c.refusal))})
}

// end makes every later Read return err, and Write too, unless it is io.EOF: after the pod's FIN, the other direction
// stays open.
func (c *podConn) end(err error) error {
	c.readErr = err
	if err != io.EOF {
		c.failed.CompareAndSwap(nil, &err)
	}
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

// Is compares the text of the message, because only text crosses the API server.
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
	network string // "port-forward" or "api-proxy"
	pod     string // namespace/name
	port    uint16
}

func (a podAddr) Network() string { return a.network }
func (a podAddr) String() string  { return a.pod + ":" + strconv.Itoa(int(a.port)) }
