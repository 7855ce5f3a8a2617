package socks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/net/proxy"

	"kubevpn/internal/testenv"
)

func TestMain(m *testing.M) {
	// net/http waits half a second after it has rejected a header, although the conn is closed.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("net/http.(*conn).closeWriteAndWait"))
}

const user, password = "kubevpn", "secret"

// testTimeout limits one answer.
const testTimeout = 20 * time.Second

// cluster dials for the tests: every name is a server of this machine.
type cluster struct {
	web   string // address of an HTTP server that prints the Host of the request
	echo  string // address of a UDP server that sends each datagram back
	dials atomic.Int32
}

func (c *cluster) dial(ctx context.Context, network, address string) (net.Conn, error) {
	c.dials.Add(1)
	var d net.Dialer
	switch host, _, _ := net.SplitHostPort(address); {
	case host == "refused.default":
		return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
	case host == "missing.default":
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	case network == "udp":
		return d.DialContext(ctx, "udp", c.echo)
	}
	return d.DialContext(ctx, "tcp", c.web)
}

// serve runs a proxy for a cluster until the test ends, and returns its address.
func serve(t *testing.T, change ...func(*Server)) (string, *cluster) {
	t.Helper()
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s %s %s%s", r.Method, r.Host, r.URL, r.Header.Get("Proxy-Authorization"), body)
	}))
	t.Cleanup(web.Close)
	c := &cluster{web: web.Listener.Addr().String(), echo: echoes(t)}
	server := New(Config{User: user, Password: password, Dial: c.dial})
	for _, f := range change {
		f(server)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Serve = %v", err)
		}
	})
	return l.Addr().String(), c
}

// echoes returns the address of a UDP server that sends each datagram back.
func echoes(t *testing.T) string {
	t.Helper()
	p, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	go func() {
		buf := make([]byte, maxDatagram)
		for {
			n, from, err := p.ReadFrom(buf)
			if err != nil {
				return
			}
			p.WriteTo(buf[:n], from)
		}
	}()
	return p.LocalAddr().String()
}

func TestCurlReachesNamesThroughEachProtocol(t *testing.T) {
	testenv.NeedPrograms(t, "curl")
	at, _ := serve(t)
	through := "://" + user + ":" + password + "@" + at
	for _, args := range [][]string{
		{"--proxy", "socks5h" + through}, {"--proxy", "http" + through}, {"--proxy", "http" + through, "--proxytunnel"},
	} {
		args = append(args, "-sS", "--max-time", "20", "--data", "hello", "http://web.default/page?a=1;b")
		out, err := exec.Command("curl", args...).CombinedOutput()
		if want := "POST web.default /page?a=1;b hello"; string(out) != want || err != nil {
			t.Errorf("curl %q: %q (%v), want %q", args, out, err, want)
		}
	}
}

func TestCurlReportsWhyATargetIsUnreachable(t *testing.T) {
	testenv.NeedPrograms(t, "curl")
	at, _ := serve(t)
	for _, tt := range []struct{ args, want string }{
		{"--proxy socks5h://kubevpn:secret@AT http://refused.default/", "(5)"},
		{"--proxy socks5h://kubevpn:secret@AT http://missing.default/", "(4)"},
		{"--proxy socks5h://kubevpn:wrong@AT http://web.default/", "rejected by the SOCKS5 server"},
		{"--proxy socks5h://AT http://web.default/", "No authentication method"},
		{"--proxy http://AT http://web.default/", "this proxy requires its user name and password"},
		{"--proxy http://kubevpn:wrong@AT http://web.default/", "this proxy requires its user name and password"},
		{"--proxy http://AT --proxytunnel http://web.default/", "407"},
		{"--proxy http://kubevpn:secret@AT http://refused.default/", "connection refused"},
		{"--proxy http://kubevpn:secret@AT --proxytunnel http://missing.default/", "502"},
	} {
		t.Run(tt.args, func(t *testing.T) {
			args := strings.Fields("-sS --max-time 20 " + strings.ReplaceAll(tt.args, "AT", at))
			if out, _ := exec.Command("curl", args...).CombinedOutput(); !strings.Contains(string(out), tt.want) {
				t.Errorf("%q does not contain %q", out, tt.want)
			}
		})
	}
}

func TestOriginFormIsForbidden(t *testing.T) {
	page := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "function") })
	at, c := serve(t, func(s *Server) { s.cfg.Page, s.cfg.PagePath = page, "/secret.pac" })
	for _, tt := range []struct {
		path string
		want int
	}{{"/", 403}, {"/proxy.pac", 403}, {"//web.default/", 403}, {"/secret.pac", 200}} {
		t.Run(tt.path, func(t *testing.T) {
			req, err := http.NewRequest("GET", "http://"+at, nil)
			if err != nil {
				t.Fatal(err)
			}
			req.URL.Path = tt.path
			req.SetBasicAuth(user, password)
			req.Header.Set("Proxy-Authorization", req.Header.Get("Authorization"))
			transport := &http.Transport{DisableKeepAlives: true}
			resp, err := transport.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != tt.want || resp.Header.Get("Access-Control-Allow-Origin") != "" {
				t.Errorf("%s %v, want %d", resp.Status, resp.Header, tt.want)
			}
		})
	}
	if n := c.dials.Load(); n != 0 {
		t.Errorf("%d dials", n)
	}
}

// send sends a request line by line, and returns the answer until the end of the conn.
func send(t *testing.T, at, text string) string {
	t.Helper()
	conn, err := net.Dial("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, text); err != nil {
		t.Fatal(err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(testTimeout)); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(conn)
	if err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("after %q: %v", got, err)
	}
	return string(got)
}

func TestMalformedClientsAreClosed(t *testing.T) {
	at, c := serve(t)
	for _, tt := range []struct{ name, sends, want string }{
		{"SOCKS4", "\x04\x01\x00\x50\x01\x02\x03\x04\x00\r\n\r\n", "HTTP/1.1 400"},
		{"no password method", "\x05\x01\x00", "\x05\xff"},
		{"no methods", "\x05\x00", "\x05\xff"},
		{"wrong password", "\x05\x01\x02\x01\x01a\x01b", "\x05\x02\x01\x01"},
		{"longer user", "\x05\x01\x02\x01\x08kubevpnx\x06secret", "\x05\x02\x01\x01"},
		{"empty password", "\x05\x01\x02\x01\x07kubevpn\x00", "\x05\x02\x01\x01"},
		{"version of the password", "\x05\x01\x02\x05", "\x05\x02"},
		{"BIND", "\x05\x01\x02\x01\x07kubevpn\x06secret\x05\x02\x00\x01\x01\x02\x03\x04\x00\x50",
			"\x05\x02\x01\x00\x05\x07\x00\x01\x00\x00\x00\x00\x00\x00"},
		{"type of the address", "\x05\x01\x02\x01\x07kubevpn\x06secret\x05\x01\x00\x02",
			"\x05\x02\x01\x00\x05\x08\x00\x01\x00\x00\x00\x00\x00\x00"},
		{"an https URL", "GET https://web.default/ HTTP/1.1\r\nHost: web.default\r\nConnection: close\r\n" +
			"Proxy-Authorization: Basic a3ViZXZwbjpzZWNyZXQ=\r\n\r\n", "HTTP/1.1 400"},
		{"a large header", "GET http://web.default/ HTTP/1.1\r\nX: " + strings.Repeat("x", 2*maxHeader) + "\r\n\r\n",
			"HTTP/1.1 431"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := send(t, at, tt.sends); !strings.HasPrefix(got, tt.want) {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
	if n := c.dials.Load(); n != 0 {
		t.Errorf("%d dials", n)
	}
}

func TestHalfCloseReachesTheTarget(t *testing.T) {
	target, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	go func() {
		conn, err := target.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		all, _ := io.ReadAll(conn) // until the client's half-close
		conn.Write(append(all, '!'))
	}()
	at, c := serve(t)
	c.web = target.Addr().String()
	d, err := proxy.SOCKS5("tcp", at, &proxy.Auth{User: user, Password: password}, nil)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := d.Dial("tcp", "web.default:80")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	io.WriteString(conn, "hello")
	if err := closeWrite(conn); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(conn); string(got) != "hello!" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}
}

// echoesTCP returns the address of a TCP server that sends everything back.
func echoesTCP(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				io.Copy(conn, conn)
			}()
		}
	}()
	return l.Addr().String()
}

// Clients without the password, however many conns they hold, neither keep out nor cut off those that have it.
func TestProxyIsBounded(t *testing.T) {
	at, c := serve(t)
	c.web = echoesTCP(t)
	auth := &proxy.Auth{User: user, Password: password}
	open := func() net.Conn {
		t.Helper()
		d, err := proxy.SOCKS5("tcp", at, auth, nil)
		if err != nil {
			t.Fatal(err)
		}
		conn, err := d.Dial("tcp", "web.default:80")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	echo := func(conn net.Conn) {
		t.Helper()
		var b [5]byte
		if _, err := io.WriteString(conn, "hello"); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(conn, b[:]); err != nil || string(b[:]) != "hello" {
			t.Fatalf("read %q, %v", b, err)
		}
	}
	first := open()
	for _, begin := range []string{"\x05\x01\x02", "GET http://web.default/ HTTP/1.1\r\nHost: a\r\n"} {
		testenv.Flood(t, at, begin, func() error { echo(open()); return nil })
	}
	echo(first)
}

func TestSilentClientsAreClosed(t *testing.T) {
	at, _ := serve(t, func(s *Server) { s.handshake = time.Millisecond })
	for _, sends := range []string{"", "\x05\x01", "\x05\x01\x02\x01\x07kube", "GET http://web.default/ HTTP/1.1\r\n"} {
		if got := send(t, at, sends); strings.Contains(got, "200") || strings.HasPrefix(got, "\x05\x02\x01") {
			t.Errorf("after %q: %q", sends, got)
		}
	}
}

func TestGoClientsUseTheHTTPProxy(t *testing.T) {
	at, _ := serve(t)
	transport := &http.Transport{Proxy: http.ProxyURL(&url.URL{Scheme: "http", Host: at,
		User: url.UserPassword(user, password)})}
	defer transport.CloseIdleConnections()
	for range 2 {
		resp, err := (&http.Client{Transport: transport}).Get("http://web.default/x")
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if want := "GET web.default /x "; string(body) != want || err != nil {
			t.Errorf("%q (%v), want %q", body, err, want)
		}
	}
}
