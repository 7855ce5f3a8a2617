//go:build linux

package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os/exec"
	"strings"
	"testing"

	mdns "github.com/miekg/dns"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/connection"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/protocol/dns"
	"kubevpn/pkg/protocol/httpmatch"
)

// reached is a connection to a cluster with one Service, web.default, which is a server of this machine.
type reached struct {
	*fakeConnection
	config connection.Config
	web    string
}

var webAddr = netip.MustParseAddrPort("10.96.0.80:80")

func (c *reached) DialFlow(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error) {
	if addr != webAddr {
		return nil, fmt.Errorf("dialed %v inside", addr)
	}
	return new(net.Dialer).DialContext(ctx, network, c.web)
}

// ServeDNS is the cluster's DNS.
func (c *reached) ServeDNS(_ context.Context, q *mdns.Msg) (*mdns.Msg, error) {
	reply := new(mdns.Msg).SetReply(q)
	switch asked := q.Question[0]; {
	case asked.Qtype == mdns.TypeA && strings.EqualFold(asked.Name, "rebound.default.svc.cluster.local."):
		header := mdns.RR_Header{Name: asked.Name, Rrtype: mdns.TypeA, Class: mdns.ClassINET, Ttl: 5}
		reply.Answer = []mdns.RR{&mdns.A{Hdr: header, A: net.IP{192, 168, 1, 7}}} // a host of the laptop's LAN
	case !strings.EqualFold(asked.Name, "web.default.svc.cluster.local."):
		reply.Rcode = mdns.RcodeNameError
	case asked.Qtype == mdns.TypeA:
		header := mdns.RR_Header{Name: asked.Name, Rrtype: mdns.TypeA, Class: mdns.ClassINET, Ttl: 5}
		reply.Answer = []mdns.RR{&mdns.A{Hdr: header, A: webAddr.Addr().AsSlice()}}
	}
	return reply, nil
}

func (c *reached) Run(ctx context.Context) error {
	index := new(dns.Index)
	index.Apply(true, map[string][]string{"default": {"web"}}, nil)
	if err := c.config.Network.SetZone(&dns.Zone{Domain: "cluster.local", Services: index, Cluster: c}); err != nil {
		return err
	}
	_, err := c.config.Network.SetLink(ctx, api.Link{
		Routes:       []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("fd00:96::/112")},
		MatchDomains: []string{"cluster.local", "svc", "default", "96.10.in-addr.arpa"},
	})
	if err != nil {
		return err
	}
	close(c.connected)
	select {
	case err := <-c.end:
		return err
	case <-ctx.Done():
		return nil
	}
}

func (c *reached) Inside(dst netip.Addr) bool {
	return netip.MustParsePrefix("10.96.0.0/12").Contains(dst) || netip.MustParsePrefix("fd00:96::/112").Contains(dst)
}

// startSOCKS holds a proxy until the test ends, and returns what it reports.
func startSOCKS(t *testing.T, headers ...httpmatch.Named) (*api.SOCKS, *reached, <-chan error) {
	t.Helper()
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, r.Host, r.Header["X-User"], r.Header["Baggage"])
	}))
	t.Cleanup(web.Close)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &reached{fakeConnection: &fakeConnection{id: "east", connected: make(chan struct{}), end: make(chan error, 1)},
		web: web.Listener.Addr().String()}
	shown := make(chan *api.SOCKS, 1)
	done := make(chan error, 1)
	connect := request("east")
	connect.AddHeaders = headers
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		done <- Hold(ctx, HoldConfig{
			Request: api.InterceptRequest{Connect: connect}, Proxy: l, Logger: discard(),
			Progress: func(e api.Event) {
				if c := e.Connection; c != nil && c.Status == api.StatusConnected {
					shown <- c.SOCKS
				}
			},
			Factory: connectionFactory{new: func(cfg connection.Config) (Connection, error) {
				c.config = cfg
				return c, nil
			}},
		})
		close(done)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return wait(t, shown, "the proxy"), c, done
}

func TestSOCKSReachesTheClusterByNameAndAddress(t *testing.T) {
	testenv.NeedPrograms(t, "curl")
	p, c, done := startSOCKS(t)
	if len(p.Password) < 26 || !strings.HasPrefix(p.PAC, "http://"+p.Address+"/") { // 26 letters of base32: 130 bits
		t.Errorf("%+v", p)
	}
	for _, tt := range []struct{ host, http, socks string }{
		{"web", "web", "web"},
		{"web.default", "web.default", "web.default"},
		{"WEB.default.svc.cluster.local", "WEB.default.svc.cluster.local", "WEB.default.svc.cluster.local"},
		{"10.96.0.80", "10.96.0.80", "10.96.0.80"},
		{"10.96.0.81", "dialed 10.96.0.81:80 inside", "(1)"},
		{"gone.default.svc", "lookup gone.default.svc: no such host", "(4)"},
		{"rebound.default.svc", "the cluster answers with 192.168.1.7, which is not routed to it", "(4)"},
		// The program means its own machine, and the proxy is not there to reach that.
		{"localhost", "no route to host", "(4)"},
		{"127.0.0.1", "no route to host", "(4)"},
	} {
		for scheme, want := range map[string]string{"http": tt.http, "socks5h": tt.socks} {
			through := url.URL{Scheme: scheme, User: url.UserPassword(p.User, p.Password), Host: p.Address}
			out, _ := exec.Command("curl", "-sS", "--noproxy", "none", "--max-time", "20", "--proxy", through.String(),
				"http://"+tt.host).CombinedOutput()
			if !strings.Contains(string(out), want) {
				t.Errorf("%s through %s: %q, want %q", tt.host, scheme, out, want)
			}
		}
	}
	lost := api.Errorf(api.ExitLost, "the manager is gone")
	c.end <- lost
	if err := wait(t, done, "the end"); !errors.Is(err, lost) || err.Error() != lost.Message {
		t.Errorf("Hold = %v, want %v", err, lost)
	}
}

// TestProxyOfAPodReachesTheAPIServer: its address is never routed, but the name kubernetes.default leads to it.
func TestProxyOfAPodReachesTheAPIServer(t *testing.T) {
	for _, inPod := range []bool{false, true} {
		p := newProxy(nil, nil, discard())
		if p.inPod = inPod; p.routed(netip.MustParseAddr("10.96.0.1")) != inPod {
			t.Errorf("in a pod %v: the proxy accepts the address %v", inPod, !inPod)
		}
	}
}

func TestProxyAddsHeadersForTheClusterOnly(t *testing.T) {
	testenv.NeedPrograms(t, "curl")
	p, _, _ := startSOCKS(t, httpmatch.Named{Name: "x-user", Value: "me"}, httpmatch.Named{Name: "baggage", Value: "user=me"})
	for _, tt := range []struct {
		scheme, header, want string
	}{
		{"http", "a: b", "web[me] [user=me]"},
		{"http", "x-user: you", "web[you] [user=me]"},
		{"http", "baggage: a=b", "web[me] [a=b,user=me]"},
		{"socks5h", "a: b", "web[] []"}, // bytes
	} {
		through := url.URL{Scheme: tt.scheme, User: url.UserPassword(p.User, p.Password), Host: p.Address}
		out, err := exec.Command("curl", "-sS", "--noproxy", "none", "--max-time", "20", "--proxy", through.String(), "-H", tt.header, "http://web").CombinedOutput()
		if err != nil || string(out) != tt.want {
			t.Errorf("%s, %s: %q, %v, want %q", tt.scheme, tt.header, out, err, tt.want)
		}
	}
	inside := &proxy{headers: []httpmatch.Named{{Name: "x-user", Value: "me"}}, inside: (&reached{}).Inside}
	for address, want := range map[string]string{"10.96.0.80:8080": "me", "[fd00:96::1]": "me", "93.184.216.34": ""} {
		r := httptest.NewRequest("GET", "http://"+address+"/", nil)
		if inside.addHeaders(r); r.Header.Get("X-User") != want {
			t.Errorf("%s: %v", address, r.Header)
		}
	}
}

// After the user's consent, the next attempt serves the same listener.
func TestFailedConnectionKeepsTheListenerOfItsProxy(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	why := api.Errorf(api.ExitConsent, "public networks")
	r := &rig{t: t, onRun: func(context.Context, *fakeConnection) error { return why }}
	err = Hold(t.Context(), HoldConfig{Request: api.InterceptRequest{Connect: request("east")}, Proxy: l, Factory: r,
		Progress: func(api.Event) {}, Logger: discard()})
	if !errors.Is(err, why) {
		t.Errorf("Hold = %v, want %v", err, why)
	}
	if err := l.Close(); err != nil {
		t.Errorf("the listener was closed: %v", err)
	}
}

func TestBrowsersUseTheProxyForTheClusterOnly(t *testing.T) {
	p, _, _ := startSOCKS(t)
	resp, err := http.Get(p.PAC)
	if err != nil {
		t.Fatal(err)
	}
	script, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	if err != nil || resp.Header.Get("Content-Type") != "application/x-ns-proxy-autoconfig" {
		t.Fatalf("%v, %v", err, resp.Header)
	}
	for _, want := range []string{
		`domains = ["cluster.local","svc","default"], networks = [["10.96.0.0","255.240.0.0"]]`, `"PROXY ` + p.Address + `"`,
	} {
		if !strings.Contains(string(script), want) {
			t.Errorf("%s\ndoes not contain %s", script, want)
		}
	}
}
