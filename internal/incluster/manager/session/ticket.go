package session

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/wire/authlistener"
	"kubevpn/pkg/wire/transport"
)

const (
	ticketLife = time.Hour
	// clockSkew is how far a laptop's clock may be behind the manager's.
	clockSkew = 5 * time.Minute
	// ticketsKept is how many tickets of a session are valid at a time: the latest, and those that a dial may be using.
	ticketsKept = 4

	maxTicketRequest = 4 << 10 // bytes of a TicketRequest
	ticketTimeout    = 10 * time.Second
)

// tickets holds the tickets with which laptops open conns through the proxy port, and the keys that sign them. The keys
// exist only in memory, for the lifetime of the process.
//
//	authority (ECDSA P-256) ─ signs ─┬─▶ the server's certificate, which every ticket names
//	                                 └─▶ each ticket's certificate, for the laptop's own key
//
// It is safe for concurrent use.
type tickets struct {
	port   uint16
	now    func() time.Time
	ca     *x509.Certificate
	caKey  *ecdsa.PrivateKey
	pool   *x509.CertPool // ca alone
	server tls.Certificate

	mu     sync.Mutex
	grants map[transport.SessionID]*grants
}

// grants contains one session's tickets, the oldest first.
type grants struct {
	session *transport.Session
	all     []grant
}

type grant struct {
	secret   [32]byte
	notAfter time.Time
}

// newTickets generates the keys.
func newTickets(port uint16) (*tickets, error) {
	t := &tickets{port: port, now: time.Now, grants: make(map[transport.SessionID]*grants)}
	var err error
	if t.caKey, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return nil, fmt.Errorf("making the authority's key: %w", err)
	}
	serverKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making the server's key: %w", err)
	}
	// Both certificates are valid until this process ends, so they have no expiration date (RFC 5280, 4.1.2.5).
	never := time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)
	authority := &x509.Certificate{
		Subject: pkix.Name{CommonName: "kubevpn traffic manager"}, NotAfter: never,
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := t.sign(authority, authority, &t.caKey.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("making the authority: %w", err)
	}
	if t.ca, err = x509.ParseCertificate(der); err != nil {
		return nil, fmt.Errorf("making the authority: %w", err)
	}
	t.pool = x509.NewCertPool()
	t.pool.AddCert(t.ca)
	if der, err = t.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: "kubevpn proxy port"}, NotAfter: never,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, t.ca, &serverKey.PublicKey); err != nil {
		return nil, fmt.Errorf("making the server's certificate: %w", err)
	}
	t.server = tls.Certificate{Certificate: [][]byte{der}, PrivateKey: serverKey}
	return t, nil
}

// sign returns a certificate for key, signed by the authority, with a random serial number.
func (t *tickets) sign(template, parent *x509.Certificate, key *ecdsa.PublicKey) ([]byte, error) {
	template.NotBefore = t.now().Add(-clockSkew)
	return x509.CreateCertificate(rand.Reader, template, parent, key, t.caKey)
}

// issue returns a ticket of the session for the laptop's key.
func (t *tickets) issue(s *transport.Session, request api.TicketRequest) (api.Ticket, error) {
	key, err := publicKey(request.PublicKey)
	if err != nil {
		return api.Ticket{}, err
	}
	g := grant{notAfter: t.now().Add(ticketLife).UTC().Truncate(time.Second)} // as certificates have it
	rand.Read(g.secret[:])
	cert, err := t.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: s.ID().String()}, NotAfter: g.notAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, t.ca, key)
	if err != nil {
		return api.Ticket{}, fmt.Errorf("signing the laptop's certificate: %w", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	of := t.grants[s.ID()]
	if of == nil {
		of = &grants{session: s}
		t.grants[s.ID()] = of
	}
	of.all = append(of.all, g)
	of.all = of.all[max(0, len(of.all)-ticketsKept):]
	return api.Ticket{
		Port: t.port, Path: "/", Secret: g.secret[:], Certificate: cert, Server: t.server.Certificate[0],
		NotAfter: g.notAfter,
	}, nil
}

// publicKey reads a laptop's key, which must be on the P-256 curve.
func publicKey(der []byte) (*ecdsa.PublicKey, error) {
	parsed, err := x509.ParsePKIXPublicKey(der)
	if err != nil {
		return nil, fmt.Errorf("invalid public key: %w", err)
	}
	key, ok := parsed.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P256() {
		return nil, errors.New("the public key is not ECDSA P-256")
	}
	return key, nil
}

// check returns the reason to reject a conn for the session, or "".
func (t *tickets) check(session transport.SessionID, secret [32]byte) authlistener.Reason {
	t.mu.Lock()
	defer t.mu.Unlock()
	of := t.grants[session]
	if of == nil || of.session.Err() != nil {
		return unknownSession
	}
	found := -1
	for i, g := range of.all {
		if subtle.ConstantTimeCompare(g.secret[:], secret[:]) == 1 {
			found = i
		}
	}
	switch {
	case found < 0:
		return wrongSecret
	case !t.now().Before(of.all[found].notAfter):
		return expiredTicket
	}
	return ""
}

// lives reports whether the session has a ticket and has not ended.
func (t *tickets) lives(session transport.SessionID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	of := t.grants[session]
	return of != nil && of.session.Err() == nil
}

// forget removes the tickets of a session that has ended.
func (t *tickets) forget(session transport.SessionID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.grants, session)
}

// tlsConfig returns the configuration for one conn of the session: TLS 1.3, with a client certificate of the session.
func (t *tickets) tlsConfig(session transport.SessionID) *tls.Config {
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{t.server},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    t.pool,
		Time:         t.now,
		VerifyConnection: func(state tls.ConnectionState) error {
			switch {
			case state.PeerCertificates[0].Subject.CommonName != session.String():
				return errOthersCertificate
			case !t.lives(session):
				return errSessionEnded
			}
			return nil
		},
		SessionTicketsDisabled:      true, // each conn shows its certificate
		DynamicRecordSizingDisabled: true, // a frame needs its whole record anyway
	}
}

// acceptTicket answers one request for a ticket:
//
//	laptop                     manager
//	  │ TicketRequest, FIN ──────▶│
//	  │◀───────────── Ticket, FIN │   or Error
func (s *session) acceptTicket(in *transport.Incoming) error {
	laptop, err := in.Accept()
	if err != nil {
		return err
	}
	defer laptop.Close()
	if err := laptop.SetDeadline(time.Now().Add(ticketTimeout)); err != nil {
		return fmt.Errorf("cannot answer a ticket request: %w", err)
	}
	ticket, refusal := s.ticket(laptop)
	if refusal != nil {
		s.log.Debug("no ticket", "err", refusal)
		ticket = api.Ticket{Error: refusal}
	}
	if err := json.NewEncoder(laptop).Encode(ticket); err != nil {
		return fmt.Errorf("cannot send a ticket: %w", err)
	}
	return laptop.CloseWrite()
}

func (s *session) ticket(laptop io.Reader) (api.Ticket, *api.Error) {
	if s.server.Proxy == nil {
		return api.Ticket{}, api.Errorf(api.ExitUnreachable,
			"the traffic manager has no port for api-proxy and direct (--proxy-listen)")
	}
	var request api.TicketRequest
	if err := json.NewDecoder(io.LimitReader(laptop, maxTicketRequest)).Decode(&request); err != nil {
		return api.Ticket{}, api.Errorf(api.ExitIncompatible, "invalid ticket request: %w", err)
	}
	ticket, err := s.server.Proxy.tickets.issue(s.transport, request)
	if err != nil {
		return api.Ticket{}, api.Errorf(api.ExitIncompatible, "cannot create a ticket: %w", err)
	}
	s.log.Debug("ticket", "until", ticket.NotAfter)
	return ticket, nil
}
