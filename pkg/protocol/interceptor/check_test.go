package interceptor

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"kubevpn/pkg/protocol/httpmatch"
)

// checked returns a rig whose port the kubelet checks so, from 192.0.2.1, and a claim of everything.
func checked(t *testing.T, app, laptop string, checks ...httpmatch.Check) (r *rig, port uint16) {
	t.Helper()
	node := netip.MustParseAddr("192.0.2.1")
	r = newRig(t, app, func(c *Config) {
		c.CheckedFrom, c.Checks = []netip.Prefix{netip.PrefixFrom(node, 32)}, checks
	})
	r.claim(Claim{Target: &target{addr: laptop}})
	r.client.Store(&node)
	port = addrPort(t, r.addr).Port()
	for n := range checks {
		checks[n].Port = port
	}
	return r, port
}

// kubelet returns a client that sends what the kubelet's does: see pkg/probe/http of Kubernetes.
func kubelet(t *testing.T) *http.Client {
	tr := &http.Transport{DisableKeepAlives: true, DisableCompression: true, ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second}
}

func TestChecksOfHTTPReachTheApplication(t *testing.T) {
	var app http.ServeMux
	var own string // the pod's
	app.Handle("/healthz", says("app"))
	app.HandleFunc("/moved", func(w http.ResponseWriter, r *http.Request) {
		to := "/login"
		if r.Host == "shop.test" { // then the client does not send its Host again
			to = own + to
		}
		http.Redirect(w, r, to, http.StatusFound)
	})
	app.Handle("/login", says("app"))
	laptop := serve(t, says("laptop"))
	sent := http.Header{"User-Agent": {"hc"}, "X-Check": {"a", "b"}}
	check := httpmatch.Check{Scheme: "http", URI: "/healthz?deep=1", Header: sent}
	moved := httpmatch.Check{Scheme: "http", URI: "/moved", Header: http.Header{"User-Agent": {"hc"}}}
	silent := httpmatch.Check{Scheme: "http", URI: "/healthz", Header: http.Header{"User-Agent": {""}, "Accept": {""}}}
	r, _ := checked(t, serve(t, &app), laptop, check, moved, silent, httpmatch.Check{Scheme: "http", URI: "/no-agent", Header: http.Header{"X-Check": {"a"}}})
	own = r.url("")
	elsewhere, within := netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("127.0.0.1")
	node := *r.client.Load()
	with := func(more ...string) http.Header {
		h := sent.Clone()
		for n := 0; n < len(more); n += 2 {
			h.Set(more[n], more[n+1])
		}
		return h
	}
	for _, tt := range []struct {
		name, method, uri, host string
		header                  http.Header
		from                    netip.Addr
		want                    string
	}{
		{"the check", "GET", "/healthz?deep=1", "", sent, node, "app"},
		{"a redirect", "GET", "/moved", "", moved.Header, node, "app"},
		{"a redirect that loses the host", "GET", "/moved", "shop.test", moved.Header, node, "app"},
		{"a host", "GET", "/healthz?deep=1", "shop.test", sent, node, "app"},
		{"without a User-Agent", "GET", "/healthz", "", http.Header{"User-Agent": {""}}, node, "app"},
		{"by default", "GET", "/", "", http.Header{"User-Agent": {"kube-probe/1.34"}}, node, "404 page not found\n"},
		{"a hook", "GET", "/", "", http.Header{"User-Agent": {"kube-lifecycle/1.34"}}, node, "404 page not found\n"},
		{"from elsewhere", "GET", "/healthz?deep=1", "", sent, elsewhere, "laptop"},
		{"another path", "GET", "/healthz", "", sent, node, "laptop"},
		{"another method", "POST", "/healthz?deep=1", "", sent, node, "laptop"},
		{"by a NodePort", "GET", "/healthz?deep=1", "192.0.2.1:30080", http.Header{"User-Agent": {"curl"}}, node, "laptop"},
		{"the spec sets no User-Agent", "GET", "/no-agent", "", http.Header{"X-Check": {"a"}}, node, "laptop"},
		{"another value", "GET", "/healthz?deep=1", "", with("User-Agent", "curl"), node, "laptop"},
		{"a header less", "GET", "/healthz?deep=1", "", http.Header{"User-Agent": {"hc"}}, node, "laptop"},
		{"passed on in the pod", "GET", "/healthz?deep=1", "front", with("X-Forwarded-For", "192.0.2.1"), within, "app"},
		{"a call in the pod", "GET", "/healthz?deep=1", "", with("User-Agent", "curl"), within, "laptop"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r.client.Store(&tt.from)
			req, err := http.NewRequest(tt.method, r.url(tt.uri), nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Header, req.Host = tt.header.Clone(), tt.host
			resp, err := kubelet(t).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if got, err := io.ReadAll(resp.Body); string(got) != tt.want || err != nil {
				t.Errorf("answered with %q, %v", got, err)
			}
		})
	}
	if n := (*r.claims.Load())[0].Stats.Requests(); n != 8 {
		t.Errorf("the claim counts %d requests", n)
	}
}

func TestChecksOfHTTPSReachTheApplication(t *testing.T) {
	app, certificate := serveTLS(t, "app", true)
	laptop, _ := serveTLS(t, "laptop", true)
	check := httpmatch.Check{Scheme: httpmatch.CheckHTTPS, URI: "/", Header: http.Header{"User-Agent": {"hc"}}}
	r, port := checked(t, app, laptop, check)
	node, elsewhere, within := *r.client.Load(), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("127.0.0.1")
	matching := *r.claims.Load()
	terminating := []Claim{{ID: "key", Target: matching[0].Target, Stats: new(Stats), TLS: &tls.Config{Certificates: []tls.Certificate{certificate}}}}
	for _, tt := range []struct {
		name, host string
		from       netip.Addr
		claims     []Claim
		agent      string
		want       string
	}{
		{"the check", "127.0.0.1", node, matching, "hc", "app HTTP/2.0 "},
		{"a client that names the server", "localhost", node, matching, "hc", "laptop HTTP/2.0 localhost"},
		{"from elsewhere", "127.0.0.1", elsewhere, matching, "hc", "laptop HTTP/2.0 "},
		{"a call in the pod", "127.0.0.1", within, matching, "hc", "laptop HTTP/2.0 "},
		{"the check, decrypted", "127.0.0.1", node, terminating, "hc", "app HTTP/2.0 "},
		{"a request, decrypted", "127.0.0.1", node, terminating, "curl", "laptop HTTP/2.0 "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r.client.Store(&tt.from)
			r.claims.Store(&tt.claims)
			_, got := get(t, kubelet(t), fmt.Sprintf("https://%s:%d/", tt.host, port), "User-Agent", tt.agent, "Accept", "*/*")
			if got != tt.want {
				t.Errorf("answered with %q", got)
			}
		})
	}
}

// A ClientHello that comes in pieces, or never as a whole, is not held back for long, and not lost.
func TestBrokenClientHelloCrosses(t *testing.T) {
	laptop := listen(t, func(c net.Conn) {
		b := make([]byte, 8)
		_, _ = io.ReadFull(c, b)
		fmt.Fprintf(c, "laptop got %x", b)
	})
	r, _ := checked(t, "", laptop, httpmatch.Check{Scheme: httpmatch.CheckHTTPS})
	if got := talk(t, dial(t, r.addr), "\x16\x03\x01\x01\x00\x01\x00\x01"); got != "laptop got 1603010100010001" {
		t.Errorf("answered with %q", got)
	}
}

func TestConnectionsThatCheckReachTheApplication(t *testing.T) {
	seen := make(chan string, 4)
	server := func(name string) string {
		return listen(t, func(c net.Conn) {
			_, _ = io.Copy(io.Discard, c)
			seen <- name
		})
	}
	r, _ := checked(t, server("app"), server("laptop"), httpmatch.Check{Scheme: httpmatch.CheckConnect})
	r.i.config.Checks = append(r.i.config.Checks, httpmatch.Check{Scheme: httpmatch.CheckConnect, Port: 1}, httpmatch.Check{Scheme: httpmatch.CheckHTTPS, Port: 1})
	connect := func(from string, text, want string) {
		t.Helper()
		client := netip.MustParseAddr(from)
		r.client.Store(&client)
		c := dial(t, r.addr)
		if _, err := io.WriteString(c, text); err != nil {
			t.Fatal(err)
		}
		c.Close()
		if got := <-seen; got != want {
			t.Errorf("%q from %s came to %s", text, from, got)
		}
	}
	for _, speaks := range []bool{false, true} {
		r.i.serverSpeaksFirst(addrPort(t, r.addr).Port()).Store(speaks)
		connect("192.0.2.1", "", "app")
		connect("192.0.2.1", "\x00text", "laptop")
		connect("192.0.2.2", "", "laptop")
		connect("127.0.0.1", "", "laptop")
	}
}
