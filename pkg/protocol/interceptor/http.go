package interceptor

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"kubevpn/pkg/protocol/httpmatch"
	"kubevpn/pkg/wire/authlistener"
)

// maxHead is the largest head of a request or an answer, in bytes.
const maxHead = 1 << 20

// newServer returns the server of one connection of HTTP/2. ctx is that of its requests.
func (i *Interceptor) newServer(ctx context.Context, limits limits2) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler:           http.HandlerFunc(i.serveRequest),
		Protocols:         protocols,
		MaxHeaderBytes:    limits.head,
		ReadHeaderTimeout: headTimeout,
		HTTP2:             &limits.HTTP2Config,
		// "OPTIONS *" is a request like others.
		DisableGeneralOptionsHandler: true,
		BaseContext:                  func(net.Listener) context.Context { return ctx },
		ConnState: func(c net.Conn, s http.ConnState) {
			if s == http.StateIdle || s == http.StateActive {
				c.(*clientConn).setIdle(s == http.StateIdle)
			}
		},
		ErrorLog: slog.NewLogLogger(i.log.Handler(), slog.LevelDebug),
	}
}

type connKey struct{}

// clientConn is a client's HTTP connection. net/http's server owns, reads and writes one of HTTP/2.
type clientConn struct {
	net.Conn
	i       *Interceptor
	flow    Flow
	prefix  []byte // bytes already read
	head    *authlistener.Held
	http2   bool
	tls     bool // the interceptor terminated its TLS
	dial    dialer
	checks  []httpmatch.Check
	mirrors *mirrors
	closed  chan struct{}
	life    context.Context // ends with ServeConn

	closing sync.Once
	running sync.WaitGroup // requests of HTTP/2 in progress

	mu       sync.Mutex
	idle     bool // no request is being read or answered
	draining bool // the connection ends as soon as it is idle
	ended    bool // no request of HTTP/2 may begin

	// HTTP/1.
	own       *stream
	watch     watch                // of the client while it waits for an answer
	raw       []byte               // the head of the current request
	unread    bool                 // the current request was not read to its end
	upstreams map[Target]*upstream // idle; the key of the application's is nil
	last      Target               // of the latest request
	fin       bool                 // the client's FIN came in the middle of a request
	gone      bool                 // the client's connection broke off in the middle of a request
	current   *upstream            // of the current request
	whole     bool                 // current has received all of the request, and may get a FIN

	transports map[transportKey]*http.Transport
	conns      map[*trackedConn]struct{} // of transports; nil after closeTransports
	met        *trackedConn              // the first to the application
	first      *http.ClientConn          // over met; nil: there is none
	frames     frames
}

// serveHTTP serves a connection with HTTP until it ends.
func (i *Interceptor) serveHTTP(ctx, hard context.Context, c *clientConn) {
	c.i = i
	if c.dial == nil {
		c.dial = i.dial
	}
	c.closed = make(chan struct{})
	c.upstreams = make(map[Target]*upstream)
	c.conns = make(map[*trackedConn]struct{})
	c.checks = i.checks(c.flow)
	c.mirrors = newMirrors(hard, c.dial)
	var cancel context.CancelFunc
	c.life, cancel = context.WithCancel(hard)
	defer cancel()
	stop := context.AfterFunc(ctx, c.drain)
	defer stop()
	if c.http2 {
		c.frames.left = len(preface2)
		c.countFrames(c.prefix)
		// The error only says that the listener has no second connection.
		_ = i.newServer(context.WithValue(hard, connKey{}, c), c.meetApplication()).
			Serve(authlistener.One(c, c.closed))
	} else {
		c.serve1()
	}
	c.finish()
}

// serveRequest is the handler of the server.
func (i *Interceptor) serveRequest(w http.ResponseWriter, r *http.Request) {
	c := r.Context().Value(connKey{}).(*clientConn)
	if !c.begin() {
		panic(http.ErrAbortHandler)
	}
	defer c.running.Done()
	c.head.Leave()
	t, mirrors := c.judge(r)
	p := c.record(r, t, mirrors)
	if p != nil {
		defer p.end()
		w = recordedWriter{w, p}
		if hasBody(r) {
			r.Body = recordedBody{r.Body, &p.request}
		}
	}
	c.serve2(w, r, t, copied(mirrors), p)
}

// judge returns where a request goes, and which claims get a copy.
func (c *clientConn) judge(r *http.Request) (t destination, mirrors []*Claim) {
	claims := c.i.config.Claims(c.flow.Protocol, c.flow.Dst.Port())
	if !slices.ContainsFunc(c.checks, func(k httpmatch.Check) bool { return k.Sends(r, c.flow.Dst) }) {
		t, mirrors = judge(claims, r)
	}
	if c.i.config.Trace != nil {
		c.i.config.Trace(c.flow, r, claims, t.claim)
	}
	if !t.application() {
		t.claim.Stats.requests.Add(1)
	}
	return t, mirrors
}

// begin starts a request. It returns false if the connection has ended.
func (c *clientConn) begin() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ended {
		c.running.Add(1)
	}
	return !c.ended
}

// finish waits for the connection's requests and their copies, and closes the connections to destinations.
func (c *clientConn) finish() {
	c.mu.Lock()
	c.ended = true
	upstreams := c.upstreams
	c.upstreams = nil
	c.mu.Unlock()
	c.running.Wait()
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
	c.idle = idle
	over := idle && c.draining && !c.http2 // HTTP/2 has sent GOAWAY, and ends by itself
	c.mu.Unlock()
	if over {
		c.Close()
	}
}

// Read is for HTTP/2.
func (c *clientConn) Read(p []byte) (int, error) {
	if len(c.prefix) > 0 {
		n := copy(p, c.prefix)
		c.prefix = c.prefix[n:]
		return n, nil
	}
	n, err := c.Conn.Read(p)
	c.countFrames(p[:n])
	return n, err
}

// SetReadDeadline is for HTTP/2.
func (c *clientConn) SetReadDeadline(t time.Time) error {
	if c.frames.size > 0 { // countFrames has set one
		return nil
	}
	return c.Conn.SetReadDeadline(t)
}

// Close closes the connection. It may be called several times.
func (c *clientConn) Close() error {
	err := c.Conn.Close()
	c.closing.Do(func() { close(c.closed) })
	return err
}

// abort resets the client's connection and ends the request.
func (c *clientConn) abort() {
	reset(c.Conn)
	panic(http.ErrAbortHandler)
}

// fail answers a request of HTTP/2 whose target failed.
func (c *clientConn) fail(w http.ResponseWriter, t destination, err error) {
	t.claim.Stats.failed(err)
	h := w.Header()
	clear(h)
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(http.StatusBadGateway)
	io.WriteString(w, failure(c.flow, err))
}
