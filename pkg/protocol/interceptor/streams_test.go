package interceptor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"kubevpn/internal/testenv"
)

// serve2 starts a server of HTTP/2 with these limits, and returns its address.
func serve2(tb testing.TB, h http.Handler, limits http.HTTP2Config) string {
	tb.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Config.HTTP2 = &limits
	s.Start()
	tb.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// hold opens n requests on one connection, and returns how many were answered before the time is over, and the heap that
// they take then, in bytes each.
func hold(t *testing.T, addr string, n int, headers ...string) (answers, each int) {
	t.Helper()
	before := testenv.Heap()
	tr := &http.Transport{Protocols: new(http.Protocols), HTTP2: &http.HTTP2Config{StrictMaxConcurrentRequests: true}}
	tr.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(tr.CloseIdleConnections)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var answered atomic.Int64
	var all sync.WaitGroup
	deadline := time.Now().Add(10 * time.Second)
	for i := range n {
		for i == 1 && answered.Load() == 0 && time.Now().Before(deadline) { // the others share its connection
			time.Sleep(time.Millisecond)
		}
		all.Go(func() {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, fmt.Sprintf("http://%s/%d", addr, i), nil)
			if err != nil {
				t.Error(err)
				return
			}
			for n := 0; n < len(headers); n += 2 {
				req.Header.Set(headers[n], headers[n+1])
			}
			resp, err := tr.RoundTrip(req)
			if err != nil {
				if !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
					t.Error(err)
				}
				return
			}
			answered.Add(1)
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		})
	}
	for answered.Load() < int64(n) && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
	}
	answers, each = int(answered.Load()), (int(testenv.Heap())-int(before))/n
	cancel()
	all.Wait()
	return answers, each
}

// Streams wait for nothing but the application: it allows thousands at once, and the interceptor has no limit of its own.
func TestStreamsAreLimitedByTheApplication(t *testing.T) {
	waits := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	app := serve2(t, waits, http.HTTP2Config{MaxConcurrentStreams: 5000})
	local := serve2(t, waits, http.HTTP2Config{})
	r := newRig(t, app)
	r.claim(Claim{Match: header(t, "x-user=me"), Target: &target{addr: local}})
	for _, n := range []int{400, 1500} {
		if got, _ := hold(t, app, n); got != n {
			t.Fatalf("without the interceptor %d of %d streams were answered", got, n)
		}
		for _, user := range []string{"you", "me"} {
			if got, _ := hold(t, r.addr, n, "x-user", user); got != n {
				t.Errorf("%d of %d streams of %s were answered", got, n, user)
			}
		}
	}
}

// The agent shares the memory of the application's pod. Client and server are in this process as well.
func TestWaitingStreamsTakeLittleMemory(t *testing.T) {
	r := newRig(t, serve2(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}), http.HTTP2Config{MaxConcurrentStreams: 5000}))
	if got, each := hold(t, r.addr, 1000); got != 1000 || each > 56<<10 {
		t.Errorf("%d streams wait, and take %d bytes each", got, each)
	}
}

// settings returns what a server of HTTP/2 announces.
func settings(t *testing.T, addr string) map[http2.SettingID]uint32 {
	t.Helper()
	conn := dial(t, addr)
	io.WriteString(conn, preface2)
	f := http2.NewFramer(conn, conn)
	f.WriteSettings()
	frame, err := f.ReadFrame()
	if err != nil {
		t.Fatal(err)
	}
	all := map[http2.SettingID]uint32{}
	frame.(*http2.SettingsFrame).ForeachSetting(func(s http2.Setting) error {
		all[s.ID] = s.Val
		return nil
	})
	return all
}

func TestSettingsAreTheApplications(t *testing.T) {
	for _, limits := range []http.HTTP2Config{
		{MaxConcurrentStreams: 7, MaxReadFrameSize: 64 << 10, MaxReceiveBufferPerStream: 100_000},
		{MaxConcurrentStreams: 100_000, MaxReadFrameSize: 1 << 20, MaxReceiveBufferPerStream: 3 << 20},
	} {
		app := serve2(t, says("app"), limits)
		r := newRig(t, app)
		want, got := settings(t, app), settings(t, r.addr)
		for _, id := range []http2.SettingID{http2.SettingMaxConcurrentStreams, http2.SettingInitialWindowSize, http2.SettingMaxHeaderListSize} {
			if got[id] != want[id] {
				t.Errorf("%v: the interceptor says %d, the application %d", id, got[id], want[id])
			}
		}
		if id := http2.SettingMaxFrameSize; got[id] > want[id] {
			t.Errorf("%v: the interceptor says %d, the application %d", id, got[id], want[id])
		}
	}
	// Without an application there is something to say, too.
	r := newRig(t, "127.0.0.1:1")
	r.claim(Claim{Target: &target{addr: serve(t, says("laptop"))}})
	if _, got := get(t, client(t, 2), r.url("/")); got != "laptop" {
		t.Errorf("answered by %q", got)
	}
}
