package interceptor

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
)

// transportKey identifies a transport among those of one client: by the destination and the HTTP version.
type transportKey struct {
	target Target // nil: the application
	mirror bool
	major  int
}

// transport returns net/http's client for requests to t. It uses one connection, or more if HTTP/2 has too many
// concurrent requests for one. Mirrors have HTTP/1 connections as well.
func (c *clientConn) transport(t destination, major int) http.RoundTripper {
	key := transportKey{t.target(), !t.application() && t.claim.Mirror, major}
	c.mu.Lock()
	defer c.mu.Unlock()
	if rt := c.transports[key]; rt != nil {
		return rt
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(major == 1)
	protocols.SetUnencryptedHTTP2(major != 1)
	rt := &http.Transport{
		Protocols:              protocols,
		DisableCompression:     true,
		MaxResponseHeaderBytes: maxHead,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			// net/http continues to dial after the request has ended.
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			defer context.AfterFunc(c.life, cancel)()
			conn, err := c.dial(ctx, t, c.flow)
			if err != nil {
				return nil, &dialError{err}
			}
			return c.track(conn, t)
		},
	}
	if c.transports == nil {
		c.transports = make(map[transportKey]*http.Transport)
	}
	c.transports[key] = rt
	return rt
}

// settingsTimeout limits the wait for the application's SETTINGS, which a server sends at once (RFC 9113, 3.4).
const settingsTimeout = 500 * time.Millisecond

// limits2 are those of a connection of HTTP/2, and the longest head.
type limits2 struct {
	http.HTTP2Config
	head int
}

// meetApplication connects to the application, and returns its limits: the client must not notice that another server
// answers it. The memory of a connection is bounded, because the window of all its streams together is that of
// net/http: 1 MiB. Without an application, some limits are needed as well.
func (c *clientConn) meetApplication() limits2 {
	l := limits2{http.HTTP2Config{MaxConcurrentStreams: 1000, MaxReadFrameSize: 16 << 10}, maxHead}
	ctx, cancel := context.WithTimeout(c.life, settingsTimeout)
	defer cancel()
	first, err := c.transport(destination{}, 2).(*http.Transport).NewClientConn(ctx, "http", c.flow.Dst.String())
	if err != nil {
		c.i.log.Debug("cannot meet the application", "client", c.flow.Client, "port", c.flow.Dst.Port(), "error", err)
		return l
	}
	c.first = first
	c.mu.Lock()
	met := c.met
	c.mu.Unlock()
	select {
	case <-met.greeted:
	case <-ctx.Done():
		return l
	}
	l.MaxConcurrentStreams, l.MaxReceiveBufferPerStream = maxStreams, 64<<10-1 // without a word of the application
	for _, s := range met.settings {
		n := int(s.Val)
		switch s.ID {
		case http2.SettingMaxConcurrentStreams:
			l.MaxConcurrentStreams = min(max(n, 1), maxStreams)
		case http2.SettingInitialWindowSize:
			l.MaxReceiveBufferPerStream = min(max(n, 1), 4<<20-1)
		case http2.SettingMaxFrameSize:
			l.MaxReadFrameSize = min(n, maxHead)
		case http2.SettingMaxHeaderListSize:
			l.head = min(max(n-listOverhead, 1), maxHead)
		}
	}
	return l
}

const (
	maxStreams   = 1 << 20 // of one connection: no limit
	listOverhead = 320     // that net/http adds to MaxHeaderBytes when it announces it
)

// trackedConn is a connection of a transport. It ends with the client's.
type trackedConn struct {
	net.Conn
	c           *clientConn
	application bool

	frame    []byte          // the first frame of the other end, so far; used by Read
	settings []http2.Setting // of it; valid when greeted
	greeted  chan struct{}
}

// Read looks at the first frame.
func (t *trackedConn) Read(p []byte) (int, error) {
	n, err := t.Conn.Read(p)
	select {
	case <-t.greeted:
		return n, err
	default:
	}
	t.frame = append(t.frame, p[:n]...)
	f, parsing := http2.NewFramer(nil, bytes.NewReader(t.frame)).ReadFrame()
	if errors.Is(parsing, io.ErrUnexpectedEOF) || errors.Is(parsing, io.EOF) {
		if err == nil && len(t.frame) < 16<<10 {
			return n, err // it has not come yet
		}
	} else if f, ok := f.(*http2.SettingsFrame); ok {
		for i := range f.NumSettings() {
			t.settings = append(t.settings, f.Setting(i))
		}
	}
	t.frame = nil
	close(t.greeted)
	return n, err
}

func (c *clientConn) track(conn net.Conn, t destination) (net.Conn, error) {
	tracked := &trackedConn{Conn: conn, c: c, application: t.application(), greeted: make(chan struct{})}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conns == nil { // after closeTransports
		conn.Close()
		return nil, net.ErrClosed
	}
	c.conns[tracked] = struct{}{}
	if c.met == nil && tracked.application {
		c.met = tracked
	} else {
		close(tracked.greeted)
	}
	return tracked, nil
}

// Close closes the connection. The transport also calls it when the other end has sent GOAWAY and all answers. If that
// is the application, the client's connection drains too: the client gets GOAWAY, or the end of the connection if
// there is no request.
func (t *trackedConn) Close() error {
	err := t.Conn.Close()
	c := t.c
	c.mu.Lock()
	_, mine := c.conns[t]
	delete(c.conns, t)
	c.mu.Unlock()
	if mine && t.application {
		c.drain()
	}
	return err
}

func (c *clientConn) closeTransports() {
	c.mu.Lock()
	conns := c.conns
	c.conns = nil
	c.mu.Unlock()
	for conn := range conns {
		conn.Close()
	}
}

// requestBody is a request's body for an upstream and for copies.
type requestBody struct {
	io.ReadCloser
	begun, closed atomic.Bool
	copies        copies
}

func (b *requestBody) Read(p []byte) (int, error) {
	b.begun.Store(true)
	if b.closed.Load() { // the answer was there first, and nobody would end this read
		return 0, http.ErrBodyReadAfterClose
	}
	n, err := b.ReadCloser.Read(p)
	b.copies.put(p[:n])
	if err != nil {
		b.copies.end(err)
	}
	return n, err
}

// Close keeps a body open that was not read: net/http closes it also when another attempt may follow.
func (b *requestBody) Close() error {
	b.closed.Store(true)
	if b.begun.Load() {
		return b.ReadCloser.Close()
	}
	return nil
}

// serve2 answers an HTTP/2 request.
func (c *clientConn) serve2(w http.ResponseWriter, r *http.Request, t destination, mirrors []*Claim, p *recording) {
	began, host := time.Now(), c.flow.Dst.String()
	body := &requestBody{ReadCloser: r.Body, copies: c.mirrors.request(r, mirrors, host, c.transport)}
	defer body.copies.end(errBroken) // no effect if they have ended
	if !hasBody(r) {
		body.copies.end(nil)
	}
	resp, err := c.roundTrip(w, r, t, body, host)
	var notDialed *dialError
	if err != nil && r.Context().Err() == nil && wentAway(t, err) && errors.As(err, &notDialed) && !body.begun.Load() {
		t = destination{}
		resp, err = c.roundTrip(w, r, t, body, host)
	}
	if err == nil {
		defer resp.Body.Close()
		if c.isDraining() {
			w.Header().Set("Connection", "close") // GOAWAY
		}
		if t.noStore(r.Method) {
			for _, name := range cacheHeaders {
				resp.Header.Del(name)
			}
			resp.Header.Set(cacheHeaders[0], noStore)
		}
		err = relay(w, resp)
	}
	var trailer http.Header
	if p != nil {
		trailer = recordedWriter{w, p}.trailer()
	}
	p.note(t, err, trailer)
	if err == nil {
		return
	}
	c.i.log.DebugContext(r.Context(), "an exchange failed", "client", c.flow.Client, "port", c.flow.Dst.Port(), "error",
		err)
	var stream http2.StreamError
	var client errClient
	switch {
	case r.Context().Err() != nil, errors.As(err, &client):
		panic(http.ErrAbortHandler)
	case errors.As(err, &stream) && stream.Code == http2.ErrCodeCancel && isGRPC(r):
		endCall(w, r, began, resp != nil)
	case !t.application() && resp == nil:
		c.fail(w, t, err)
	case !t.application():
		t.claim.Stats.failed(err)
		panic(http.ErrAbortHandler)
	case errors.As(err, &stream):
		panic(http.ErrAbortHandler)
	default: // the connection is lost, not only this request
		c.abort()
	}
}

func isGRPC(r *http.Request) bool {
	return strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc")
}

// grpcUnits makes the units of Grpc-Timeout those of time.ParseDuration.
var grpcUnits = strings.NewReplacer("H", "h", "M", "m", "S", "s", "m", "ms", "u", "us", "n", "ns")

// endCall ends a gRPC call whose server reset the stream with CANCEL, which is how a server says that the call's
// deadline has passed. net/http resets streams with INTERNAL_ERROR only, so the client gets the status that it would
// make of CANCEL. https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md#errors
func endCall(w http.ResponseWriter, r *http.Request, began time.Time, answered bool) {
	const canceled, deadlineExceeded = "1", "4"
	status := canceled
	timeout, err := time.ParseDuration(grpcUnits.Replace(r.Header.Get("Grpc-Timeout")))
	if err == nil && time.Since(began) >= timeout {
		status = deadlineExceeded
	}
	name := http.TrailerPrefix + "Grpc-Status"
	if !answered {
		clear(w.Header())
		w.Header().Set("Content-Type", "application/grpc")
		name = "Grpc-Status" // an answer of only trailers sends them as headers
	}
	w.Header().Set(name, status)
}

func (c *clientConn) roundTrip(w http.ResponseWriter, r *http.Request, t destination, body *requestBody,
	host string) (*http.Response, error) {
	h := w.Header()
	ctx := httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
			if code == http.StatusContinue { // net/http sends its own when the handler reads the body
				return nil
			}
			copyHeader(h, http.Header(header))
			w.WriteHeader(code)
			clear(h)
			return nil
		},
	})
	out := outgoing(ctx, r, host)
	if t.application() && c.i.config.ForwardedFor {
		c.addForwardedFor(out.Header)
	}
	body.closed.Store(false) // by an attempt that has failed
	out.Body = body
	if !hasBody(r) {
		out.Body = http.NoBody
	}
	if t.application() && c.first != nil && c.first.Reserve() == nil {
		return c.first.RoundTrip(out)
	}
	return c.transport(t, r.ProtoMajor).RoundTrip(out)
}
