package diff

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// listening returns a Program for a server of this machine, which is for port 8080 of the container.
func listening(t *testing.T, body int, h http.HandlerFunc) *Program {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	return NewProgram([]api.PortMap{{Protocol: "tcp", Container: 8080, Local: uint16(s.Listener.Addr().(*net.TCPAddr).Port)}}, body)
}

func toPort(port uint16, method, path string) *api.Exchange {
	e := recorded(method, path, "")
	e.Server = netip.AddrPortFrom(netip.MustParseAddr("10.244.1.7"), port)
	return e
}

func TestProgramGetsTheRequestOfTheClient(t *testing.T) {
	for _, proto := range []string{"HTTP/1.1", "HTTP/2.0"} {
		p := listening(t, 5, func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil || string(body) != "hello" || r.Method != "POST" || r.RequestURI != "//a%2Fb?c=%20&d" || r.Host != "web.shop" || r.Proto != proto ||
				r.Header.Get("Authorization") != "Bearer secret" || r.Header.Get("X-Hop") != "" || len(r.Header["User-Agent"]) > 0 || r.Header.Get("Accept-Encoding") != "" {
				t.Errorf("%s: got %s %s %s %v %q %v", proto, r.Method, r.RequestURI, r.Host, r.Header, body, err)
			}
			w.Header().Set("X-Answer", "yes")
			w.WriteHeader(http.StatusFound)
			io.WriteString(w, "long answer")
		})
		e := toPort(8080, "POST", "//a%2Fb?c=%20&d")
		e.Request.Host, e.Request.Proto = "web.shop", proto
		e.Request.Headers = http.Header{"Authorization": {"Bearer secret"}, "Connection": {"x-hop, close"}, "X-Hop": {"1"}, "Content-Length": {"99"}}
		e.Request.Body = api.ExchangeBody{Size: 5, Data: []byte("hello")}
		got := p.Send(t.Context(), e)
		if r := got.Response; got.Error != "" || r == nil || r.Status != http.StatusFound || r.Headers.Get("X-Answer") != "yes" ||
			string(r.Body.Data) != "long " || r.Body.Size != 11 || got.To != api.ToLaptop {
			t.Errorf("%s: %+v %+v", proto, got, r)
		}
		if e.Request.Headers.Get("X-Hop") == "" {
			t.Error("the exchange has changed")
		}
	}
}

func TestOptionsForTheServer(t *testing.T) {
	p := listening(t, 0, func(_ http.ResponseWriter, r *http.Request) {
		t.Errorf("path %q", r.RequestURI) // net/http answers itself
	})
	if got := p.Send(t.Context(), toPort(8080, "OPTIONS", "*")); got.Response == nil || got.Response.Status != http.StatusOK {
		t.Errorf("%+v", got)
	}
}

func TestProgramThatDoesNotAnswer(t *testing.T) {
	p := listening(t, 5, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	if got := p.Send(t.Context(), toPort(8080, "GET", "/")); got.Response != nil || got.Error == "" {
		t.Errorf("%+v", got)
	}
	if got := p.Send(t.Context(), toPort(9090, "GET", "/")); !strings.Contains(got.Error, "the intercept forwards port 9090 to no port of this machine") {
		t.Errorf("%+v", got)
	}
	if got := p.Send(t.Context(), toPort(8080, "GET", "no path")); !strings.Contains(got.Error, "path") {
		t.Errorf("%+v", got)
	}
	hangs := listening(t, 5, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	if got := hangs.Send(ctx, toPort(8080, "GET", "/")); got.Error != "enough" {
		t.Errorf("%+v", got)
	}
	if hangs.Listens(t.Context()) == "" || NewProgram(nil, 0).Listens(t.Context()) != "" {
		t.Error("Listens is wrong")
	}
}

// A program may open its other port first: it must not differ because of a port that it has not opened yet.
func TestRequestsToAPortOnWhichNothingHasListenedAreNotCompared(t *testing.T) {
	p := listening(t, 5, func(http.ResponseWriter, *http.Request) {})
	closed := testenv.ClosedPort(t, "tcp").Port()
	p.ports[9090] = api.PortMap{Local: closed}
	if got := p.Send(t.Context(), toPort(9090, "GET", "/")); got != nil {
		t.Errorf("before the program listens: %+v", got)
	}
	if got := p.Send(t.Context(), toPort(8080, "GET", "/")); got == nil || got.Response == nil {
		t.Errorf("to the port that is open: %+v", got)
	}
	p.listened.Store(p.ports[9090].Place(), true)
	if got := p.Send(t.Context(), toPort(9090, "GET", "/")); got == nil || !strings.Contains(got.Error, "refused") {
		t.Errorf("to a port that has closed: %+v", got)
	}
}

func TestProgramWithTLS(t *testing.T) {
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "inside") }))
	t.Cleanup(s.Close)
	p := NewProgram([]api.PortMap{{Protocol: "tcp", Container: 443, Local: uint16(s.Listener.Addr().(*net.TCPAddr).Port)}}, 100)
	e := toPort(443, "GET", "/")
	e.Request.Scheme = "https"
	if got := p.Send(t.Context(), e); got.Response == nil || string(got.Response.Body.Data) != "inside" {
		t.Errorf("%+v", got)
	}
}
