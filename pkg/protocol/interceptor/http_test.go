package interceptor

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/protocol/httpmatch"
)

// forEachProtocol runs a test with HTTP/1.1 and HTTP/2 (prior knowledge).
func forEachProtocol(t *testing.T, f func(t *testing.T, major int)) {
	for major, name := range []string{1: "http1", 2: "http2"} {
		if major > 0 {
			t.Run(name, func(t *testing.T) { f(t, major) })
		}
	}
}

// Browsers and caches must not keep what a target answers; the application's answers, calls of other methods, and a claim
// that says so, stay as they are.
func TestAnswersOfTheTargetAreNotKept(t *testing.T) {
	says := func(name string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			h := w.Header()
			h.Set("X-Name", name)
			h["Cache-Control"] = []string{"public", "max-age=60"}
			h.Set("CDN-Cache-Control", "max-age=600")
			h.Set("ETag", `"x"`)
			if r.Header.Get("If-None-Match") != "" {
				w.WriteHeader(http.StatusNotModified)
			}
		})
	}
	forEachProtocol(t, func(t *testing.T, major int) {
		r := newRig(t, serve(t, says("app")))
		c := client(t, major)
		for _, tt := range []struct {
			method, user string
			conditional  bool
			want         string
		}{
			{"GET", "me", false, "laptop [no-store] []"},
			{"GET", "me", true, "laptop [no-store] []"},
			{"HEAD", "me", false, "laptop [no-store] []"},
			{"POST", "me", false, "laptop [public max-age=60] [max-age=600]"},
			{"GET", "kept", false, "laptop [public max-age=60] [max-age=600]"},
			{"GET", "", false, "app [public max-age=60] [max-age=600]"},
		} {
			laptop := &target{addr: serve(t, says("laptop"))}
			r.claim(Claim{Match: header(t, "x-user=me"), NoStore: true, Target: laptop}, Claim{Match: header(t, "x-user=kept"), Target: laptop})
			req, err := http.NewRequest(tt.method, r.url("/"), nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("X-User", tt.user)
			if tt.conditional {
				req.Header.Set("If-None-Match", `"x"`)
			}
			resp, err := c.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			h := resp.Header
			if got := fmt.Sprint(h.Get("X-Name"), " ", h["Cache-Control"], " ", h["Cdn-Cache-Control"]); got != tt.want || h.Get("Etag") != `"x"` {
				t.Errorf("%s of %q: %s, want %s", tt.method, tt.user, got, tt.want)
			}
		}
	})
}

func TestEachRequestIsMatched(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, major int) {
		r := newRig(t, serve(t, says("app")))
		ann, bob := &target{addr: serve(t, says("ann"))}, &target{addr: serve(t, says("bob"))}
		r.claim(
			Claim{ID: "ann", Match: header(t, "x-user=ann"), Target: ann, Stats: new(Stats)},
			Claim{ID: "bob", Match: header(t, "x-user=~b.*"), Target: bob, Stats: new(Stats)},
		)
		var conns atomic.Int64
		c := client(t, major)
		dialer := new(net.Dialer)
		c.Transport.(*http.Transport).DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conns.Add(1)
			return dialer.DialContext(ctx, network, addr)
		}
		want := func(user, want string) {
			t.Helper()
			if _, got := get(t, c, r.url("/"), "X-User", user); got != want {
				t.Errorf("%s's request was answered by %q, want %q", user, got, want)
			}
		}
		for range 3 {
			want("ann", "ann")
			want("carl", "app")
			want("bob", "bob")
			want("", "app")
		}
		if _, got := get(t, c, r.url("/"), "X-User", "ann", "User-Agent", "kube-probe/1.37"); got != "app" {
			t.Errorf("a probe was answered by %q", got)
		}
		bob.away.Store(true)
		want("bob", "app")
		bob.away.Store(false)
		want("bob", "bob")
		claims := *r.claims.Load()
		r.claim(claims[1])
		want("ann", "app")
		// Requests share connections. For HTTP/2, an http.Transport may open a second one: it gives the first to the
		// request that waits for it, and only then to later ones (dialConnFor). The interceptor has a Transport for
		// each connection of the client.
		most := map[int]int64{1: 1, 2: 2}[major]
		if n := conns.Load(); n > most {
			t.Errorf("the client made %d connections, want at most %d", n, most)
		}
		most *= most
		for name, n := range map[string]int64{"application": r.appDials.Load(), "ann": ann.dials.Load(), "bob": bob.dials.Load()} {
			if n > most {
				t.Errorf("%s saw %d connections, want at most %d", name, n, most)
			}
		}
		if n := claims[0].Stats.Requests(); n != 3 {
			t.Errorf("%d requests of ann were counted, want 3", n)
		}
	})
}

// The owner returned through another conn, with a claim of the same ID.
func TestReplacedClaimGetsNoRequests(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, major int) {
		r := newRig(t, serve(t, says("app")))
		c := client(t, major)
		for _, name := range []string{"one", "two"} {
			r.claim(Claim{ID: "same", Match: header(t, "x-user=me"), Target: &target{addr: serve(t, says(name))}})
			if _, got := get(t, c, r.url("/"), "X-User", "me"); got != name {
				t.Errorf("answered by %q, want %q", got, name)
			}
		}
	})
}

func TestClaimOfEverythingLeavesProbesToTheApplication(t *testing.T) {
	r := newRig(t, serve(t, says("app")))
	r.claim(Claim{Target: &target{addr: serve(t, says("laptop"))}})
	if _, got := get(t, client(t, 1), r.url("/"), "User-Agent", "kube-probe/1.37"); got != "app" {
		t.Errorf("a probe was answered by %q", got)
	}
	if _, got := get(t, client(t, 1), r.url("/")); got != "laptop" {
		t.Errorf("a request was answered by %q", got)
	}
}

func TestRequestAndResponseAreUnchanged(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, major int) {
		app := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			h := w.Header()
			h["Date"], h["Content-Type"] = nil, nil
			h["X-Two"] = []string{"a", "b"}
			h.Set("Keep-Alive", "timeout=5")
			h.Set("Location", "/elsewhere")
			w.WriteHeader(http.StatusFound)
			for _, name := range []string{"X-Forwarded-For", "User-Agent", "Accept-Encoding", "Cookie", "X-Odd", "Content-Length", "Te", "Forwarded"} {
				for _, v := range r.Header[name] {
					fmt.Fprintf(w, "%s: %s\n", name, v)
				}
			}
			fmt.Fprintf(w, "%s %s %s %d", r.Method, r.Host, r.RequestURI, r.ContentLength)
		}))
		r := newRig(t, app)
		fetch := func(addr string) (*http.Response, string) {
			req, err := http.NewRequest("PURGE", "http://"+addr+"/a%2Fb//c;d?x=%zz&y;z", nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Host = "example.org:81"
			req.Header = http.Header{"X-Odd": {" a  b ", ""}, "Forwarded": {"for=1"}, "X-Forwarded-For": {"1.2.3.4"}, "User-Agent": {""},
				"Connection": {"X-Private"}, "X-Private": {"1"}, "Te": {"trailers"}}
			if major == 2 {
				delete(req.Header, "Connection")
			}
			resp, err := client(t, major).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Fatal(err)
			}
			return resp, string(body)
		}
		direct, want := fetch(app)
		got, body := fetch(r.addr)
		if body != want {
			t.Errorf("the application got\n%s\nwithout the interceptor\n%s", body, want)
		}
		if major == 2 {
			delete(direct.Header, "Keep-Alive") // hop-by-hop
		}
		if fmt.Sprint(got.StatusCode, got.Header, got.ContentLength) != fmt.Sprint(direct.StatusCode, direct.Header, direct.ContentLength) {
			t.Errorf("the client got %d %v, without the interceptor %d %v", got.StatusCode, got.Header, direct.StatusCode, direct.Header)
		}
	})
}

func TestForwardedForNamesTheClient(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, major int) {
		told := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "%q", r.Header["X-Forwarded-For"]) })
		r := newRig(t, serve(t, told), func(c *Config) { c.ForwardedFor = true })
		r.claim(Claim{Match: header(t, "x-user=me"), Target: &target{addr: serve(t, told)}})
		if _, got := get(t, client(t, major), r.url("/"), "X-Forwarded-For", "1.2.3.4"); got != `["1.2.3.4, 127.0.0.1"]` {
			t.Errorf("the application is told %s", got)
		}
		if _, got := get(t, client(t, major), r.url("/")); got != `["127.0.0.1"]` {
			t.Errorf("the application is told %s", got)
		}
		if _, got := get(t, client(t, major), r.url("/"), "X-User", "me"); got != `[]` {
			t.Errorf("the target is told %s", got)
		}
	})
}

// wire serves each connection with f, without net/http's server.
func wire(tb testing.TB, f func(c *net.TCPConn, br *bufio.Reader)) string {
	return listen(tb, func(c net.Conn) { f(c.(*net.TCPConn), bufio.NewReader(c)) })
}

// tape records the bytes that its servers read.
type tape struct {
	mu    sync.Mutex
	bytes []byte
}

func (t *tape) reader(c net.Conn) *bufio.Reader { return bufio.NewReader(io.TeeReader(c, t)) }

func (t *tape) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.bytes = append(t.bytes, p...)
	return len(p), nil
}

func (t *tape) take() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	defer func() { t.bytes = nil }()
	return string(t.bytes)
}

// answering serves each connection: it reads lines until an empty one, and bodies of a single digit in Content-Length, and
// sends an answer. It reads on for ever, as a server that accepts everything.
func (t *tape) answering(tb testing.TB, answer string, closes bool) string {
	return listen(tb, func(c net.Conn) {
		br := t.reader(c)
		body := 0
		for {
			line, err := br.ReadString('\n')
			if err != nil {
				return
			}
			if n, ok := strings.CutPrefix(strings.ToLower(line), "content-length: "); ok {
				body = int(n[0] - '0')
			}
			if strings.TrimRight(line, "\r\n") != "" {
				continue
			}
			if _, err := io.ReadFull(br, make([]byte, body)); err != nil {
				return
			}
			body = 0
			if _, err := io.WriteString(c, answer); err != nil || closes {
				return
			}
		}
	})
}

// Every byte of a message crosses, also where net/http would reject it, or write it in another way.
func TestHTTP1MessagesCrossUnchanged(t *testing.T) {
	const (
		ok   = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
		bye  = "Connection: close\r\n\r\n"
		get  = "GET / HTTP/1.1\r\nHost: a\r\n"
		mine = "X-User: me\r\n"
	)
	for name, tt := range map[string]struct {
		say, answer string
		closes      bool // the server, after its answer
	}{
		"http10":                {"GET / HTTP/1.0\r\n\r\n", ok, true},
		"http10-keepalive":      {"GET /1 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok", true},
		"until-the-end":         {get + "\r\n", "HTTP/1.0 200 OK\r\n\r\nuntil the end", true},
		"pipelined":             {get + "\r\nPOST /2 HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc" + get + bye, ok, false},
		"application-closes":    {get + "\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok", true},
		"head":                  {"HEAD / HTTP/1.1\r\nHost: a\r\n" + bye, "HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n\r\n", false},
		"204":                   {get + bye, "HTTP/1.1 204 No Content\r\n\r\n", false},
		"304":                   {get + bye, "HTTP/1.1 304 Not Modified\r\nEtag: x\r\nContent-Length: 7\r\n\r\n", false},
		"chunks":                {get + bye, "HTTP/1.1 200 OK\r\ntransfer-ENCODING: Chunked\r\n\r\n2;a=b\r\nok\r\n000\r\nx-Sum: 1\r\n\r\n", false},
		"chunks-with-LF":        {get + bye, "HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n2\nok\n0\n\n", false},
		"absolute-form":         {"GET http://other/x HTTP/1.1\r\nHost: a\r\n" + bye, ok, false},
		"asterisk":              {"OPTIONS * HTTP/1.1\r\nHost: a\r\n" + bye, ok, false},
		"case-of-names":         {get + "x-api-KEY: 1\r\nSOAPAction: a\r\nsOAPAction: b\r\nX-mixedCase:  c \r\naccept: x\r\n" + bye, "HTTP/1.1 200 OK\r\nx-some-header: 1\r\nETag: \"a\"\r\nWWW-Authenticate: x\r\ncontent-length: 2\r\n\r\nok", false},
		"percent":               {"GET /pay/%transId%/x?%zz HTTP/1.1\r\nHost: a\r\n" + bye, ok, false},
		"percent-at-the-end":    {"GET /a% HTTP/1.1\r\nHost: a\r\n" + bye, ok, false},
		"blank-in-target":       {"GET /a b HTTP/1.1\r\nHost: a\r\n" + bye, ok, false},
		"bytes-in-target":       {"GET /a\x01\xff HTTP/1.1\r\nHost: a\r\n" + bye, ok, false},
		"odd-names":             {get + "X(a): 1\r\nX b: 2\r\nno colon\r\n: 3\r\n\xff: 4\r\n" + bye, ok, false},
		"odd-values":            {get + "X-A: \x01\x7f\xff\r\nX-B:\r\n" + bye, ok, false},
		"folded":                {get + "X-A: 1\r\n  2\r\n" + bye, ok, false},
		"two-hosts":             {"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n" + bye, ok, false},
		"no-host":               {"GET / HTTP/1.1\r\n" + bye, ok, false},
		"empty-lines-first":     {"GET / HTTP/1.1\r\nHost: a\r\n\r\n\r\n" + get + bye, ok, false},
		"LF":                    {"GET / HTTP/1.1\nHost: a\nConnection: close\n\n", ok, false},
		"method":                {"M-SEARCH * HTTP/1.1\r\nHost: a\r\n" + bye, ok, false},
		"two-equal-lengths":     {"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 2\r\n" + bye + "ab", ok, false},
		"coded-chunks":          {"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n" + bye + "0\r\n\r\n", ok, false},
		"blank-before-colon":    {get + bye, "HTTP/1.1 200 OK\r\nHeader : v\r\nContent-Length : 2\r\n\r\nok", false},
		"control-in-answer":     {get + bye, "HTTP/1.1 200 OK\r\nX: a\x01b\x00\r\nContent-Length: 2\r\n\r\nok", false},
		"no-reason":             {get + bye, "HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", false},
		"odd-status":            {get + bye, "HTTP/1.1 999 \xff\r\nContent-Length: 2\r\n\r\nok", false},
		"no-status":             {get + bye, "hello\r\n\r\nworld", true},
		"contradictory-answer":  {get + bye, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok!", true},
		"both-lengths-answered": {get + bye, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", false},
		"informational":         {get + bye, "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + ok, false},
		"unknown-upgrade":       {get + "upgrade: TLS/1.0, x\r\nconnection: Upgrade, close\r\n\r\n", ok, false},
		"expect":                {"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nexpect: 100-Continue\r\n" + bye + "ab", "HTTP/1.1 100 Go On\r\nX: y\r\n\r\n" + ok, false},
	} {
		t.Run(name, func(t *testing.T) {
			var read, other tape
			r := newRig(t, read.answering(t, tt.answer, tt.closes))
			r.claim(Claim{Match: header(t, "x-user=me"), Target: &target{addr: other.answering(t, tt.answer, tt.closes)}})
			check := func(say string, by *tape) {
				t.Helper()
				got := talk(t, dial(t, r.addr), say)
				if want := strings.Repeat(tt.answer, max(1, strings.Count(say, "Host: a\r\n"))); got != want && name != "two-hosts" {
					t.Errorf("the client got\n%q, want\n%q", got, want)
				}
				if got := by.take(); got != say {
					t.Errorf("the server got\n%q, want\n%q", got, say)
				}
			}
			check(tt.say, &read)
			if strings.Contains(tt.say, "Host: a\r\n") { // to the target, as it is
				check(strings.ReplaceAll(tt.say, "Host: a\r\n", "Host: a\r\n"+mine), &other)
			}
			if got := read.take(); got != "" {
				t.Errorf("the application got %q", got)
			}
		})
	}
}

// The offer to continue in HTTP/2 is the only thing that does not cross.
func TestOfferOfHTTP2IsDropped(t *testing.T) {
	var read tape
	r := newRig(t, read.answering(t, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", false))
	for say, want := range map[string]string{
		"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n": "Connection: close\r\n",
		"Connection: Upgrade, close,\r\n HTTP2-Settings\r\nUpgrade: H2C, websocket\r\n":        "Connection: Upgrade, close\r\nUpgrade: websocket\r\n",
	} {
		talk(t, dial(t, r.addr), "GET / HTTP/1.1\r\nhost: a\r\n"+say+"\r\n")
		if got, want := read.take(), "GET / HTTP/1.1\r\nhost: a\r\n"+want+"\r\n"; got != want {
			t.Errorf("the application got\n%q, want\n%q", got, want)
		}
	}
}

// For contradictory body lengths, the interceptor and the application agree where the next request begins.
func TestSmugglingIsRejected(t *testing.T) {
	var paths atomic.Pointer[[]string]
	app := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		seen := append(slices.Clone(*paths.Load()), r.URL.Path)
		paths.Store(&seen)
	}))
	for name, say := range map[string]string{
		"length-and-chunks": "POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /evil HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
		"two-lengths":       "POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nContent-Length: 45\r\n\r\nGET /evil HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
		"odd-coding":        "POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\nGET /evil HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
		"hidden-coding":     "POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nConnection: Content-Length, close\r\n\r\nGET /evil HTTP/1.1\r\nHost: a\r\n\r\n",
		"space-in-name":     "POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\nGET /evil HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			var direct []string
			paths.Store(new([]string))
			r := newRig(t, app)
			// Every request for /evil must go to this claim.
			evil, err := httpmatch.New(httpmatch.Spec{Path: "/evil"})
			if err != nil {
				t.Fatal(err)
			}
			var caught atomic.Int64
			r.claim(Claim{Match: evil, Target: &target{addr: serve(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { caught.Add(1) }))}})
			talk(t, dial(t, r.addr), say)
			if seen := *paths.Load(); slices.Contains(seen, "/evil") {
				t.Errorf("the application got %q (%q without the interceptor)", seen, direct)
			}
		})
	}
}

func TestLongHeadsAreAccepted(t *testing.T) {
	r := newRig(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Long", r.Header.Get("X-Long"))
		w.Header().Set("X-Path", r.URL.Path)
	})))
	for _, where := range []string{"header", "path"} {
		long, path := strings.Repeat("h", 900<<10), "/"
		if where == "path" {
			long, path = "", "/"+long
		}
		req, err := http.NewRequest(http.MethodGet, r.url(path), nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Long", long)
		resp, err := client(t, 1).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.Header.Get("X-Long") != long || resp.Header.Get("X-Path") != path {
			t.Errorf("a long %s came back changed: %d", where, resp.StatusCode)
		}
	}
	if code, _ := get(t, client(t, 1), r.url("/"), "X-Long", strings.Repeat("x", 2<<20)); code != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("2 MiB of header were answered with %d", code)
	}
}

func TestInformationalResponsesReachTheClient(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, major int) {
		r := newRig(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Link", "</a.css>")
			w.WriteHeader(http.StatusEarlyHints)
			w.Header().Del("Link")
			io.WriteString(w, "done")
		})))
		hints := ""
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
			hints += fmt.Sprint(code, h.Get("Link"))
			return nil
		}})
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.url("/"), nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client(t, major).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || string(body) != "done" || hints != "103</a.css>" || resp.Header.Get("Link") != "" {
			t.Errorf("hints %q, then %q, %v, with Link %q", hints, body, err, resp.Header.Get("Link"))
		}
	})
}

func TestExpectContinueIsForwarded(t *testing.T) {
	const head = "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"
	t.Run("the application asks for the body", func(t *testing.T) {
		r := newRig(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) })))
		c := dial(t, r.addr)
		br := bufio.NewReader(c)
		for range 2 { // the connection stays open
			io.WriteString(c, head)
			if resp, _ := readResponse(t, br, "POST"); resp.StatusCode != http.StatusContinue {
				t.Fatalf("answered with %s", resp.Status)
			}
			io.WriteString(c, "body")
			if resp, body := readResponse(t, br, "POST"); resp.StatusCode != http.StatusOK || body != "body" {
				t.Fatalf("then with %s %q", resp.Status, body)
			}
		}
	})
	t.Run("the application rejects the body", func(t *testing.T) {
		r := newRig(t, wire(t, func(c *net.TCPConn, br *bufio.Reader) {
			if _, err := http.ReadRequest(br); err != nil {
				t.Error(err)
			}
			io.WriteString(c, "HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno")
			if n, _ := io.Copy(io.Discard, br); n > 0 {
				t.Errorf("the application got %d bytes of a body that it did not want", n)
			}
		}))
		got := talk(t, dial(t, r.addr), head)
		if want := "HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"; got != want {
			t.Errorf("answered with %q", got)
		}
	})
	t.Run("the application ignores the header", func(t *testing.T) {
		r := newRig(t, wire(t, func(c *net.TCPConn, br *bufio.Reader) {
			if _, err := http.ReadRequest(br); err != nil {
				t.Error(err)
			}
			io.ReadFull(br, make([]byte, 4))
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		}))
		c := dial(t, r.addr) // the client does not wait for ever either
		br := bufio.NewReader(c)
		io.WriteString(c, head)
		io.WriteString(c, "body")
		if resp, _ := readResponse(t, br, "POST"); resp.StatusCode != http.StatusOK {
			t.Fatalf("then with %s", resp.Status)
		}
	})
}

func TestTrailersReachBothEnds(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, major int) {
		for _, announced := range []bool{true, false} {
			r := newRig(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				body, err := io.ReadAll(r.Body)
				if err != nil {
					t.Error(err)
				}
				name := http.TrailerPrefix + "X-Sum"
				if announced {
					w.Header().Set("Trailer", "X-Sum")
					name = "X-Sum"
				}
				w.Write(body)
				http.NewResponseController(w).Flush()
				w.Header().Set(name, r.Trailer.Get("X-Length"))
			})))
			req, err := http.NewRequest(http.MethodPost, r.url("/"), io.MultiReader(strings.NewReader("12345")))
			if err != nil {
				t.Fatal(err)
			}
			req.Trailer = http.Header{"X-Length": {"5"}}
			resp, err := client(t, major).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || string(body) != "12345" || resp.Trailer.Get("X-Sum") != "5" {
				t.Errorf("announced %v: %q, %v, trailers %v", announced, body, err, resp.Trailer)
			}
		}
	})
}

// Each piece of a response arrives before the server sends the next. The same holds for a request.
func TestPiecesAreForwardedAtOnce(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, major int) {
		r := newRig(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			rc := http.NewResponseController(w)
			if r.ProtoMajor == 1 {
				if err := rc.EnableFullDuplex(); err != nil {
					t.Error(err)
				}
			}
			w.Header().Set("Content-Type", "text/event-stream")
			rc.Flush()
			b := make([]byte, 100)
			for {
				n, err := r.Body.Read(b)
				if n > 0 {
					w.Write(bytes.ToUpper(b[:n]))
					rc.Flush()
				}
				if err != nil {
					return
				}
			}
		})))
		pr, pw := io.Pipe()
		req, err := http.NewRequest(http.MethodPost, r.url("/"), pr)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client(t, major).Do(req) // before the body begins
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		for _, text := range []string{"a", "bb", "ccc"} {
			io.WriteString(pw, text)
			b := make([]byte, len(text))
			if _, err := io.ReadFull(resp.Body, b); err != nil || string(b) != strings.ToUpper(text) {
				t.Fatalf("%q, %v", b, err)
			}
		}
		pw.Close()
		if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) > 0 {
			t.Errorf("%q, %v", rest, err)
		}
	})
}

// arrives reads as many bytes from a connection as text has, which must be those.
func arrives(t *testing.T, c net.Conn, text string) {
	t.Helper()
	got := make([]byte, len(text))
	if n, err := io.ReadFull(c, got); err != nil || string(got) != text {
		t.Fatalf("%d of %d bytes, or in another order: %v", n, len(text), err)
	}
}

// A body whose first bytes come alone keeps its order, also where the kernel moves the rest of it.
func TestBodyAfterAPauseKeepsItsOrder(t *testing.T) {
	var numbers strings.Builder
	for n := 0; numbers.Len() < 256<<10; n++ {
		fmt.Fprintf(&numbers, "%07d\n", n)
	}
	body := numbers.String()
	for name, framed := range map[string]struct{ head, end string }{
		"length": {fmt.Sprintf("Content-Length: %d\r\n\r\n", len(body)), ""},
		"chunk":  {fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n", len(body)), "\r\n0\r\n\r\n"},
		"FIN":    {"Connection: close\r\n\r\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			accepted, done := make(chan net.Conn), make(chan struct{})
			r := newRig(t, listen(t, func(c net.Conn) { accepted <- c; <-done }))
			t.Cleanup(func() { close(done) })
			r.claim(Claim{Match: header(t, "x-user=me"), Target: new(target)})
			c := dial(t, r.addr)
			request := "POST / HTTP/1.1\r\nHost: a\r\n"
			if name == "FIN" { // a request has no such body
				request += "Content-Length: 0\r\n\r\n"
			} else {
				request += framed.head + body[:300]
			}
			first, rest := body[:300], body[300:]+framed.end
			io.WriteString(c, request)
			app := <-accepted
			app.SetDeadline(time.Now().Add(20 * time.Second))
			arrives(t, app, request)
			if name != "FIN" {
				go io.WriteString(c, rest)
				arrives(t, app, rest)
			}
			answer := "HTTP/1.1 200 OK\r\n" + framed.head + first
			io.WriteString(app, answer)
			arrives(t, c, answer)
			go io.WriteString(app, rest)
			arrives(t, c, rest)
		})
	}
}

// The interceptor forwards 128 MiB piece by piece. The test has no time limit of its own.
func TestLargeUploadNeedsNoMemory(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, major int) {
		const size = 128 << 20
		inUse := func() uint64 { // without garbage, which other tests may have left
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return m.HeapAlloc
		}
		before := inUse()
		var peak atomic.Uint64
		r := newRig(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			b := make([]byte, 1<<20)
			for total := 0; ; {
				n, err := r.Body.Read(b)
				if total += n; err == io.EOF {
					fmt.Fprint(w, total)
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
				if total>>24 != (total-n)>>24 {
					peak.Store(max(peak.Load(), inUse()))
				}
			}
		})))
		r.claim(Claim{Mirror: true, Target: &stuck{}})
		c := client(t, major)
		c.Timeout = 0
		resp, err := c.Post(r.url("/"), "", io.LimitReader(zeros{}, size))
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || string(got) != fmt.Sprint(size) {
			t.Errorf("%s bytes arrived, %v", got, err)
		}
		if n := peak.Load(); n == 0 || n > before+32<<20 {
			t.Errorf("%d MiB of heap were in use, %d MiB before", n>>20, before>>20)
		}
	})
}

func TestClientAbortReachesTheApplication(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, major int) {
		began, canceled := make(chan struct{}), make(chan struct{})
		r := newRig(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			close(began)
			<-r.Context().Done()
			close(canceled)
		})))
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			<-began
			cancel()
		}()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.url("/"), nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client(t, major).Do(req); !errors.Is(err, context.Canceled) {
			t.Errorf("the client saw %v", err)
		}
		select {
		case <-canceled:
		case <-time.After(10 * time.Second):
			t.Error("the application's request did not end")
		}
	})
}

func TestTruncatedResponseBreaksTheConnection(t *testing.T) {
	for name, answer := range map[string]string{
		"length":    "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
		"chunks":    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
		"until-end": "HTTP/1.1 200 OK\r\n\r\nhalf", // with RST
	} {
		for _, version := range []string{"1.0", "1.1"} {
			t.Run(name+"-"+version, func(t *testing.T) {
				sent := make(chan struct{})
				r := newRig(t, wire(t, func(c *net.TCPConn, br *bufio.Reader) {
					if _, err := http.ReadRequest(br); err != nil {
						t.Error(err)
					}
					io.WriteString(c, answer)
					<-sent
					if name == "until-end" {
						c.SetLinger(0)
					}
				}))
				c := dial(t, r.addr)
				fmt.Fprintf(c, "GET / HTTP/%s\r\nHost: a\r\n\r\n", version)
				br := bufio.NewReader(c)
				resp, err := http.ReadResponse(br, nil)
				if err != nil {
					t.Fatal(err)
				}
				half := make([]byte, 4)
				if _, err := io.ReadFull(resp.Body, half); err != nil || string(half) != "half" {
					t.Fatalf("%q, %v", half, err)
				}
				close(sent)
				if rest, err := io.ReadAll(resp.Body); err == nil {
					t.Errorf("the answer ended without an error, with %q", rest)
				}
			})
		}
	}
	t.Run("http2", func(t *testing.T) {
		r := newRig(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, "half")
			http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		})))
		resp, err := client(t, 2).Get(r.url("/"))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if b, err := io.ReadAll(resp.Body); err == nil || string(b) != "half" {
			t.Errorf("%q, %v", b, err)
		}
	})
}

// An application that breaks off with FIN resets nobody: the client reads what was sent, and the end.
func TestClientReadsWhatABrokenAnswerHas(t *testing.T) {
	part := "HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + strings.Repeat("x", 3<<20)
	for name, answer := range map[string]string{"nothing": "", "a part": part} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, wire(t, func(c *net.TCPConn, br *bufio.Reader) {
				if _, err := http.ReadRequest(br); err != nil {
					t.Error(err)
				}
				io.WriteString(c, answer)
			}))
			c := dial(t, r.addr)
			c.SetReadBuffer(16 << 10)
			if got := talk(t, c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n"); got != answer {
				t.Errorf("the client got %d bytes of %d", len(got), len(answer))
			}
		})
	}
}

// A client that sends FIN after its request still gets the response.
func TestHalfCloseReachesTheApplication(t *testing.T) {
	for _, body := range []string{"", "Content-Length: 3\r\n\r\nabc", "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"} {
		saw := make(chan error, 1)
		r := newRig(t, wire(t, func(c *net.TCPConn, br *bufio.Reader) {
			req, err := http.ReadRequest(br)
			if err == nil {
				_, err = io.Copy(io.Discard, req.Body)
			}
			if err != nil {
				saw <- err
				return
			}
			_, err = br.ReadByte()
			saw <- err // io.EOF; only then answer
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nanswer")
		}))
		if body == "" {
			body = "\r\n"
		}
		if got := half(t, r.addr, "POST / HTTP/1.1\r\nHost: a\r\n"+body); !strings.HasSuffix(got, "answer") {
			t.Errorf("%q: the client got %q", body, got)
		}
		if err := <-saw; err != io.EOF {
			t.Errorf("%q: the application saw %v", body, err)
		}
	}
}

func TestFINFollowsPipelinedRequests(t *testing.T) {
	r := newRig(t, wire(t, func(c *net.TCPConn, br *bufio.Reader) {
		req, err := http.ReadRequest(br)
		if err != nil {
			t.Error(err)
			return
		}
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n%s", req.RequestURI)
		io.Copy(io.Discard, br)
	}))
	got := half(t, r.addr, "GET /1 HTTP/1.1\r\nHost: a\r\n\r\nGET /2 HTTP/1.1\r\nHost: a\r\n\r\n")
	if want := "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n/1HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n/2"; got != want {
		t.Errorf("the client got %q", got)
	}
}

// The client's connection ends with the application's if idle, but stays if its latest request went to a target.
func TestIdleConnectionEndsWithTheApplications(t *testing.T) {
	hangUp := make(chan struct{}, 2)
	r := newRig(t, wire(t, func(c *net.TCPConn, br *bufio.Reader) {
		if _, err := http.ReadRequest(br); err != nil {
			return
		}
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\napp")
		<-hangUp
	}))
	r.claim(Claim{Match: header(t, "x-user=me"), Target: &target{addr: serve(t, says("laptop"))}})
	c := dial(t, r.addr)
	br := bufio.NewReader(c)
	ask := func(headers, want string) {
		t.Helper()
		fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: a\r\n%s\r\n", headers)
		if _, got := readResponse(t, br, "GET"); got != want {
			t.Fatalf("answered by %q, want %q", got, want)
		}
	}
	ask("", "app")
	ask("X-User: me\r\n", "laptop")
	hangUp <- struct{}{}
	ask("X-User: me\r\n", "laptop")
	ask("", "app") // on a new connection
	hangUp <- struct{}{}
	if _, err := br.ReadByte(); err != io.EOF {
		t.Errorf("the client saw %v", err)
	}
}

// The application closes its connection while the interceptor sends the next request.
func TestOnlyIdempotentRequestsAreRepeated(t *testing.T) {
	for _, tt := range []struct {
		method string
		again  bool
	}{{"GET", true}, {"POST", false}} {
		t.Run(tt.method, func(t *testing.T) {
			var conns atomic.Int64
			r := newRig(t, wire(t, func(c *net.TCPConn, br *bufio.Reader) {
				first := conns.Add(1) == 1
				for n := 0; ; n++ {
					if _, err := http.ReadRequest(br); err != nil || first && n == 1 {
						return
					}
					io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
				}
			}))
			c := dial(t, r.addr)
			br := bufio.NewReader(c)
			io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
			readResponse(t, br, "GET")
			fmt.Fprintf(c, "%s / HTTP/1.1\r\nHost: a\r\n\r\n", tt.method)
			if tt.again {
				readResponse(t, br, tt.method)
			} else if _, err := br.ReadByte(); err == nil {
				t.Error("a request that must not be repeated was answered")
			}
			if n := conns.Load(); n != 1 && !tt.again || n != 2 && tt.again {
				t.Errorf("the application saw %d connections", n)
			}
		})
	}
}

func TestFailedTargetIsBadGateway(t *testing.T) {
	closed := testenv.ClosedPort(t, "tcp").String()
	forEachProtocol(t, func(t *testing.T, major int) {
		for name, addr := range map[string]string{"refused": closed, "silent": listen(t, func(net.Conn) {})} {
			r := newRig(t, serve(t, says("app")))
			stats := new(Stats)
			r.claim(Claim{Match: header(t, "x-user=me"), Target: &target{addr: addr}, Stats: stats})
			c := client(t, major)
			code, text := get(t, c, r.url("/"), "X-User", "me")
			if code != http.StatusBadGateway || !strings.HasPrefix(text, "kubevpn: ") || name == "refused" && !strings.Contains(text, "connection refused") {
				t.Errorf("%s: %d %q", name, code, text)
			}
			if stats.LastError() == nil {
				t.Errorf("%s: LastError returns nil", name)
			}
			if _, got := get(t, c, r.url("/")); got != "app" {
				t.Errorf("%s: the application's request was answered with %q", name, got)
			}
			req, err := http.NewRequest(http.MethodPost, r.url("/"), io.LimitReader(zeros{}, 100<<10))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("X-User", "me")
			resp, err := c.Do(req)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusBadGateway {
				t.Errorf("%s: an upload was answered with %d", name, resp.StatusCode)
			}
		}
	})
}

// The owner vanishes while a request waits for the dial, and while another waits for its response.
func TestRequestsOfALostOwnerEnd(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, major int) {
		r := newRig(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) })))
		r.claim(Claim{Target: new(vanishing)})
		resp, err := client(t, major).Post(r.url("/"), "", strings.NewReader("body"))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || string(body) != "body" {
			t.Errorf("answered with %d %q, %v", resp.StatusCode, body, err)
		}
	})
	t.Run("while it waits for the response", func(t *testing.T) {
		r := newRig(t, serve(t, says("app")))
		laptop := &target{}
		laptop.addr = serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			laptop.away.Store(true)
			<-r.Context().Done()
		}))
		r.claim(Claim{Target: laptop})
		if code, got := get(t, client(t, 1), r.url("/")); got != "app" {
			t.Errorf("answered with %d %q", code, got)
		}
	})
}

func TestMissingApplicationResetsTheClient(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, major int) {
		r := newRig(t, "127.0.0.1:1")
		_, err := client(t, major).Get(r.url("/"))
		if err == nil || !errors.Is(err, syscall.ECONNRESET) && !strings.Contains(err.Error(), "EOF") {
			t.Errorf("the client saw %v", err)
		}
	})
}

// The client gets a response that precedes the end of its upload, even if it sends no more.
func TestEarlyResponseReachesTheClient(t *testing.T) {
	r := newRig(t, wire(t, func(c *net.TCPConn, br *bufio.Reader) {
		if _, err := http.ReadRequest(br); err != nil {
			t.Error(err)
		}
		io.WriteString(c, "HTTP/1.1 413 Too Large\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n0\r\n\r\n")
		io.Copy(io.Discard, br)
	}))
	got := talk(t, dial(t, r.addr), "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nabc")
	if !strings.HasPrefix(got, "HTTP/1.1 413 ") || !strings.HasSuffix(got, "2\r\nno\r\n0\r\n\r\n") {
		t.Errorf("answered with %q", got)
	}
}

func TestDrainFinishesOpenRequests(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, major int) {
		began, goOn := make(chan struct{}), make(chan struct{})
		r := newRig(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/slow" {
				close(began)
				<-goOn
			}
			io.WriteString(w, "done")
		})), func(c *Config) { c.Drain = time.Minute })
		idle := dial(t, r.addr)
		io.WriteString(idle, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
		readResponse(t, bufio.NewReader(idle), "GET")
		go func() {
			<-began
			r.stop()
			if _, err := idle.Read(make([]byte, 1)); err != io.EOF {
				t.Errorf("the idle connection saw %v", err)
			}
			close(goOn)
		}()
		if code, got := get(t, client(t, major), r.url("/slow")); got != "done" {
			t.Errorf("the request in progress got %d %q", code, got)
		}
		r.conns.Wait()
	})
	t.Run("a request that lasts longer is cut off", func(t *testing.T) {
		began := make(chan struct{})
		r := newRig(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			close(began)
			<-r.Context().Done()
		})), func(c *Config) { c.Drain = 50 * time.Millisecond })
		go func() { <-began; r.stop() }()
		if _, err := client(t, 1).Get(r.url("/")); err == nil || os.IsTimeout(err) {
			t.Errorf("the client saw %v", err)
		}
	})
}

func TestUpgradedConnectionHalfCloses(t *testing.T) {
	// echo answers after the client's FIN.
	echo := wire(t, func(c *net.TCPConn, br *bufio.Reader) {
		req, err := http.ReadRequest(br)
		if err != nil {
			return
		}
		if req.Header.Get("Upgrade") != "raw" || !strings.Contains(req.Header.Get("Connection"), "Upgrade") {
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno")
			return
		}
		io.WriteString(c, "HTTP/1.1 101 Changed It\r\nUpgrade: raw\r\nConnection: Upgrade\r\n\r\nwelcome ")
		got, err := io.ReadAll(br)
		if err != nil {
			t.Error(err)
		}
		c.Write(got)
	})
	r := newRig(t, echo)
	r.claim(Claim{Match: header(t, "x-user=me"), Target: &target{addr: echo}})
	for _, who := range []string{"me", "you"} {
		got := half(t, r.addr, "GET / HTTP/1.1\r\nHost: a\r\nX-User: "+who+"\r\nConnection: keep-alive, Upgrade\r\nUpgrade: raw\r\n\r\nearly")
		if want := "HTTP/1.1 101 Changed It\r\nUpgrade: raw\r\nConnection: Upgrade\r\n\r\nwelcome early"; got != want {
			t.Errorf("%s got %q", who, got)
		}
	}
	if got := half(t, r.addr, "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: other\r\n\r\n"); !strings.HasSuffix(got, "\r\n\r\nno") {
		t.Errorf("an upgrade that was refused got %q", got)
	}
}

// An HTTP/2 answer may have both a length and a trailer.
func TestTrailerFollowsABodyOfKnownLength(t *testing.T) {
	r := newRig(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Trailer", "X-Sum")
		w.Header().Set("Content-Length", "5")
		io.WriteString(w, "hello")
		w.Header().Set("X-Sum", "42")
	})))
	resp, err := client(t, 2).Get(r.url("/"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "hello" || resp.Trailer.Get("X-Sum") != "42" {
		t.Errorf("%q, %v, trailer %v", body, err, resp.Trailer)
	}
}
