package interceptor

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kubevpn/pkg/protocol/httpmatch"
)

// rig is an interceptor on a port of its own. Tests set its application and its claims.
type rig struct {
	tb       testing.TB
	i        *Interceptor
	addr     string
	app      atomic.Pointer[string] // the address of the application
	appDials atomic.Int64
	claims   atomic.Pointer[[]Claim]
	client   atomic.Pointer[netip.Addr] // from which connections seem to come; nil: as they do
	stop     context.CancelFunc
	conns    sync.WaitGroup // of ServeConn

	mu    sync.Mutex
	notes []string
}

func newRig(tb testing.TB, app string, configure ...func(*Config)) *rig {
	tb.Helper()
	r := &rig{tb: tb}
	r.app.Store(&app)
	r.claims.Store(new([]Claim))
	config := Config{
		Claims: func(string, uint16) []Claim { return *r.claims.Load() },
		Application: func(ctx context.Context, f Flow) (net.Conn, error) {
			r.appDials.Add(1)
			return new(net.Dialer).DialContext(ctx, f.Protocol, *r.app.Load())
		},
		Note: func(protocol string, port uint16, text string) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.notes = append(r.notes, text)
		},
	}
	for _, f := range configure {
		f(&config)
	}
	r.i = New(config)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	r.addr = l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	r.stop = cancel
	dst := l.Addr().(*net.TCPAddr).AddrPort()
	accepting := make(chan struct{})
	go func() {
		defer close(accepting)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			from := conn.RemoteAddr().(*net.TCPAddr).AddrPort()
			if client := r.client.Load(); client != nil {
				from = netip.AddrPortFrom(*client, from.Port())
			}
			r.conns.Go(func() { r.i.ServeConn(ctx, conn, Flow{"tcp", from, dst}) })
		}
	}()
	context.AfterFunc(ctx, func() { l.Close() })
	tb.Cleanup(func() {
		cancel()
		<-accepting
		r.conns.Wait()
	})
	return r
}

func (r *rig) url(path string) string { return "http://" + r.addr + path }

func (r *rig) claim(claims ...Claim) {
	for n := range claims {
		if claims[n].ID == "" {
			claims[n].ID = fmt.Sprint("claim", n)
		}
		if claims[n].Stats == nil {
			claims[n].Stats = new(Stats)
		}
	}
	r.claims.Store(&claims)
}

// target dials an address.
type target struct {
	addr  string
	away  atomic.Bool
	dials atomic.Int64
}

func (t *target) Dial(ctx context.Context, f Flow) (net.Conn, error) {
	t.dials.Add(1)
	c, err := new(net.Dialer).DialContext(ctx, f.Protocol, t.addr)
	if tcp, ok := c.(*net.TCPConn); ok {
		return tunnelled{c, tcp}, nil
	}
	return c, err
}

// tunnelled is a connection whose bytes the kernel cannot move, like the connections of targets, and unlike those of
// the application.
type tunnelled struct {
	net.Conn
	tcp *net.TCPConn
}

func (t tunnelled) CloseWrite() error { return t.tcp.CloseWrite() }
func (t tunnelled) Reset() error {
	t.tcp.SetLinger(0)
	return t.tcp.Close()
}

func (t *target) Away() bool { return t.away.Load() }

func header(tb testing.TB, s string) *httpmatch.Match {
	tb.Helper()
	h, err := httpmatch.ParseNamed(s)
	if err != nil {
		tb.Fatal(err)
	}
	m, err := httpmatch.New(httpmatch.Spec{Headers: []httpmatch.Named{h}})
	if err != nil {
		tb.Fatal(err)
	}
	return m
}

// serve starts a server with HTTP/1 and HTTP/2, and returns its address.
func serve(tb testing.TB, h http.Handler) string {
	tb.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	tb.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// says returns a handler that answers every request with a name.
func says(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, name) })
}

// listen starts a server that calls f for each connection, and returns its address.
func listen(tb testing.TB, f func(net.Conn)) string {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				f(c)
			})
		}
	})
	tb.Cleanup(func() {
		l.Close()
		wg.Wait()
	})
	return l.Addr().String()
}

func dial(tb testing.TB, addr string) *net.TCPConn {
	tb.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second))
	return c.(*net.TCPConn)
}

// client returns a client with a connection pool of its own.
func client(tb testing.TB, major int) *http.Client {
	tr := &http.Transport{Protocols: new(http.Protocols), DisableCompression: true}
	tr.Protocols.SetHTTP1(major == 1)
	tr.Protocols.SetUnencryptedHTTP2(major == 2)
	tb.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 30 * time.Second, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

func get(tb testing.TB, c *http.Client, url string, headers ...string) (int, string) {
	tb.Helper()
	req, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		tb.Fatal(err)
	}
	for n := 0; n < len(headers); n += 2 {
		req.Header.Set(headers[n], headers[n+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		tb.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		tb.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// talk sends text, and returns the whole answer until the end of the connection.
func talk(tb testing.TB, c *net.TCPConn, text string) string {
	tb.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		tb.Fatal(err)
	}
	answer, err := io.ReadAll(c)
	if err != nil {
		tb.Fatalf("after %q: %v", answer, err)
	}
	return string(answer)
}

func readResponse(tb testing.TB, br *bufio.Reader, method string) (*http.Response, string) {
	tb.Helper()
	resp, err := http.ReadResponse(br, &http.Request{Method: method})
	if err != nil {
		tb.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		tb.Fatal(err)
	}
	return resp, string(body)
}

func addrPort(tb testing.TB, s string) netip.AddrPort {
	tb.Helper()
	a, err := netip.ParseAddrPort(s)
	if err != nil {
		tb.Fatal(err)
	}
	return a
}
