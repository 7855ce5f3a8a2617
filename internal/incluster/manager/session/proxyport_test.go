package session

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/api"

	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/authlistener"
	"kubevpn/pkg/wire/nonblock"
	"kubevpn/pkg/wire/transport"
)

// withProxyPort is a manager with a proxy port on loopback, and a laptop that has said hello.
type withProxyPort struct {
	*running
	later atomic.Int64 // the port's clock is ahead by this duration
}

func startProxyPort(t testing.TB) *withProxyPort {
	t.Helper()
	w := new(withProxyPort)
	l := managertest.Listen(t)
	w.running = start(t, testConfig{}, func(m *Server) {
		var err error
		if m.Proxy, err = NewProxyPort(l, m.cfg.Logger); err != nil {
			t.Fatal(err)
		}
		m.Proxy.tickets.now = func() time.Time { return time.Now().Add(time.Duration(w.later.Load())) }
	})
	greet(t, w.laptop)
	return w
}

func greet(t testing.TB, laptop *transport.Session) {
	t.Helper()
	c := managertest.Hello(t, laptop, api.ClientHello{Protocol: api.Protocol, Client: laptop.ID().String()})
	if c.Next().Hello == nil {
		t.Fatal("no Hello")
	}
}

// holder is a laptop with a ticket for conns.
type holder struct {
	api.Ticket
	session transport.SessionID
	key     *ecdsa.PrivateKey
}

// askTicket sends a request for a ticket, possibly an invalid one, and returns the answer.
func askTicket(t testing.TB, laptop *transport.Session, request any) api.Ticket {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), managertest.Timeout)
	defer cancel()
	st, err := laptop.Open(ctx, transport.Request{Proto: transport.ProtoTicket})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	st.SetDeadline(time.Now().Add(managertest.Timeout))
	if err := json.NewEncoder(st).Encode(request); err != nil {
		t.Fatal(err)
	}
	st.CloseWrite()
	var ticket api.Ticket
	answer, err := io.ReadAll(st)
	if err != nil || json.Unmarshal(answer, &ticket) != nil || bytes.Count(answer, []byte("\n")) != 1 {
		t.Fatalf("the answer is %q, %v", answer, err)
	}
	return ticket
}

func obtain(t testing.TB, laptop *transport.Session) holder {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	ticket := askTicket(t, laptop, api.TicketRequest{PublicKey: der})
	if ticket.Error != nil {
		t.Fatal(ticket.Error)
	}
	return holder{ticket, laptop.ID(), key}
}

// request is the request of a conn, in the API server's words.
func (r holder) request() string {
	return "GET / HTTP/1.1\r\nHost: 10.244.1.2:10802\r\nUser-Agent: kubevpn\r\nConnection: Upgrade\r\n" +
		api.TicketHeader + ": " + r.HeaderValue(r.session) + "\r\nUpgrade: kubevpn\r\nX-Forwarded-For: 192.0.2.1\r\n\r\n"
}

func (r holder) certificate() *tls.Certificate {
	return &tls.Certificate{Certificate: [][]byte{r.Certificate}, PrivateKey: r.key}
}

// tls is the laptop's end of TLS with this certificate, or none.
func (r holder) tls(conn net.Conn, cert *tls.Certificate) *tls.Conn {
	return tls.Client(conn, &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // the key is pinned
		VerifyPeerCertificate: func(chain [][]byte, _ [][]*x509.Certificate) error {
			if len(chain) == 0 || !bytes.Equal(chain[0], r.Server) {
				return errors.New("not the certificate of the ticket")
			}
			return nil
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			if cert == nil {
				return new(tls.Certificate), nil
			}
			return cert, nil
		},
	})
}

// upgrade sends the request and reads the answer.
func (r holder) upgrade(conn net.Conn) error {
	if _, err := io.WriteString(conn, r.request()); err != nil {
		return err
	}
	answer := make([]byte, len(switching))
	if _, err := io.ReadFull(conn, answer); err != nil {
		return err
	}
	if string(answer) != switching {
		return fmt.Errorf("the answer is %q", answer)
	}
	return nil
}

// dial opens a conn.
func (r holder) dial(ctx context.Context, addr string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	if err := r.upgrade(conn); err != nil {
		conn.Close()
		return nil, err
	}
	return r.tls(conn, r.certificate()), nil
}

// visit connects to the port.
func (w *withProxyPort) visit(t testing.TB) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", w.Proxy.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(managertest.Timeout))
	return conn
}

// wantRejected fails the test unless the connection ends without sending a byte.
func (w *withProxyPort) wantRejected(t testing.TB, conn net.Conn, before int, why authlistener.Reason) {
	t.Helper()
	got, err := io.ReadAll(conn)
	var timeout net.Error
	if len(got) > 0 || errors.As(err, &timeout) && timeout.Timeout() {
		t.Errorf("got %q, %v, want only the end", got, err)
	}
	if !slices.Contains(ProxyReasons, why) {
		t.Errorf("%q has no metric", why)
	}
	// An evicted conn is closed before its server learns of it and counts it.
	testenv.Until(t, "the count", func() bool { return w.Proxy.Rejected(why) > before })
	if n := w.Proxy.Rejected(why); n != before+1 {
		t.Errorf("%d were rejected with %q, want %d", n, why, before+1)
	}
}

// A session that began over a port-forward continues over conns of the proxy port, with every byte of its streams.
func TestProxyPortContinuesASession(t *testing.T) {
	w := new(withProxyPort)
	l := managertest.Listen(t)
	w.running = start(t, testConfig{}, func(m *Server) {
		var err error
		if m.Proxy, err = NewProxyPort(l, m.cfg.Logger); err != nil {
			t.Fatal(err)
		}
	})
	var (
		have    atomic.Pointer[holder]
		proxied atomic.Int32
		mu      sync.Mutex
		conns   []net.Conn
	)
	arrived := make(chan *transport.Session, 1)
	client := transport.NewClient(transport.ClientConfig{
		Dial: func(ctx context.Context) (net.Conn, error) {
			var conn net.Conn
			var err error
			if r := have.Load(); r != nil {
				conn, err = r.dial(ctx, l.Addr().String())
				proxied.Add(1)
			} else {
				conn, err = new(net.Dialer).DialContext(ctx, "tcp", w.addr)
			}
			if err == nil {
				mu.Lock()
				conns = append(conns, conn)
				mu.Unlock()
			}
			return conn, err
		},
		OnSession: func(_ context.Context, s *transport.Session) { arrived <- s },
	})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { client.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	w.laptop = <-arrived
	greet(t, w.laptop)

	st, err := w.open(t, managertest.TCPPod(t, func(c *net.TCPConn) {
		io.Copy(c, c)
		c.CloseWrite()
	}))
	if err != nil {
		t.Fatal(err)
	}
	const size = 4 << 20
	sent := make([]byte, size)
	rand.Read(sent)
	half := make(chan struct{})
	go func() {
		st.Write(sent[:size/2])
		close(half)
		st.Write(sent[size/2:])
		st.CloseWrite()
	}()
	r := obtain(t, w.laptop)
	have.Store(&r)
	<-half
	mu.Lock()
	for _, c := range conns { // the conns of the other port
		c.Close()
	}
	mu.Unlock()
	got, err := io.ReadAll(st)
	if err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("%d bytes of %d, %v", len(got), size, err)
	}
	if proxied.Load() == 0 {
		t.Error("no conn went through the proxy port")
	}
	// The laptop can request the next ticket over a conn of the proxy port.
	if again := obtain(t, w.laptop); bytes.Equal(again.Secret, r.Secret) {
		t.Error("two tickets have the same secret")
	}
	for _, why := range []authlistener.Reason{noRequest, noUpgrade, unknownSession, wrongSecret, othersHello, authlistener.NoTLS, authlistener.HungUp} {
		if n := w.Proxy.Rejected(why); n > 0 {
			t.Errorf("%d were rejected: %s", n, why)
		}
	}
	if err := w.laptop.Err(); err != nil {
		t.Errorf("the session ended: %v", err)
	}
}

// The port sends no byte to a client without a valid ticket.
func TestProxyPortIsSilent(t *testing.T) {
	w := startProxyPort(t)
	good := obtain(t, w.laptop)
	change := func(old, new string) string {
		if !strings.Contains(good.request(), old) {
			t.Fatalf("the request has no %q", old)
		}
		return strings.Replace(good.request(), old, new, 1)
	}
	header := api.TicketHeader + ": " + good.HeaderValue(good.session) + "\r\n"
	wrong := good
	wrong.Secret = bytes.Clone(good.Secret)
	wrong.Secret[31] ^= 1
	unknown := good
	unknown.session[0] ^= 1
	var clientHello bytes.Buffer
	tls.Client(writeOnly{&clientHello}, &tls.Config{ServerName: "manager"}).Handshake()
	for _, test := range []struct {
		name, say string
		why       authlistener.Reason
	}{
		{"garbage", "\x00\x01\x02\r\n\r\n\r\n", noRequest},
		{"tls", clientHello.String(), noRequest},
		{"session", "kubevpn\x01" + strings.Repeat("\x00", 64) + "\r\n\r\n", noRequest},
		{"not-http", "HELO example\r\n\r\n", noRequest},
		{"http2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", noUpgrade},
		{"plain-get", "GET / HTTP/1.1\r\nHost: pod\r\n\r\n", noUpgrade},
		{"ticket-without-upgrade", change("Connection: Upgrade\r\n", ""), noUpgrade},
		{"websocket", change("Upgrade: kubevpn\r\n", "Upgrade: websocket\r\n"), noUpgrade},
		{"post", change("GET", "POST"), noUpgrade},
		{"http1.0", change("HTTP/1.1", "HTTP/1.0"), noUpgrade},
		{"body", change("Upgrade: kubevpn\r\n", "Upgrade: kubevpn\r\nContent-Length: 1\r\n"), noUpgrade},
		{"chunked", change("Upgrade: kubevpn\r\n", "Upgrade: kubevpn\r\nTransfer-Encoding: chunked\r\n"), noUpgrade},
		{"more-than-a-request", good.request() + "x", noUpgrade},
		{"no-ticket", change(header, ""), noTicket},
		{"two-tickets", change(header, header+header), noTicket},
		{"half-a-ticket", change(header, header[:len(header)-4]+"\r\n"), noTicket},
		{"empty-ticket", change(header, api.TicketHeader+": \r\n"), noTicket},
		{"ticket-in-the-url", strings.Replace(change(header, ""), "GET /", "GET /?"+api.TicketHeader+"="+good.HeaderValue(good.session), 1), noTicket},
		{"wrong-secret", wrong.request(), wrongSecret},
		{"unknown-session", unknown.request(), unknownSession},
		{"too-large", change("User-Agent: kubevpn", "User-Agent: "+strings.Repeat("k", maxProxyRequest)), tooLarge},
		{"endless-line", "GET /" + strings.Repeat("k", 2*maxProxyRequest), tooLarge},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := w.Proxy.Rejected(test.why)
			conn := w.visit(t)
			go io.WriteString(conn, test.say) // the port may close the connection before it has read all of this
			w.wantRejected(t, conn, before, test.why)
		})
	}
	t.Run("nothing", func(t *testing.T) {
		before := w.Proxy.Rejected(noRequest)
		conn := w.visit(t)
		conn.(*net.TCPConn).CloseWrite()
		w.wantRejected(t, conn, before, noRequest)
	})
	t.Run("expired", func(t *testing.T) {
		w.later.Store(int64(ticketLife + time.Second))
		defer w.later.Store(0)
		conn := w.visit(t)
		io.WriteString(conn, good.request())
		w.wantRejected(t, conn, 0, expiredTicket)
	})
	t.Run("ended-session", func(t *testing.T) {
		other := managertest.Connect(t, w.addr)
		greet(t, other)
		r := obtain(t, other)
		other.Close()
		testenv.Until(t, "the session's end", func() bool { return !w.Proxy.tickets.lives(r.session) })
		before := w.Proxy.Rejected(unknownSession)
		conn := w.visit(t)
		io.WriteString(conn, r.request())
		w.wantRejected(t, conn, before, unknownSession)
		testenv.Until(t, "forgetting", func() bool {
			w.Proxy.tickets.mu.Lock()
			defer w.Proxy.tickets.mu.Unlock()
			return len(w.Proxy.tickets.grants) == 1 // the grants of the other laptop remain
		})
	})
	// After all that, clients with a ticket still connect.
	conn := w.visit(t)
	if err := good.upgrade(conn); err != nil {
		t.Error(err)
	}
}

// writeOnly records the first bytes of a TLS client.
type writeOnly struct{ w io.Writer }

func (c writeOnly) Write(p []byte) (int, error)      { return c.w.Write(p) }
func (c writeOnly) Read([]byte) (int, error)         { return 0, io.EOF }
func (c writeOnly) Close() error                     { return nil }
func (c writeOnly) LocalAddr() net.Addr              { return nil }
func (c writeOnly) RemoteAddr() net.Addr             { return nil }
func (c writeOnly) SetDeadline(time.Time) error      { return nil }
func (c writeOnly) SetReadDeadline(time.Time) error  { return nil }
func (c writeOnly) SetWriteDeadline(time.Time) error { return nil }

// A valid ticket is not enough: the certificate and the hello must belong to the same session.
func TestProxyPortRequiresTheSessionsCertificate(t *testing.T) {
	w := startProxyPort(t)
	good := obtain(t, w.laptop)
	other := managertest.Connect(t, w.addr)
	greet(t, other)
	others := obtain(t, other)

	selfSigned := func(name string) *tls.Certificate {
		template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name},
			NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
		der, err := x509.CreateCertificate(rand.Reader, template, template, &good.key.PublicKey, good.key)
		if err != nil {
			t.Fatal(err)
		}
		return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: good.key}
	}
	// signedByLaptop returns a certificate with the name of another session, signed with the laptop's own certificate.
	signedByLaptop := func() *tls.Certificate {
		parent, err := x509.ParseCertificate(good.Certificate)
		if err != nil {
			t.Fatal(err)
		}
		template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: others.session.String()},
			NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour)}
		der, err := x509.CreateCertificate(rand.Reader, template, parent, &good.key.PublicKey, good.key)
		if err != nil {
			t.Fatal(err)
		}
		return &tls.Certificate{Certificate: [][]byte{der, good.Certificate}, PrivateKey: good.key}
	}
	for _, test := range []struct {
		name string
		show holder // of the ticket
		cert *tls.Certificate
		why  authlistener.Reason
	}{
		{"no-certificate", good, nil, authlistener.NoCertificate},
		{"self-signed", good, selfSigned(good.session.String()), authlistener.BadCertificate},
		{"authority-of-the-same-name", good, selfSigned("kubevpn traffic manager"), authlistener.BadCertificate},
		{"laptop-as-authority", others, signedByLaptop(), authlistener.BadCertificate},
		{"another-session", good, others.certificate(), othersCertificate},
		{"another-session-the-other-way", others, good.certificate(), othersCertificate},
		{"without-the-key", good, &tls.Certificate{Certificate: [][]byte{good.Certificate}, PrivateKey: others.key}, authlistener.NoTLS},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := w.Proxy.Rejected(test.why)
			conn := w.visit(t)
			if err := test.show.upgrade(conn); err != nil {
				t.Fatal(err)
			}
			laptop := test.show.tls(conn, test.cert)
			if got, err := io.ReadAll(laptop); len(got) > 0 || err == nil {
				t.Errorf("inside, got %q, %v", got, err)
			}
			w.wantRejected(t, conn, before, test.why)
		})
	}
	t.Run("expired-certificate", func(t *testing.T) {
		w.later.Store(int64(ticketLife + time.Second))
		defer w.later.Store(0)
		renewed := obtain(t, w.laptop)
		conn := w.visit(t)
		if err := renewed.upgrade(conn); err != nil {
			t.Fatal(err)
		}
		if _, err := renewed.tls(conn, good.certificate()).Read(make([]byte, 1)); err == nil {
			t.Error("got something")
		}
		w.wantRejected(t, conn, 0, authlistener.ExpiredCertificate)
	})
	t.Run("old-tls", func(t *testing.T) {
		before := w.Proxy.Rejected(authlistener.NoTLS)
		conn := w.visit(t)
		if err := good.upgrade(conn); err != nil {
			t.Fatal(err)
		}
		old := tls.Client(conn, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12, Certificates: []tls.Certificate{*good.certificate()}})
		if err := old.Handshake(); err == nil {
			t.Error("TLS 1.2 will do")
		}
		w.wantRejected(t, conn, before, authlistener.NoTLS)
	})
	t.Run("hangs-up", func(t *testing.T) {
		conn := w.visit(t)
		if err := good.upgrade(conn); err != nil {
			t.Fatal(err)
		}
		conn.(*net.TCPConn).CloseWrite()
		w.wantRejected(t, conn, 0, authlistener.HungUp)
	})
	t.Run("another-session-inside", func(t *testing.T) {
		conn := w.visit(t)
		if err := good.upgrade(conn); err != nil {
			t.Fatal(err)
		}
		laptop := good.tls(conn, good.certificate())
		id := other.ID()
		greeting := append([]byte("kubevpn\x01"), id[:]...)
		if _, err := laptop.Write(append(greeting, make([]byte, 72-len(greeting))...)); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(laptop); len(got) > 0 {
			t.Errorf("got %q, %v", got, err)
		}
		w.wantRejected(t, conn, 0, othersHello)
	})
	for _, s := range []*transport.Session{w.laptop, other} {
		if err := s.Err(); err != nil {
			t.Errorf("a session ended: %v", err)
		}
	}
}

// A slow client is rejected after the timeout.
func TestProxyPortRejectsSlowClient(t *testing.T) {
	p, err := NewProxyPort(managertest.Listen(t), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	laptop := startProxyPort(t) // the test adds its ticket to p
	good := obtain(t, laptop.laptop)
	p.tickets.grants = laptop.Proxy.tickets.grants
	for _, test := range []struct {
		name, say string
		drip      string // sent every second after say
		why       authlistener.Reason
		time      time.Duration
		answer    string
	}{
		{"slowloris", "GET / HTTP/1.1\r\n", "X-Header: value\r\n", tooSlow, requestTimeout, ""},
		{"silent", "", "", tooSlow, requestTimeout, ""},
		{"slow-inside", good.request(), "", authlistener.TLSTooSlow, 10 * time.Second, switching},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p.tickets.now = func() time.Time { return good.NotAfter.Add(-time.Minute) } // the bubble has its own clock
				near, far := net.Pipe()
				var laptop sync.WaitGroup
				got := make(chan string, 1)
				laptop.Go(func() {
					b, _ := io.ReadAll(near)
					got <- string(b)
				})
				laptop.Go(func() {
					_, err := io.WriteString(near, test.say)
					for test.drip != "" && err == nil {
						time.Sleep(time.Second)
						_, err = io.WriteString(near, test.drip)
					}
				})
				began := time.Now()
				_, why, err := p.authenticate(far)
				if took := time.Since(began); why != test.why || took != test.time {
					t.Errorf("rejected with %q after %v (%v), want %q after %v", why, took, err, test.why, test.time)
				}
				far.Close()
				if s := <-got; s != test.answer {
					t.Errorf("got %q, want %q", s, test.answer)
				}
				laptop.Wait()
				near.Close()
			})
		})
	}
}

// One address cannot keep the others out, and all together cannot exhaust the
func TestProxyPortClosesTheBusiestAddress(t *testing.T) {
	w := startProxyPort(t)
	good := obtain(t, w.laptop)
	from := func(i int) net.Conn {
		t.Helper()
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(i))}}
		conn, err := d.Dial("tcp", w.Proxy.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		conn.SetDeadline(time.Now().Add(managertest.Timeout))
		return conn
	}
	first := from(2)
	for range authlistener.MaxPendingFrom {
		from(2)
	}
	w.wantRejected(t, first, 0, authlistener.TooMany) // the newest evicts the oldest
	for _, i := range []int{3, 2} {
		if err := good.upgrade(from(i)); err != nil {
			t.Errorf("from 127.0.0.%d: %v", i, err)
		}
	}
}

func TestTicketIsForOneSession(t *testing.T) {
	w := startProxyPort(t)
	r := obtain(t, w.laptop)
	cert, err := x509.ParseCertificate(r.Certificate)
	if err != nil {
		t.Fatal(err)
	}
	if !r.key.PublicKey.Equal(cert.PublicKey) || cert.Subject.CommonName != w.laptop.ID().String() || cert.IsCA ||
		len(cert.ExtKeyUsage) != 1 || cert.ExtKeyUsage[0] != x509.ExtKeyUsageClientAuth || !cert.NotAfter.Equal(r.NotAfter) {
		t.Errorf("the laptop's certificate is %+v", cert)
	}
	if left := time.Until(r.NotAfter); left > time.Hour || left < 59*time.Minute {
		t.Errorf("it is valid for %v", left)
	}
	if skew := time.Since(cert.NotBefore); skew < 5*time.Minute || skew > 6*time.Minute {
		t.Errorf("it has been valid for %v", skew)
	}
	if port := w.Proxy.Addr().(*net.TCPAddr).Port; int(r.Port) != port || r.Path != "/" || len(r.Secret) != 32 {
		t.Errorf("port %d, path %q, secret of %d bytes; the port is %d", r.Port, r.Path, len(r.Secret), port)
	}
	server, err := x509.ParseCertificate(r.Server)
	if err != nil || server.IsCA || server.ExtKeyUsage[0] != x509.ExtKeyUsageServerAuth {
		t.Errorf("the server's certificate: %+v, %v", server, err)
	}
	// After a renewal, the older tickets stay valid for dials in progress, but not for ever.
	check := func(r holder) authlistener.Reason { return w.Proxy.tickets.check(r.session, [32]byte(r.Secret)) }
	for range ticketsKept - 1 {
		newer := obtain(t, w.laptop)
		if check(newer) != "" || check(r) != "" {
			t.Errorf("newer %q, older %q", check(newer), check(r))
		}
	}
	newest := obtain(t, w.laptop)
	if check(newest) != "" || check(r) != wrongSecret {
		t.Errorf("newest %q, oldest %q", check(newest), check(r))
	}
}

func TestManagerRefusesInvalidTicketRequest(t *testing.T) {
	w := startProxyPort(t)
	p384, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	otherCurve, err := x509.MarshalPKIXPublicKey(&p384.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	good, err := x509.MarshalPKIXPublicKey(&obtain(t, w.laptop).key.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	offCurve := bytes.Clone(good)
	offCurve[len(offCurve)-1] ^= 1
	for _, test := range []struct {
		name    string
		request any
		says    string
	}{
		{"no-key", api.TicketRequest{}, "invalid public key: "},
		{"garbage", api.TicketRequest{PublicKey: []byte("ssh-rsa AAAA")}, "invalid public key: "},
		{"another-curve", api.TicketRequest{PublicKey: otherCurve}, "not ECDSA P-256"},
		{"off-the-curve", api.TicketRequest{PublicKey: offCurve}, "invalid public key: "},
		{"not-a-request", []int{1}, "invalid ticket request: "},
		{"too-long", api.TicketRequest{PublicKey: make([]byte, maxTicketRequest)}, "invalid ticket request: "},
	} {
		t.Run(test.name, func(t *testing.T) {
			ticket := askTicket(t, w.laptop, test.request)
			if ticket.Error == nil || !strings.Contains(ticket.Error.Message, test.says) || ticket.Error.Code != api.ExitIncompatible {
				t.Errorf("got %+v", ticket.Error)
			}
			if ticket.Secret != nil || ticket.Certificate != nil || ticket.Server != nil {
				t.Error("the answer contains more than an error")
			}
		})
	}
	t.Run("no-port", func(t *testing.T) {
		r := start(t, testConfig{})
		greet(t, r.laptop)
		if e := askTicket(t, r.laptop, api.TicketRequest{PublicKey: good}).Error; e == nil || e.Code != api.ExitUnreachable || !strings.Contains(e.Message, "--proxy-listen") {
			t.Errorf("got %+v", e)
		}
	})
}

// The reader of requests reads a bounded number of bytes, and returns a ticket only from a request that contains one.
func FuzzReadUpgrade(f *testing.F) {
	r := holder{Ticket: api.Ticket{Secret: make([]byte, 32)}}
	f.Add([]byte(r.request()))
	f.Add([]byte(r.request() + "more"))
	f.Add([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	f.Add([]byte("GET / HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, upgrade\r\nUpgrade: KUBEVPN\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"))
	f.Add([]byte("\x16\x03\x01\x00\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		in := bytes.NewReader(data)
		session, secret, why, err := readUpgrade(in)
		if read := len(data) - in.Len(); read > maxProxyRequest {
			t.Errorf("%d bytes were read", read)
		}
		if why != "" {
			return
		}
		if err != nil {
			t.Errorf("accepted, with the error %v", err)
		}
		shown := (&api.Ticket{Secret: secret[:]}).HeaderValue(session)
		if !bytes.HasPrefix(data, []byte("GET ")) || in.Len() != 0 ||
			!bytes.Contains(bytes.ToLower(data), []byte(strings.ToLower(shown))) || !bytes.Contains(data, []byte(shown[32:])) {
			t.Errorf("%q returns the ticket %s", data, shown)
		}
	})
}

// BenchmarkConn measures the manager's end of a conn with writes of 64 KiB, as a link makes them.
func BenchmarkConn(b *testing.B) {
	w := startProxyPort(b)
	good := obtain(b, w.laptop)
	l := nonblock.Listener{Listener: managertest.Listen(b)} // its connections do not reach a transport.Server
	var laptop sync.WaitGroup
	defer laptop.Wait()
	laptop.Go(func() {
		conn, err := good.dial(context.Background(), l.Addr().String())
		if err != nil {
			b.Error(err)
			return
		}
		defer conn.Close()
		io.Copy(io.Discard, conn)
	})
	conn, err := l.Accept()
	if err != nil {
		b.Fatal(err)
	}
	c, why, err := w.Proxy.authenticate(conn)
	if why != "" {
		b.Fatal(why, err)
	}
	defer c.Close()
	chunk := make([]byte, 64<<10)
	b.SetBytes(int64(len(chunk)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Write(chunk); err != nil {
			b.Fatal(err)
		}
	}
}
