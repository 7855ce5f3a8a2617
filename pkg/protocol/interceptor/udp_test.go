package interceptor

import (
	"context"
	"errors"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"
)

// answerUDP answers each datagram with a name and the datagram.
func answerUDP(tb testing.TB, name string) string {
	tb.Helper()
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b := make([]byte, maxDatagram)
		for {
			n, from, err := pc.ReadFrom(b)
			if err != nil {
				return
			}
			pc.WriteTo(append([]byte(name+":"), b[:n]...), from)
		}
	}()
	tb.Cleanup(func() {
		pc.Close()
		<-ended
	})
	return pc.LocalAddr().String()
}

func TestPacketProbeIsEchoed(t *testing.T) {
	r := newUDPRig(t, answerUDP(t, "app"), func(c *Config) { c.Probe = *testProbe() })
	laptop, stats := &target{addr: answerUDP(t, "laptop")}, new(Stats)
	r.claim(Claim{ID: "all", Target: laptop, Stats: stats})
	c := r.client()
	r.ask(c, "\x00probe\x001234", "\x00probe\x001234")
	if n := stats.Requests(); n != 0 {
		t.Errorf("a probe was counted as %d flows", n)
	}
	// A datagram that was not announced, or is longer, is an ordinary one.
	for _, text := range []string{"\x00probe\x004321", "\x00probe\x0012345", "\x00probe\x00"} {
		r.ask(c, text, "laptop:"+text)
	}
	r.ask(c, "\x00probe\x001234", "\x00probe\x001234") // in the middle of a flow
}

type udpRig struct {
	*rig
	addr string
}

func newUDPRig(tb testing.TB, app string, options ...func(*Config)) udpRig {
	tb.Helper()
	r := newRig(tb, app, options...)
	pc, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	addr := pc.LocalAddr().String()
	go func() { ended <- r.i.ServePackets(ctx, pc, addrPort(tb, addr)) }()
	tb.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			tb.Error(err)
		}
		pc.Close()
	})
	return udpRig{r, addr}
}

func (r udpRig) client() net.Conn {
	r.tb.Helper()
	c, err := net.Dial("udp", r.addr)
	if err != nil {
		r.tb.Fatal(err)
	}
	r.tb.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(10 * time.Second))
	return c
}

func (r udpRig) ask(c net.Conn, text, want string) {
	r.tb.Helper()
	if _, err := c.Write([]byte(text)); err != nil {
		r.tb.Fatal(err)
	}
	b := make([]byte, maxDatagram)
	n, err := c.Read(b)
	if err != nil || string(b[:n]) != want {
		r.tb.Errorf("%q was answered with %.40q, %v; want %.40q", text, b[:n], err, want)
	}
}

func TestOpenPacketFlowsKeepTheirTarget(t *testing.T) {
	r := newUDPRig(t, answerUDP(t, "app"))
	laptop := &target{addr: answerUDP(t, "laptop")}
	stats := new(Stats)
	old := r.client()
	r.ask(old, "1", "app:1")
	r.claim(Claim{ID: "other", Match: header(t, "x-user=me"), Target: laptop}, Claim{ID: "all", Target: laptop, Stats: stats})
	r.ask(old, "2", "app:2") // an open flow keeps its destination
	a, b := r.client(), r.client()
	r.ask(a, "a", "laptop:a")
	r.ask(b, "b", "laptop:b")
	r.ask(a, "", "laptop:")
	if n := stats.Requests(); n != 2 {
		t.Errorf("%d flows were counted, want 2", n)
	}
	laptop.away.Store(true)
	r.ask(a, "back", "app:back")
	laptop.away.Store(false)
	r.ask(b, "still", "laptop:still")
}

func TestPacketsReachALateApplication(t *testing.T) {
	app := answerUDP(t, "app")
	r := newUDPRig(t, "127.0.0.1:1")
	c := r.client()
	c.Write([]byte("lost")) // refused, unless the application is faster than the dial
	r.app.Store(&app)
	for {
		c.Write([]byte("now"))
		c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		b := make([]byte, 100)
		n, err := c.Read(b)
		if err == nil {
			if got := string(b[:n]); got != "app:now" && got != "app:lost" {
				t.Errorf("answered with %q", got)
			}
			return
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) || t.Context().Err() != nil {
			t.Fatal(err)
		}
	}
}

// slowConn is the connection of a mirror whose owner reads nothing.
type slowConn struct {
	net.Conn
	closed chan struct{}
	once   atomic.Bool
}

func (c *slowConn) Write([]byte) (int, error) { <-c.closed; return 0, net.ErrClosed }
func (c *slowConn) Read([]byte) (int, error)  { <-c.closed; return 0, net.ErrClosed }
func (c *slowConn) Close() error {
	if !c.once.Swap(true) {
		close(c.closed)
	}
	return nil
}

type slowTarget struct{ target }

func (*slowTarget) Dial(context.Context, Flow) (net.Conn, error) {
	return &slowConn{closed: make(chan struct{})}, nil
}

func TestPacketsAreMirrored(t *testing.T) {
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	r := newUDPRig(t, answerUDP(t, "app"))
	slow := new(Stats)
	r.claim(Claim{ID: "slow", Mirror: true, Target: new(slowTarget), Stats: slow},
		Claim{ID: "mirror", Mirror: true, Target: &target{addr: pc.LocalAddr().String()}})
	c := r.client()
	pc.SetDeadline(time.Now().Add(10 * time.Second))
	b := make([]byte, 100)
	for range 2 * maxQueued {
		r.ask(c, "x", "app:x")
		if n, _, err := pc.ReadFrom(b); err != nil || string(b[:n]) != "x" {
			t.Fatalf("the mirror got %q, %v", b[:n], err)
		}
	}
	if f := slow.LastError(); f == nil || f.Error != errBehind.Error() {
		t.Errorf("a mirror that reads nothing has the error %v, want %v", f, errBehind)
	}
}
