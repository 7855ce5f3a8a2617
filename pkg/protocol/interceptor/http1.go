package interceptor

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync/atomic"
	"time"
)

const (
	// uploadTimeout is how long an upload may stand still after its answer has ended.
	uploadTimeout = time.Second
	// maxDiscard is how many bytes of a request are read and dropped after the upstream stops reading, so that the
	// client gets the answer.
	maxDiscard = 256 << 10
	// closeTimeout is the time that a client gets to read the answer if its request was not read to its end.
	closeTimeout = 500 * time.Millisecond
)

// serve1 serves a client's connection of HTTP/1.
//
//	idle ─▶ head ─▶ judge ─▶ exchange ─┬─▶ idle
//	                                   └─▶ end: one end closes, switches protocols, or broke off
func (c *clientConn) serve1() {
	c.own = &stream{c.Conn, nil, nil}
	c.own.br, c.own.bw = readers.Get().(*bufio.Reader), writers.Get().(*bufio.Writer)
	c.own.br.Reset(&prefixedConn{c.Conn, c.prefix})
	c.own.bw.Reset(c.Conn)
	_, _ = c.own.br.Peek(len(c.prefix)) // moves all of it into the buffer
	c.watch = watch{br: c.own.br, conn: c.Conn, seen: c.clientSpoke}
	defer c.own.release()
	for c.next() {
	}
	c.linger()
}

// next serves the next request. It returns false if the connection ends.
func (c *clientConn) next() bool {
	raw, err := c.readRequest()
	if err != nil {
		if errors.Is(err, errHeadTooLong) {
			c.reject(http.StatusRequestHeaderFieldsTooLarge, err.Error())
		}
		return false
	}
	h := parseHead(raw)
	r, why := h.request()
	if why != "" {
		c.i.log.Debug("a request was rejected", "client", c.flow.Client, "port", c.flow.Dst.Port(), "why", why)
		c.reject(http.StatusBadRequest, why)
		return false
	}
	t, mirrors := c.judge(r)
	h.dropH2C()
	x := &exchange{c: c, h: h, r: r, t: t, record: c.record(r, t, mirrors), last: h.closes()}
	defer x.record.end()
	x.copy(copied(mirrors))
	return x.serve() && !x.last
}

// readRequest waits for a request, and reads its head.
func (c *clientConn) readRequest() ([]byte, error) {
	c.setIdle(true)
	_, err := c.own.br.Peek(1) // how long that may take, the application chooses
	c.setIdle(false)
	if err != nil {
		return nil, err
	}
	timed := false
	c.raw, err = readHead(c.own.br, c.raw, func(b []byte) {
		if !timed {
			timed = true
			c.Conn.SetReadDeadline(time.Now().Add(headTimeout))
		}
		c.head.SetCost(connCost + headCost(b))
	})
	if timed {
		c.Conn.SetReadDeadline(time.Time{})
	}
	c.head.Leave()
	return c.raw, err
}

// reject answers a request that cannot be forwarded, and ends the connection.
func (c *clientConn) reject(code int, why string) {
	text := fmt.Sprintf("kubevpn: this request cannot be forwarded: %s\n", why)
	fmt.Fprintf(c.own.bw, "HTTP/1.1 %d %s\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\n"+
		"Connection: close\r\n\r\n%s", code, http.StatusText(code), len(text), text)
	_ = c.own.bw.Flush() // the connection ends anyway
	c.unread = true
}

// linger ends a connection with a request that was not read to its end: a close with unread bytes would reset it, and
// the client might lose the answer.
func (c *clientConn) linger() {
	if c.unread && closeWrite(c.Conn) == nil {
		c.Conn.SetReadDeadline(time.Now().Add(closeTimeout))
		_, _ = io.CopyN(io.Discard, c.Conn, maxDiscard)
	}
	c.Close()
}

// clientSpoke handles what the client does while its request is answered: its next request waits; many clients send FIN
// after the request, and wait for the answer. The upstream gets the FIN as well, and decides.
func (c *clientConn) clientSpoke(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case err == nil:
	case err == io.EOF:
		c.fin = true
		if c.whole && c.current != nil {
			if err := closeWrite(c.current.Conn); err != nil {
				c.i.log.Debug("cannot forward a FIN", "client", c.flow.Client, "error", err)
			}
		}
	case c.current != nil:
		c.current.abort()
		c.gone = true
	}
}

// setCurrent notes which upstream has the current request; nil: none.
func (c *clientConn) setCurrent(u *upstream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.current, c.whole = u, false
}

// exchange is one HTTP/1 request and its answer.
type exchange struct {
	c      *clientConn
	h      *head
	r      *http.Request
	t      destination
	copies copies
	record *recording

	ctx      context.Context // ends with the exchange
	upload   *upload         // nil: not begun, or there is no body
	watching bool            // the client's connection
	answered bool            // the client has a part of the answer
	last     bool            // the client's connection ends after the answer
	trailer  http.Header     // of the answer
}

// copy begins the copies of the request.
func (x *exchange) copy(mirrors []*Claim) {
	switch {
	case len(mirrors) == 0:
	case !x.switchable():
		x.copies = x.c.mirrors.request(x.r, mirrors, x.c.flow.Dst.String(), x.c.transport)
	default: // all bytes, because the connection may leave HTTP
		x.copies = x.c.mirrors.connection(x.c.flow, mirrors)
		x.copies.put(x.h.raw)
	}
}

// switchable reports whether the bytes after the request may not be HTTP.
func (x *exchange) switchable() bool {
	return len(x.r.Header["Upgrade"]) > 0 || x.r.Method == http.MethodConnect
}

// serve answers the request. It returns false if the client's connection broke off, or left HTTP.
func (x *exchange) serve() bool {
	ctx, cancel := context.WithCancel(x.c.life)
	defer cancel()
	x.ctx = ctx
	err := x.run()
	for err != nil && x.again(err) {
		err = x.run()
	}
	x.copies.end(err) // no effect if they have ended
	x.record.note(x.t, err, x.trailer)
	if err == nil {
		return true
	}
	x.c.i.log.Debug("an exchange failed", "client", x.c.flow.Client, "port", x.c.flow.Dst.Port(), "error", err)
	var client errClient
	switch {
	case x.clientGone(), errors.As(err, &client):
	case !x.t.application() && !x.answered:
		x.fail(err)
		return x.c.own.bw.Flush() == nil && !hasBody(x.r)
	case !x.t.application():
		x.t.claim.Stats.failed(err)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF): // the application's FIN, not RST
		return false
	}
	reset(x.c.Conn)
	return false
}

func (x *exchange) clientGone() bool {
	x.c.mu.Lock()
	defer x.c.mu.Unlock()
	return x.c.gone || x.ctx.Err() != nil
}

// fail answers a request whose target failed.
func (x *exchange) fail(err error) {
	x.t.claim.Stats.failed(err)
	h := &head{first: "HTTP/1.1 502 Bad Gateway", header: http.Header{}}
	text := failure(x.c.flow, err)
	for _, line := range [][2]string{{"Content-Type", "text/plain; charset=utf-8"},
		{"X-Content-Type-Options", "nosniff"}, {"Content-Length", fmt.Sprint(len(text))}} {
		h.header.Set(line[0], line[1])
		h.raw = fmt.Appendf(h.raw, "%s: %s\r\n", line[0], line[1])
	}
	if hasBody(x.r) { // which was not read
		h.raw = append(h.raw, "Connection: close\r\n"...)
		x.c.unread = true
	}
	fmt.Fprintf(x.c.own.bw, "%s\r\n%s\r\n", h.first, h.raw)
	x.record.answered(http.StatusBadGateway, h.header)
	if x.r.Method != http.MethodHead {
		x.c.own.bw.WriteString(text)
		_, answer := x.record.bodies()
		answer.add([]byte(text))
	}
}

// staleError is the end of a connection that was idle before, and carried no byte of an answer.
type staleError struct{ error }

func (e staleError) Unwrap() error { return e.error }

// dialError means that the destination has received no byte of the request.
type dialError struct{ error }

func (e *dialError) Unwrap() error { return e.error }

// again reports whether the exchange may be tried once more, and prepares x for that.
func (x *exchange) again(err error) bool {
	if x.answered || x.clientGone() || x.upload != nil {
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

// run tries the exchange with one upstream.
func (x *exchange) run() (err error) {
	u, err := x.c.upstream(x.ctx, x.t)
	if err != nil {
		return &dialError{err}
	}
	x.c.setCurrent(u)
	defer x.c.setCurrent(nil)
	stop := context.AfterFunc(x.ctx, u.abort)
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
		x.unwatch()
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
	if x.upload != nil && !x.upload.wait(u) {
		x.c.unread, x.last = true, true
	}
	x.unwatch() // the upload may have begun to watch
	u.close()
	return err
}

// sent notes that the upstream has all of the request, and watches the client while it waits for the answer.
func (x *exchange) sent() {
	x.c.mu.Lock()
	x.c.whole = !x.switchable() // otherwise the bytes that follow, and a FIN, may be for the upstream
	x.c.mu.Unlock()
	x.watching = true
	x.c.watch.start()
}

// unwatch makes the client's connection readable again. The upload has ended.
func (x *exchange) unwatch() {
	if x.watching {
		x.watching = false
		x.c.watch.stop()
	}
}

// over sends the request over u and relays the answer. done reports whether u can carry another request.
func (x *exchange) over(u *upstream) (done bool, err error) {
	h := x.h
	if x.t.application() && x.c.i.config.ForwardedFor {
		with := *h
		with.extend("X-Forwarded-For", x.c.flow.Client.Addr().Unmap().String())
		h = &with
	}
	u.bw.Write(h.raw) // it keeps its first error, and Flush returns it
	if !hasBody(x.r) {
		if err := u.bw.Flush(); err != nil {
			return false, fmt.Errorf("sending the request: %w", err)
		}
		x.sent()
	} else {
		x.startUpload(u)
	}
	for {
		u.head, err = readHead(u.br, u.head, nil)
		if err != nil {
			return false, fmt.Errorf("waiting for the answer: %w", err)
		}
		a := parseHead(u.head)
		status := a.status()
		switch {
		case status == http.StatusSwitchingProtocols, x.r.Method == http.MethodConnect && status/100 == 2:
			return false, x.switchProtocols(u, a, status)
		case status/100 != 1:
			return x.relay(u, a, status)
		}
		if err := x.send(a.raw); err != nil { // an informational answer
			return false, err
		}
	}
}

// send sends bytes to the client at once.
func (x *exchange) send(b []byte) error {
	_, err := x.c.own.bw.Write(b)
	if err == nil {
		err = x.c.own.bw.Flush()
	}
	if err != nil {
		return errClient{err}
	}
	return nil
}

// relay relays an answer, whose head was read.
func (x *exchange) relay(u *upstream, a *head, status int) (done bool, err error) {
	length := a.length("")
	if x.r.Method == http.MethodHead || status == http.StatusNoContent || status == http.StatusNotModified {
		length = 0
	}
	closes := a.closes() || length == untilEnd
	ends := x.c.isDraining()
	if x.upload != nil && len(x.r.Header["Expect"]) > 0 && x.upload.moved.Load() == 0 {
		x.upload.unwanted = true
		ends = true // the client's next bytes may be the body or another request
	}
	if ends && !a.closes() {
		a.add("Connection: close")
	}
	x.last = x.last || closes || ends
	x.answered = true
	if x.t.noStore(x.r.Method) {
		a.drop(cacheHeaders[:]...)
		a.header.Set(cacheHeaders[0], noStore)
		a.add(cacheHeaders[0] + ": " + noStore)
	}
	x.record.answered(status, a.header)
	if _, err := x.c.own.bw.Write(a.raw); err != nil {
		return false, errClient{err}
	}
	_, record := x.record.bodies()
	t := transfer{from: &u.stream, to: x.c.own, length: length, record: record}
	err = t.run()
	x.trailer = t.trailer
	if err == nil {
		err = t.flush()
	}
	switch {
	case errors.Is(err, errDropped):
		return false, errClient{err}
	case err != nil:
		x.c.own.bw.Flush()
		return false, fmt.Errorf("reading the answer: %w", err)
	}
	whole := x.upload == nil || x.upload.wait(u)
	return !closes && whole && u.br.Buffered() == 0, nil
}

// switchProtocols forwards the bytes after an answer that ends HTTP.
func (x *exchange) switchProtocols(u *upstream, a *head, status int) error {
	if x.upload != nil && !x.upload.wait(u) {
		return errors.New("the answer changes the protocol in the middle of the request")
	}
	x.unwatch()
	x.answered, x.last = true, true
	x.record.answered(status, a.header)
	x.record.note(x.t, nil, nil)
	x.record.end()
	said, err := x.c.own.br.Peek(x.c.own.br.Buffered())
	if err != nil {
		return errClient{err}
	}
	answered, err := u.br.Peek(u.br.Buffered())
	if err != nil {
		return err
	}
	first := append(bytes.Clone(a.raw), answered...)
	return splice(x.ctx, end{x.c.Conn, said}, end{u.Conn, first}, x.copies)
}

// upload forwards the body of a request; the answer may come meanwhile.
type upload struct {
	x     *exchange
	t     transfer
	done  chan struct{}
	moved atomic.Int64
	err   error // valid when done

	unwanted bool // the answer came although the client waits for permission to send the body
}

// startUpload forwards a body that has come already, or has a goroutine forward it.
func (x *exchange) startUpload(u *upstream) {
	record, _ := x.record.bodies()
	l := &upload{x: x, done: make(chan struct{})}
	l.t = transfer{from: x.c.own, to: &u.stream, length: x.r.ContentLength, strict: true, copies: x.copies,
		record: record, mayDrop: maxDiscard, moved: func(n int) { l.moved.Add(int64(n)) }}
	x.upload = l
	if n := l.t.length; n > 0 && n <= int64(x.c.own.br.Buffered()) {
		l.run()
	} else {
		go l.run()
	}
}

func (l *upload) run() {
	defer close(l.done)
	err := l.t.run()
	if err == nil {
		err = l.t.flush()
	}
	if err == nil && l.t.failed == nil {
		for name := range l.x.r.Trailer {
			l.x.r.Trailer[name] = l.t.trailer[name]
		}
		l.x.copies.end(nil)
		l.x.sent()
		return
	}
	l.err = err
	l.x.copies.end(errBroken)
	switch {
	case err == nil: // the upstream has stopped reading: its answer says why
		l.err = l.t.failed
	case errors.Is(err, io.ErrUnexpectedEOF):
		_ = closeWrite(l.t.to.Conn) // like the client; the upstream's answer or end follows
	case !errors.Is(err, errDropped) && !errors.Is(err, os.ErrDeadlineExceeded):
		reset(l.t.to.Conn)
	}
}

// wait waits for the upload's end while it makes progress, and reports whether all was sent. It gives up without
// progress: then both ends have lost interest, or the client waits for the end of the answer.
func (l *upload) wait(u *upstream) bool {
	ticker := time.NewTicker(uploadTimeout)
	defer ticker.Stop()
	for {
		before := l.moved.Load()
		if !l.unwanted {
			select {
			case <-l.done:
				return l.err == nil
			case <-ticker.C:
			}
		}
		if l.moved.Load() == before {
			u.abort()
			l.x.c.Conn.SetReadDeadline(time.Unix(1, 0))
			<-l.done
			return false
		}
	}
}

// failure is the text for a client whose request's target failed.
func failure(f Flow, err error) string {
	return fmt.Sprintf("kubevpn: this request to port %d is intercepted, and its owner's port did not answer: %v\n",
		f.Dst.Port(), err)
}
