package manager

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/balancer"
	"kubevpn/pkg/wire/transport"
)

func TestMain(m *testing.M) {
	if childMain() {
		return
	}
	goleak.VerifyTestMain(m)
}

// testTimeout bounds the wait for something that must happen. No test waits for it unless it fails.
const testTimeout = time.Minute

// running is a Manager on loopback, with a laptop's session.
type running struct {
	*Manager
	laptop *transport.Session
	health string
	addr   string // for sessions
}

// start runs a Manager until the test ends. It may dial loopback, which a real one may not: that is where tests
// have their pods.
func start(t testing.TB, cfg Config, prepare ...func(*Manager)) *running {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	m := New(cfg)
	m.dialer.check = func(netip.AddrPort) error { return nil }
	m.routes = func() ([]netip.Prefix, error) { return nil, nil } // the routes of this machine must not affect tests
	for _, p := range prepare {
		p(m)
	}
	ctx, cancel := context.WithCancel(context.Background())
	sessions, health := listen(t), listen(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := m.serve(ctx, sessions, health); err != nil {
			t.Errorf("serving: %v", err)
		}
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return &running{Manager: m, laptop: connect(t, sessions.Addr().String()), health: "http://" + health.Addr().String(), addr: sessions.Addr().String()}
}

// connect returns a laptop's session with the manager at addr. The session ends with the test.
func connect(t testing.TB, addr string) *transport.Session {
	t.Helper()
	arrived := make(chan *transport.Session, 1)
	client := transport.NewClient(transport.ClientConfig{
		Dial: func(ctx context.Context) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", addr)
		},
		OnSession: func(_ context.Context, s *transport.Session) { arrived <- s },
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := client.Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
			t.Logf("client: %v", err)
		}
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	select {
	case s := <-arrived:
		return s
	case <-time.After(testTimeout):
		t.Fatal("no session")
		return nil
	}
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// control is the laptop's end of a control stream.
type control struct {
	t      testing.TB
	stream *transport.Stream
	lines  *bufio.Reader
}

// hello opens a control stream.
func hello(t testing.TB, laptop *transport.Session, greeting any) *control {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	st, err := laptop.Open(ctx, transport.Request{Proto: transport.ProtoControl})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	if err := json.NewEncoder(st).Encode(greeting); err != nil {
		t.Fatal(err)
	}
	return &control{t, st, bufio.NewReader(st)}
}

// next returns the manager's next message.
func (c *control) next() api.ControlMessage {
	c.t.Helper()
	c.stream.SetReadDeadline(time.Now().Add(testTimeout))
	line, err := c.lines.ReadBytes('\n')
	if err != nil {
		c.t.Fatalf("reading a control message: %v", err)
	}
	var m api.ControlMessage
	if err := json.Unmarshal(line, &m); err != nil {
		c.t.Fatal(err)
	}
	return m
}

// until reads messages until wanted accepts a State.
func (c *control) until(what string, wanted func(*api.ManagerState) bool) api.ManagerState {
	c.t.Helper()
	for {
		m := c.next()
		if m.State != nil && wanted(m.State) {
			return *m.State
		}
		if m.State != nil {
			c.t.Logf("waiting for %s: %+v", what, *m.State)
		}
	}
}

// identified is start, with a laptop that has said hello.
func identified(t testing.TB, scheduler string) *running {
	t.Helper()
	r := start(t, Config{})
	c := hello(t, r.laptop, api.ClientHello{Protocol: api.Protocol, Client: "laptop", Scheduler: scheduler})
	if c.next().Hello == nil {
		t.Fatal("no Hello")
	}
	return r
}

// open opens a TCP flow to addr.
func (r *running) open(t testing.TB, addr string) (*transport.Stream, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	st, err := r.laptop.Open(ctx, transport.Request{Proto: transport.ProtoTCP, Dst: netip.MustParseAddrPort(addr)})
	if err == nil {
		st.SetDeadline(time.Now().Add(testTimeout))
		t.Cleanup(func() { st.Reset() })
	}
	return st, err
}

// vip makes 10.96.0.1:80, of both protocols, a Service with these endpoints.
func (r *running) vip(endpoints ...string) {
	s := balancer.Service{Name: balancer.Name{Namespace: "default", Name: "web"}, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
		Ports: []balancer.Port{{Protocol: balancer.TCP, Port: 80}, {Protocol: balancer.UDP, Port: 80}}}
	for i := range s.Ports {
		for _, e := range endpoints {
			s.Ports[i].Endpoints = append(s.Ports[i].Endpoints, balancer.Endpoint{Addr: netip.MustParseAddrPort(e), Ready: true, Serving: true})
		}
	}
	r.dialer.balancer.Apply([]balancer.Service{s}, nil)
}

// pod serves every connection to a new loopback address with handle until the test ends.
func pod(t testing.TB, handle func(*net.TCPConn)) string {
	t.Helper()
	l := listen(t)
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	t.Cleanup(func() { l.Close() })
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				conn.SetDeadline(time.Now().Add(testTimeout))
				handle(conn.(*net.TCPConn))
			})
		}
	})
	return l.Addr().String()
}

func readAll(t testing.TB, r io.Reader) string {
	t.Helper()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Errorf("reading: %v", err)
	}
	return string(b)
}
