package manager

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/http/httpguts"

	"kubevpn/internal/api"
	"kubevpn/pkg/rawio"
	"kubevpn/pkg/transport"
)

const (
	maxProxyRequest = 8 << 10 // bytes
	requestPatience = 5 * time.Second
	tlsPatience     = 10 * time.Second

	// Connections that have not shown yet what they may: of one address, which is usually an API server, and in all.
	maxArriving     = 256
	maxArrivingFrom = 64
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
	listener net.Listener
	tickets  *tickets
	tally    *tally
	log      *slog.Logger

	arrived chan net.Conn
	closed  chan struct{}
	close   func() error

	mu       sync.Mutex
	arriving int
	from     map[netip.Addr]int
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
	p := &proxyPort{
		listener: rawio.Listener{Listener: l, Unsent: unsent}, tickets: t, tally: newTally(log), log: log,
		arrived: make(chan net.Conn), closed: make(chan struct{}), from: make(map[netip.Addr]int),
	}
	p.close = sync.OnceValue(func() error {
		close(p.closed)
		return l.Close()
	})
	return p, nil
}

// Accept gives the next carrier. It ends with net.ErrClosed.
func (p *proxyPort) Accept() (net.Conn, error) {
	select {
	case c := <-p.arrived:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

// Close ends Accept and run.
func (p *proxyPort) Close() error { return p.close() }

// Addr is the port's.
func (p *proxyPort) Addr() net.Addr { return p.listener.Addr() }

// run lets carriers in until ctx ends or the port is closed.
func (p *proxyPort) run(ctx context.Context) error {
	var work sync.WaitGroup
	defer work.Wait()
	manager := ctx
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { p.Close() })
	defer stop()
	defer p.Close()
	work.Go(func() { p.tally.run(ctx) })
	for {
		conn, err := p.listener.Accept()
		switch {
		case errors.Is(err, net.ErrClosed): // by transport.Server perhaps, whose context ends with the manager's as well
			return ended(manager, fmt.Errorf("accepting at the proxy port: %w", err))
		case err != nil: // out of file descriptors, or the peer went away already: it passes
			p.log.Warn("accepting at the proxy port", "err", err)
			select {
			case <-time.After(acceptPause):
			case <-ctx.Done():
			}
			continue
		}
		from := remote(conn)
		if !p.enter(from) {
			p.tally.add(tooMany, conn.RemoteAddr().String())
			conn.Close()
			continue
		}
		work.Go(func() {
			defer p.leave(from)
			p.serve(ctx, conn)
		})
	}
}

func remote(conn net.Conn) netip.Addr {
	if addr, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
		return addr.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

// enter takes a place among those that arrive, if there is one.
func (p *proxyPort) enter(from netip.Addr) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.arriving >= maxArriving || p.from[from] >= maxArrivingFrom {
		return false
	}
	p.arriving++
	p.from[from]++
	return true
}

func (p *proxyPort) leave(from netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.arriving--
	if p.from[from]--; p.from[from] == 0 {
		delete(p.from, from)
	}
}

// serve makes a carrier of conn, or closes it.
func (p *proxyPort) serve(ctx context.Context, conn net.Conn) {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	c, why, err := p.admit(conn)
	if !stop() {
		return // the manager ends, and conn is closed
	}
	if why != "" {
		p.tally.add(why, conn.RemoteAddr().String())
		p.log.Debug("proxy port: turned away", "reason", why, "remote", conn.RemoteAddr(), "err", err)
		conn.Close()
		return
	}
	select {
	case p.arrived <- c:
	case <-p.closed:
		c.Close()
	}
}

// admit sees to it that conn's other end may have a carrier. The error says more than the reason, where there is more.
func (p *proxyPort) admit(conn net.Conn) (*carrier, reason, error) {
	if err := conn.SetDeadline(time.Now().Add(requestPatience)); err != nil {
		return nil, hungUp, err
	}
	session, secret, why, err := readUpgrade(conn)
	if why == "" {
		why = p.tickets.check(session, secret)
	}
	if why != "" {
		return nil, why, err
	}
	if _, err := io.WriteString(conn, switching); err != nil {
		return nil, hungUp, err
	}
	if err := conn.SetDeadline(time.Now().Add(tlsPatience)); err != nil {
		return nil, hungUp, err
	}
	batch := rawio.NewBatch(conn)
	c := &carrier{Conn: tls.Server(batch, p.tickets.tlsConfig(session)), batch: batch, session: session}
	if err := c.Handshake(); err != nil {
		return nil, handshakeReason(err), err
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return nil, hungUp, err
	}
	return c, "", nil
}

// readUpgrade reads one request, and what it shows of a ticket. The error is that of reading.
func readUpgrade(r io.Reader) (session transport.SessionID, secret [32]byte, why reason, err error) {
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

// handshakeReason is what was wrong with a TLS handshake.
func handshakeReason(err error) reason {
	var (
		verify  *tls.CertificateVerificationError
		invalid x509.CertificateInvalidError
	)
	switch {
	case errors.Is(err, errOthersCertificate):
		return othersCertificate
	case errors.Is(err, errSessionEnded):
		return unknownSession
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return expiredCertificate
	case errors.As(err, &verify):
		return badCertificate
	case strings.Contains(err.Error(), "client didn't provide a certificate"): // crypto/tls has no other sign
		return noCertificate
	case errors.Is(err, os.ErrDeadlineExceeded):
		return tlsTooSlow
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return hungUp
	}
	return noTLS
}

// refused is told by transport.Server of carriers that it does not take.
func (p *proxyPort) refused(conn net.Conn, err error) {
	if _, ours := conn.(*carrier); ours && errors.Is(err, transport.ErrOtherSession) {
		p.tally.add(othersHello, conn.RemoteAddr().String())
	}
}

// carrier is a connection whose laptop has shown a ticket and a certificate of the session.
type carrier struct {
	*tls.Conn
	batch   *rawio.Batch
	session transport.SessionID
}

// OnlySession tells transport.Server that the carrier is for this session alone.
func (c *carrier) OnlySession() transport.SessionID { return c.session }

// Write sends p, however long, in one write to the kernel.
func (c *carrier) Write(p []byte) (int, error) { return c.batch.Through(c.Conn, p) }

// Close closes the connection without TLS's farewell, which takes five seconds where nobody takes it, and tells the
// laptop nothing that it would not know from its session.
func (c *carrier) Close() error { return c.batch.Close() }
