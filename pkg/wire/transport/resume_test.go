package transport_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/transport"
	"kubevpn/pkg/wire/transport/transporttest"
)

// killer breaks conns.
type killer struct {
	network
	mu     sync.Mutex
	conns  []net.Conn
	killed int
}

func (k *killer) Dial(ctx context.Context) (net.Conn, error) {
	c, err := k.network.Dial(ctx)
	if err == nil {
		k.mu.Lock()
		k.conns = append(k.conns, c)
		k.mu.Unlock()
	}
	return c, err
}

// kill closes all conns.
func (k *killer) kill() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range k.conns {
		c.Close()
	}
	k.killed += len(k.conns)
	k.conns = nil
}

// dead returns the number of killed conns.
func (k *killer) dead() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.killed
}

func TestStreamsSurviveKilledConns(t *testing.T) {
	for _, n := range networks {
		t.Run(n.name, func(t *testing.T) {
			t.Parallel()
			most, flows := 8*time.Millisecond, 8
			if n.name == "tls" { // its handshake alone takes as long
				most, flows = 80*time.Millisecond, 2
			}
			k := &killer{network: n.make(t)}
			r := start(t, k.network, transport.ClientConfig{Dial: k.Dial, BackoffMin: time.Millisecond, BackoffMax: 4 * time.Millisecond}, transport.ServerConfig{})
			stop := background(t, func(ctx context.Context) error {
				for ctx.Err() == nil {
					time.Sleep(time.Millisecond + rand.N(most))
					k.kill()
				}
				return nil
			})
			const enough, size = 40, 8 << 20
			rounds := 0
			for began := time.Now(); k.dead() < enough && !t.Failed(); rounds++ {
				if time.Since(began) > time.Minute {
					t.Fatalf("only %d conns were killed: nothing was tested", k.dead())
				}
				pourBothWays(t, r, flows, size)
			}
			stop()
			t.Logf("%d conns killed in %d rounds", k.dead(), rounds)
			if r.laptop.Err() != nil || r.manager.Err() != nil {
				t.Errorf("session ended: %v, %v", r.laptop.Err(), r.manager.Err())
			}
		})
	}
}

// pourBothWays sends size bytes in either direction of each of some streams at once, and compares the received bytes.
func pourBothWays(t *testing.T, r *rig, streams, size int) {
	t.Helper()
	var wg sync.WaitGroup
	defer wg.Wait()
	for range streams {
		a, b := open(t, r.laptop, r.manager)
		for _, d := range [][2]*transport.Stream{{a, b}, {b, a}} {
			sum := make(chan [32]byte, 1)
			wg.Go(func() { sum <- pour(t, d[0], size) })
			wg.Go(func() {
				h := sha256.New()
				n, err := d[1].WriteTo(h)
				if err != nil || n != int64(size) {
					t.Errorf("%d bytes, %v", n, err)
				}
				if want := <-sum; !bytes.Equal(h.Sum(nil), want[:]) {
					t.Error("bytes were changed on the way")
				}
			})
		}
	}
}

// pour writes n random bytes in writes of random sizes, ends the stream, and returns their hash.
func pour(t *testing.T, s *transport.Stream, n int) (sum [32]byte) {
	src := rand.NewChaCha8([32]byte{byte(n)})
	h := sha256.New()
	buf := make([]byte, 100<<10)
	for n > 0 {
		b := buf[:min(n, 1+rand.N(len(buf)))]
		src.Read(b)
		h.Write(b)
		if _, err := s.Write(b); err != nil {
			t.Error(err)
			break
		}
		n -= len(b)
	}
	s.CloseWrite()
	h.Sum(sum[:0])
	return sum
}

// hole is a network whose conns discard all writes on demand, without an error.
type hole struct {
	network
	mu    sync.Mutex
	holed bool
}

func (h *hole) Dial(ctx context.Context) (net.Conn, error) {
	h.mu.Lock()
	holed := h.holed
	h.mu.Unlock()
	if holed {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	c, err := h.network.Dial(ctx)
	return &holedConn{Conn: c, h: h}, err
}

func (h *hole) set(holed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.holed = holed
}

type holedConn struct {
	net.Conn
	h       *hole
	swallow bool
}

func (c *holedConn) Write(p []byte) (int, error) {
	c.h.mu.Lock()
	c.swallow = c.swallow || c.h.holed // a conn that lost bytes carries none of the bytes behind them
	swallow := c.swallow
	c.h.mu.Unlock()
	if swallow {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

// TestSilentConnIsReplaced runs in a bubble with the default times: a minute passes in no time.
func TestSilentConnIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &hole{network: memory(t)}
		var mu sync.Mutex
		var states []string
		began := time.Now()
		r := start(t, h.network, transport.ClientConfig{Dial: h.Dial, OnState: func(s transport.State, err error) {
			mu.Lock()
			defer mu.Unlock()
			states = append(states, fmt.Sprintf("%v %s %v", time.Since(began).Truncate(time.Second), s, err))
		}}, transport.ServerConfig{})
		a, b := open(t, r.laptop, r.manager)
		h.set(true)
		lost := time.Now()
		_, err := a.Write([]byte("into the void"))
		check(t, err)
		for r.laptop.Stats().Links[0].Up {
			time.Sleep(100 * time.Millisecond)
		}
		if took := time.Since(lost); took > 15*time.Second {
			t.Errorf("the laptop noticed after %s", took)
		}
		for r.manager.Stats().Links[0].Up {
			time.Sleep(100 * time.Millisecond)
		}
		if took := time.Since(lost); took > 15*time.Second {
			t.Errorf("the manager noticed after %s", took)
		}
		time.Sleep(time.Minute)
		h.set(false)
		buf := make([]byte, 13)
		_, err = io.ReadFull(b, buf)
		check(t, err)
		if string(buf) != "into the void" {
			t.Errorf("got %q", buf)
		}
		if took := time.Since(lost); took > time.Minute+35*time.Second {
			t.Errorf("came through after %s", took)
		}
		a.Close()
		b.Close()
		mu.Lock()
		defer mu.Unlock()
		if len(states) < 4 || states[0] != "0s connecting <nil>" || states[1] != "0s connected <nil>" ||
			!strings.HasPrefix(states[2], "12s reconnecting ") { // whichever end noticed first
			t.Errorf("states: %q", states)
		}
	})
}

// TestStaleDialIsRestarted: a dial into a black hole does not delay its link when the other links are back.
func TestStaleDialIsRestarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := memory(t)
		h := &hole{network: n}
		var dials atomic.Int64
		healed := make(chan struct{})
		r := start(t, n, transport.ClientConfig{DialTimeout: time.Hour, Dial: func(ctx context.Context) (net.Conn, error) {
			select {
			case <-healed:
				return n.Dial(ctx)
			default:
			}
			switch number := dials.Add(1); {
			case number <= 4:
				return h.Dial(ctx)
			case number == 5: // notices at once
				<-healed
				return nil, errors.New("reset")
			}
			<-ctx.Done()
			return nil, ctx.Err()
		}}, transport.ServerConfig{})
		synctest.Wait()
		h.set(true)
		time.Sleep(20 * time.Second)
		for i, l := range r.laptop.Stats().Links {
			if l.Up {
				t.Fatalf("link %d is up in a black hole", i)
			}
		}
		close(healed)
		time.Sleep(time.Second)
		for i, l := range r.laptop.Stats().Links {
			if !l.Up {
				t.Errorf("link %d waits for what it dialed into the black hole", i)
			}
		}
	})
}

// TestIdleSessionStaysUp stays connected over the same conns, and costs next to nothing.
func TestIdleSessionStaysUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{})
		a, b := open(t, r.laptop, r.manager)
		time.Sleep(3 * time.Hour)
		go a.Write([]byte("still here"))
		buf := make([]byte, 10)
		_, err := io.ReadFull(b, buf)
		check(t, err)
		for _, s := range []transport.SessionStats{r.laptop.Stats(), r.manager.Stats()} {
			for _, l := range s.Links {
				if l.Conns != 1 || !l.Up || l.Unacked > 1000 || l.RTT <= 0 {
					t.Errorf("%+v", l)
				}
			}
		}
		a.Close()
		b.Close()
	})
}

func TestProbeReplacesASilentConn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &hole{network: memory(t)}
		r := start(t, h.network, transport.ClientConfig{Dial: h.Dial}, transport.ServerConfig{})
		time.Sleep(time.Second)
		r.client.Probe(kept) // nothing wrong
		time.Sleep(3 * time.Second)
		for _, l := range r.laptop.Stats().Links {
			if l.Conns != 1 {
				t.Errorf("a healthy conn was replaced: %+v", l)
			}
		}
		h.set(true)
		r.client.Probe(kept)
		time.Sleep(150 * time.Millisecond)
		r.client.Probe(kept) // must not postpone the end of the first one
		time.Sleep(151 * time.Millisecond)
		for _, l := range r.laptop.Stats().Links {
			if l.Up {
				t.Error("a dead conn survives a probe")
			}
		}
	})
}

// kept reports that the machine still has each address.
func kept(net.Addr) bool { return false }

func TestProbeReplacesConnsWithoutLocalAddressAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &hole{network: memory(t)}
		r := start(t, h.network, transport.ClientConfig{Dial: h.Dial, DialTimeout: time.Hour}, transport.ServerConfig{})
		a, b := open(t, r.laptop, r.manager)
		up := func() (up int) {
			for _, l := range r.laptop.Stats().Links {
				if l.Up {
					up++
				}
			}
			return up
		}
		synctest.Wait() // all links are up
		h.set(true)
		_, err := a.Write([]byte("into the void"))
		check(t, err)
		r.client.Probe(func(net.Addr) bool { return true })
		synctest.Wait()
		if n := up(); n != 0 {
			t.Errorf("%d conns without their address survive a probe", n)
		}
		h.set(false)
		r.client.Probe(kept) // restarts the dials into the black hole
		buf := make([]byte, 13)
		_, err = io.ReadFull(b, buf)
		check(t, err)
		synctest.Wait()
		if n := up(); string(buf) != "into the void" || n != len(r.laptop.Stats().Links) {
			t.Errorf("got %q, %d links are up", buf, n)
		}
		a.Close()
		b.Close()
	})
}

func TestSessionEndsAfterGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &hole{network: memory(t)}
		r := start(t, h.network, transport.ClientConfig{Dial: h.Dial}, transport.ServerConfig{})
		a, b := open(t, r.laptop, r.manager)
		h.set(true)
		time.Sleep(4 * time.Minute)
		if r.manager.Err() != nil {
			t.Fatalf("ended too early: %v", r.manager.Err())
		}
		time.Sleep(2 * time.Minute)
		if !errors.Is(r.manager.Err(), transport.ErrSessionLost) {
			t.Fatalf("manager's session: %v", r.manager.Err())
		}
		if _, err := b.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("manager's stream: %v", err)
		}
		if _, err := r.manager.Accept(t.Context()); !errors.Is(err, transport.ErrSessionLost) {
			t.Errorf("manager's Accept: %v", err)
		}
		h.set(false)
		old := r.laptop
		r.next()
		if old.ID() == r.laptop.ID() || r.laptop.ID() != r.manager.ID() {
			t.Error("no new session")
		}
		if !errors.Is(old.Err(), transport.ErrSessionLost) {
			t.Errorf("laptop's session: %v", old.Err())
		}
		if _, err := a.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) || !errors.Is(err, transport.ErrSessionLost) {
			t.Errorf("laptop's stream: %v", err)
		}
	})
}

// TestClientCreatesANewSessionAfterARestart replaces the manager by one that knows nothing, as when its pod is killed.
func TestClientCreatesANewSessionAfterARestart(t *testing.T) {
	first, second := tcp(t), tcp(t)
	var mu sync.Mutex
	now := &killer{network: first}
	dial := func(ctx context.Context) (net.Conn, error) {
		mu.Lock()
		k := now
		mu.Unlock()
		return k.Dial(ctx)
	}
	r := start(t, first, transport.ClientConfig{Dial: dial}, transport.ServerConfig{})
	a, _ := open(t, r.laptop, r.manager)
	readErr := make(chan error, 1)
	go func() {
		_, err := a.Read(make([]byte, 1))
		readErr <- err
	}()

	newcomer := transport.NewServer(transport.ServerConfig{OnSession: func(_ context.Context, s *transport.Session) { r.managers <- s }})
	background(t, func(ctx context.Context) error { return newcomer.Serve(ctx, second) })
	mu.Lock()
	old := now
	now = &killer{network: second}
	mu.Unlock()
	began := time.Now()
	old.kill() // no farewell: the process is gone
	lost := r.laptop
	r.next()
	t.Logf("a new session after %s", time.Since(began))
	if err := receive(t, readErr); !errors.Is(err, syscall.ECONNRESET) || !errors.Is(err, transport.ErrSessionLost) {
		t.Errorf("old stream: %v", err)
	}
	if _, err := lost.Open(t.Context(), tcpRequest); !errors.Is(err, transport.ErrSessionLost) {
		t.Errorf("opening in the old session: %v", err)
	}
	x, y := open(t, r.laptop, r.manager)
	x.Close()
	y.Close()
	if got := len(newcomer.Sessions()); got != 1 {
		t.Errorf("%d sessions", got)
	}
}

func TestServerStopEndsSessions(t *testing.T) {
	r := start(t, tcp(t), transport.ClientConfig{}, transport.ServerConfig{})
	a, _ := open(t, r.laptop, r.manager)
	r.stopServer() // says farewell
	receive(t, r.laptop.Done())
	if err := r.laptop.Err(); !errors.Is(err, transport.ErrSessionClosed) {
		t.Errorf("got %v", err)
	}
	if _, err := a.Write([]byte("x")); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v", err)
	}
	if got := r.server.Sessions(); len(got) != 0 {
		t.Errorf("%d sessions", len(got))
	}
}

func TestClientStopEndsTheSession(t *testing.T) {
	r := start(t, tcp(t), transport.ClientConfig{}, transport.ServerConfig{})
	r.stopClient()
	receive(t, r.manager.Done())
	if err := r.manager.Err(); !errors.Is(err, transport.ErrSessionClosed) {
		t.Errorf("got %v", err)
	}
	testenv.Until(t, "the server forgets the session", func() bool { return len(r.server.Sessions()) == 0 })
}

// TestClientStopWaitsOnlyForTheAcknowledgement: when a conn is closed it drops data in flight, and it reports the other end's close late,
// as the proxies of a port-forward do. The manager still receives CLOSE, and the laptop waits only for its
// acknowledgement.
func TestClientStopWaitsOnlyForTheAcknowledgement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := memory(t)
		r := start(t, n, transport.ClientConfig{Links: 1, Dial: func(ctx context.Context) (net.Conn, error) {
			c, err := n.Dial(ctx)
			if err != nil {
				return nil, err
			}
			return &lossyEnd{Conn: c, order: make(chan struct{}, 1), closed: make(chan struct{})}, nil
		}}, transport.ServerConfig{})
		began := time.Now()
		r.stopClient()
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("the laptop waited for %s", took)
		}
		receive(t, r.manager.Done())
		if err := r.manager.Err(); !errors.Is(err, transport.ErrSessionClosed) {
			t.Errorf("got %v", err)
		}
	})
}

// lossyEnd delivers a write after 20 ms, unless it was closed by then, and never reports the other end's close.
type lossyEnd struct {
	net.Conn
	order  chan struct{} // capacity 1: keeps writes in order; a mutex would stop synctest's clock
	once   sync.Once
	closed chan struct{}
}

func (c *lossyEnd) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err != nil {
		<-c.closed
	}
	return n, err
}

func (c *lossyEnd) Write(p []byte) (int, error) {
	p = bytes.Clone(p)
	c.order <- struct{}{}
	time.AfterFunc(20*time.Millisecond, func() {
		defer func() { <-c.order }()
		select {
		case <-c.closed:
		default:
			c.Conn.Write(p)
		}
	})
	return len(p), nil
}

func (c *lossyEnd) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// TestOneConnIsEnough: the first conn is enough for a session.
func TestOneConnIsEnough(t *testing.T) {
	n := tcp(t)
	var mu sync.Mutex
	dials := 0
	r := start(t, n, transport.ClientConfig{Dial: func(ctx context.Context) (net.Conn, error) {
		mu.Lock()
		dials++
		first := dials == 1
		mu.Unlock()
		if !first {
			return nil, errors.New("no more")
		}
		return n.Dial(ctx)
	}}, transport.ServerConfig{})
	a, b := open(t, r.laptop, r.manager)
	a.Close()
	b.Close()
}

func TestStreamsSpreadOverLinks(t *testing.T) {
	r := start(t, tcp(t), transport.ClientConfig{}, transport.ServerConfig{})
	testenv.Until(t, "four links are up", func() bool { return len(r.laptop.Stats().Links) == 4 && len(r.manager.Stats().Links) == 4 })
	for range 40 {
		open(t, r.laptop, r.manager)
	}
	for i, l := range r.laptop.Stats().Links {
		if l.Streams < 9 || l.Streams > 11 {
			t.Errorf("link %d has %d streams of 40", i, l.Streams)
		}
	}
}

func TestServerLimitsSessionsAndLinks(t *testing.T) {
	n := tcp(t)
	r := start(t, n, transport.ClientConfig{}, transport.ServerConfig{MaxSessions: 1, MaxLinks: 2})
	testenv.Until(t, "two links are up", func() bool { return len(r.laptop.Stats().Links) == 2 })
	why := make(chan error, 64)
	other := transport.NewClient(transport.ClientConfig{Dial: n.Dial, OnState: func(_ transport.State, err error) {
		if err != nil {
			select {
			case why <- err:
			default:
			}
		}
	}})
	background(t, other.Run)
	if err := receive(t, why); !errors.Is(err, transport.ErrServerFull) {
		t.Errorf("got %v, want %v", err, transport.ErrServerFull)
	}
	r.stopClient()
	receive(t, r.managers) // now there is room
}

func TestSilentConnIsDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := transporttest.NewListener()
		server := transport.NewServer(transport.ServerConfig{})
		background(t, func(ctx context.Context) error { return server.Serve(ctx, l) })
		c, err := l.Dial(t.Context())
		check(t, err)
		began := time.Now()
		if _, err := c.Read(make([]byte, 1)); err != io.EOF || time.Since(began) != 10*time.Second {
			t.Errorf("%v after %s", err, time.Since(began))
		}
	})
}

// TestOnlyDataWaitsWhileStalled: while no conn takes anything, only data waits; ending a stream and giving up do not.
func TestOnlyDataWaitsWhileStalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &hole{network: memory(t)}
		r := start(t, h.network, transport.ClientConfig{Dial: h.Dial, Links: 1}, transport.ServerConfig{})
		var near, far []*transport.Stream
		for range 100 {
			a, b := open(t, r.laptop, r.manager)
			near, far = append(near, a), append(far, b)
		}
		h.set(true)
		time.Sleep(20 * time.Second)
		if r.laptop.Stats().Links[0].Up {
			t.Fatal("the link is still up")
		}
		began := time.Now()
		for i, st := range near {
			switch i % 3 {
			case 0:
				check(t, st.Reset())
			case 1:
				check(t, st.Close())
			case 2:
				check(t, st.CloseWrite())
			}
		}
		if took := time.Since(began); took != 0 {
			t.Errorf("ending streams took %s", took)
		}
		p, err := r.laptop.OpenPackets(t.Context(), udpRequest)
		check(t, err)
		go func() {
			for p.WritePacket(make([]byte, 1000)) == nil { // fills the link
			}
		}()
		synctest.Wait()
		if got := r.laptop.Stats().Links[0].Unacked; got > 200<<10 {
			t.Errorf("%d bytes are queued", got)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began = time.Now()
		if _, err := r.laptop.Open(ctx, tcpRequest); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != time.Second {
			t.Errorf("open gives %v after %s", err, time.Since(began))
		}
		h.set(false)
		for i, st := range far { // everything arrives in the end
			_, err := st.Read(make([]byte, 1))
			if i%3 == 0 && !errors.Is(err, syscall.ECONNRESET) || i%3 != 0 && err != io.EOF {
				t.Errorf("stream %d: %v", i, err)
			}
			st.Close()
		}
		in, err := r.manager.Accept(t.Context())
		check(t, err)
		if in.Request != udpRequest {
			t.Errorf("the stream that its opener gave up arrives: %s", in.Request)
		}
		check(t, in.Reject(transport.CodeFailed))
	})
}

// TestMarkArrivesWithTheAcknowledgement: a mark has arrived when the other end has acknowledged it, also after its conn
// broke, and when the session has ended.
func TestMarkArrivesWithTheAcknowledgement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &hole{network: memory(t)}
		r := start(t, h.network, transport.ClientConfig{Dial: h.Dial, Links: 1}, transport.ServerConfig{})
		a, _ := open(t, r.laptop, r.manager)
		time.Sleep(time.Second)
		if !a.Arrived(a.Mark()) {
			t.Error("a mark has not arrived though nothing is in flight")
		}
		write := func() uint64 {
			t.Helper()
			before := a.Mark()
			if _, err := a.Write([]byte("hello")); err != nil {
				t.Fatal(err)
			}
			if !a.Arrived(before) {
				t.Error("a mark that had arrived has not arrived any more")
			}
			return a.Mark()
		}
		mark := write()
		if a.Arrived(mark) {
			t.Error("arrived at once")
		}
		time.Sleep(time.Second)
		if !a.Arrived(mark) {
			t.Error("not arrived after a second")
		}
		h.set(true)
		mark = write()
		time.Sleep(20 * time.Second)
		if a.Arrived(mark) {
			t.Error("a mark arrived through a black hole")
		}
		h.set(false)
		time.Sleep(20 * time.Second)
		if !a.Arrived(mark) {
			t.Error("not arrived though the link is back")
		}
		h.set(true)
		mark = write()
		check(t, r.laptop.Close())
		if !a.Arrived(mark) {
			t.Error("a session that has ended keeps its streams waiting")
		}
	})
}
