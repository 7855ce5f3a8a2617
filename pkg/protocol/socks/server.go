// Package socks serves the protocols of forward proxies on one listener: SOCKS5 (RFC 1928) with CONNECT and UDP
// ASSOCIATE, and HTTP with CONNECT and requests for http URLs. The first byte of a conn tells which one it speaks.
//
//	conn ── first byte ─┬─ 5 ─▶ SOCKS5 ─▶ user and password (RFC 1929) ─┬─ CONNECT ───────▶ Dial tcp
//	                    │                                               └─ UDP ASSOCIATE ─▶ Dial udp, per target
//	                    └─ else ─▶ HTTP ─┬─ CONNECT, http://... ─▶ user and password ─▶ Dial tcp
//	                                     ├─ the path of Config.Page ─▶ the page
//	                                     └─ any other path ─▶ 403
//
// Every client needs the user and the password. A web page in a browser does not have them, and can only send requests
// for a path. Other users of this machine do not have them either. UDP has no credentials: an association serves the
// first socket of the client's address that sends to it.
//
// Config.Dial receives host names as the client sent them, so that they resolve where the target is.
package socks

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"kubevpn/pkg/wire/authlistener"
)

const (
	// handshakeTimeout limits the time until a client has sent its request, or the header of an HTTP request.
	handshakeTimeout = 10 * time.Second
	// dialTimeout limits Config.Dial.
	dialTimeout = 30 * time.Second
	// idleTimeout limits how long an HTTP conn waits for the next request, and an idle target of UDP stays open.
	idleTimeout = 2 * time.Minute
	// maxPending limits the conns that have not shown the credentials. The Server closes the oldest.
	maxPending = 256
)

// Config configures New. User, Password and Dial must be set.
type Config struct {
	User, Password string
	// Dial connects to HOST:PORT. network is "tcp" or "udp"; a conn of "udp" has one datagram per Read and Write. The
	// client learns from the error whether the target refused, was unreachable or did not answer.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Modify, if not nil, may change the headers of a request for an http URL before it is sent. It may be called
	// concurrently.
	Modify func(*http.Request)
	// Page, if not nil, answers HTTP requests for PagePath. It needs no credentials, so the path should be a secret.
	Page     http.Handler
	PagePath string
	Logger   *slog.Logger // nil: slog.Default
}

// Server serves one proxy.
type Server struct {
	cfg       Config
	log       *slog.Logger
	handshake time.Duration      // its timeout
	pending   authlistener.Bound // conns that have not shown the credentials
}

// New returns a Server. It starts nothing.
func New(c Config) *Server {
	return &Server{cfg: c, log: cmp.Or(c.Logger, slog.Default()), handshake: handshakeTimeout,
		pending: authlistener.Bound{Max: maxPending}}
}

// Serve serves the conns of l until ctx ends, which returns nil, or until l fails. It closes l and all conns, and
// returns after the last of them has ended.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	defer l.Close()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	transport := s.transport()
	defer transport.CloseIdleConnections()
	server := s.httpServer(ctx, transport)
	defer server.Close()
	return authlistener.Serve(ctx, l, s.log, func(conn net.Conn) {
		c := &clientConn{Conn: conn, pending: s.pending.Enter(conn), closed: make(chan struct{})}
		running.Go(func() { s.serveConn(ctx, c, server) })
	})
}

// serveConn serves one conn until it ends, and closes it.
func (s *Server) serveConn(ctx context.Context, c *clientConn, web *http.Server) {
	defer c.pending.Leave()
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	if err := c.SetReadDeadline(time.Now().Add(s.handshake)); err != nil {
		return
	}
	first := make([]byte, 1)
	if _, err := io.ReadFull(c.Conn, first); err != nil {
		return
	}
	if first[0] == version5 {
		if err := s.serveSOCKS(ctx, c.Conn, c.pending); err != nil {
			s.log.Debug("a client of the proxy", "client", c.RemoteAddr(), "err", err)
		}
		return
	}
	c.from = io.MultiReader(bytes.NewReader(first), c.Conn)
	_ = web.Serve(authlistener.One(c, c.closed)) // the error only says that there is no second conn
}

// allows reports whether the credentials are right. Its duration does not depend on them.
func (s *Server) allows(user, password string) bool {
	same := func(a, b string) int { // of equal length, whatever the client sends
		x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
		return subtle.ConstantTimeCompare(x[:], y[:])
	}
	return same(user, s.cfg.User)&same(password, s.cfg.Password) == 1
}

// dial is Config.Dial with a timeout.
func (s *Server) dial(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	return s.cfg.Dial(ctx, network, address)
}

// clientConn is a conn whose first byte has been read. The HTTP server reads it again.
type clientConn struct {
	net.Conn
	from    io.Reader // the first byte, and then those of Conn
	pending *authlistener.Held
	once    sync.Once
	closed  chan struct{}
}

func (c *clientConn) Read(p []byte) (int, error) { return c.from.Read(p) }

func (c *clientConn) CloseWrite() error { return closeWrite(c.Conn) }

func (c *clientConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() { close(c.closed) })
	return err
}

// Relay copies between a client and a target until both directions have ended, and closes both conns. A half-close
// crosses unchanged. from reads the bytes of the client.
func Relay(ctx context.Context, client, target net.Conn, from io.Reader) {
	end := func() {
		client.Close()
		target.Close()
	}
	defer end()
	defer context.AfterFunc(ctx, end)()
	var upstream sync.WaitGroup
	upstream.Go(func() {
		if _, err := io.Copy(target, from); err != nil || closeWrite(target) != nil {
			end()
		}
	})
	if _, err := io.Copy(client, target); err != nil || closeWrite(client) != nil {
		end()
	}
	upstream.Wait()
}

// closeWrite sends the end of the stream. It fails if the conn has no half-close.
func closeWrite(c net.Conn) error {
	if half, ok := c.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}
