//go:build linux

package agent

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/process/version"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/protocol/httpmatch"
	"kubevpn/pkg/wire/transport"
	"kubevpn/pkg/wire/transport/transporttest"
)

// memory is a listener whose connections have addresses.
type memory struct {
	*transporttest.Listener
	addr *net.TCPAddr
}

func newMemory(number uint16) *memory {
	return &memory{transporttest.NewListener(), &net.TCPAddr{IP: net.IPv4(10, 0, 0, 9), Port: int(number)}}
}

func (m *memory) Addr() net.Addr { return m.addr }

func (m *memory) Accept() (net.Conn, error) {
	c, err := m.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &addressed{c, m.addr, &net.TCPAddr{IP: net.IPv4(10, 0, 0, 7), Port: 40000}}, nil
}

type addressed struct {
	net.Conn
	local, remote net.Addr
}

func (a *addressed) LocalAddr() net.Addr  { return a.local }
func (a *addressed) RemoteAddr() net.Addr { return a.remote }

// fakeKernel redirects nothing, and records its calls. Every connection was for port 8080.
type fakeKernel struct {
	application *memory // port 8080
	opaque      error
	refuse      error // returned by Set

	mu      sync.Mutex
	now     map[port]uint16
	flushed []port
	closed  bool
}

func (k *fakeKernel) Set(to map[port]uint16) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.refuse != nil {
		return k.refuse
	}
	k.now = maps.Clone(to)
	return nil
}

// ports are those that are redirected.
func (k *fakeKernel) ports() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return "closed"
	}
	return fmt.Sprint(slices.SortedFunc(maps.Keys(k.now), comparePorts))
}

func (k *fakeKernel) Original(net.Conn) (netip.AddrPort, error) {
	return netip.MustParseAddrPort("10.0.0.9:8080"), nil
}

func (k *fakeKernel) Dial(ctx context.Context, _ string, _ netip.Addr, to netip.AddrPort) (net.Conn, error) {
	if to.Port() != 8080 {
		return nil, fmt.Errorf("nothing listens at %v", to)
	}
	return k.application.Dial(ctx)
}

func (k *fakeKernel) Opaque() error { return k.opaque }

func (k *fakeKernel) Open(ports []port) ([]netip.AddrPort, error) {
	return []netip.AddrPort{netip.MustParseAddrPort("10.244.9.9:40000")}, nil
}

func (k *fakeKernel) Flush(ports []port) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.flushed = append(k.flushed, ports...)
	return len(ports), nil
}

func (k *fakeKernel) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.closed = true
	return nil
}

// pod is a leader in memory, with an application that answers "application".
type pod struct {
	t        *testing.T
	conns    *memory // the agent's port
	agents   *transporttest.Listener
	incoming map[uint16]*memory // by the number that listen got
	kernel   *fakeKernel
	log      *testenv.Buffer
	infos    *infos
	ended    chan error
	stop     context.CancelFunc
}

// newPod runs a leader until the test ends. home is its own owner.
func newPod(t *testing.T, home *person, change ...func(*Config)) *pod {
	t.Helper()
	p := &pod{
		t: t, conns: newMemory(7), agents: transporttest.NewListener(), incoming: make(map[uint16]*memory),
		kernel: &fakeKernel{application: newMemory(8080)}, log: new(testenv.Buffer), infos: newInfos(), ended: make(chan error, 1),
	}
	cfg := Config{
		Owner: home.hash, OwnerName: home.name, PodIPs: []netip.Addr{netip.MustParseAddr("10.0.0.9")}, Output: p.infos,
		Logger: slog.New(slog.NewTextHandler(p.log, nil)),
	}
	serveHTTP(t, p.kernel.application, "application")
	ctx, cancel := context.WithCancel(context.Background())
	p.stop = cancel
	a := New(cfg)
	a.cfg.kernel = func() (kernel, error) { return p.kernel, nil }
	a.cfg.listenTCP, a.cfg.dialPlain = p.listen, p.kernel.Dial
	a.cfg.sameUser = func(net.Conn) error { return nil }
	a.cfg.listeners = func() ([]netip.AddrPort, error) { return nil, nil }
	for _, c := range change {
		c(&a.cfg)
	}
	go func() { p.ended <- a.serve(ctx, p.agents, p.conns, 7) }()
	t.Cleanup(func() {
		cancel()
		if err := <-p.ended; err != nil {
			t.Errorf("the agent ends with %v", err)
		}
		p.agents.Close()
		if t.Failed() {
			t.Logf("the agent's log:\n%s", p.log)
		}
	})
	p.infos.next(t)
	return p
}

func (p *pod) listen(number uint16) (net.Listener, error) {
	l := newMemory(cmp.Or(number, 9999))
	p.incoming[number] = l
	return l, nil
}

// end waits for the agent's end.
func (p *pod) end(within time.Duration) {
	p.t.Helper()
	select {
	case err := <-p.ended:
		p.ended <- err
	case <-time.After(within):
		p.t.Fatalf("the agent has not ended within %v", within)
	}
}

// lives fails the test if the agent has ended.
func (p *pod) lives() {
	p.t.Helper()
	select {
	case err := <-p.ended:
		p.t.Fatalf("the agent has ended: %v", err)
	default:
	}
}

// ask sends a request to a port of the pod, and returns who answers.
func (p *pod) ask(header ...string) string {
	p.t.Helper()
	l := p.incoming[0]
	if l == nil {
		return "application" // no agent listens
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return askOn(ctx, p.t, l, header...)
}

func askOn(ctx context.Context, t *testing.T, l *memory, header ...string) string {
	t.Helper()
	conn, err := l.Dial(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://pod/", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Close = true
	for _, h := range header {
		name, value, _ := strings.Cut(h, "=")
		r.Header.Set(name, value)
	}
	if err := r.Write(conn); err != nil {
		t.Fatal(err)
	}
	answer, err := http.ReadResponse(bufio.NewReader(conn), r)
	if err != nil {
		return err.Error()
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		return err.Error()
	}
	io.Copy(io.Discard, conn) // the agent closes it
	return strings.TrimSpace(string(body))
}

// serveHTTP answers every request with a word, until the test ends.
func serveHTTP(t *testing.T, l net.Listener, answer string) {
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, answer) })}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("serving: %v", err)
		}
	}()
	t.Cleanup(func() {
		server.Close()
		<-done
	})
}

// person is an owner's key and name.
type person struct {
	name, hash string
	key        tls.Certificate
}

func newPerson(t *testing.T, name string) *person {
	t.Helper()
	key, hash, err := newKey()
	if err != nil {
		t.Fatal(err)
	}
	return &person{name, hash, key}
}

// towards returns the configuration for TLS with an agent.
func (p *person) towards() *tls.Config {
	return &tls.Config{
		InsecureSkipVerify: true, // internal/laptop/intercept tests that a laptop verifies the agent's key
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return &p.key, nil
		},
	}
}

// testLaptop is a laptop with a session to the agent: it answers every request with its name.
type testLaptop struct {
	t       *testing.T
	control *transport.Stream
	session *transport.Session
	stop    func()
	reports chan api.AgentReport
	id      uint64

	mu      sync.Mutex
	conns   []net.Conn
	offline bool
}

// connect attaches a laptop of an owner, which sends hello.
func (p *pod) connect(by *person) *testLaptop {
	p.t.Helper()
	m := p.attach(by)
	m.hello(api.AgentHello{Protocol: api.Protocol, Version: "test"})
	return m
}

// attach is connect without a hello.
func (p *pod) attach(by *person) *testLaptop {
	p.t.Helper()
	return attach(p.t, by, p.conns.Dial)
}

func attach(t *testing.T, by *person, dial func(context.Context) (net.Conn, error)) *testLaptop {
	t.Helper()
	m := &testLaptop{t: t, reports: make(chan api.AgentReport, 1024)}
	sessions := make(chan *transport.Session, 1)
	client := transport.NewClient(transport.ClientConfig{
		Links: 1, BackoffMax: 100 * time.Millisecond,
		Dial: func(ctx context.Context) (net.Conn, error) { return m.dial(ctx, dial, by) },
		OnSession: func(ctx context.Context, s *transport.Session) {
			select {
			case sessions <- s:
			default: // another one, of which the test wants nothing
				return
			}
			m.serve(ctx, s, by.name)
		},
		Budget: transport.NewBudget(1<<10, 64<<20),
		Tuning: transport.Tuning{Heartbeat: time.Second, DeadAfter: 3 * time.Second},
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := client.Run(ctx); err != nil {
			t.Errorf("the laptop's session: %v", err)
		}
	}()
	m.stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	t.Cleanup(m.stop)
	select {
	case m.session = <-sessions:
	case <-time.After(10 * time.Second):
		t.Fatal("no session")
	}
	return m
}

func (m *testLaptop) dial(ctx context.Context, dial func(context.Context) (net.Conn, error), by *person) (net.Conn, error) {
	m.mu.Lock()
	offline := m.offline
	m.mu.Unlock()
	if offline {
		return nil, errors.New("offline")
	}
	conn, err := dial(ctx)
	if err != nil {
		return nil, err
	}
	inside := tls.Client(conn, by.towards())
	if err := inside.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	quiet := &silent{Conn: inside, under: conn}
	m.conns = append(m.conns, quiet)
	return quiet, nil
}

// silent is a conn that closes without TLS's close_notify.
type silent struct {
	net.Conn
	under net.Conn
}

func (s *silent) Close() error { return s.under.Close() }

// lose breaks the laptop's conns. The laptop opens no other until find.
func (m *testLaptop) lose() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.offline = true
	for _, c := range m.conns {
		c.Close()
	}
	m.conns = nil
}

func (m *testLaptop) find() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.offline = false
}

// serve answers the agent's HTTP requests with the laptop's name.
func (m *testLaptop) serve(ctx context.Context, s *transport.Session, name string) {
	l := &streams{ctx: ctx, session: s, name: name}
	defer l.flows.Wait()
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, name) })}
	server.Serve(l) // until the session ends
	server.Close()
}

// streams is a listener for the TCP streams of a session. It answers UDP streams with the name.
type streams struct {
	ctx     context.Context
	session *transport.Session
	name    string
	flows   sync.WaitGroup
}

func (l *streams) Accept() (net.Conn, error) {
	for {
		in, err := l.session.Accept(l.ctx)
		if err != nil {
			return nil, err
		}
		if !in.Datagrams() {
			conn, err := in.Accept()
			if err != nil {
				continue // the agent has closed it meanwhile
			}
			return conn, nil
		}
		flow, err := in.AcceptPackets()
		if err != nil {
			continue
		}
		l.flows.Go(func() {
			defer flow.Close()
			buf := make([]byte, 2048)
			for {
				n, err := flow.ReadPacket(buf)
				if err != nil {
					return
				}
				if flow.WritePacket(fmt.Appendf(buf[:n], " for %s", l.name)) != nil {
					return
				}
			}
		})
	}
}

func (l *streams) Close() error   { return nil }
func (l *streams) Addr() net.Addr { return &net.TCPAddr{} }

// hello opens the control stream with one line.
func (m *testLaptop) hello(hello any) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var err error
	if m.control, err = m.session.Open(ctx, transport.Request{Proto: transport.ProtoControl}); err != nil {
		m.t.Fatal(err)
	}
	if err := json.NewEncoder(m.control).Encode(hello); err != nil {
		m.t.Fatal(err)
	}
	go func() {
		defer close(m.reports)
		for in := json.NewDecoder(m.control); ; {
			var r api.AgentReport
			if in.Decode(&r) != nil {
				return
			}
			m.reports <- r
		}
	}()
}

// order gives an order and waits for its answer.
func (m *testLaptop) order(o api.AgentOrder) error {
	m.t.Helper()
	_, err := m.answer(o)
	return err
}

// answer gives an order and returns its answer.
func (m *testLaptop) answer(o api.AgentOrder) (api.AgentReport, error) {
	m.t.Helper()
	m.id++
	o.ID = m.id
	if err := json.NewEncoder(m.control).Encode(o); err != nil {
		m.t.Fatal(err)
	}
	timeout := time.After(10 * time.Second)
	for {
		select {
		case r, ok := <-m.reports:
			if !ok {
				m.t.Fatal("the control stream has ended")
			}
			if r.ID != o.ID {
				continue
			}
			if r.Error != nil {
				return r, r.Error
			}
			return r, nil
		case <-timeout:
			m.t.Fatal("no answer")
		}
	}
}

// claim claims port 8080, for requests with these headers.
func (m *testLaptop) claim(id string, header ...string) error {
	m.t.Helper()
	return m.order(api.AgentOrder{Claim: claimOrder(id, header...)})
}

func claimOrder(id string, header ...string) *api.ClaimOrder {
	o := &api.ClaimOrder{ID: id, Ports: []api.AgentPort{{Protocol: "tcp", Port: 8080}}}
	for _, h := range header {
		name, value, _ := strings.Cut(h, "=")
		o.Match.Headers = append(o.Match.Headers, httpmatch.Named{Name: name, Value: value})
	}
	return o
}

// state waits for a report whose state so accepts.
func (m *testLaptop) state(what string, so func(*api.AgentState) bool) *api.AgentState {
	m.t.Helper()
	timeout := time.After(10 * time.Second)
	for {
		select {
		case r, ok := <-m.reports:
			if !ok {
				m.t.Fatalf("the control stream has ended before %s", what)
			}
			if r.State != nil && so(r.State) {
				return r.State
			}
		case <-timeout:
			m.t.Fatalf("no report: %s", what)
		}
	}
}

// infos receives an agent's output.
type infos struct{ lines chan []byte }

func newInfos() *infos { return &infos{make(chan []byte, 16)} }

func (g *infos) Write(p []byte) (int, error) {
	g.lines <- bytes.Clone(p)
	return len(p), nil
}

func (g *infos) next(t *testing.T) api.AgentInfo {
	t.Helper()
	select {
	case line := <-g.lines:
		var a api.AgentInfo
		if err := json.Unmarshal(line, &a); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if a.Error == nil && (a.Protocol != api.Protocol || a.Version != version.String() || a.Key == "" || a.Port == 0) {
			t.Errorf("an incomplete info: %s", line)
		}
		return a
	case <-time.After(20 * time.Second):
		t.Fatal("no info")
		panic("unreachable")
	}
}

// pass advances the clock of the bubble by d, and waits for everything that is due.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}
