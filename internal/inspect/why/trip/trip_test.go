package trip

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

func goTo(t *testing.T, ctx context.Context, to string) Result {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, to, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-User", "me")
	Mark(r)
	return send(r)
}

func TestRequestIsMarkedAndAnswered(t *testing.T) {
	var got http.Header
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r.Header.Clone()
		http.Redirect(w, r, "/elsewhere", http.StatusFound)
		io.WriteString(w, strings.Repeat("x", 10_000))
	}))
	defer s.Close()
	r := goTo(t, t.Context(), s.URL)
	if !r.Dial.Done || !r.Answer.Done || r.Status != http.StatusFound || len(r.Body) != maxBody || r.Lookup.Tried() {
		t.Errorf("%+v", r)
	}
	id := got.Get(api.TraceHeader)
	if len(id) != 32 || !strings.HasPrefix(got.Get(api.TraceParent), "00-"+id+"-") || got.Get("X-User") != "me" {
		t.Errorf("%v", got)
	}
	if r.Device == "" {
		t.Error("the device is unknown")
	}
}

func TestRefusedConnectionIsNamed(t *testing.T) {
	if r := goTo(t, t.Context(), "http://"+testenv.ClosedPort(t, "tcp").String()); !r.Dial.Refused() || r.Answer.Tried() {
		t.Errorf("%+v", r)
	}
}

func TestServerThatHangsIsLeftAtTheDeadline(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	r := goTo(t, ctx, "http://"+l.Addr().String()) // the kernel accepts
	if !r.Dial.Done || !r.Answer.TimedOut() {
		t.Errorf("%+v", r)
	}
}

func TestServerThatClosesOrTalksAnotherProtocolIsBroken(t *testing.T) {
	for _, says := range []string{"", "220 mail.example.com\r\n"} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			if c, err := l.Accept(); err == nil {
				io.WriteString(c, says)
				c.Close()
			}
		}()
		if r := goTo(t, t.Context(), "http://"+l.Addr().String()); !r.Dial.Done || r.Answer.Done || !r.Answer.Tried() {
			t.Errorf("%q: %+v", says, r)
		}
	}
}
