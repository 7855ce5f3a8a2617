package interceptor

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// watchAfter is how long a connection is idle before its watcher starts. Between requests that follow each other
	// closely there is no watcher, because it costs more than the request.
	watchAfter = 50 * time.Millisecond
	// continueTimeout is how long a client with "Expect: 100-continue" waits for an upstream that does not send 100.
	continueTimeout = time.Second
	// uploadTimeout is how long an upload may stand still after its answer has ended.
	uploadTimeout = time.Second
	// maxDiscard is how many bytes of a request are read and dropped after the upstream stops reading, so that the
	// client gets the answer.
	maxDiscard = 256 << 10
)

var errHeadTooLong = errors.New("the head of the answer is longer than 1 MiB")

var (
	// notCopied are the headers of a request that are hop-by-hop or that this package writes itself.
	notCopied = with(hopByHop, "Content-Length", "Http2-Settings")
	// notInTrailer are the fields that say where a message ends or goes. A trailer comes too late for them, and a
	// reader must not take them from there.
	notInTrailer = with(notCopied, "Host")
)

// with returns a copy of names with more names.
func with(names map[string]bool, more ...string) map[string]bool {
	names = maps.Clone(names)
	for _, name := range more {
		names[name] = true
	}
	return names
}

var (
	readers = sync.Pool{New: func() any { return bufio.NewReader(nil) }}
	writers = sync.Pool{New: func() any { return bufio.NewWriter(nil) }}
)

// upstream is a connection on which one client's HTTP/1 requests go to one destination, one after the other.
//
//	        take                     rest
//	idle ─────────▶ exchange ──────────────────▶ idle       ended by the other end: its watcher discards it
//	                   └── error, or no more ──▶ discarded
type upstream struct {
	net.Conn
	br    *bufio.Reader
	bw    *bufio.Writer
	limit int64       // bytes that may be read
	seen  atomic.Bool // the first byte of the answer has arrived
	used  bool        // for an earlier request

	chunk  [3][]byte // the pieces that writeBody writes
	pieces net.Buffers

	onEnd   func()        // the watcher calls it
	timer   *time.Timer   // starts the watcher
	watched chan struct{} // capacity 1: the watcher has ended
	dead    bool          // the watcher saw the end
}

func newUpstream(conn net.Conn, onEnd func(*upstream)) *upstream {
	u := &upstream{Conn: conn, watched: make(chan struct{}, 1)}
	u.br, u.bw = readers.Get().(*bufio.Reader), writers.Get().(*bufio.Writer)
	u.br.Reset(u)
	u.bw.Reset(conn)
	u.onEnd = func() { onEnd(u) }
	return u
}

// Read is for br.
func (u *upstream) Read(p []byte) (int, error) {
	if u.limit <= 0 {
		return 0, errHeadTooLong
	}
	n, err := u.Conn.Read(p[:min(int64(len(p)), u.limit)])
	u.limit -= int64(n)
	if n > 0 {
		u.seen.Store(true)
	}
	return n, err
}

// waits reports whether a Read may have to wait for the other end.
func (u *upstream) waits() bool { return u.br.Buffered() == 0 }

// rest makes the connection idle.
func (u *upstream) rest() {
	u.used = true
	u.limit = 1
	u.seen.Store(false)
	if u.timer == nil {
		u.timer = time.AfterFunc(watchAfter, u.watch)
	} else {
		u.timer.Reset(watchAfter)
	}
}

// watch waits for the other end of an idle connection to close it.
func (u *upstream) watch() {
	_, err := u.br.Peek(1)
	dead := !errors.Is(err, os.ErrDeadlineExceeded)
	u.dead = dead
	u.watched <- struct{}{} // from here on u.dead belongs to the next watcher
	if dead {
		u.onEnd()
	}
}

// wake ends the idle state. It returns false if the other end has closed the connection.
func (u *upstream) wake() bool {
	if !u.timer.Stop() {
		u.SetReadDeadline(time.Unix(1, 0))
		<-u.watched
		u.SetReadDeadline(time.Time{})
	}
	return !u.dead
}

// discard closes an idle connection.
func (u *upstream) discard() {
	u.wake()
	u.close()
}

// close closes the connection. Afterwards only abort may be called.
func (u *upstream) close() {
	u.Conn.Close()
	u.br.Reset(nil)
	u.bw.Reset(nil)
	readers.Put(u.br)
	writers.Put(u.bw)
	u.br, u.bw = nil, nil
}

func (u *upstream) abort() { reset(u.Conn) }

// upstream returns a connection to t, an idle one if there is one.
func (c *clientConn) upstream(ctx context.Context, t destination) (*upstream, error) {
	to := t.target()
	c.mu.Lock()
	u := c.upstreams[to]
	delete(c.upstreams, to)
	c.last = to
	c.mu.Unlock()
	if u != nil {
		if u.wake() {
			return u, nil
		}
		u.close()
	}
	conn, err := c.dial(ctx, t, c.flow)
	if err != nil {
		return nil, err
	}
	return newUpstream(conn, func(u *upstream) { c.upstreamEnded(to, u) }), nil
}

// upstreamEnded handles an idle connection that the other end has closed. If the other end is the application, the
// client's connection ends too, as it would without the agent.
func (c *clientConn) upstreamEnded(to Target, u *upstream) {
	c.mu.Lock()
	mine := c.upstreams[to] == u
	if mine {
		delete(c.upstreams, to)
	}
	closeClient := mine && to == nil && c.last == nil && c.idle
	c.mu.Unlock()
	if mine {
		u.close()
	}
	if closeClient {
		c.Close()
	}
}

// keep makes u idle, if the client's connection goes on.
func (c *clientConn) keep(t destination, u *upstream) {
	u.rest()
	c.mu.Lock()
	keep := !c.fin && !c.readStopped && c.upstreams != nil
	if keep {
		c.upstreams[t.target()] = u
	}
	c.mu.Unlock()
	if !keep {
		u.discard()
	}
}

// setCurrent notes which upstream has the current request.
func (c *clientConn) setCurrent(u *upstream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.current, c.whole = u, false
}

// sent notes that the upstream has all of the request.
func (c *clientConn) sent() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.whole = true
	c.passFIN()
}

// exchange is one HTTP/1 request and its answer.
type exchange struct {
	c      *clientConn
	w      http.ResponseWriter
	r      *http.Request
	t      destination
	copies copies

	upgrade  string // the protocols that the client asks to switch to
	upload   *upload
	answered bool // the client has a part of the answer
}

// serve1 answers an HTTP/1 request.
func (c *clientConn) serve1(w http.ResponseWriter, r *http.Request, t destination, mirrors []*Claim) {
	x := &exchange{c: c, w: w, r: r, t: t, upgrade: upgradeOf(r)}
	switch {
	case len(mirrors) == 0:
	case x.upgrade == "":
		x.copies = c.mirrors.request(r, mirrors, c.flow.Dst.String(), c.transport)
	default: // copy all bytes, because the connection may leave HTTP
		x.copies = c.mirrors.connection(c.flow, mirrors)
		var head bytes.Buffer
		bw := bufio.NewWriter(&head)
		x.writeHead(bw)
		bw.Flush()
		x.copies.put(head.Bytes())
	}
	if hasBody(r) {
		// Otherwise net/http reads the rest of the request before it sends an answer.
		if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
			c.i.log.DebugContext(r.Context(), "full duplex", "error", err)
		}
	}
	err := x.run()
	for err != nil && x.again(err) {
		err = x.run()
	}
	x.copies.end(err) // no effect if they have ended
	noteEnd(w, x.t, err)
	if err == nil {
		return
	}
	c.i.log.DebugContext(r.Context(), "an exchange failed", "client", c.flow.Client, "port", c.flow.Dst.Port(), "error",
		err)
	var client errClient
	switch {
	case !x.t.application() && !x.answered && r.Context().Err() == nil:
		c.fail(w, x.t, err)
	case errors.As(err, &client), r.Context().Err() != nil:
		panic(http.ErrAbortHandler)
	default:
		if !x.t.application() {
			x.t.claim.Stats.failed(err)
		}
		c.abort()
	}
}

// staleError is the end of a connection that was idle before, and carried no byte of an answer.
type staleError struct{ error }

func (e staleError) Unwrap() error { return e.error }

// again reports whether the exchange may be tried once more, and prepares x for that.
func (x *exchange) again(err error) bool {
	if x.answered || x.r.Context().Err() != nil || x.upload != nil && x.upload.begun.Load() {
		return false
	}
	var stale staleError
	var notDialed *dialError
	if errors.As(err, &stale) && x.repeatable() {
		return true
	}
	if !wentAway(x.t, err) || !errors.As(err, &notDialed) && !x.repeatable() {
		return false
	}
	x.t = destination{}
	return true
}

// repeatable reports whether the other end may receive the request twice without harm.
func (x *exchange) repeatable() bool {
	switch x.r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return !hasBody(x.r)
	}
	return false
}

func hasBody(r *http.Request) bool { return r.ContentLength != 0 }

// dialError means that the destination has received no byte of the request.
type dialError struct{ error }

func (e *dialError) Unwrap() error { return e.error }

// run tries the exchange with one upstream.
func (x *exchange) run() (err error) {
	ctx := x.r.Context()
	u, err := x.c.upstream(ctx, x.t)
	if err != nil {
		return &dialError{err}
	}
	x.c.setCurrent(u)
	defer x.c.setCurrent(nil)
	stop := context.AfterFunc(ctx, u.abort)
	defer stop()
	if !x.t.application() && x.repeatable() {
		// The application can answer if the owner is away, so do not wait for the owner.
		defer whenAway(x.t.claim.Target, func() {
			if !u.seen.Load() {
				u.abort()
			}
		})()
	}

	done, err := x.over(u)
	if err == nil && done && stop() {
		x.c.keep(x.t, u)
		return nil
	}
	if err != nil {
		stale := u.used && !u.seen.Load()
		u.abort()
		if stale {
			err = staleError{err}
		}
	}
	if x.upload != nil {
		if err != nil && (x.answered || x.t.application()) {
			x.c.stopReading() // the client's connection will be reset
		}
		x.upload.wait(x.c, u)
		if !x.upload.read {
			x.c.stopReading()
		}
	}
	u.close()
	return err
}

// over sends the request over u and relays the answer. done reports whether u can carry another request.
func (x *exchange) over(u *upstream) (done bool, err error) {
	u.limit = maxHead
	x.writeHead(u.bw)
	if err := u.bw.Flush(); err != nil {
		return false, fmt.Errorf("sending the request: %w", err)
	}
	x.upload = nil
	if hasBody(x.r) {
		x.upload = &upload{done: make(chan struct{}), wanted: make(chan bool, 1)}
		go x.upload.run(x, u)
	} else if x.upgrade == "" && x.r.Method != http.MethodConnect {
		// With an upgrade, the bytes that follow may be for the upstream.
		x.c.sent()
	}
	resp, err := x.readHead(u)
	if err != nil {
		return false, fmt.Errorf("waiting for the answer: %w", err)
	}
	if switches(x.r, resp) {
		return false, x.switchProtocols(u, resp)
	}
	u.limit = math.MaxInt64
	x.answered = true
	if x.t.application() && resp.Close || x.c.isDraining() {
		x.w.Header().Set("Connection", "close")
	}
	if err := relay(x.w, resp, u); err != nil {
		return false, err
	}
	if x.upload != nil && !x.upload.ended() {
		// The answer is complete, but net/http holds a part back until the handler returns.
		if err := http.NewResponseController(x.w).Flush(); err != nil {
			return false, errClient{err}
		}
		x.upload.wait(x.c, u)
	}
	return !resp.Close && u.br.Buffered() == 0 && (x.upload == nil || x.upload.whole), nil
}

// readHead reads the head of the answer, and relays informational answers before it.
func (x *exchange) readHead(u *upstream) (*http.Response, error) {
	for {
		u.limit = maxHead
		resp, err := http.ReadResponse(u.br, x.r)
		if x.upload != nil && (err != nil || resp.StatusCode == http.StatusContinue ||
			resp.StatusCode >= http.StatusOK) {
			x.upload.want(err == nil && resp.StatusCode == http.StatusContinue)
		}
		switch {
		case err != nil:
			return nil, err
		case resp.StatusCode == http.StatusContinue: // net/http sends its own when the handler reads the body
		case resp.StatusCode >= http.StatusOK || resp.StatusCode == http.StatusSwitchingProtocols:
			return resp, nil
		case x.r.ProtoAtLeast(1, 1):
			h := x.w.Header()
			copyHeader(h, resp.Header)
			x.w.WriteHeader(resp.StatusCode)
			clear(h)
		}
	}
}

// writeHead writes the request's head.
func (x *exchange) writeHead(w *bufio.Writer) {
	r := x.r
	for _, s := range []string{r.Method, " ", r.RequestURI, " HTTP/1.1\r\nHost: ", r.Host, "\r\n"} {
		w.WriteString(s)
	}
	h := r.Header
	if x.t.application() && x.c.i.config.ForwardedFor {
		h = h.Clone()
		x.c.addForwardedFor(h)
	}
	// w keeps its first error, and Flush returns it.
	_ = h.WriteSubset(w, x.excluded())
	switch {
	case r.ContentLength > 0, r.ContentLength == 0 && r.Header["Content-Length"] != nil:
		w.WriteString("Content-Length: ")
		w.Write(strconv.AppendInt(w.AvailableBuffer(), r.ContentLength, 10))
		w.WriteString("\r\n")
	case r.ContentLength < 0:
		w.WriteString("Transfer-Encoding: chunked\r\n")
		for name := range r.Trailer {
			w.WriteString("Trailer: " + name + "\r\n")
		}
	}
	if acceptsTrailers(r.Header) {
		w.WriteString("Te: trailers\r\n")
	}
	switch {
	case x.upgrade != "":
		w.WriteString("Connection: Upgrade\r\nUpgrade: " + x.upgrade + "\r\n")
	case r.Close:
		w.WriteString("Connection: close\r\n")
	}
	w.WriteString("\r\n")
}

// excluded returns the headers that writeHead does not copy.
func (x *exchange) excluded() map[string]bool {
	if h := x.r.Header["Connection"]; h == nil {
		return notCopied
	} else if len(h) == 1 && (strings.EqualFold(h[0], "keep-alive") || strings.EqualFold(h[0], "close")) {
		return notCopied
	}
	exclude := maps.Clone(notCopied)
	named(x.r.Header, func(name string) { exclude[name] = true })
	return exclude
}

// upgradeOf returns the protocols that the client asks to speak instead of HTTP/1.1. It omits HTTP/2, because judge
// would not see the requests that follow.
func upgradeOf(r *http.Request) string {
	if len(r.Header["Upgrade"]) == 0 || !r.ProtoAtLeast(1, 1) {
		return ""
	}
	asked := false
	named(r.Header, func(name string) { asked = asked || name == "Upgrade" })
	if !asked {
		return ""
	}
	var protocols []string
	for protocol := range strings.SplitSeq(strings.Join(r.Header["Upgrade"], ","), ",") {
		if protocol = strings.TrimSpace(protocol); protocol != "" && !strings.EqualFold(protocol, "h2c") {
			protocols = append(protocols, protocol)
		}
	}
	return strings.Join(protocols, ", ")
}

// switches reports whether the bytes after the answer are not HTTP.
func switches(r *http.Request, resp *http.Response) bool {
	return resp.StatusCode == http.StatusSwitchingProtocols || r.Method == http.MethodConnect &&
		resp.StatusCode/100 == 2
}

// switchProtocols forwards the bytes after the answer.
func (x *exchange) switchProtocols(u *upstream, resp *http.Response) error {
	if resp.StatusCode == http.StatusSwitchingProtocols && x.upgrade == "" {
		return errors.New("the answer changes to a protocol that the client did not ask for")
	}
	if x.upload != nil && !x.upload.wait(x.c, u) {
		return errors.New("the answer changes the protocol in the middle of the request")
	}
	conn, rw, err := http.NewResponseController(x.w).Hijack()
	if err != nil {
		return errClient{err}
	}
	x.answered = true
	noteSwitch(x.w, x.t, resp)
	defer conn.Close()
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return errClient{err}
	}
	said, err := rw.Reader.Peek(rw.Reader.Buffered())
	if err != nil {
		return errClient{err}
	}
	answered, err := u.br.Peek(u.br.Buffered())
	if err != nil {
		return err
	}
	var first bytes.Buffer
	fmt.Fprintf(&first, "HTTP/1.1 %s\r\n", resp.Status)
	if err := resp.Header.Write(&first); err != nil {
		return err
	}
	first.WriteString("\r\n")
	first.Write(answered)
	return splice(x.r.Context(), end{x.c.Conn, said}, end{u.Conn, first.Bytes()}, x.copies)
}

// upload forwards the body of a request; the answer may come meanwhile.
type upload struct {
	wanted chan bool // whether the client may continue
	done   chan struct{}
	begun  atomic.Bool // copy has begun to read the body
	moved  atomic.Int64
	read   bool // all of it was read from the client; valid when done
	whole  bool // and sent; valid when done
}

// want reports, once, whether the upstream wants the body. Only a client that asked waits for it.
func (l *upload) want(yes bool) {
	select {
	case l.wanted <- yes:
	default:
	}
}

func (l *upload) run(x *exchange, u *upstream) {
	err := errors.New("the body was not sent")
	defer close(l.done)
	defer func() { x.copies.end(err) }()
	if x.r.Header.Get("Expect") != "" {
		timer := time.NewTimer(continueTimeout)
		defer timer.Stop()
		select {
		case wanted := <-l.wanted:
			if !wanted {
				return
			}
		case <-timer.C:
		}
	}
	l.begun.Store(true)
	if err = l.copy(x, u); err == nil {
		l.whole = true
		x.c.sent()
	}
}

// copy forwards the body. If the upstream stops reading, copy reads and drops the rest, up to maxDiscard, so that the
// client gets the answer.
func (l *upload) copy(x *exchange, u *upstream) (err error) {
	b := copyBuffers.Get().(*[copyLen]byte)
	defer copyBuffers.Put(b)
	chunked := x.r.ContentLength < 0
	discarded := 0
	for {
		n, readErr := x.r.Body.Read(b[:])
		if n > 0 {
			l.moved.Add(int64(n))
			x.copies.put(b[:n])
			if err == nil {
				err = u.writeBody(b[:n], chunked)
			} else if discarded += n; discarded > maxDiscard {
				x.c.stopReading()
				return err
			}
		}
		switch {
		case readErr == nil:
			continue
		case readErr == io.EOF:
			l.read = true
		case errors.Is(readErr, io.ErrUnexpectedEOF):
			_ = closeWrite(u.Conn) // like the client; readErr ends the exchange in any case
			return readErr
		default:
			u.abort()
			return readErr
		}
		break
	}
	if err != nil || !chunked {
		return err
	}
	// u.bw keeps its first error, and Flush returns it.
	u.bw.WriteString("0\r\n")
	_ = x.r.Trailer.WriteSubset(u.bw, notInTrailer)
	u.bw.WriteString("\r\n")
	return u.bw.Flush()
}

// writeBody writes and flushes a piece of a body, as a chunk if chunked is set.
func (u *upstream) writeBody(b []byte, chunked bool) error {
	if !chunked {
		_, err := u.Conn.Write(b)
		return err
	}
	size := append(strconv.AppendInt(u.bw.AvailableBuffer(), int64(len(b)), 16), "\r\n"...)
	if _, ok := u.Conn.(*net.TCPConn); ok {
		u.chunk = [3][]byte{size, b, size[len(size)-2:]}
		u.pieces = u.chunk[:]
		_, err := u.pieces.WriteTo(u.Conn) // with one system call
		return err
	}
	u.bw.Write(size)
	u.bw.Write(b)
	u.bw.WriteString("\r\n")
	return u.bw.Flush()
}

func (l *upload) ended() bool {
	select {
	case <-l.done:
		return true
	default:
		return false
	}
}

// wait waits for the upload's end while it makes progress, and reports whether all was sent. It gives up without
// progress: then both ends have lost interest, or the client waits for the end of the answer.
func (l *upload) wait(c *clientConn, u *upstream) bool {
	l.want(false)
	ticker := time.NewTicker(uploadTimeout)
	defer ticker.Stop()
	for {
		before := l.moved.Load()
		select {
		case <-l.done:
			return l.whole
		case <-ticker.C:
		}
		if l.moved.Load() == before {
			u.abort()
			c.stopReading()
			<-l.done
			return false
		}
	}
}
