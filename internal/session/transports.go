package session

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"kubevpn/internal/api"
	"kubevpn/pkg/rawio"
	"kubevpn/pkg/transport"
)

// A session begins over a port-forward. Over it the laptop gets a ticket, with which it dials the manager through the
// API server's pod proxy as well:
//
//	port-forward:  TLS ─ API server ─ TLS ─ kubelet ─ container runtime ─ 127.0.0.1 of the pod
//	api-proxy:     TLS ─ API server ─ TCP ─ the pod's IP; inside, TLS of our own, with the ticket's certificates
//
// Which of them carries the session is measured and chosen by pkg/transport.

const (
	ticketTimeout = 10 * time.Second
	// A ticket that ends sooner than this is not used any more: the clocks may differ.
	ticketMargin = 5 * time.Minute
	maxTicket    = 64 << 10 // bytes
)

// tickets keeps the ticket of the session of the moment.
type tickets struct {
	turn    chan struct{} // has a value while one looks at the rest, or fetches a ticket: who else wants it waits
	session *transport.Session
	ticket  api.Ticket
	key     *ecdsa.PrivateKey
	until   time.Time // by this machine's clocks
}

func newTickets() *tickets { return &tickets{turn: make(chan struct{}, 1)} }

// shortcut is how api-proxy is dialled; nil: it is not to be used.
func (s *Session) shortcut() func(context.Context) (net.Conn, error) {
	if s.cfg.Request.Transport == api.TransportPortForward {
		return nil
	}
	return s.dialProxy
}

// dialProxy opens a carrier through the API server's pod proxy.
func (s *Session) dialProxy(ctx context.Context) (net.Conn, error) {
	ts, err := s.current.wait(ctx)
	if err != nil {
		return nil, err
	}
	ticket, key, err := s.tickets.get(ctx, ts)
	if err != nil {
		return nil, err
	}
	st := s.Status()
	header := http.Header{api.TicketHeader: {ticket.HeaderValue(ts.ID())}}
	conn, err := s.cluster.PodProxy(ctx, st.ManagerNamespace, st.ManagerPod, ticket.Port, ticket.Path, api.UpgradeProtocol, header)
	if err != nil {
		if status := apierrors.APIStatus(nil); errors.As(err, &status) {
			s.tickets.forget(ticket) // the manager was asked perhaps, and does not say whether that was why
		}
		return nil, err
	}
	batch := rawio.NewBatch(conn)
	inside := tls.Client(batch, &tls.Config{
		MinVersion: tls.VersionTLS13,
		// The first records of a connection would be small ones, and a carrier carries much from the beginning.
		DynamicRecordSizingDisabled: true,
		Certificates:                []tls.Certificate{{Certificate: [][]byte{ticket.Certificate}, PrivateKey: key}},
		InsecureSkipVerify:          true, // nobody signed the manager's certificate: it has to be the very one that the ticket names
		VerifyConnection: func(state tls.ConnectionState) error {
			if len(state.PeerCertificates) == 0 || !bytes.Equal(state.PeerCertificates[0].Raw, ticket.Server) {
				return errors.New("whoever answers is not the traffic manager of this session")
			}
			return nil
		},
	})
	if err := inside.HandshakeContext(ctx); err != nil {
		conn.Close()
		s.tickets.forget(ticket)
		return nil, notTheServer("TLS with the traffic manager", err)
	}
	return &proxyCarrier{Conn: inside, batch: batch}, nil
}

// proxyCarrier is TLS over a connection that is TLS itself, up to the API server.
type proxyCarrier struct {
	*tls.Conn
	batch *rawio.Batch
}

// Read gives what the manager has sent. That it does not take the certificate comes here: with TLS 1.3 the laptop's
// end of the handshake is over before.
func (c *proxyCarrier) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if op := (*net.OpError)(nil); errors.As(err, &op) && op.Op == "remote error" {
		err = notTheServer("TLS with the traffic manager", err)
	}
	return n, err
}

// notTheServer says that err is the traffic manager's, where it reads like one of the API server's: an end, an alert of TLS.
func notTheServer(doing string, err error) error {
	if said := (*api.Error)(nil); errors.As(err, &said) {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return api.Errorf(api.ExitUnreachable, "%s: %w", doing, err)
}

// Write sends p, however long, in one write to the connection beneath.
func (c *proxyCarrier) Write(p []byte) (int, error) { return c.batch.Through(c.Conn, p) }

// Close closes the connection without TLS's farewell, which takes five seconds where nobody takes it, and tells the
// manager nothing that the session does not.
func (c *proxyCarrier) Close() error { return c.batch.Close() }

// get gives a ticket of the session that can be used for a while, and its key.
func (t *tickets) get(ctx context.Context, ts *transport.Session) (api.Ticket, *ecdsa.PrivateKey, error) {
	select {
	case t.turn <- struct{}{}:
		defer func() { <-t.turn }()
	case <-ctx.Done():
		return api.Ticket{}, nil, context.Cause(ctx)
	}
	if t.session == ts && t.lasts() {
		return t.ticket, t.key, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, ticketTimeout, fmt.Errorf("no answer within %v", ticketTimeout))
	defer cancel()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return api.Ticket{}, nil, fmt.Errorf("making a key: %w", err)
	}
	began := time.Now()
	ticket, err := askForTicket(ctx, ts, &key.PublicKey)
	if err != nil {
		return api.Ticket{}, nil, notTheServer("asking the traffic manager for a ticket", err)
	}
	certificate, err := x509.ParseCertificate(ticket.Certificate)
	if err != nil {
		return api.Ticket{}, nil, notTheServer("the traffic manager's ticket", err)
	}
	// How long it lasts is told by the manager's clock alone; what it has shown is the time of signing, and its end.
	lasts := certificate.NotAfter.Sub(certificate.NotBefore)
	t.session, t.ticket, t.key, t.until = ts, ticket, key, began.Add(lasts-ticketMargin)
	return t.ticket, t.key, nil
}

// lasts reports whether the ticket can be used for a while. One of the clocks stands still while the laptop sleeps, the
// other one can be set.
func (t *tickets) lasts() bool {
	now := time.Now()
	return t.until.Sub(now) > ticketMargin && t.until.Round(0).Sub(now.Round(0)) > ticketMargin
}

// forget has another ticket fetched instead of this one.
func (t *tickets) forget(ticket api.Ticket) {
	select {
	case t.turn <- struct{}{}:
		defer func() { <-t.turn }()
	default:
		return // another is being fetched
	}
	if bytes.Equal(t.ticket.Secret, ticket.Secret) {
		t.session = nil
	}
}

func askForTicket(ctx context.Context, ts *transport.Session, public *ecdsa.PublicKey) (api.Ticket, error) {
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		return api.Ticket{}, err
	}
	stream, err := ts.Open(ctx, transport.Request{Proto: transport.ProtoTicket})
	if err != nil {
		return api.Ticket{}, err
	}
	defer stream.Close()
	stop := context.AfterFunc(ctx, func() { stream.Reset() })
	defer stop()
	ticket, err := exchange(stream, api.TicketRequest{PublicKey: der})
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx) // the reset is ours
	}
	return ticket, err
}

func exchange(stream *transport.Stream, request api.TicketRequest) (api.Ticket, error) {
	if err := json.NewEncoder(stream).Encode(request); err != nil {
		return api.Ticket{}, err
	}
	if err := stream.CloseWrite(); err != nil {
		return api.Ticket{}, err
	}
	var ticket api.Ticket
	err := json.NewDecoder(io.LimitReader(stream, maxTicket)).Decode(&ticket)
	switch {
	case err == io.EOF:
		return api.Ticket{}, io.ErrUnexpectedEOF
	case err != nil:
		return api.Ticket{}, err
	case ticket.Error != nil:
		return api.Ticket{}, ticket.Error
	}
	return ticket, nil
}

// onShortcut follows what pkg/transport makes of api-proxy.
func (s *Session) onShortcut(status transport.ShortcutStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log.Info("api-proxy", "state", status.State, "reason", status.Reason)
	s.proxy = status
	s.move()
}

// forced waits for api-proxy where that was asked for, and says why it cannot be had.
func (s *Session) forced(ctx context.Context) error {
	if s.cfg.Request.Transport != api.TransportAPIProxy {
		return nil
	}
	var reason error
	err := s.await(ctx, func() bool {
		reason = s.proxy.Reason
		return s.proxy.State == transport.ShortcutTaken || s.proxy.State == transport.ShortcutFailing
	})
	if err != nil {
		return err
	}
	if reason != nil {
		e := s.cluster.Explain(reason)
		return api.Errorf(e.Code, "the transport api-proxy cannot be had: %s", e.Message).WithHint("`kubevpn connect --transport port-forward` works without it.")
	}
	return nil
}

// connectedOnce reports whether the connection was proved.
func (s *Session) connectedOnce() bool {
	select {
	case <-s.connected:
		return true
	default:
		return false
	}
}

// transports is the transport in use, and what is known of both. s.mu is held.
func (s *Session) transports() (string, []api.Transport) {
	forward := api.Transport{Name: api.TransportPortForward, State: api.TransportInUse, Since: s.status.Since}
	proxy := api.Transport{Name: api.TransportAPIProxy, State: api.TransportTrying, Since: s.proxy.Since}
	inUse := s.cluster.Transport()
	switch {
	case s.cfg.Request.Transport == api.TransportPortForward:
		proxy.State, proxy.Reason = api.TransportOff, "--transport port-forward"
	case s.proxy.State == transport.ShortcutTaken:
		proxy.State, forward.State, forward.Since = api.TransportInUse, api.TransportStandby, s.proxy.Since
		inUse = api.TransportAPIProxy
	case s.proxy.State == transport.ShortcutPassed:
		proxy.State, proxy.Reason = api.TransportStandby, "port-forward does better"
	case s.proxy.State == transport.ShortcutFailing:
		proxy.State = api.TransportFailing
		if s.proxy.Reason != nil {
			proxy.Reason = s.cluster.Explain(s.proxy.Reason).Message
		}
	}
	if s.cfg.Request.Transport == api.TransportAPIProxy && forward.State == api.TransportInUse && s.connectedOnce() {
		forward.State, forward.Reason = api.TransportStandby, "--transport api-proxy"
		inUse = api.TransportAPIProxy
	}
	forward.Seconds, forward.Rate = s.proxy.Base.RTT.Seconds(), s.proxy.Base.Echo
	proxy.Seconds, proxy.Rate = s.proxy.Shortcut.RTT.Seconds(), s.proxy.Shortcut.Echo
	if ts := s.current.now(); ts != nil {
		stats := ts.Stats()
		forward.Sent, forward.Received = stats.Base.Sent, stats.Base.Received
		proxy.Sent, proxy.Received = stats.Shortcut.Sent, stats.Shortcut.Received
	}
	return inUse, []api.Transport{forward, proxy}
}
