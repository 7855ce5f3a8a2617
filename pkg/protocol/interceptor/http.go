package interceptor

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"kubevpn/pkg/wire/authlistener"
)

// maxHead is the largest head of a request or an answer, in bytes.
const maxHead = 1 << 20

// closeTimeout is the time that a client gets to read the answer if its request was not read to its end.
const closeTimeout = 500 * time.Millisecond

// newServer returns the server to which serveHTTP gives connections one by one.
func (i *Interceptor) newServer() *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler:           http.HandlerFunc(i.serveRequest),
		Protocols:         protocols,
		MaxHeaderBytes:    maxHead,
		ReadHeaderTimeout: headTimeout,
		// The server keeps a buffer as long as the longest frame that a client has announced. This is HTTP/2's default.
		HTTP2: &http.HTTP2Config{MaxReadFrameSize: 16 << 10},
		// "OPTIONS *" is a request like others.
		DisableGeneralOptionsHandler: true,
		BaseContext: func(l net.Listener) context.Context {
			return context.WithValue(l.(*oneListener).ctx, connKey{}, l.(*oneListener).conn)
		},
		ConnState: func(c net.Conn, s http.ConnState) {
			if s == http.StateIdle || s == http.StateActive {
				c.(*clientConn).setIdle(s == http.StateIdle)
			}
		},
		ErrorLog: slog.NewLogLogger(i.log.Handler(), slog.LevelDebug),
	}
}

type connKey struct{}

// oneListener has one connection.
type oneListener struct {
	ctx   context.Context
	conn  *clientConn
	given bool
}

func (l *oneListener) Accept() (net.Conn, error) {
	if !l.given {
		l.given = true
		return l.conn, nil
	}
	<-l.conn.closed
	return nil, net.ErrClosed
}

func (l *oneListener) Close() error   { return nil }
func (l *oneListener) Addr() net.Addr { return l.conn.LocalAddr() }

// clientConn is a client's HTTP connection. net/http's server owns, reads and writes it.
type clientConn struct {
	net.Conn
	i       *Interceptor
	flow    Flow
	prefix  []byte // bytes already read
	head    *authlistener.Held
	http2   bool
	tls     bool // the interceptor terminated its TLS
	dial    dialer
	mirrors *mirrors
	closed  chan struct{}
	life    context.Context // ends with ServeConn

	closing sync.Once

	mu          sync.Mutex
	over        sync.Cond
	running     int  // requests in progress
	idle        bool // the server neither reads nor answers a request
	active      bool // the server has read a request, and answers it
	draining    bool // the connection ends as soon as it is idle
	ended       bool // no request may begin
	readStopped bool // Read returns io.EOF

	// HTTP/1.
	upstreams  map[Target]*upstream // idle; the key of the application's is nil
	last       Target               // of the latest request
	fin        bool                 // the client's FIN came in the middle of a request
	releaseFIN chan struct{}        // closed to make Read return; nil: Read does not hold a FIN back
	reading    bool                 // the server waits for the rest of a head
	headCost   int                  // the memory of what it has read of it; only Read uses it
	expired    bool                 // the deadline of Read has passed
	current    *upstream            // of the current request
	whole      bool                 // current has received all of the request

	transports map[transportKey]*http.Transport
	conns      map[*trackedConn]struct{} // of transports; nil after closeTransports
	frames     frames
}

// serveHTTP serves a connection with HTTP until it ends.
func (i *Interceptor) serveHTTP(ctx, hard context.Context, c *clientConn) {
	c.i = i
	if c.dial == nil {
		c.dial = i.dial
	}
	c.over.L = &c.mu
	c.closed = make(chan struct{})
	c.upstreams = make(map[Target]*upstream)
	c.conns = make(map[*trackedConn]struct{})
	c.mirrors = newMirrors(hard, c.dial)
	var cancel context.CancelFunc
	c.life, cancel = context.WithCancel(hard)
	defer cancel()
	stop := context.AfterFunc(ctx, c.drain)
	defer stop()
	c.headCost = connCost + headCost(c.prefix)
	if c.http2 {
		c.frames.left = len(preface2)
		c.countFrames(c.prefix)
	}
	// The error only says that the listener has no second connection.
	_ = i.server.Serve(&oneListener{ctx: hard, conn: c})
	c.finish()
}

// serveRequest is the handler of the server.
func (i *Interceptor) serveRequest(w http.ResponseWriter, r *http.Request) {
	c := r.Context().Value(connKey{}).(*clientConn)
	if !c.begin() {
		panic(http.ErrAbortHandler)
	}
	defer c.end()
	c.head.Leave()
	// net/http passes the preface of HTTP/2 to handlers if it follows a request.
	if r.ProtoMajor >= 2 && r.Method == "PRI" {
		w.Header().Set("Connection", "close")
		http.Error(w, "kubevpn: HTTP/2 begins with the connection", http.StatusHTTPVersionNotSupported)
		return
	}
	claims := i.config.Claims(c.flow.Protocol, c.flow.Dst.Port())
	t, mirrors := judge(claims, r)
	if i.config.Trace != nil {
		i.config.Trace(c.flow, r, claims, t.claim)
	}
	if !t.application() {
		t.claim.Stats.requests.Add(1)
	}
	if p := c.record(w, r, t, mirrors); p != nil {
		defer p.end()
		w = p
	}
	mirrors = copied(mirrors)
	if r.ProtoMajor >= 2 {
		c.serve2(w, r, t, mirrors)
	} else {
		c.serve1(w, r, t, mirrors)
	}
}

// begin starts a request. It returns false if the connection has ended.
func (c *clientConn) begin() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return false
	}
	c.running++
	return true
}

func (c *clientConn) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running--
	c.over.Signal()
}

// finish waits for the connection's requests and their copies, and closes the connections to destinations.
func (c *clientConn) finish() {
	c.mu.Lock()
	c.ended = true
	for c.running > 0 {
		c.over.Wait()
	}
	upstreams := c.upstreams
	c.upstreams = nil
	c.mu.Unlock()
	for _, u := range upstreams {
		u.discard()
	}
	c.mirrors.wait()
	c.closeTransports()
}

// drain makes the connection end as soon as it is idle.
func (c *clientConn) drain() {
	c.mu.Lock()
	c.draining = true
	idle := c.idle
	c.mu.Unlock()
	if idle {
		c.Close()
	}
}

func (c *clientConn) isDraining() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.draining
}

func (c *clientConn) setIdle(idle bool) {
	c.mu.Lock()
	c.idle, c.active = idle, !idle
	over := idle && c.draining && !c.http2 // HTTP/2 has sent GOAWAY, and ends by itself
	c.mu.Unlock()
	if over {
		c.Close()
	}
}

// Read holds the client's FIN back while the server answers a request, because net/http's server would take it for the
// end of the connection. Many clients send FIN after the request, and wait for the answer. The upstream gets the FIN
// as well, and decides.
//
// At such a time the server reads one byte, to detect the connection's end. It may also read one byte of a head.
func (c *clientConn) Read(p []byte) (int, error) {
	if len(c.prefix) > 0 {
		n := copy(p, c.prefix)
		c.prefix = c.prefix[n:]
		return n, nil
	}
	c.mu.Lock()
	readStopped, active, reading := c.readStopped, c.active, c.reading
	c.mu.Unlock()
	if readStopped {
		return 0, io.EOF
	}
	if reading {
		c.head.SetCost(c.headCost)
	}
	n, err := c.Conn.Read(p)
	switch {
	case reading:
		if c.headCost == connCost {
			c.Conn.SetReadDeadline(time.Now().Add(headTimeout))
		}
		c.headCost += headCost(p[:n])
	case !active && !c.http2:
		c.headCost = connCost + headCost(p[:n])
	}
	if c.http2 {
		c.countFrames(p[:n])
	}
	if err == io.EOF && len(p) == 1 && active && !c.http2 {
		return 0, c.holdFIN()
	}
	return n, err
}

func (c *clientConn) holdFIN() error {
	releaseFIN := make(chan struct{})
	c.mu.Lock()
	c.fin = true
	c.passFIN()
	expired := c.expired
	if !expired {
		c.releaseFIN = releaseFIN
	}
	c.mu.Unlock()
	if expired { // the deadline passed after the FIN
		return os.ErrDeadlineExceeded
	}
	select {
	case <-releaseFIN:
		return os.ErrDeadlineExceeded
	case <-c.closed:
		return net.ErrClosed
	}
}

// passFIN forwards the client's FIN after the request. Call with mu held.
func (c *clientConn) passFIN() {
	if c.fin && c.whole && c.current != nil {
		if err := closeWrite(c.current.Conn); err != nil {
			c.i.log.Debug("cannot forward a FIN", "client", c.flow.Client, "error", err)
		}
	}
}

// SetReadDeadline ends a Read that holds a FIN back. The server sets a deadline in the future only for a head, of
// HTTP/1 or the first of a connection.
func (c *clientConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	c.expired = !t.IsZero() && !t.After(time.Now())
	c.reading = !t.IsZero() && !c.expired
	if c.releaseFIN != nil && c.expired {
		close(c.releaseFIN)
		c.releaseFIN = nil
	}
	if c.reading && c.headCost == connCost { // no byte of it has come: how long that may take, the application chooses
		t = time.Time{}
	}
	c.mu.Unlock()
	if c.frames.size > 0 { // countFrames has set one
		return nil
	}
	return c.Conn.SetReadDeadline(t)
}

// stopReading makes the client's connection end after the answer, without reading the rest of the request.
func (c *clientConn) stopReading() {
	c.mu.Lock()
	c.readStopped = true
	c.mu.Unlock()
	c.SetReadDeadline(time.Unix(1, 0))
}

// ReadFrom is for long bodies: between two TCP connections the kernel moves the bytes.
func (c *clientConn) ReadFrom(r io.Reader) (int64, error) { return io.Copy(c.Conn, r) }

// Close closes the connection. The server calls it.
func (c *clientConn) Close() error {
	c.mu.Lock()
	readStopped := c.readStopped
	c.mu.Unlock()
	if readStopped && closeWrite(c.Conn) == nil {
		// A close with unread bytes would reset the client's connection, and the client might lose the answer.
		c.Conn.SetReadDeadline(time.Now().Add(closeTimeout))
		_, _ = io.CopyN(io.Discard, c.Conn, maxDiscard)
	}
	err := c.Conn.Close()
	c.closing.Do(func() { close(c.closed) })
	return err
}

// CloseWrite sends FIN. The server calls it when it ends a connection to which the client may still write.
func (c *clientConn) CloseWrite() error { return closeWrite(c.Conn) }

// abort resets the client's connection and ends the request.
func (c *clientConn) abort() {
	reset(c.Conn)
	panic(http.ErrAbortHandler)
}

// fail answers a request whose target failed.
func (c *clientConn) fail(w http.ResponseWriter, t destination, err error) {
	t.claim.Stats.failed(err)
	h := w.Header()
	clear(h)
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(http.StatusBadGateway)
	fmt.Fprintf(w, "kubevpn: this request to port %d is intercepted, and its owner's port did not answer: %v\n",
		c.flow.Dst.Port(), err)
}
