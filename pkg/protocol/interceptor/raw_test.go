package interceptor

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/testenv"
)

// echoServer answers with a name and all bytes of the client, after the client's FIN.
func echoServer(tb testing.TB, name string) string {
	return listen(tb, func(c net.Conn) {
		got, err := io.ReadAll(c)
		if err == nil {
			c.Write(append([]byte(name+":"), got...))
		}
	})
}

func TestRawGoesToTheClaimOfEverything(t *testing.T) {
	r := newRig(t, echoServer(t, "app"))
	laptop := &target{addr: echoServer(t, "laptop")}
	matching := Claim{ID: "matching", Match: header(t, "x-user=me"), Target: laptop}
	all := Claim{ID: "all", Target: laptop, Stats: new(Stats)}
	for _, text := range []string{"\x01binary", "PING\r\n", "EHLO", ""} {
		r.claim(matching)
		if got := half(t, r.addr, text); got != "app:"+text {
			t.Errorf("with a claim that matches headers, %q was answered with %q", text, got)
		}
		r.claim(matching, all)
		if got := half(t, r.addr, text); got != "laptop:"+text {
			t.Errorf("with a claim for everything, %q was answered with %q", text, got)
		}
		laptop.away.Store(true)
		if got := half(t, r.addr, text); got != "app:"+text {
			t.Errorf("with the owner away, %q was answered with %q", text, got)
		}
		laptop.away.Store(false)
	}
	if n := all.Stats.Requests(); n != 4 {
		t.Errorf("%d connections were counted, want 4", n)
	}
}

// half sends text and FIN, and returns the answer.
func half(t *testing.T, addr, text string) string {
	t.Helper()
	c := dial(t, addr)
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	return string(got)
}

// The data exceeds every buffer on the path and flows both ways at once.
func TestRawCarriesEveryByte(t *testing.T) {
	want := bytes.Repeat([]byte("\x01 0123456789abcdef"), 1<<20)
	r := newRig(t, listen(t, func(c net.Conn) { io.Copy(c, c) }))
	r.claim(Claim{Match: header(t, "x-user=me"), Target: &target{}})
	c := dial(t, r.addr)
	go func() {
		c.Write(want)
		c.CloseWrite()
	}()
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d of %d bytes came back: %v", len(got), len(want), err)
	}
}

// The first connection waits for the client; later ones do not, until a client speaks first again.
func TestServerMaySpeakFirst(t *testing.T) {
	var greets atomic.Bool
	greets.Store(true)
	r := newRig(t, listen(t, func(c net.Conn) {
		if greets.Load() {
			io.WriteString(c, "220 hello\r\n")
		}
		io.Copy(c, c)
	}))
	web := serve(t, says("laptop"))
	r.claim(Claim{Match: header(t, "x-user=me"), Target: &target{addr: web}})
	greeting := func() time.Duration {
		start := time.Now()
		c := dial(t, r.addr)
		b := make([]byte, 11)
		if _, err := io.ReadFull(c, b); err != nil || string(b) != "220 hello\r\n" {
			t.Fatalf("%q, %v", b, err)
		}
		took := time.Since(start)
		if _, err := io.WriteString(c, "GET / HTTP/1.1\r\n"); err != nil {
			t.Fatal(err)
		}
		b = make([]byte, 16)
		if _, err := io.ReadFull(c, b); err != nil || string(b) != "GET / HTTP/1.1\r\n" {
			t.Errorf("bytes like HTTP after a greeting were answered with %q, %v", b, err)
		}
		return took
	}
	if took := greeting(); took < clientTimeout {
		t.Errorf("the interceptor waited %v for the first client", took)
	}
	// A busy machine may delay one greeting, but not all of them.
	testenv.Until(t, "later clients are greeted at once", func() bool { return greeting() < clientTimeout })
	// HTTP on the same port is still recognized, and resets the flag.
	greets.Store(false)
	if _, got := get(t, client(t, 1), r.url("/"), "x-user", "me"); got != "laptop" {
		t.Errorf("HTTP was answered with %q", got)
	}
	greets.Store(true)
	if took := greeting(); took < clientTimeout {
		t.Errorf("after a client that spoke first, the interceptor waited %v for the next", took)
	}
}

// Browsers open connections early and send their first request later.
func TestSilentClientIsMatchedLater(t *testing.T) {
	dialed := make(chan struct{}, 1)
	app := serve(t, says("app"))
	r := newRig(t, app, func(c *Config) {
		inner := c.Application
		c.Application = func(ctx context.Context, f Flow) (net.Conn, error) {
			defer func() { dialed <- struct{}{} }()
			return inner(ctx, f)
		}
	})
	r.claim(Claim{Match: header(t, "x-user=me"), Target: &target{addr: serve(t, says("laptop"))}})
	c := dial(t, r.addr)
	<-dialed // clientTimeout has passed
	if got := talk(t, c, "GET / HTTP/1.1\r\nHost: a\r\nX-User: me\r\nConnection: close\r\n\r\n"); !strings.HasSuffix(got, "laptop") {
		t.Errorf("answered with %q", got)
	}
	if r.i.serverSpeaksFirst(addrPort(t, r.addr).Port()).Load() {
		t.Error("the flag says that the server speaks first, and it did not")
	}
}

func TestRawResetCrosses(t *testing.T) {
	t.Run("reset by the application reaches the client", func(t *testing.T) {
		r := newRig(t, listen(t, func(c net.Conn) {
			io.ReadFull(c, make([]byte, 1))
			c.(*net.TCPConn).SetLinger(0)
		}))
		c := dial(t, r.addr)
		c.Write([]byte{0})
		if _, err := io.ReadAll(c); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the client saw %v", err)
		}
	})
	t.Run("reset by the client reaches the application", func(t *testing.T) {
		saw := make(chan error, 1)
		r := newRig(t, listen(t, func(c net.Conn) {
			io.ReadFull(c, make([]byte, 1))
			c.Write([]byte{1})
			_, err := io.ReadAll(c)
			saw <- err
		}))
		c := dial(t, r.addr)
		c.Write([]byte{0})
		io.ReadFull(c, make([]byte, 1))
		c.SetLinger(0)
		c.Close()
		if err := <-saw; !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the application saw %v", err)
		}
	})
}

func TestRawConnectionToAClosedPortIsReset(t *testing.T) {
	nobody := listen(t, func(net.Conn) {})
	closed := testenv.ClosedPort(t, "tcp").String()
	stats := new(Stats)
	for _, tt := range []struct {
		name, app string
		claims    []Claim
	}{
		{"application", closed, nil},
		{"target", nobody, []Claim{{ID: "a", Target: &target{addr: closed}, Stats: stats}}},
	} {
		r := newRig(t, tt.app)
		r.claim(tt.claims...)
		c := dial(t, r.addr)
		c.Write([]byte{0})
		if _, err := io.ReadAll(c); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: the client saw %v", tt.name, err)
		}
	}
	if f := stats.LastError(); f == nil || !strings.Contains(f.Error, "refused") {
		t.Errorf("the claim's last error is %v", f)
	}
}

// vanishing is a target whose owner goes away during a dial.
type vanishing struct{ target }

func (v *vanishing) Dial(ctx context.Context, f Flow) (net.Conn, error) {
	v.away.Store(true)
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestLostOwnerLeavesRawConnectionsToTheApplication(t *testing.T) {
	r := newRig(t, echoServer(t, "app"))
	r.claim(Claim{Target: new(vanishing)})
	if got := half(t, r.addr, "\x01"); got != "app:\x01" {
		t.Errorf("answered with %q", got)
	}
}

func TestProbeIsEchoed(t *testing.T) {
	r := newRig(t, echoServer(t, "app"), func(c *Config) { c.Probe = *testProbe() })
	if got := talk(t, dial(t, r.addr), "\x00probe\x001234"); got != "\x00probe\x001234" {
		t.Errorf("a probe was answered with %q", got)
	}
	if got := half(t, r.addr, "\x00probe\x004321"); got != "app:\x00probe\x004321" {
		t.Errorf("a probe that was not announced was answered with %q", got)
	}
	if n := r.appDials.Load(); n != 1 {
		t.Errorf("the application saw %d connections, want 1", n)
	}
}

func TestServeConnEndsWithItsContext(t *testing.T) {
	r := newRig(t, listen(t, func(c net.Conn) { io.Copy(c, c) }))
	silent, talking := dial(t, r.addr), dial(t, r.addr)
	talking.Write([]byte{0})
	if _, err := io.ReadFull(talking, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	r.stop()
	for _, c := range []net.Conn{silent, talking} {
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the client saw %v", err)
		}
	}
}

// If the server speaks first, the interceptor hardly waits for the client. A probe arrives a round trip later.
func TestProbeIsRecognizedWhereTheServerSpeaksFirst(t *testing.T) {
	var due atomic.Bool
	r := newRig(t, listen(t, func(c net.Conn) {
		io.WriteString(c, "220 hello\r\n")
		io.Copy(c, c)
	}), func(c *Config) {
		c.Probe = *testProbe()
		c.Probe.Due = due.Load
	})
	c := dial(t, r.addr)
	if _, err := io.ReadFull(c, make([]byte, 11)); err != nil { // the interceptor learns that the server speaks first
		t.Fatal(err)
	}
	due.Store(true)
	c = dial(t, r.addr)
	time.Sleep(20 * time.Millisecond) // the round trip
	if got := talk(t, c, "\x00probe\x001234"); got != "\x00probe\x001234" {
		t.Errorf("the probe was answered with %q", got)
	}
}
