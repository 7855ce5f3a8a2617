package manager

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
	"kubevpn/pkg/door"
	"kubevpn/pkg/rawio"
	"kubevpn/pkg/transport"
)

const (
	maxProxyRequest = 8 << 10 // bytes
	requestPatience = 5 * time.Second
)

// Why somebody is turned away at the proxy port, besides the door's own reasons.
const (
	noRequest door.Reason = "no HTTP request" // garbage, another protocol, or nothing at all
	tooLarge  door.Reason = "request too large"
	tooSlow   door.Reason = "request too slow"
	noUpgrade door.Reason = "not an upgrade to kubevpn"
	noTicket  door.Reason = "no ticket"

	unknownSession door.Reason = "unknown session" // or one that has ended
	wrongSecret    door.Reason = "wrong secret"
	expiredTicket  door.Reason = "expired ticket"

	othersCertificate door.Reason = "another session's certificate"
	othersHello       door.Reason = "another session's hello"
)

// switching is the only thing that the port ever says in the clear.
const switching = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + api.UpgradeProtocol + "\r\n\r\n"

var (
	errOthersCertificate = errors.New("the certificate is another session's")
	errSessionEnded      = errors.New("the session has ended")
)

// proxyPort is the port that the API server's pods/proxy leads to, and that every pod reaches as well. It says nothing
// to those without a ticket:
//
//	laptop, through the API server               port
//	  GET / with Upgrade and a ticket ─────────▶  a ticket of a session that lives? no: closed, counted
//	  ◀──────────────────────────────────── 101
//	  ◀═══════════════ TLS 1.3 ════════════════▶  a certificate of the same session? no: closed, counted
//	  hello, frames (pkg/transport) ◀══════════▶  a carrier of that session, and of no other
//
// To transport.Server it is a net.Listener.
type proxyPort struct {
	*door.Door
	tickets *tickets
}

// newProxyPort takes l over, which accepts TCP connections, and makes the keys.
func newProxyPort(l net.Listener, log *slog.Logger) (*proxyPort, error) {
	addr, ok := l.Addr().(*net.TCPAddr)
	if !ok {
		return nil, fmt.Errorf("the proxy port's listener is of %s, not of TCP", l.Addr().Network())
	}
	t, err := newTickets(addr.AddrPort().Port())
	if err != nil {
		return nil, err
	}
	p := &proxyPort{tickets: t}
	p.Door = door.New(door.Config{
		Name: "proxy port", Listener: rawio.Listener{Listener: l, Unsent: unsent}, Logger: log,
		Admit: func(conn net.Conn) (net.Conn, door.Reason, error) { return p.admit(conn) },
	})
	return p, nil
}

// admit sees to it that conn's other end may have a carrier. The error says more than the reason, where there is more.
func (p *proxyPort) admit(conn net.Conn) (*carrier, door.Reason, error) {
	if err := conn.SetDeadline(time.Now().Add(requestPatience)); err != nil {
		return nil, door.HungUp, err
	}
	session, secret, why, err := readUpgrade(conn)
	if why == "" {
		why = p.tickets.check(session, secret)
	}
	if why != "" {
		return nil, why, err
	}
	if _, err := io.WriteString(conn, switching); err != nil {
		return nil, door.HungUp, err
	}
	inside, why, err := door.Shake(conn, p.tickets.tlsConfig(session))
	switch {
	case errors.Is(err, errOthersCertificate):
		why = othersCertificate
	case errors.Is(err, errSessionEnded):
		why = unknownSession
	}
	if why != "" {
		return nil, why, err
	}
	return &carrier{inside, session}, "", nil
}

// readUpgrade reads one request, and what it shows of a ticket. The error is that of reading.
func readUpgrade(r io.Reader) (session transport.SessionID, secret [32]byte, why door.Reason, err error) {
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
		lines.Buffered() > 0: // nobody goes on before the answer
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

// refused is told by transport.Server of carriers that it does not take.
func (p *proxyPort) refused(conn net.Conn, err error) {
	if _, ours := conn.(*carrier); ours && errors.Is(err, transport.ErrOtherSession) {
		p.Count(othersHello, conn.RemoteAddr())
	}
}

// carrier is a connection whose laptop has shown a ticket and a certificate of the session.
type carrier struct {
	*door.Conn
	session transport.SessionID
}

// OnlySession tells transport.Server that the carrier is for this session alone.
func (c *carrier) OnlySession() transport.SessionID { return c.session }
