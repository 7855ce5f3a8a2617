package session

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"kubevpn/internal/api"
	"kubevpn/pkg/wire/authlistener"
	"kubevpn/pkg/wire/nonblock"
	"kubevpn/pkg/wire/transport"
)

const (
	maxProxyRequest = 8 << 10 // bytes
	requestTimeout  = 5 * time.Second
)

// Reasons for which the proxy port rejects a connection, besides those of authlistener.
const (
	noRequest authlistener.Reason = "no HTTP request" // garbage, another protocol, or nothing at all
	tooLarge  authlistener.Reason = "request too large"
	tooSlow   authlistener.Reason = "request too slow"
	noUpgrade authlistener.Reason = "not an upgrade to kubevpn"
	noTicket  authlistener.Reason = "no ticket"

	unknownSession authlistener.Reason = "unknown session" // or one that has ended
	wrongSecret    authlistener.Reason = "wrong secret"
	expiredTicket  authlistener.Reason = "expired ticket"

	othersCertificate authlistener.Reason = "another session's certificate"
	othersHello       authlistener.Reason = "another session's hello"
)

// ProxyReasons are all reasons for which the proxy port rejects a connection. Their metrics exist from the start.
var ProxyReasons = []authlistener.Reason{noRequest, tooLarge, tooSlow, noUpgrade, noTicket, unknownSession, wrongSecret,
	expiredTicket, othersCertificate, othersHello, authlistener.TooMany, authlistener.HungUp, authlistener.NoTLS,
	authlistener.TLSTooSlow, authlistener.NoCertificate, authlistener.ExpiredCertificate, authlistener.BadCertificate}

// Unsent bounds the bytes of a conn that the kernel holds unsent. A longer queue would only delay what comes next.
const Unsent = 128 << 10

// switching is the only answer that the port sends in the clear.
const switching = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + api.UpgradeProtocol +
	"\r\n\r\n"

var (
	errOthersCertificate = errors.New("the certificate is another session's")
	errSessionEnded      = errors.New("the session has ended")
)

// ProxyPort is the port that the API server's pods/proxy connects to, and laptops by the transport direct. Every pod
// can reach it too, and perhaps the whole internet, so it sends nothing to a client without a ticket:
//
//	laptop, directly or through the API server   port
//	  GET / with Upgrade and a ticket ─────────▶  a ticket of a session that lives? no: closed, counted
//	  ◀──────────────────────────────────── 101
//	  ◀═══════════════ TLS 1.3 ════════════════▶  a certificate of the same session? no: closed, counted
//	  hello, frames (pkg/wire/transport) ◀══════════▶  a conn of that session, and of no other
//
// To transport.Server it is a net.Listener.
type ProxyPort struct {
	*authlistener.Listener
	tickets *tickets
}

// NewProxyPort returns a port that owns l, which accepts TCP connections, and generates its keys.
func NewProxyPort(l net.Listener, log *slog.Logger) (*ProxyPort, error) {
	addr, ok := l.Addr().(*net.TCPAddr)
	if !ok {
		return nil, fmt.Errorf("the proxy port's listener uses %s instead of TCP", l.Addr().Network())
	}
	t, err := newTickets(addr.AddrPort().Port())
	if err != nil {
		return nil, err
	}
	p := &ProxyPort{tickets: t}
	p.Listener = authlistener.New(authlistener.Config{
		Name: "proxy port", Listener: nonblock.Listener{Listener: l, Unsent: Unsent}, Logger: log,
		Authenticate: p.authenticate,
	})
	return p, nil
}

// Port returns the number of the port.
func (p *ProxyPort) Port() uint16 { return p.tickets.port }

// authenticate checks the ticket and the certificate of conn's other end. The error adds details to the reason.
func (p *ProxyPort) authenticate(conn net.Conn) (net.Conn, authlistener.Reason, error) {
	if err := conn.SetDeadline(time.Now().Add(requestTimeout)); err != nil {
		return nil, authlistener.HungUp, err
	}
	session, secret, why, err := readUpgrade(conn)
	if why == "" {
		why = p.tickets.check(session, secret)
	}
	if why != "" {
		return nil, why, err
	}
	if _, err := io.WriteString(conn, switching); err != nil {
		return nil, authlistener.HungUp, err
	}
	inside, why, err := authlistener.Handshake(conn, p.tickets.tlsConfig(session))
	switch {
	case errors.Is(err, errOthersCertificate):
		why = othersCertificate
	case errors.Is(err, errSessionEnded):
		why = unknownSession
	}
	if why != "" {
		return nil, why, err
	}
	return &sessionConn{inside, session}, "", nil
}

// readUpgrade reads one request, and returns the session and the secret of its ticket. If why is not empty, the request
// is rejected; err adds details.
func readUpgrade(r io.Reader) (session transport.SessionID, secret [32]byte, why authlistener.Reason, err error) {
	limited := &io.LimitedReader{R: r, N: maxProxyRequest}
	lines := bufio.NewReader(limited)
	req, err := http.ReadRequest(lines)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return session, secret, tooSlow, err
	case err != nil && limited.N <= 0:
		return session, secret, tooLarge, err
	case err != nil:
		return session, secret, noRequest, err
	case req.Method != http.MethodGet, !req.ProtoAtLeast(1, 1), req.ContentLength != 0, len(req.TransferEncoding) > 0,
		!httpguts.HeaderValuesContainsToken(req.Header["Connection"], "Upgrade"),
		!strings.EqualFold(req.Header.Get("Upgrade"), api.UpgradeProtocol),
		lines.Buffered() > 0: // a client must wait for the answer
		return session, secret, noUpgrade, nil
	}
	shown := req.Header[api.TicketHeader]
	if len(shown) != 1 {
		return session, secret, noTicket, nil
	}
	id, secret, err := api.ParseTicketHeader(shown[0])
	if err != nil {
		return session, secret, noTicket, err
	}
	return id, secret, "", nil
}

// Refused counts a conn that transport.Server rejected.
func (p *ProxyPort) Refused(conn net.Conn, err error) {
	if _, ours := conn.(*sessionConn); ours && errors.Is(err, transport.ErrOtherSession) {
		p.CountRejected(othersHello, conn.RemoteAddr())
	}
}

// sessionConn is a conn whose laptop has shown a ticket and a certificate of the session.
type sessionConn struct {
	*nonblock.TLS
	session transport.SessionID
}

// OnlySession restricts the conn to one session (transport.Server).
func (c *sessionConn) OnlySession() transport.SessionID { return c.session }
