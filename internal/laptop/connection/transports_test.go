package connection

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/podconn"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/transport"
	"kubevpn/pkg/wire/transport/transporttest"
)

// authority is a traffic manager's, which signs what tickets name.
type authority struct {
	ca     *x509.Certificate
	key    *ecdsa.PrivateKey
	server tls.Certificate
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := new(authority)
	a.key = newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &a.key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.ca, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.server = a.newServer(t)
	return a
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// newServer is another certificate for a server.
func (a *authority) newServer(t *testing.T) tls.Certificate {
	t.Helper()
	key := newKey(t)
	der, err := a.sign("server", &key.PublicKey, time.Now().Add(-time.Minute), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func (a *authority) sign(name string, key any, from time.Time, lasts time.Duration) ([]byte, error) {
	return x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, NotBefore: from, NotAfter: from.Add(lasts),
	}, a.ca, key, a.key)
}

// issuer gives tickets at the manager's end of a session.
type issuer struct {
	*authority
	lasts  time.Duration                  // the certificates; they began five minutes ago
	answer func(*transport.Incoming) bool // whether it has answered; nil: it never does
	asked  atomic.Int32
}

// serve answers requests for tickets until the test ends.
func (i *issuer) serve(t *testing.T, manager *transport.Session) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			in, err := manager.Accept(ctx)
			if err != nil {
				return
			}
			n := i.asked.Add(1)
			if in.Proto != transport.ProtoTicket {
				t.Errorf("a stream of %v", in.Proto)
			}
			if i.answer != nil && i.answer(in) {
				continue
			}
			if err := i.issue(in, manager.ID(), n); err != nil {
				t.Errorf("giving a ticket: %v", err)
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
}

func (i *issuer) issue(in *transport.Incoming, id transport.SessionID, n int32) error {
	st, err := in.Accept()
	if err != nil {
		return err
	}
	defer st.Close()
	text, err := io.ReadAll(st) // it is half-closed
	if err != nil {
		return err
	}
	var request api.TicketRequest
	if err := json.Unmarshal(text, &request); err != nil {
		return err
	}
	key, err := x509.ParsePKIXPublicKey(request.PublicKey)
	if err != nil {
		return err
	}
	const before = 5 * time.Minute
	der, err := i.sign(id.String(), key, time.Now().Add(-before), i.lasts+before)
	if err != nil {
		return err
	}
	return json.NewEncoder(st).Encode(api.Ticket{
		Port: 10802, Path: "/", Secret: fmt.Appendf(nil, "%032d", n), Certificate: der, Server: i.server.Certificate[0],
	})
}

func TestTicketsAreReused(t *testing.T) {
	for _, tt := range []struct {
		name  string
		lasts time.Duration
		asked int32 // by three dials
	}{
		{"an_hour", time.Hour, 1},
		{"just_enough", ticketMargin + time.Minute, 1},
		{"near_its_end", ticketMargin - time.Second, 3},
		{"over", -time.Minute, 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			laptop, manager := transporttest.Pair(t)
			i := &issuer{authority: newAuthority(t), lasts: tt.lasts}
			i.serve(t, manager)
			tickets := newTickets()
			for n := range int32(3) {
				ticket, key, err := tickets.get(t.Context(), laptop)
				if err != nil {
					t.Fatal(err)
				}
				if want := fmt.Sprintf("%032d", min(n+1, tt.asked)); string(ticket.Secret) != want {
					t.Errorf("ticket %s, want %s", ticket.Secret, want)
				}
				if cert, err := x509.ParseCertificate(ticket.Certificate); err != nil || !key.PublicKey.Equal(cert.PublicKey) {
					t.Errorf("the certificate is not for the key, %v", err)
				}
			}
			if got := i.asked.Load(); got != tt.asked {
				t.Errorf("asked %d times, want %d", got, tt.asked)
			}
		})
	}
}

// The links of a session dial at the same time and share its ticket.
func TestTicketsBelongToOneSession(t *testing.T) {
	tickets := newTickets()
	for range 2 {
		laptop, manager := transporttest.Pair(t)
		i := &issuer{authority: newAuthority(t), lasts: time.Hour}
		i.serve(t, manager)
		var dials sync.WaitGroup
		for range 5 {
			dials.Go(func() {
				ticket, _, err := tickets.get(t.Context(), laptop)
				if err != nil {
					t.Error(err)
					return
				}
				cert, err := x509.ParseCertificate(ticket.Certificate)
				if err != nil || cert.Subject.CommonName != laptop.ID().String() {
					t.Errorf("the certificate is not the session's, %v", err)
				}
			})
		}
		dials.Wait()
		if got := i.asked.Load(); got != 1 {
			t.Errorf("asked %d times, want once", got)
		}
	}
}

// The user sees the manager's reason for rejecting a ticket request, and the next dial asks again.
func TestRejectedTicketNamesTheReason(t *testing.T) {
	say := func(text string) func(*transport.Incoming) bool {
		return func(in *transport.Incoming) bool {
			st, err := in.Accept()
			if err == nil {
				defer st.Close()
				if _, err := io.Copy(io.Discard, st); err == nil {
					io.WriteString(st, text)
					st.CloseWrite()
				}
			}
			return true
		}
	}
	for _, tt := range []struct {
		name   string
		answer func(*transport.Incoming) bool
		says   string
		hint   string
	}{
		{"refusal", say(`{"error":{"code":11,"message":"there is no port","hint":"Open one."}}`), "asking the traffic manager for a ticket: there is no port", "Open one."},
		{"no_ticket", say("what?"), "asking the traffic manager for a ticket: invalid character", ""},
		{"nothing", say(""), "asking the traffic manager for a ticket: unexpected EOF", ""},
		{"cut", say(`{"port":10802,`), "asking the traffic manager for a ticket: unexpected EOF", ""},
		{"endless", say(`{"path":"` + strings.Repeat("x", 2*maxTicket) + `"}`), "asking the traffic manager for a ticket: unexpected EOF", ""},
		{"certificate", say(`{"certificate":"AAAA"}`), "the traffic manager's ticket: x509: ", ""},
		{"rejected", func(in *transport.Incoming) bool { in.Reject(transport.CodeProhibited); return true }, "asking the traffic manager for a ticket: ", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			laptop, manager := transporttest.Pair(t)
			i := &issuer{authority: newAuthority(t), lasts: time.Hour, answer: tt.answer}
			i.serve(t, manager)
			s := newTestConnection(t)
			for range 2 {
				_, _, err := s.transports.tickets.get(t.Context(), laptop)
				if err == nil || !strings.Contains(err.Error(), tt.says) {
					t.Fatalf("got %v", err)
				}
				if e := s.cluster.Explain(err); e.Code != api.ExitUnreachable || !strings.HasPrefix(e.Message, tt.says) || e.Hint != tt.hint {
					t.Errorf("explained as %+v", e)
				}
			}
			if got := i.asked.Load(); got != 2 {
				t.Errorf("asked %d times, want 2", got)
			}
		})
	}
}

// A manager that does not answer delays each caller until the timeout, or until the caller's context ends.
func TestMissingTicketEndsTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		laptop, manager := transporttest.Pair(t)
		i := &issuer{answer: func(in *transport.Incoming) bool { in.Accept(); return true }}
		i.serve(t, manager)
		tickets := newTickets()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		first, second := make(chan error, 1), make(chan error, 1)
		began := time.Now()
		go func() {
			_, _, err := tickets.get(t.Context(), laptop)
			first <- err
		}()
		synctest.Wait()
		go func() {
			_, _, err := tickets.get(ctx, laptop)
			second <- err
		}()
		synctest.Wait()
		cancel()
		if err := <-second; !errors.Is(err, context.Canceled) || time.Since(began) != 0 {
			t.Errorf("who waits for another's ticket got %v after %v", err, time.Since(began))
		}
		if err := <-first; err == nil || err.Error() != "asking the traffic manager for a ticket: no answer within 10s" || time.Since(began) != ticketTimeout {
			t.Errorf("got %v after %v", err, time.Since(began))
		}
	})
}

// podPort is an API server whose pods/proxy leads to a traffic manager's port.
type podPort struct {
	*httptest.Server
	shows  tls.Certificate
	pool   *x509.CertPool // of whom it takes certificates
	refuse int            // so many requests are closed without an answer

	mu   sync.Mutex
	seen []string // method, path and headers of the requests
	peer []string // whose certificates were shown
	errs []error  // of handshakes
	wg   sync.WaitGroup
}

func newPodPort(t *testing.T, a *authority) *podPort {
	t.Helper()
	p := &podPort{shows: a.server, pool: x509.NewCertPool()}
	p.pool.AddCert(a.ca)
	p.Server = httptest.NewTLSServer(http.HandlerFunc(p.serve))
	t.Cleanup(func() {
		p.CloseClientConnections()
		p.Close()
		p.wg.Wait()
	})
	return p
}

func (p *podPort) serve(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	p.seen = append(p.seen, fmt.Sprintf("%s %s %s %s", r.Method, r.URL.Path, r.Header.Get("Upgrade"), r.Header.Get(api.TicketHeader)))
	refused := len(p.seen) <= p.refuse
	p.mu.Unlock()
	if refused {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusServiceUnavailable)
		io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"ServiceUnavailable","code":503,"message":"EOF"}`)
		return
	}
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	p.wg.Go(func() {
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
			return
		}
		fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", r.Header.Get("Upgrade"))
		inside := tls.Server(buffered{conn, rw}, &tls.Config{
			MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{p.shows},
			ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: p.pool,
		})
		err := inside.Handshake()
		p.mu.Lock()
		if err != nil {
			p.errs = append(p.errs, err)
		}
		for _, c := range inside.ConnectionState().PeerCertificates {
			p.peer = append(p.peer, c.Subject.CommonName)
		}
		p.mu.Unlock()
		if err == nil {
			io.Copy(inside, inside)
		}
	})
}

// buffered is a connection of which something was read already.
type buffered struct {
	net.Conn
	r io.Reader
}

func (c buffered) Read(p []byte) (int, error) { return c.r.Read(p) }

// proxied is a Session that has a transport session, and an API server that leads to the port.
func proxied(t *testing.T, i *issuer, p *podPort) (*Connection, *transport.Session) {
	t.Helper()
	laptop, manager := transporttest.Pair(t)
	i.serve(t, manager)
	s := newTestConnection(t)
	text, err := json.Marshal(map[string]any{
		"current-context": "c",
		"contexts":        []any{map[string]any{"name": "c", "context": map[string]any{"cluster": "c"}}},
		"clusters": []any{map[string]any{"name": "c", "cluster": map[string]any{
			"server":                     p.URL,
			"certificate-authority-data": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.Certificate().Raw}),
		}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if s.cluster, err = client.Load(text, client.Options{}); err != nil {
		t.Fatal(err)
	}
	s.pods = podconn.New(s.cluster)
	s.manager.location.Update(func(p *managerLocation) { p.namespace, p.pod = "kubevpn", "manager-7" })
	s.current.set(laptop)
	return s, laptop
}

func TestDialProxyCarriesData(t *testing.T) {
	a := newAuthority(t)
	p := newPodPort(t, a)
	s, laptop := proxied(t, &issuer{authority: a, lasts: time.Hour}, p)
	for range 2 {
		conn, err := s.transports.dialProxy(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		echoes(t, conn)
	}
	// One ticket for both, and none of it in the path.
	secret := base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, "%032d", 1))
	request := "GET /api/v1/namespaces/kubevpn/pods/manager-7:10802/proxy/ kubevpn " + laptop.ID().String() + "." + secret
	p.mu.Lock()
	defer p.mu.Unlock()
	if d := cmp.Diff([]string{request, request}, p.seen); d != "" {
		t.Errorf("requests (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]string{laptop.ID().String(), laptop.ID().String()}, p.peer); d != "" {
		t.Errorf("certificates (-want +got):\n%s", d)
	}
}

// The laptop accepts only the certificate that the ticket names, not another one of the same authority.
func TestDialProxyRejectsAnotherCertificate(t *testing.T) {
	a := newAuthority(t)
	p := newPodPort(t, a)
	p.shows = a.newServer(t)
	i := &issuer{authority: a, lasts: time.Hour}
	s, _ := proxied(t, i, p)
	for range 2 {
		conn, err := s.transports.dialProxy(t.Context())
		if err == nil {
			conn.Close()
		}
		if err == nil || !strings.Contains(err.Error(), "the server is not the traffic manager of this session") {
			t.Fatalf("got %v, %v", conn, err)
		}
	}
	p.wg.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.seen) != 2 || len(p.peer) != 0 || len(p.errs) != 2 {
		t.Errorf("requests %q, certificates %q, errors %v", p.seen, p.peer, p.errs)
	}
	if got := i.asked.Load(); got != 2 {
		t.Errorf("asked for %d tickets, want one for each dial: the manager may be another", got)
	}
}

// The error names the manager, not the API server, as the one that rejected the laptop's certificate.
func TestRejectionByTheManagerIsNamed(t *testing.T) {
	a := newAuthority(t)
	p := newPodPort(t, a)
	p.pool = x509.NewCertPool()
	s, _ := proxied(t, &issuer{authority: a, lasts: time.Hour}, p)
	conn, err := s.transports.dialProxy(t.Context())
	if err == nil { // with TLS 1.3 the laptop does not know yet
		defer conn.Close()
		_, err = conn.Read(make([]byte, 1))
	}
	if e := s.cluster.Explain(err); e == nil || !strings.HasPrefix(e.Message, "TLS with the traffic manager: remote error: tls: ") {
		t.Errorf("explained as %+v", e)
	}
}

// The manager may have revoked a ticket without notice, so a failed dial discards it.
func TestDialProxyForgetsRejectedTickets(t *testing.T) {
	a := newAuthority(t)
	p := newPodPort(t, a)
	p.refuse = 1
	i := &issuer{authority: a, lasts: time.Hour}
	s, _ := proxied(t, i, p)
	if conn, err := s.transports.dialProxy(t.Context()); err == nil || !strings.Contains(s.cluster.Explain(err).Message, "port 10802 of pod kubevpn/manager-7 closed the connection") {
		t.Fatalf("got %v, %v", conn, err)
	}
	conn, err := s.transports.dialProxy(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if got := i.asked.Load(); got != 2 {
		t.Errorf("asked for %d tickets, want 2", got)
	}
	s.transports.tickets.forget(api.Ticket{Secret: fmt.Appendf(nil, "%032d", 1)}) // by a dial that is late
	if conn, err = s.transports.dialProxy(t.Context()); err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if got := i.asked.Load(); got != 2 {
		t.Errorf("asked for %d tickets though one was good, want 2", got)
	}
}

func TestStatusListsTransports(t *testing.T) {
	began := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	later := began.Add(time.Minute)
	forward := func(state api.TransportState, since time.Time) api.Transport {
		return api.Transport{Name: api.TransportPortForward, State: state, Since: since}
	}
	proxy := func(state api.TransportState, reason string, since time.Time) api.Transport {
		return api.Transport{Name: api.TransportAPIProxy, State: state, Reason: reason, Since: since}
	}
	direct := func(state api.TransportState, reason string, since time.Time) api.Transport {
		d := proxy(state, reason, since)
		d.Name = api.TransportDirect
		return d
	}
	forwardInUse := forward(api.TransportInUse, began)
	state := func(state transport.PreferredState) transport.PreferredStatus {
		return transport.PreferredStatus{State: state, Since: later}
	}
	failing := func(reason error) transport.PreferredStatus {
		return transport.PreferredStatus{State: transport.PreferredFailing, Since: later, Reason: reason}
	}
	unreachable := failing(api.Errorf(api.ExitUnreachable, "no address"))
	directFails := direct(api.TransportFailing, "no address", later)
	type all []transport.PreferredStatus // of direct and of api-proxy
	for _, tt := range []struct {
		name  string
		asked string
		seen  all
		inUse string // "": as the port-forward says itself, which has not been dialed
		want  []api.Transport
	}{
		{"forced_port_forward", api.TransportPortForward, nil, "", []api.Transport{
			forwardInUse, proxy(api.TransportOff, "--transport port-forward", time.Time{}), direct(api.TransportOff, "--transport port-forward", time.Time{})}},
		{"not_tried_yet", api.TransportAuto, all{{}, {}}, "", []api.Transport{
			forwardInUse, proxy(api.TransportTrying, "", time.Time{}), direct(api.TransportTrying, "", time.Time{})}},
		{"api_proxy_not_tried_yet", "", all{unreachable, {}}, "", []api.Transport{
			forwardInUse, proxy(api.TransportTrying, "", time.Time{}), directFails}},
		{"api_proxy_in_use", api.TransportAuto, all{unreachable, state(transport.PreferredInUse)}, api.TransportAPIProxy, []api.Transport{
			forward(api.TransportStandby, later), proxy(api.TransportInUse, "", later), directFails}},
		{"direct_in_use", api.TransportAuto, all{state(transport.PreferredInUse), state(transport.PreferredStandby)}, api.TransportDirect, []api.Transport{
			forward(api.TransportStandby, later), proxy(api.TransportStandby, "direct is in use", later), direct(api.TransportInUse, "", later)}},
		{"forced_api_proxy", api.TransportAPIProxy, all{state(transport.PreferredInUse)}, api.TransportAPIProxy, []api.Transport{
			forward(api.TransportStandby, later), proxy(api.TransportInUse, "", later), direct(api.TransportOff, "--transport api-proxy", time.Time{})}},
		{"forced_direct", api.TransportDirect, all{state(transport.PreferredInUse)}, api.TransportDirect, []api.Transport{
			forward(api.TransportStandby, later), proxy(api.TransportOff, "--transport direct", time.Time{}), direct(api.TransportInUse, "", later)}},
		{"forced_and_gone", api.TransportAPIProxy, all{failing(io.EOF)}, api.TransportAPIProxy, []api.Transport{
			{Name: api.TransportPortForward, State: api.TransportStandby, Reason: "--transport api-proxy", Since: began},
			proxy(api.TransportFailing, "the API server 127.0.0.1:1, or a proxy before it, broke the connection: EOF", later),
			direct(api.TransportOff, "--transport api-proxy", time.Time{})}},
		{"failing", api.TransportAuto, all{unreachable, failing(io.EOF)}, "", []api.Transport{
			forwardInUse, proxy(api.TransportFailing, "the API server 127.0.0.1:1, or a proxy before it, broke the connection: EOF", later), directFails}},
		{"refused_a_ticket", api.TransportAuto, all{unreachable, failing(fmt.Errorf("asking: %w", api.Errorf(api.ExitUnreachable, "there is no port")))}, "", []api.Transport{
			forwardInUse, proxy(api.TransportFailing, "asking: there is no port", later), directFails}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newTestConnection(t)
			s.cfg.Request.Transport = tt.asked
			s.status.establish()
			s.status.change(func(r *report) { r.shown.Since = began })
			s.transports.onPreferred(tt.seen)
			c := s.Status()
			if c.Transport != tt.inUse {
				t.Errorf("in use is %q, want %q", c.Transport, tt.inUse)
			}
			if d := cmp.Diff(tt.want, c.Transports); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			if n := len(s.transports.preferred()); n != len(tt.seen) {
				t.Errorf("%d transports are dialed besides port-forward, want %d", n, len(tt.seen))
			}
		})
	}
}

func TestBytesAreCountedPerTransport(t *testing.T) {
	laptop, manager := transporttest.Pair(t)
	(&issuer{authority: newAuthority(t), lasts: time.Hour}).serve(t, manager)
	s := newTestConnection(t)
	s.current.set(laptop)
	if _, _, err := s.transports.tickets.get(t.Context(), laptop); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 10*time.Second, func() error { // a write is counted when it has ended
		c := s.Status()
		all := c.Transports
		if forward, proxy := all[0], all[1]; forward.Sent < 100 || forward.Received < 500 || proxy.Sent != 0 || proxy.Received != 0 {
			return fmt.Errorf("counted %+v", all)
		}
		if forward, proxy := all[0].Seconds, all[1].Seconds; forward <= 0 || c.Seconds != forward || proxy != 0 {
			return fmt.Errorf("the round trip is %v, of %+v", c.Seconds, all)
		}
		return nil
	})
}

// With --transport api-proxy, connect waits for that transport or fails with the reason.
func TestForcedTransportIsAwaited(t *testing.T) {
	for _, tt := range []struct {
		name  string
		asked string
		seen  []transport.PreferredStatus
		want  string // "": it can be had
	}{
		{"not_asked_for", api.TransportAuto, nil, ""},
		{"taken", api.TransportAPIProxy, []transport.PreferredStatus{{State: transport.PreferredTrying}, {State: transport.PreferredInUse}}, ""},
		{"direct_taken", api.TransportDirect, []transport.PreferredStatus{{State: transport.PreferredTrying}, {State: transport.PreferredInUse}}, ""},
		{"direct_failing", api.TransportDirect, []transport.PreferredStatus{{State: transport.PreferredFailing, Reason: api.Errorf(api.ExitUnreachable, "no address")}},
			"the transport direct does not work: no address"},
		{"failing", api.TransportAPIProxy, []transport.PreferredStatus{{State: transport.PreferredTrying}, {State: transport.PreferredFailing, Reason: io.EOF}},
			"the transport api-proxy does not work: the API server 127.0.0.1:1, or a proxy before it, broke the connection: EOF"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newTestConnection(t)
				s.cfg.Request.Transport = tt.asked
				done := make(chan error, 1)
				go func() { done <- s.transports.awaitForced(t.Context()) }()
				for i, seen := range tt.seen {
					synctest.Wait()
					select {
					case err := <-done:
						t.Fatalf("it did not wait for %v, but gave %v", tt.seen[i:], err)
					default:
					}
					s.transports.onPreferred([]transport.PreferredStatus{seen})
				}
				err := <-done
				if tt.want == "" {
					if err != nil {
						t.Error(err)
					}
					return
				}
				if e := api.AsError(err); e == nil || e.Message != tt.want || !strings.Contains(e.Hint, "--transport port-forward") {
					t.Errorf("got %+v", e)
				}
			})
		})
	}
}
