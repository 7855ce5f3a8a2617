package interceptor

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/time/rate"
)

// recorded returns a Claim.Record with that limit of bytes, and a channel of its exchanges.
func recorded(limit int) (chan *Exchange, func() (func(*Exchange), int)) {
	all := make(chan *Exchange, 64)
	return all, func() (func(*Exchange), int) { return func(e *Exchange) { all <- e }, limit }
}

func next(t *testing.T, all chan *Exchange) *Exchange {
	t.Helper()
	select {
	case e := <-all:
		if e.Began.IsZero() || e.Ended.Before(e.Began) || e.Status != 0 && e.Answered.Before(e.Began) {
			t.Errorf("times: %v %v %v", e.Began, e.Answered, e.Ended)
		}
		return e
	case <-time.After(20 * time.Second):
		t.Fatal("nothing was recorded")
		return nil
	}
}

func none(t *testing.T, all chan *Exchange) {
	t.Helper()
	select {
	case e := <-all:
		t.Errorf("recorded %+v", e)
	default:
	}
}

// echo answers with the request's body, a header and a trailer.
func echo(t *testing.T) string {
	return serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "X-Sum")
		w.Header().Set("X-Answer", "yes")
		w.WriteHeader(http.StatusCreated)
		io.Copy(w, r.Body)
		w.Header().Set("X-Sum", "42")
	}))
}

func TestExchangeIsRecorded(t *testing.T) {
	for major := 1; major <= 2; major++ {
		t.Run(fmt.Sprint("HTTP/", major), func(t *testing.T) {
			r := newRig(t, serve(t, says("application")))
			all, record := recorded(8)
			r.claim(Claim{Match: header(t, "x-user=me"), Target: &target{addr: echo(t)}, Record: record})
			c := client(t, major)
			if _, body := get(t, c, r.url("/"), "x-user", "you"); body != "application" {
				t.Error(body)
			}
			get(t, c, r.url("/"), "x-user", "me", "User-Agent", "kube-probe/1.33")
			none(t, all)
			req, err := http.NewRequest(http.MethodPost, r.url("/a?b=c"), strings.NewReader("more than eight"))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("X-User", "me")
			resp, err := c.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "more than eight" || resp.Trailer.Get("X-Sum") != "42" {
				t.Errorf("%q, %v, %v", body, err, resp.Trailer)
			}
			resp.Body.Close()
			e := next(t, all)
			if e.Method != "POST" || e.URI != "/a?b=c" || e.Host != r.addr || e.Status != http.StatusCreated || e.TLS ||
				e.Header.Get("X-User") != "me" || e.Answer.Get("X-Answer") != "yes" || e.Trailer.Get("X-Sum") != "42" ||
				len(e.Trailer) != 1 || !strings.HasPrefix(e.Proto, fmt.Sprint("HTTP/", major)) || e.To == nil || e.Err != nil {
				t.Errorf("recorded %+v", e)
			}
			for _, b := range []Body{e.Body, e.AnswerBody} {
				if b.Size != 15 || string(b.Data) != "more tha" {
					t.Errorf("body %d %q", b.Size, b.Data)
				}
			}
		})
	}
}

// The kernel moves the rest of a long body, which is counted.
func TestLongBodyIsCounted(t *testing.T) {
	const size = 1 << 20
	r := newRig(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(size))
		io.CopyN(w, zeros{}, size)
	})))
	all, record := recorded(100)
	r.claim(Claim{Mirror: true, Target: &target{addr: echo(t)}, Record: record})
	if _, body := get(t, client(t, 1), r.url("/")); len(body) != size {
		t.Errorf("%d bytes", len(body))
	}
	if e := next(t, all); e.AnswerBody.Size != size || len(e.AnswerBody.Data) != 100 || e.To != nil {
		t.Errorf("recorded %d of %d, to %v", len(e.AnswerBody.Data), e.AnswerBody.Size, e.To)
	}
}

func TestFailureIsRecorded(t *testing.T) {
	r := newRig(t, serve(t, says("application")))
	all, record := recorded(1000)
	nobody := listen(t, func(c net.Conn) { c.(*net.TCPConn).SetLinger(0) })
	r.claim(Claim{Target: &target{addr: nobody}, Record: record})
	for major := 1; major <= 2; major++ {
		if status, _ := get(t, client(t, major), r.url("/")); status != http.StatusBadGateway {
			t.Errorf("status %d", status)
		}
		e := next(t, all)
		if e.Status != http.StatusBadGateway || e.Err == nil || !strings.Contains(string(e.AnswerBody.Data), "kubevpn") {
			t.Errorf("recorded %+v", e)
		}
	}
}

func TestRequestOfClientThatGivesUpIsRecorded(t *testing.T) {
	for major := 1; major <= 2; major++ {
		release := make(chan struct{})
		r := newRig(t, serve(t, says("application")))
		all, record := recorded(0)
		slow := serve(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-release }))
		asked := &target{addr: slow}
		r.claim(Claim{Target: asked, Record: record})
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			for asked.dials.Load() == 0 {
				time.Sleep(time.Millisecond)
			}
			cancel()
		}()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.url("/hangs"), nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client(t, major).Do(req); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if major == 1 { // the server notices the end of the connection
			r.stop()
		}
		if e := next(t, all); e.Status != 0 || e.Err == nil || e.URI != "/hangs" {
			t.Errorf("recorded %+v", e)
		}
		close(release)
	}
}

// Two owners record one request, each with its own limit.
func TestEachOwnerRecords(t *testing.T) {
	r := newRig(t, serve(t, says("application")))
	one, recordOne := recorded(2)
	two, recordTwo := recorded(1000)
	r.claim(
		Claim{Mirror: true, Target: &target{addr: echo(t)}, Record: recordOne},
		Claim{Target: &target{addr: serve(t, says("target"))}, Record: recordTwo},
		Claim{Mirror: true, Match: header(t, "x-user=you"), Target: &target{addr: echo(t)}, Record: func() (func(*Exchange), int) {
			t.Error("Record was called for a request that does not match")
			return nil, 0
		}},
		Claim{Mirror: true, Target: &target{addr: echo(t)}, Record: func() (func(*Exchange), int) { return nil, 0 }},
	)
	if _, body := get(t, client(t, 1), r.url("/")); body != "target" {
		t.Error(body)
	}
	if e := next(t, one); string(e.AnswerBody.Data) != "ta" || e.AnswerBody.Size != 6 || e.To == nil {
		t.Errorf("recorded %+v", e)
	}
	if e := next(t, two); string(e.AnswerBody.Data) != "target" {
		t.Errorf("recorded %+v", e)
	}
}

// A claim that observes records the requests and answers of the application. Its target gets nothing.
func TestObserverGetsNoCopy(t *testing.T) {
	r := newRig(t, serve(t, says("application")))
	all, record := recorded(1000)
	observer := &target{addr: serve(t, says("target"))}
	stats := new(Stats)
	r.claim(Claim{Mirror: true, Observe: true, Target: observer, Record: record, Stats: stats})
	for major := 1; major <= 2; major++ {
		if _, body := get(t, client(t, major), r.url("/")); body != "application" {
			t.Error(body)
		}
		if e := next(t, all); e.To != nil || string(e.AnswerBody.Data) != "application" {
			t.Errorf("recorded %+v", e)
		}
	}
	c := dial(t, r.addr) // not HTTP
	io.WriteString(c, "\x00raw")
	c.CloseWrite()
	io.Copy(io.Discard, c)
	r.stop()
	if n := observer.dials.Load(); n != 0 || stats.Requests() != 2 {
		t.Errorf("%d connections to the target, %d requests counted", n, stats.Requests())
	}
}

// The bytes after a switch of protocols are not HTTP. The exchange ends with the switch.
func TestSwitchIsRecordedAtOnce(t *testing.T) {
	server := listen(t, func(c net.Conn) {
		http.ReadRequest(bufio.NewReader(c))
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: chat\r\n\r\n")
		io.Copy(c, c)
	})
	r := newRig(t, server)
	all, record := recorded(1000)
	r.claim(Claim{Target: &target{addr: server}, Record: record})
	c := dial(t, r.addr)
	io.WriteString(c, "GET /chat HTTP/1.1\r\nHost: web\r\nConnection: Upgrade\r\nUpgrade: chat\r\n\r\n")
	e := next(t, all)
	if e.Status != http.StatusSwitchingProtocols || e.Answer.Get("Upgrade") != "chat" || e.To == nil {
		t.Errorf("recorded %+v", e)
	}
	c.CloseWrite()
	if rest, err := io.ReadAll(c); err != nil {
		t.Error(string(rest), err)
	}
	none(t, all)
}

// benchmarkRecorded measures requests that a target gets while their owner records as many of them as the agent admits.
func benchmarkRecorded(b *testing.B, app string, body int, f func(b *testing.B, addr string)) {
	waiting := make(chan *Exchange, 1024)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		enc := json.NewEncoder(io.Discard)
		for {
			select {
			case e := <-waiting:
				enc.Encode([]any{e.Method, e.URI, e.Header, e.Answer, e.Body, e.AnswerBody})
			case <-stop:
				return
			}
		}
	}()
	admit := rate.NewLimiter(100, 500)
	r := newRig(b, app)
	r.claim(Claim{Target: &target{addr: app}, Record: func() (func(*Exchange), int) {
		if !admit.Allow() {
			return nil, 0
		}
		return func(e *Exchange) {
			select {
			case waiting <- e:
			default:
			}
		}, body
	}})
	f(b, r.addr)
	close(stop)
	<-done
}
