package connection

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"golang.org/x/sync/semaphore"

	"kubevpn/internal/api"
	"kubevpn/pkg/wire/transport"
)

const (
	ticketTimeout = 10 * time.Second
	ticketMargin  = 5 * time.Minute // a ticket that ends sooner is not used: the clocks may differ
	maxTicket     = 64 << 10        // bytes
)

// tickets caches the ticket of the current session. With a ticket the laptop dials the manager over api-proxy
// or direct.
type tickets struct {
	turn    *semaphore.Weighted // a mutex that ctx can interrupt
	session *transport.Session
	ticket  api.Ticket
	key     *ecdsa.PrivateKey
	until   time.Time // by this machine's clocks
}

func newTickets() *tickets { return &tickets{turn: semaphore.NewWeighted(1)} }

// get returns a ticket of the session that lasts for a while, and its key.
func (t *tickets) get(ctx context.Context, ts *transport.Session) (api.Ticket, *ecdsa.PrivateKey, error) {
	if t.turn.Acquire(ctx, 1) != nil {
		return api.Ticket{}, nil, context.Cause(ctx)
	}
	defer t.turn.Release(1)
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
		return api.Ticket{}, nil, managerError("asking the traffic manager for a ticket", err)
	}
	certificate, err := x509.ParseCertificate(ticket.Certificate)
	if err != nil {
		return api.Ticket{}, nil, managerError("the traffic manager's ticket", err)
	}
	// Both times come from the manager's clock, so their difference holds on this machine too.
	lasts := certificate.NotAfter.Sub(certificate.NotBefore)
	t.session, t.ticket, t.key, t.until = ts, ticket, key, began.Add(lasts-ticketMargin)
	return t.ticket, t.key, nil
}

// lasts reports whether the ticket lasts for a while. It asks both clocks: the monotonic one stands still while the
// laptop sleeps, and the user can set the wall clock.
func (t *tickets) lasts() bool {
	now := time.Now()
	return t.until.Sub(now) > ticketMargin && t.until.Round(0).Sub(now.Round(0)) > ticketMargin
}

// forget makes the next get fetch another ticket instead of this one.
func (t *tickets) forget(ticket api.Ticket) {
	if !t.turn.TryAcquire(1) {
		return // get is fetching another one
	}
	defer t.turn.Release(1)
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
		err = context.Cause(ctx) // the reset above ended the stream
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
