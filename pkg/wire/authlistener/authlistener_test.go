package authlistener

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"kubevpn/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const refused Reason = "wrong word"

// word accepts a client that sends "in".
func word(conn net.Conn) (net.Conn, Reason, error) {
	var b [2]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return nil, HungUp, err
	}
	if string(b[:]) != "in" {
		return nil, refused, nil
	}
	return conn, "", nil
}

// start runs a Listener until the test ends.
func start(t *testing.T, l net.Listener, authenticate func(net.Conn) (net.Conn, Reason, error)) *Listener {
	d := New(Config{Name: "test", Listener: l, Authenticate: authenticate, Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run gives %v", err)
		}
	})
	return d
}

func TestAcceptReturnsAuthenticatedConns(t *testing.T) {
	l := fakeListener{conns: make(chan net.Conn)}
	d := start(t, l, word)
	visit := func(say string) net.Conn {
		t.Helper()
		conn, far := net.Pipe()
		l.conns <- far
		t.Cleanup(func() { conn.Close() })
		if _, err := io.WriteString(conn, say); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	if got, err := io.ReadAll(visit("no")); len(got) > 0 || err != nil {
		t.Errorf("a rejected client receives %q, %v", got, err)
	}
	if n := d.Rejected(refused); n != 1 {
		t.Errorf("%d rejected connections are counted, want 1", n)
	}
	slow := visit("i") // does not delay other clients
	welcome := visit("in")
	conn, err := d.Accept()
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		conn.Write([]byte("hello"))
		conn.Close()
	}()
	if got, err := io.ReadAll(welcome); string(got) != "hello" || err != nil {
		t.Errorf("an authenticated client receives %q, %v", got, err)
	}
	visit("in") // is never accepted
	d.Close()
	if _, err := d.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept gives %v", err)
	}
	if got, err := io.ReadAll(slow); len(got) > 0 || err != nil {
		t.Errorf("after Close, a pending client receives %q, %v", got, err)
	}
}

// farConn is a connection from an address.
type farConn struct {
	net.Conn
	from netip.Addr
}

func (c farConn) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(netip.AddrPortFrom(c.from, 1)) }

// fakeListener returns the connections that a test sends to conns.
type fakeListener struct {
	net.Listener
	conns chan net.Conn
}

func (l fakeListener) Accept() (net.Conn, error) {
	c, ok := <-l.conns
	if !ok {
		return nil, net.ErrClosed
	}
	return c, nil
}

func (l fakeListener) Close() error   { close(l.conns); return nil }
func (l fakeListener) Addr() net.Addr { return &net.TCPAddr{} }

// Idle connections do not keep others out, even if very many pods hold them.
func TestIdleConnectionsKeepNobodyOut(t *testing.T) {
	for _, test := range []struct {
		name        string
		pods, conns int
		from        string // of the good connection
	}{
		{"four pods", 4, MaxPendingFrom, "192.0.2.200"},
		{"a hundred pods", 100, 10, "192.0.2.200"},
		{"behind the same address", 1, 10 * MaxPendingFrom, "192.0.2.1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := fakeListener{conns: make(chan net.Conn)}
			d := start(t, s, word)
			dial := func(from netip.Addr) net.Conn {
				near, far := net.Pipe()
				t.Cleanup(func() { near.Close() })
				s.conns <- farConn{far, from}
				return near
			}
			pod := netip.MustParseAddr("192.0.2.1")
			for range test.pods {
				for range test.conns {
					dial(pod)
				}
				pod = pod.Next()
			}
			good := dial(netip.MustParseAddr(test.from))
			go io.WriteString(good, "in")
			accepted := make(chan net.Conn, 1)
			go func() {
				if c, err := d.Accept(); err == nil {
					accepted <- c
				}
			}()
			select {
			case c := <-accepted:
				if got := remote(c).String(); got != test.from {
					t.Errorf("the connection of %s was accepted, want that of %s", got, test.from)
				}
				c.Close()
			case <-time.After(10 * time.Second):
				t.Error("the good connection was not accepted")
			}
			if pending := d.Pending(); pending > MaxPending {
				t.Errorf("%d connections are pending, more than %d", pending, MaxPending)
			}
			testenv.Until(t, "a connection is rejected", func() bool { return d.Rejected(TooMany) > 0 })
		})
	}
}

// The oldest connection of the busiest address is evicted first, and a large one before many small ones.
func TestNewConnectionTakesThePlaceOfTheBusiestAddress(t *testing.T) {
	var held []*Held
	var names, gone []string
	b := &Bound{Max: 100, MaxFrom: 100}
	add := func(from string, n, cost int) {
		for i := range n {
			near, far := net.Pipe()
			t.Cleanup(func() { near.Close() })
			held = append(held, b.Enter(farConn{far, netip.MustParseAddr(from)}))
			held[len(held)-1].SetCost(cost)
			names = append(names, fmt.Sprint(from, " ", i))
		}
	}
	expect := func(want ...string) {
		t.Helper()
		gone = append(gone, want...)
		var got []string
		for i, h := range held {
			if h.evicted {
				got = append(got, names[i])
			}
		}
		if !slices.Equal(got, gone) {
			t.Errorf("evicted %q, want %q", got, gone)
		}
	}
	add("192.0.2.1", 10, 1)
	add("192.0.2.2", 50, 1)
	add("192.0.2.3", 40, 1)
	expect()
	add("192.0.2.1", 1, 1)
	expect("192.0.2.2 0")
	add("192.0.2.5", 2, 1)
	expect("192.0.2.2 1", "192.0.2.2 2")
	add("192.0.2.4", 1, 60) // more than the others have
	expect("192.0.2.2 3", "192.0.2.4 0")
}

// A conn that is evicted is closed, and its owner learns why.
func TestOwnerLearnsThatItsConnWasEvicted(t *testing.T) {
	b := &Bound{Max: 1}
	near, far := net.Pipe()
	old := b.Enter(far)
	near2, far2 := net.Pipe()
	defer near2.Close()
	defer far2.Close()
	next := b.Enter(far2)
	if _, err := near.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the client reads %v", err)
	}
	old.SetCost(2) // has no effect
	first, again := old.Leave(), old.Leave()
	if !first || !again || b.Len() != 1 {
		t.Errorf("%d conns are held, want 1", b.Len())
	}
	if next.Leave() || b.Len() != 0 {
		t.Errorf("the second conn was evicted, or %d conns are held", b.Len())
	}
	next.SetCost(1)
	if b.Len() != 1 {
		t.Error("SetCost after Leave does not count the conn")
	}
}

// The conns of a http.Server count until their client has shown who it is.
func TestAdmittedConnsAreNotEvicted(t *testing.T) {
	b := &Bound{Max: 4}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { b.Admit(r) }))
	s.Config.ConnState = b.ConnState
	s.Start()
	defer s.Close()
	c := s.Client()
	request := func() (reused bool) {
		t.Helper()
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
			GotConn: func(info httptrace.GotConnInfo) { reused = info.Reused }})
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := c.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return reused
	}
	request()
	for range 20 {
		conn, err := net.Dial("tcp", s.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	if !request() {
		t.Error("the conn of an admitted client was evicted")
	}
	c.CloseIdleConnections()
	request() // by a new conn
	if n := b.Len(); n != 3 && n != 4 {
		t.Errorf("%d conns count", n)
	}
}

func certificate(t *testing.T, notAfter time.Time) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: notAfter, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func TestHandshakeRejectsOtherCertificates(t *testing.T) {
	good, unauthorized := certificate(t, time.Now().Add(time.Hour)), certificate(t, time.Now().Add(time.Hour))
	old := certificate(t, time.Now().Add(-time.Hour))
	forged := tls.Certificate{Certificate: good.Certificate, PrivateKey: unauthorized.PrivateKey}
	pool := x509.NewCertPool()
	for _, c := range []tls.Certificate{good, old} {
		parsed, err := x509.ParseCertificate(c.Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		pool.AddCert(parsed)
	}
	errOurs := errors.New("the day is over")
	config := &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{good}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
	}
	for _, test := range []struct {
		name    string
		cert    *tls.Certificate
		version uint16
		check   error
		why     Reason
	}{
		{"good", &good, tls.VersionTLS13, nil, ""},
		{"nothing", nil, tls.VersionTLS13, nil, NoCertificate},
		{"unauthorized", &unauthorized, tls.VersionTLS13, nil, BadCertificate},
		{"expired", &old, tls.VersionTLS13, nil, ExpiredCertificate},
		{"without-the-key", &forged, tls.VersionTLS13, nil, NoTLS},
		{"old-version", &good, tls.VersionTLS12, nil, NoTLS},
		{"own-check", &good, tls.VersionTLS13, errOurs, NoTLS},
	} {
		t.Run(test.name, func(t *testing.T) {
			near, far := net.Pipe()
			defer near.Close()
			config := config.Clone()
			config.VerifyConnection = func(tls.ConnectionState) error { return test.check }
			var client sync.WaitGroup
			defer client.Wait()
			client.Go(func() {
				defer near.Close()
				conn := tls.Client(near, &tls.Config{InsecureSkipVerify: true, MaxVersion: test.version,
					GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
						if test.cert == nil {
							return new(tls.Certificate), nil
						}
						return test.cert, nil
					}})
				client.Go(func() { conn.Write([]byte("ping")) })
				var b [1]byte
				conn.Read(b[:]) // until the server sends an alert or closes the connection
			})
			defer far.Close()
			conn, why, err := Handshake(far, config)
			if why != test.why || (err == nil) != (why == "") || test.check != nil && !errors.Is(err, test.check) {
				t.Fatalf("%q, %v", why, err)
			}
			if why != "" {
				return
			}
			var b [4]byte
			if _, err := io.ReadFull(conn, b[:]); err != nil || string(b[:]) != "ping" {
				t.Errorf("read %q, %v", b, err)
			}
			conn.Close()
		})
	}
	for name, why := range map[string]Reason{"hangs-up": HungUp, "silent": TLSTooSlow} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				near, far := net.Pipe()
				defer near.Close()
				if why == HungUp {
					near.Close()
				}
				began := time.Now()
				_, got, err := Handshake(far, config)
				if got != why || err == nil {
					t.Errorf("%q, %v", got, err)
				}
				if took := time.Since(began); why == TLSTooSlow && took != tlsTimeout {
					t.Errorf("it waits for %v", took)
				}
				far.Close()
			})
		})
	}
}

// The log has at most one line a minute for each reason, and its counts include all rejected connections.
func TestTallyLogsOncePerMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log testenv.Buffer
		tally := newTally("rejected", slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey || a.Key == slog.LevelKey || a.Key == slog.MessageKey {
				return slog.Attr{}
			}
			return a
		}})))
		expect := func(when string, lines ...string) {
			t.Helper()
			want := ""
			for _, l := range lines {
				want += l + "\n"
			}
			if got := log.Take(); got != want {
				t.Errorf("%s, the log has\n%swant\n%s", when, got, want)
			}
		}
		tally.add(HungUp, "192.0.2.1:1")
		expect("at once", `reason="hung up" remote=192.0.2.1:1 total=1`)
		for i := range 1000 {
			tally.add(HungUp, fmt.Sprintf("192.0.2.1:%d", i))
		}
		tally.add(NoTLS, "192.0.2.2:1")
		expect("in the same minute", `reason="no TLS handshake" remote=192.0.2.2:1 total=1`)
		time.Sleep(time.Minute)
		expect("as long as nothing happens")
		tally.add(HungUp, "192.0.2.3:1")
		tally.add(HungUp, "192.0.2.3:2")
		expect("after a minute", `reason="hung up" remote=192.0.2.3:1 total=1002`)
		if n := tally.total(HungUp); n != 1003 {
			t.Errorf("%d in all", n)
		}
	})
}
