package interceptor

import (
	"bufio"
	"bytes"
	stdcmp "cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/http/httpguts"
)

// request is one request as a backend sees it.
type request struct {
	To                   string // the name of the backend
	Method, Target, Host string
	Header               [][2]string
	Body                 string
	Trailer              [][2]string
	Tunnel               string // the bytes after a switch of protocols
}

func (r *request) header(name string) (values []string) {
	for _, h := range r.Header {
		if strings.EqualFold(h[0], name) {
			values = append(values, h[1])
		}
	}
	return values
}

// backend records the requests that reach it. It reads them strictly by RFC 9112, and hangs up at others.
type backend struct {
	tunnels sync.WaitGroup

	read *tape // may be nil

	mu       sync.Mutex
	requests []request
}

// serve returns a function that serves the connections to one of its names.
func (b *backend) serve(to string) func(net.Conn) {
	return func(c net.Conn) { b.answer(to, c) }
}

func (b *backend) answer(to string, c net.Conn) {
	br := bufio.NewReader(c)
	if b.read != nil {
		br = b.read.reader(c)
	}
	for {
		r, err := readStrictly(br, c)
		if err != nil { // no request, an incomplete one, or one that this backend does not accept
			io.WriteString(c, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
			return
		}
		r.To = to
		b.mu.Lock()
		b.requests = append(b.requests, *r)
		n := len(b.requests) - 1
		b.mu.Unlock()
		if len(r.header("Upgrade")) > 0 && strings.HasSuffix(r.Target, "/switch") {
			b.tunnels.Add(1) // before the other end gets the answer
			defer b.tunnels.Done()
			io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+r.header("Upgrade")[0]+"\r\n\r\n")
			rest, _ := io.ReadAll(br) // errors do not matter
			b.mu.Lock()
			b.requests[n].Tunnel = string(rest)
			b.mu.Unlock()
			return
		}
		answer := "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"
		if r.Method != http.MethodHead {
			answer += "ok"
		}
		if r.Method == http.MethodConnect {
			answer = "HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n"
		}
		if _, err := io.WriteString(c, answer); err != nil || slices.Contains(r.header("Connection"), "close") {
			return
		}
	}
}

// readLine reads a line that ends with CRLF, and has no other CR or LF, and no NUL.
func readLine(br *bufio.Reader) (string, error) {
	line, err := br.ReadString('\n')
	if err != nil {
		if len(line) > 0 && err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return "", err
	}
	text, crlf := strings.CutSuffix(line, "\r\n")
	if !crlf || strings.ContainsAny(text, "\r\n\x00") {
		return "", fmt.Errorf("the line %q", line)
	}
	return text, nil
}

func readFields(br *bufio.Reader) (fields [][2]string, err error) {
	for {
		line, err := readLine(br)
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if err != nil || line == "" {
			return fields, err
		}
		name, value, colon := strings.Cut(line, ":")
		if !colon || !httpguts.ValidHeaderFieldName(name) {
			return nil, fmt.Errorf("the field %q", line)
		}
		fields = append(fields, [2]string{http.CanonicalHeaderKey(name), strings.TrimSpace(value)})
	}
}

func readStrictly(br *bufio.Reader, w io.Writer) (*request, error) {
	line, err := readLine(br)
	if err != nil {
		return nil, err
	}
	parts := strings.Split(line, " ")
	if len(parts) != 3 || !httpguts.ValidHeaderFieldName(parts[0]) || parts[1] == "" || parts[2] != "HTTP/1.1" || strings.ContainsAny(line, "\t\v\f") {
		return nil, fmt.Errorf("the request line %q", line)
	}
	r := &request{Method: parts[0], Target: parts[1]}
	if r.Header, err = readFields(br); err != nil {
		return nil, err
	}
	host, lengths, codings := r.header("Host"), r.header("Content-Length"), r.header("Transfer-Encoding")
	if len(host) != 1 {
		return nil, fmt.Errorf("the hosts %q", host)
	}
	r.Host = host[0]
	if len(lengths)+len(codings) > 1 || len(codings) == 1 && codings[0] != "chunked" {
		return nil, fmt.Errorf("Content-Length %q and Transfer-Encoding %q", lengths, codings)
	}
	if len(r.header("Expect")) > 0 && len(lengths)+len(codings) > 0 {
		io.WriteString(w, "HTTP/1.1 100 Continue\r\n\r\n")
	}
	switch {
	case len(lengths) == 1:
		n, err := strconv.ParseUint(lengths[0], 10, 31)
		if err != nil || lengths[0] != strconv.FormatUint(n, 10) {
			return nil, fmt.Errorf("Content-Length %q", lengths[0])
		}
		body := make([]byte, n)
		if _, err := io.ReadFull(br, body); err != nil {
			return nil, io.ErrUnexpectedEOF
		}
		r.Body = string(body)
	case len(codings) == 1:
		err = r.readChunks(br)
	}
	return r, err
}

func (r *request) readChunks(br *bufio.Reader) error {
	for {
		line, err := readLine(br)
		if err != nil {
			return cmpEOF(err)
		}
		n, err := strconv.ParseUint(line, 16, 31)
		if err != nil {
			return fmt.Errorf("the chunk %q", line)
		}
		if n == 0 {
			r.Trailer, err = readFields(br)
			return err
		}
		chunk := make([]byte, n)
		if _, err := io.ReadFull(br, chunk); err != nil {
			return io.ErrUnexpectedEOF
		}
		r.Body += string(chunk)
		if end, err := readLine(br); err != nil || end != "" {
			return cmpEOF(errors.Join(err, errIf(end != "", "a chunk that is longer than it says")))
		}
	}
}

func cmpEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func errIf(is bool, text string) error {
	if is {
		return errors.New(text)
	}
	return nil
}

// script is the connection of a client that has sent all requests and waits for the answers. Its end does not abort a
// request, unlike a FIN, which net/http takes for the end of the client.
type script struct {
	net.Conn // of a closed pipe, for its addresses
	mu       sync.Mutex
	rest     []byte
	wake     chan struct{} // closed by a deadline, or the end
	once     *sync.Once
}

func newScript(text []byte) *script {
	near, far := net.Pipe()
	far.Close()
	return &script{Conn: near, rest: text, wake: make(chan struct{}), once: new(sync.Once)}
}

// Read returns the bytes of the client. net/http's server reads a single byte to detect the end while it answers.
func (s *script) Read(p []byte) (int, error) {
	s.mu.Lock()
	n := copy(p, s.rest)
	s.rest = s.rest[n:]
	wake := s.wake
	s.mu.Unlock()
	if n > 0 {
		return n, nil
	}
	if len(p) > 1 {
		return 0, io.EOF
	}
	<-wake
	return 0, os.ErrDeadlineExceeded
}

func (s *script) Write(p []byte) (int, error)      { return len(p), nil }
func (s *script) SetDeadline(t time.Time) error    { return s.SetReadDeadline(t) }
func (s *script) SetWriteDeadline(time.Time) error { return nil }
func (s *script) SetReadDeadline(t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.IsZero() {
		s.wake, s.once = make(chan struct{}), new(sync.Once)
	} else if !t.After(time.Now()) {
		s.once.Do(func() { close(s.wake) })
	}
	return nil
}

func (s *script) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.once.Do(func() { close(s.wake) })
	return s.Conn.Close()
}

// oneConn is a listener of one connection. Accept returns an error after the end of that connection.
type oneConn struct {
	conns chan net.Conn
	done  chan struct{}
}

func (l *oneConn) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}
func (l *oneConn) Close() error   { return nil }
func (l *oneConn) Addr() net.Addr { return &net.TCPAddr{} }

// reverseProxied returns the requests that a backend sees behind httputil.ReverseProxy.
func reverseProxied(t *testing.T, text []byte) []request {
	b := new(backend)
	at := listen(t, b.serve("proxy"))
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", at)
		},
		DisableCompression: true, ExpectContinueTimeout: 10 * time.Second,
	}
	proxy := &httputil.ReverseProxy{
		Transport: transport, ErrorLog: log.New(io.Discard, "", 0),
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.URL.User = "http", "backend", nil
			r.Out.URL.RawQuery, r.Out.Host = r.In.URL.RawQuery, r.In.Host
		},
	}
	var handlers sync.WaitGroup
	l := &oneConn{make(chan net.Conn, 1), make(chan struct{})}
	ended := sync.OnceFunc(func() { close(l.done) })
	server := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			handlers.Add(1)
			defer handlers.Done()
			proxy.ServeHTTP(w, r)
		}),
		MaxHeaderBytes: maxHead, DisableGeneralOptionsHandler: true, ErrorLog: log.New(io.Discard, "", 0),
		ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateClosed || s == http.StateHijacked {
				ended()
			}
		},
	}
	l.conns <- newScript(text)
	server.Serve(l)
	handlers.Wait()
	transport.CloseIdleConnections()
	b.tunnels.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.requests)
}

// intercepted returns the requests that backends see behind an Interceptor that sends those with x-user=me to a
// target.
func intercepted(t *testing.T, text []byte) (requests []request, crossed []byte) {
	b := &backend{read: new(tape)}
	r := newRig(t, listen(t, b.serve("application")))
	r.claim(Claim{Match: header(t, "x-user=me"), Target: &target{addr: listen(t, b.serve("target"))}})
	c := dial(t, r.addr)
	go func() {
		c.Write(text) // the answer may come before its end
		c.CloseWrite()
	}()
	if answers, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the connection does not end after %q", answers)
	}
	c.Close()
	r.stop()
	r.conns.Wait()
	b.tunnels.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.requests), []byte(b.read.take())
}

// essence returns the parts of requests on which both proxies must agree. It normalizes targets, which can be written
// in several ways.
func essence(requests []request) []request {
	var all []request
	for _, r := range requests {
		if r.Method == "PRI" {
			continue // the preface of HTTP/2 is no request, but ReverseProxy forwards it
		}
		e := request{Method: r.Method, Target: r.Target, Host: r.Host, Body: r.Body}
		if u, err := url.ParseRequestURI(r.Target); err == nil && r.Method != http.MethodConnect {
			e.Host = stdcmp.Or(u.Host, e.Host)
			e.Target = "/" + strings.TrimPrefix(u.Path, "/") + "?" + u.RawQuery
		}
		if e.Host == "backend" { // HTTP/1.0 without one
			e.Host = ""
		}
		all = append(all, e)
	}
	return all
}

// FuzzSmuggling sends the bytes of a client through an Interceptor and through httputil.ReverseProxy. The backends
// must see the same requests: no part of one becomes another, and each goes to the backend that its head selects. The
// Interceptor forwards bytes as they are, also those that ReverseProxy and the backends do not accept.
func FuzzSmuggling(f *testing.F) {
	const (
		get  = "GET /a HTTP/1.1\r\nHost: web\r\n\r\n"
		mine = "GET /mine HTTP/1.1\r\nHost: web\r\nX-User: me\r\n\r\n"
	)
	post := func(fields, body string) string { return "POST /p HTTP/1.1\r\nHost: web\r\n" + fields + "\r\n" + body }
	for _, text := range []string{
		get, get + mine + get, mine + get,
		"5 p HTTP/1.1\n", "GET / HTTP/1.1\r\n", get + "G", // and nothing more
		// Content-Length and Transfer-Encoding.
		post("Content-Length: 5\r\n", "hello") + mine,
		post("Content-Length: 5\r\nContent-Length: 5\r\n", "hello") + get,
		post("Content-Length: 5\r\nContent-Length: 6\r\n", "hello") + get,
		post("Content-Length: 5, 5\r\n", "hello") + get,
		post("Content-Length: +5\r\n", "hello") + get,
		post("Content-Length: 0x5\r\n", "hello") + get,
		post("Content-Length: 05\r\n", "hello") + get,
		post("Content-Length: -1\r\n", "hello") + get,
		post("Content-Length : 5\r\n", "hello") + get,
		post("Content-Length:\r\n", "hello") + get,
		post(fmt.Sprintf("Content-Length: %d\r\n", len(mine)), mine) + get,
		post("Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"+mine) + get,
		post("Transfer-Encoding: chunked\r\nContent-Length: 100\r\n", "5\r\nhello\r\n0\r\n\r\n") + mine,
		post("Transfer-Encoding: xchunked\r\nContent-Length: 5\r\n", "hello") + get,
		post("Transfer-Encoding : chunked\r\nContent-Length: 5\r\n", "hello") + get,
		post("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", "0\r\n\r\n") + get,
		post("Transfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n") + get,
		post("Transfer-Encoding:\tchunked\r\n", "0\r\n\r\n") + mine,
		post("Transfer-Encoding: CHUNKED\r\n", "0\r\n\r\n") + mine,
		post("Transfer-Encoding: \x0bchunked\r\n", "0\r\n\r\n") + mine,
		post("Transfer-Encoding:\r\n chunked\r\n", "0\r\n\r\n") + mine,
		post("Connection: Transfer-Encoding, Content-Length\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n") + mine,
		post("Connection: Content-Length\r\nContent-Length: 5\r\n", "hello") + mine,
		"POST /p HTTP/1.0\r\nHost: web\r\nTransfer-Encoding: chunked\r\nConnection: keep-alive\r\n\r\n0\r\n\r\n" + mine,
		"POST /p HTTP/1.0\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nok" + mine,
		"GET /p HTTP/1.1\r\nHost: web\r\nContent-Length: 5\r\n\r\nhello" + mine,
		"HEAD /p HTTP/1.1\r\nHost: web\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n" + mine,
		// Chunks.
		post("Transfer-Encoding: chunked\r\n", "5;ext=\"a\nb\"\r\nhello\r\n0\r\n\r\n") + mine,
		post("Transfer-Encoding: chunked\r\n", "5\nhello\n0\n\n") + mine,
		post("Transfer-Encoding: chunked\r\n", "5 \r\nhello\r\n0\r\n\r\n") + mine,
		post("Transfer-Encoding: chunked\r\n", "0x5\r\nhello\r\n0\r\n\r\n") + mine,
		post("Transfer-Encoding: chunked\r\n", "5\r\nhello0\r\n\r\n") + mine,
		post("Transfer-Encoding: chunked\r\n", "fffffffffffffffff\r\nhello\r\n0\r\n\r\n") + mine,
		post("Transfer-Encoding: chunked\r\n", "5\r\nhello\r\n00000\r\n\r\n") + mine,
		post("Transfer-Encoding: chunked\r\n", "5\r\nhel"),
		post("Content-Length: 10\r\n", "hel"),
		// Trailers.
		post("Transfer-Encoding: chunked\r\nTrailer: X-T\r\n", "5\r\nhello\r\n0\r\nX-T: v\r\n\r\n") + mine,
		post("Transfer-Encoding: chunked\r\n", "0\r\nX-User: me\r\nContent-Length: 50\r\nTransfer-Encoding: x\r\n\r\n") + mine,
		post("Transfer-Encoding: chunked\r\nTrailer: Content-Length\r\n", "0\r\nContent-Length: 50\r\n\r\n") + mine,
		post("Transfer-Encoding: chunked\r\nTrailer: Host, X-A\r\n", "0\r\nHost: evil\r\nX-A: a\rb\x00\r\n\r\n") + mine,
		// Expect.
		post("Expect: 100-continue\r\nContent-Length: 5\r\n", "hello") + mine,
		post("Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n", "5\r\nhello\r\n0\r\n\r\n") + mine,
		"GET /e HTTP/1.1\r\nHost: web\r\nExpect: 100-continue\r\n\r\n" + mine,
		post("Expect: something\r\nContent-Length: 5\r\n", "hello") + mine,
		// Upgrade.
		"GET /switch HTTP/1.1\r\nHost: web\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n" + mine,
		"GET /not HTTP/1.1\r\nHost: web\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n" + mine,
		"GET /not HTTP/1.1\r\nHost: web\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n" + mine,
		"GET /switch HTTP/1.1\r\nHost: web\r\nUpgrade: echo\r\n\r\n" + mine,
		"POST /switch HTTP/1.1\r\nHost: web\r\nConnection: Upgrade\r\nUpgrade: echo\r\nContent-Length: 5\r\n\r\nhello" + mine,
		"GET /switch HTTP/1.0\r\nHost: web\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n" + mine,
		"CONNECT web:80 HTTP/1.1\r\nHost: web:80\r\n\r\n" + mine,
		get + "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + mine,
		// Targets, hosts and fields.
		"GET http://evil/x HTTP/1.1\r\nHost: web\r\n\r\n" + mine,
		"GET http://u:p@evil/x?a;b HTTP/1.1\r\nHost: web\r\n\r\n" + mine,
		"GET //x/../y?%zz HTTP/1.1\r\nHost: web\r\n\r\n", "OPTIONS * HTTP/1.1\r\nHost: web\r\n\r\n" + mine,
		"GET /a HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n" + mine, "GET /a HTTP/1.1\r\n\r\n" + mine,
		"GET /a HTTP/1.1\nHost: web\nX-User: me\n\n" + get, "GET /a HTTP/1.1\r\nHost: web\rX-User: me\r\n\r\n" + get,
		"GET /a HTTP/1.1\r\nHost: web\r\nX-Y: z\r\n X-User: me\r\n\r\n" + get, "GET /a HTTP/1.1\r\n X-User: me\r\nHost: web\r\n\r\n" + get,
		"GET /a HTTP/1.1\r\nHost: web\r\nX_User: me\r\nX-User : me\r\n\r\n" + get,
		"GET /a HTTP/1.1\r\nHost: web\r\nConnection: X-User\r\nX-User: me\r\n\r\n" + get,
		"GET /a HTTP/1.1\r\nHost: web\r\nConnection: close, Host\r\n\r\n" + mine,
		"GET /a b HTTP/1.1\r\nHost: web\r\n\r\n" + mine, "GET /a HTTP/1.2\r\nHost: web\r\n\r\n" + mine,
		"GE\x00T /a HTTP/1.1\r\nHost: web\r\n\r\n" + mine, "GET /a HTTP/1.1\r\nHost: web\r\nX-\x00: a\x00\r\n\r\n" + mine,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) > 32<<10 || classify(text, new(Probe)) != kindHTTP1 {
			return // other bytes go to the application unchanged
		}
		got, crossed := intercepted(t, text)
		// Whatever the bytes are, they cross unchanged, and none is sent twice. Only the offer of HTTP/2 is dropped.
		if !bytes.HasPrefix(text, crossed) && !bytes.Contains(bytes.ToLower(text), []byte("h2c")) {
			t.Errorf("the bytes\n%q crossed, not a part of\n%q", crossed, text)
		}
		// As far as both go, each sees the same requests. One rejects what the other accepts.
		want := essence(reverseProxied(t, text))
		n := min(len(want), len(got))
		if d := cmp.Diff(want[:n], essence(got)[:n]); n > 0 && d != "" {
			t.Errorf("-ReverseProxy +Interceptor\n%s", d)
		}
		for _, r := range got {
			if r.To == "application" && slices.Contains(r.header("X-User"), "me") {
				t.Errorf("the application has a request of the target: %+v", r)
			}
			if !bytes.HasSuffix(text, []byte(r.Tunnel)) { // ReverseProxy loses bytes that the client has sent before
				t.Errorf("after the switch of protocols comes %q", r.Tunnel)
			}
		}
	})
}
