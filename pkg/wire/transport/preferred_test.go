package transport_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/pkg/wire/transport"
)

// twoTransports are two transports to one manager.
type twoTransports struct {
	network
	fallback, preferred fakeTransport
	mu                  sync.Mutex
	states              []string
}

// fakeTransport delays writes, and can fail or become a black hole.
type fakeTransport struct {
	n     network
	mu    sync.Mutex
	delay time.Duration // of each write
	err   error         // of each dial
	holed bool
	large int // bytes of a write that becomes a black hole; 0: none
	conns []*fakeConn
	dials int
}

type fakeConn struct {
	net.Conn
	over  *fakeTransport
	holed bool
}

func newTwoTransports(t *testing.T, fallback, preferred time.Duration) *twoTransports {
	n := memory(t)
	r := &twoTransports{network: n}
	r.fallback.n, r.fallback.delay = n, fallback
	r.preferred.n, r.preferred.delay = n, preferred
	return r
}

func (r *fakeTransport) Dial(ctx context.Context) (net.Conn, error) {
	r.mu.Lock()
	r.dials++
	err, holed := r.err, r.holed
	r.mu.Unlock()
	if holed {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, err
	}
	conn, err := r.n.Dial(ctx)
	if err != nil {
		return nil, err
	}
	c := &fakeConn{Conn: conn, over: r}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.conns = append(r.conns, c)
	return c, nil
}

func (c *fakeConn) Write(p []byte) (int, error) {
	c.over.mu.Lock()
	delay := c.over.delay
	c.holed = c.holed || c.over.holed || c.over.large > 0 && len(p) > c.over.large // a conn that lost bytes carries none of the bytes behind them
	holed := c.holed
	c.over.mu.Unlock()
	if holed {
		return len(p), nil
	}
	time.Sleep(delay)
	return c.Conn.Write(p)
}

// change sets the result of dials. An error also ends the open connections.
func (r *fakeTransport) change(err error) {
	r.mu.Lock()
	r.err = err
	conns := r.conns
	r.conns = nil
	r.mu.Unlock()
	if err != nil {
		for _, c := range conns {
			c.Close()
		}
	}
}

func (r *fakeTransport) hole(holed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.holed = holed
}

func (r *fakeTransport) dialed() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.dials
}

func (r *twoTransports) start(t *testing.T, cc transport.ClientConfig) *rig {
	cc.Dial = r.fallback.Dial
	if cc.Preferred == nil {
		cc.Preferred = []func(context.Context) (net.Conn, error){r.preferred.Dial}
	}
	cc.OnPreferred = func(all []transport.PreferredStatus) {
		r.mu.Lock()
		defer r.mu.Unlock()
		s := all[len(all)-1]
		text := s.State.String()
		if s.Reason != nil {
			text = fmt.Sprintf("%s: %v", text, s.Reason)
		}
		if len(r.states) == 0 || r.states[len(r.states)-1] != text {
			r.states = append(r.states, text)
		}
	}
	return start(t, r.network, cc, transport.ServerConfig{})
}

// seen lets d pass and returns the preferred transport's states since the previous call.
func (r *twoTransports) seen(d time.Duration) []string {
	time.Sleep(d)
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	states := r.states
	r.states = nil
	return states
}

func (r *twoTransports) want(t *testing.T, within time.Duration, want ...string) {
	t.Helper()
	if got := r.seen(within); !slices.Equal(got, want) {
		t.Fatalf("the preferred transport was %q, want %q", got, want)
	}
}

// wantLast checks the state at the end of within.
func (r *twoTransports) wantLast(t *testing.T, within time.Duration, want string) {
	t.Helper()
	got := r.seen(within)
	if len(got) == 0 || got[len(got)-1] != want {
		t.Fatalf("the preferred transport was %q, want %q in the end", got, want)
	}
}

// exchange sends blocks from the laptop and compares the echo, until it is stopped.
func exchange(t *testing.T, r *rig) (stop func()) {
	near, far := open(t, r.laptop, r.manager)
	go func() {
		io.Copy(far, far)
		far.CloseWrite()
	}()
	quit, sums := make(chan struct{}), make(chan [32]byte, 2)
	end := sync.OnceFunc(func() { close(quit) })
	t.Cleanup(end)
	go func() {
		h := sha256.New()
		block := make([]byte, 10<<10)
		for i := 0; ; i++ {
			select {
			case <-quit:
				near.CloseWrite()
				sums <- [32]byte(h.Sum(nil))
				return
			case <-time.After(20 * time.Millisecond):
			}
			block[i%len(block)]++
			h.Write(block)
			if _, err := near.Write(block); err != nil {
				t.Errorf("the stream failed: %v", err)
				return
			}
		}
	}()
	go func() {
		h := sha256.New()
		if _, err := io.Copy(h, near); err != nil {
			t.Errorf("the stream failed: %v", err)
		}
		sums <- [32]byte(h.Sum(nil))
	}()
	return func() {
		t.Helper()
		end()
		if a, b := receive(t, sums), receive(t, sums); a != b {
			t.Error("the echo differs from the bytes that were sent")
		}
	}
}

// carries checks which transports carry more than 100 KiB in a second.
func carries(t *testing.T, s *transport.Session, wantFallback, wantPreferred bool) {
	t.Helper()
	before := s.Stats()
	time.Sleep(time.Second)
	after := s.Stats()
	fallback, preferred := after.Fallback.Sent-before.Fallback.Sent > 100<<10, after.Preferred[0].Sent-before.Preferred[0].Sent > 100<<10
	if fallback != wantFallback || preferred != wantPreferred {
		t.Errorf("bytes use the fallback: %v, the preferred transport: %v; want %v and %v", fallback, preferred, wantFallback, wantPreferred)
	}
}

func TestLinksMoveToPreferred(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTwoTransports(t, time.Millisecond, 100*time.Microsecond)
		rig := r.start(t, transport.ClientConfig{})
		stop := exchange(t, rig)
		r.want(t, time.Second, "in use")
		carries(t, rig.laptop, false, true)
		stop()
		for _, l := range rig.laptop.Stats().Links {
			if !l.Up {
				t.Errorf("%+v", l)
			}
		}
	})
}

// The session stays connected while all its links move at once.
func TestMoveKeepsSessionConnected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTwoTransports(t, time.Millisecond, time.Millisecond)
		var mu sync.Mutex
		var states []transport.State
		rig := r.start(t, transport.ClientConfig{OnState: func(s transport.State, _ error) {
			mu.Lock()
			defer mu.Unlock()
			states = append(states, s)
		}})
		stop := exchange(t, rig)
		r.want(t, 5*time.Second, "in use")
		stop()
		mu.Lock()
		defer mu.Unlock()
		if want := []transport.State{transport.StateConnecting, transport.StateConnected}; !slices.Equal(states, want) {
			t.Errorf("the session was %v, want %v", states, want)
		}
	})
}

// The rank decides, and not the speed.
func TestSlowerPreferredIsUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTwoTransports(t, time.Millisecond, 5*time.Millisecond)
		rig := r.start(t, transport.ClientConfig{})
		stop := exchange(t, rig)
		r.want(t, 5*time.Second, "in use")
		carries(t, rig.laptop, false, true)
		stop()
		dials := r.preferred.dialed()
		r.want(t, time.Hour)
		if n := r.preferred.dialed() - dials; n > 0 {
			t.Errorf("the transport in use was dialed %d times in an hour", n)
		}
		if st := rig.laptop.Stats(); st.Fallback.RTT <= 0 || st.Preferred[0].RTT <= st.Fallback.RTT {
			t.Errorf("round trips: fallback %v, preferred %v", st.Fallback.RTT, st.Preferred[0].RTT)
		}
	})
}

// A path may lose large packets and carry small ones, which suffice for a handshake.
func TestPreferredThatLosesLargePacketsIsNotUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTwoTransports(t, time.Millisecond, time.Millisecond)
		r.preferred.large = 1 << 10
		rig := r.start(t, transport.ClientConfig{})
		stop := exchange(t, rig)
		r.want(t, 10*time.Second, "failing: 16384 bytes did not return in 3s")
		carries(t, rig.laptop, true, false)
		stop()
	})
}

func TestFailingPreferredIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTwoTransports(t, time.Millisecond, 100*time.Microsecond)
		r.preferred.change(errors.New("pods/proxy is forbidden"))
		rig := r.start(t, transport.ClientConfig{})
		r.want(t, 500*time.Millisecond, "failing: dial the traffic manager: pods/proxy is forbidden")
		time.Sleep(10 * time.Minute)
		if n := r.preferred.dialed(); n < 10 || n > 30 {
			t.Errorf("dialed %d times in ten minutes", n)
		}
		stop := exchange(t, rig)
		carries(t, rig.laptop, true, false)
		r.preferred.change(nil)
		r.wantLast(t, 2*time.Minute, "in use")
		carries(t, rig.laptop, false, true)
		stop()
	})
}

// Streams continue on the fallback at once, and on the preferred transport when it is back.
func TestStreamsSurviveFailureOfPreferred(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTwoTransports(t, time.Millisecond, 100*time.Microsecond)
		rig := r.start(t, transport.ClientConfig{})
		stop := exchange(t, rig)
		r.want(t, time.Second, "in use")
		r.preferred.change(errors.New("refused"))
		time.Sleep(200 * time.Millisecond)
		carries(t, rig.laptop, true, false)
		if got := r.seen(0); len(got) == 0 || !strings.HasPrefix(got[0], "failing: ") {
			t.Errorf("%q", got)
		}
		r.preferred.change(nil)
		r.wantLast(t, 2*time.Minute, "in use")
		carries(t, rig.laptop, false, true)
		stop()
	})
}

// The links leave a transport that swallows bytes within a second.
func TestStuckPreferredIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTwoTransports(t, time.Millisecond, 100*time.Microsecond)
		rig := r.start(t, transport.ClientConfig{})
		stop := exchange(t, rig)
		r.want(t, time.Second, "in use")
		r.preferred.hole(true)
		began := time.Now()
		// A stream that opens now may wait a little, and opens.
		time.Sleep(100 * time.Millisecond)
		open(t, rig.laptop, rig.manager)
		if took := time.Since(began); took > time.Second {
			t.Errorf("a new stream took %v", took)
		}
		time.Sleep(time.Second)
		carries(t, rig.laptop, true, false)
		if got := r.seen(0); len(got) == 0 || got[0] != "failing: its bytes are not acknowledged, while the fallback transport works" {
			t.Errorf("%q", got)
		}
		stop()
	})
}

// If both transports are dead the network is the cause, and the links do not move.
func TestNetworkFailureDoesNotLeavePreferred(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTwoTransports(t, time.Millisecond, 100*time.Microsecond)
		rig := r.start(t, transport.ClientConfig{})
		r.want(t, time.Second, "in use")
		near, _ := open(t, rig.laptop, rig.manager)
		r.fallback.hole(true)
		r.preferred.hole(true)
		if _, err := near.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		r.want(t, 5*time.Second)
	})
}

func TestForcedPreferredIsAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTwoTransports(t, 100*time.Microsecond, time.Millisecond)
		rig := r.start(t, transport.ClientConfig{Forced: true})
		stop := exchange(t, rig)
		r.want(t, time.Second, "in use")
		carries(t, rig.laptop, false, true)
		r.preferred.change(errors.New("refused"))
		carries(t, rig.laptop, false, false)
		r.seen(time.Minute)
		carries(t, rig.laptop, false, false)
		r.preferred.change(nil)
		r.seen(2 * time.Minute)
		carries(t, rig.laptop, false, true)
		stop()
	})
}

// A forced preferred transport whose dial asks the manager for something over the session comes back after all conns
// were lost, although streams may not use the fallback.
func TestForcedPreferredMayAskManager(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTwoTransports(t, time.Millisecond, time.Millisecond)
		session := make(chan *transport.Session, 1)
		rig := r.start(t, transport.ClientConfig{Forced: true, Preferred: []func(context.Context) (net.Conn, error){func(ctx context.Context) (net.Conn, error) {
			s := <-session
			session <- s
			asked, err := s.Open(ctx, transport.Request{Proto: transport.ProtoTicket})
			if err != nil {
				return nil, err
			}
			asked.Reset()
			return r.preferred.Dial(ctx)
		}}})
		stop := exchange(t, rig)
		go func() {
			for {
				in, err := rig.manager.Accept(t.Context())
				if err != nil {
					return
				}
				if st, err := in.Accept(); err == nil {
					defer st.Close()
				}
			}
		}()
		session <- rig.laptop
		r.wantLast(t, 10*time.Second, "in use")
		gone := errors.New("network is unreachable")
		r.fallback.change(gone)
		r.preferred.change(gone)
		time.Sleep(30 * time.Second)
		r.fallback.change(nil)
		r.preferred.change(nil)
		r.wantLast(t, 5*time.Second, "in use")
		carries(t, rig.laptop, false, true)
		stop()
	})
}

// Laptops of earlier versions measure a transport with 256 KiB, and use none that does not return them and end.
func TestManagerEchoesWhatOlderLaptopsMeasure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rig := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{})
		st, err := rig.laptop.Open(t.Context(), transport.Request{Proto: transport.ProtoMeter})
		if err != nil {
			t.Fatal(err)
		}
		defer st.Reset()
		go st.Write(make([]byte, 256<<10))
		if n, err := io.Copy(io.Discard, st); n != 256<<10 || err != nil {
			t.Errorf("%d bytes returned, %v", n, err)
		}
	})
}
