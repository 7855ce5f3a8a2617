package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/wakeup"
)

// A server that keeps its connections open but does not answer on them stands for a network that has changed.
func TestFollowClosesConnectionsThatDoNotAnswer(t *testing.T) {
	var dead atomic.Bool // the connections that are open now
	var opened atomic.Int32
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Context().Value(connKey{}) == int32(1) && dead.Load() {
			<-r.Context().Done()
			return
		}
		fmt.Fprint(w, "{}")
	}))
	server.EnableHTTP2 = true
	server.Config.ConnContext = func(ctx context.Context, _ net.Conn) context.Context {
		return context.WithValue(ctx, connKey{}, opened.Add(1))
	}
	server.StartTLS()
	defer server.Close()
	c, err := Load(fmt.Appendf(nil, `{"current-context":"x","contexts":[{"name":"x","context":{"cluster":"lab","user":"u"}}],
		"clusters":[{"name":"lab","cluster":{"server":%q,"insecure-skip-tls-verify":true}}],
		"users":[{"name":"u","user":{"token":"t"}}]}`, server.URL), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Release()
	get := func(ctx context.Context) error {
		return c.kube.CoreV1().RESTClient().Get().AbsPath("/livez").Do(ctx).Error()
	}
	if err := get(t.Context()); err != nil {
		t.Fatal(err)
	}
	var moved wakeup.Broadcast
	ctx, cancel := context.WithCancel(t.Context())
	ended, waits := make(chan error, 1), make(chan struct{}, 9)
	go func() {
		ended <- c.Follow(ctx, func() <-chan struct{} { defer func() { waits <- struct{}{} }(); return moved.Next() })
	}()
	<-waits

	moved.Send()
	<-waits
	testenv.Until(t, "the API server has answered", func() bool { return get(t.Context()) == nil })
	if n := opened.Load(); n != 1 {
		t.Errorf("%d connections although the first one answers", n)
	}
	dead.Store(true)
	began := time.Now()
	moved.Send()
	testenv.Until(t, "requests use another connection", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		return get(ctx) == nil
	})
	t.Logf("another connection after %v", time.Since(began))
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("Follow returned %v", err)
	}
}

// connKey is the key of a connection's number.
type connKey struct{}

// The nameserver of the last network does not answer.
func TestDialerDoesNotWaitForASilentNameserver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDialer()
		d.lookup = func(ctx context.Context, _, _ string) ([]netip.Addr, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		older, newer := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
		d.remember("api.example", older, newer)
		began := time.Now()
		addrs, err := d.find(t.Context(), "api.example")
		if err != nil || len(addrs) != 2 || addrs[0] != newer || time.Since(began) != lookupTime {
			t.Errorf("%v, %v after %v", addrs, err, time.Since(began))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := d.find(ctx, "other.example"); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) < time.Minute {
			t.Errorf("a name without addresses: %v after %v", err, time.Since(began))
		}
	})
}
