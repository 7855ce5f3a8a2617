package connection

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"kubevpn/internal/api"
	"kubevpn/internal/podconn"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/nonblock"
	"kubevpn/pkg/wire/transport"
)

// transports dials api-proxy, and describes both transports. A session begins over a port-forward. It gives the laptop
// a ticket, with which the laptop dials the manager through the API server's pod proxy as well:
//
//	port-forward:  TLS ─ API server ─ TLS ─ kubelet ─ container runtime ─ 127.0.0.1 of the pod
//	api-proxy:     TLS ─ API server ─ TCP ─ the pod's IP; inside, TLS of kubevpn's own, with the ticket's certificates
//
// pkg/wire/transport measures both and chooses the one that carries the session.
type transports struct {
	*shared
	manager *manager
	tickets *tickets
	proxy   wakeup.Value[transport.PreferredStatus]
}

// proxyDial returns the dial function of api-proxy; nil if the user excludes that transport.
func (t *transports) proxyDial() func(context.Context) (net.Conn, error) {
	if t.cfg.Request.Transport == api.TransportPortForward {
		return nil
	}
	return t.dialProxy
}

// dialProxy opens a conn through the API server's pod proxy.
func (t *transports) dialProxy(ctx context.Context) (net.Conn, error) {
	ts, err := t.current.wait(ctx)
	if err != nil {
		return nil, err
	}
	ticket, key, err := t.tickets.get(ctx, ts)
	if err != nil {
		return nil, err
	}
	at := t.manager.place.Load()
	conn, err := t.pods.PodProxy(ctx, podconn.PodProxyOptions{
		Namespace: at.namespace, Pod: at.pod, Port: ticket.Port, Path: ticket.Path, Protocol: api.UpgradeProtocol,
		Header: http.Header{api.TicketHeader: {ticket.HeaderValue(ts.ID())}},
	})
	if err != nil {
		if status := apierrors.APIStatus(nil); errors.As(err, &status) {
			t.tickets.forget(ticket) // the manager may have rejected it, and does not say so
		}
		return nil, err
	}
	batch := nonblock.NewBatch(conn)
	inside := tls.Client(batch, &tls.Config{
		MinVersion: tls.VersionTLS13,
		// Otherwise the first records of a connection are small, although a conn carries much from the beginning.
		DynamicRecordSizingDisabled: true,
		Certificates:                []tls.Certificate{{Certificate: [][]byte{ticket.Certificate}, PrivateKey: key}},
		// nobody signed the manager's certificate: VerifyConnection compares it with the ticket's
		InsecureSkipVerify: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			if len(state.PeerCertificates) == 0 || !bytes.Equal(state.PeerCertificates[0].Raw, ticket.Server) {
				return errors.New("the server is not the traffic manager of this session")
			}
			return nil
		},
	})
	if err := inside.HandshakeContext(ctx); err != nil {
		conn.Close()
		t.tickets.forget(ticket)
		return nil, managerError("TLS with the traffic manager", err)
	}
	return &proxyConn{Conn: inside, batch: batch}, nil
}

// proxyConn is TLS with the manager, over a conn that is TLS itself up to the API server.
type proxyConn struct {
	*tls.Conn
	batch *nonblock.Batch
}

// Read returns what the manager sent. A rejection of the laptop's certificate arrives here: with TLS 1.3 the laptop's
// side of the handshake is complete before.
func (c *proxyConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if op := (*net.OpError)(nil); errors.As(err, &op) && op.Op == "remote error" {
		err = managerError("TLS with the traffic manager", err)
	}
	return n, err
}

// managerError marks err as the traffic manager's. An end of the connection or a TLS alert would otherwise be explained
// as the API server's.
func managerError(doing string, err error) error {
	if said := (*api.Error)(nil); errors.As(err, &said) {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return api.Errorf(api.ExitUnreachable, "%s: %w", doing, err)
}

// Write sends p, of any length, in one write to the conn beneath.
func (c *proxyConn) Write(p []byte) (int, error) { return c.batch.Through(c.Conn, p) }

// Close closes the conn without TLS's close_notify, which blocks for five seconds if nobody reads it and adds nothing
// to the end of the session.
func (c *proxyConn) Close() error { return c.batch.Close() }

// onPreferred takes the status of api-proxy from pkg/wire/transport.
func (t *transports) onPreferred(status transport.PreferredStatus) {
	t.log.Info("api-proxy", "state", status.State, "reason", status.Reason)
	t.proxy.Update(func(s *transport.PreferredStatus) { *s = status })
}

// awaitForced waits for api-proxy if the user asked for it, and returns an error if it does not work.
func (t *transports) awaitForced(ctx context.Context) error {
	if t.cfg.Request.Transport != api.TransportAPIProxy {
		return nil
	}
	status, err := t.proxy.Await(ctx, func(s transport.PreferredStatus) bool {
		return s.State == transport.PreferredInUse || s.State == transport.PreferredFailing
	})
	if err != nil {
		return err
	}
	if status.Reason != nil {
		e := t.cluster.Explain(status.Reason)
		return api.Errorf(e.Code, "the transport api-proxy does not work: %s", e.Message).
			WithHint("`kubevpn connect --transport port-forward` works without it")
	}
	return nil
}

// describe returns the transport in use, and the state of both. The connection has been up since then.
func (t *transports) describe(since time.Time) (inUse string, both []api.Transport) {
	status := t.proxy.Load()
	forward := api.Transport{Name: api.TransportPortForward, State: api.TransportInUse, Since: since}
	proxy := api.Transport{Name: api.TransportAPIProxy, State: api.TransportTrying, Since: status.Since}
	inUse = t.pods.Transport()
	switch {
	case t.cfg.Request.Transport == api.TransportPortForward:
		proxy.State, proxy.Reason = api.TransportOff, "--transport port-forward"
	case status.State == transport.PreferredInUse:
		proxy.State, forward.State, forward.Since = api.TransportInUse, api.TransportStandby, status.Since
		inUse = api.TransportAPIProxy
	case status.State == transport.PreferredStandby:
		proxy.State, proxy.Reason = api.TransportStandby, "port-forward does better"
	case status.State == transport.PreferredFailing:
		proxy.State = api.TransportFailing
		if status.Reason != nil {
			proxy.Reason = t.cluster.Explain(status.Reason).Message
		}
	}
	if t.cfg.Request.Transport == api.TransportAPIProxy && forward.State == api.TransportInUse &&
		t.status.report.Load().established {
		forward.State, forward.Reason = api.TransportStandby, "--transport api-proxy"
		inUse = api.TransportAPIProxy
	}
	forward.Seconds, forward.Rate = status.Fallback.RTT.Seconds(), status.Fallback.Echo
	proxy.Seconds, proxy.Rate = status.Preferred.RTT.Seconds(), status.Preferred.Echo
	if ts := t.current.now(); ts != nil {
		stats := ts.Stats()
		forward.Sent, forward.Received = stats.Fallback.Sent, stats.Fallback.Received
		proxy.Sent, proxy.Received = stats.Preferred.Sent, stats.Preferred.Received
	}
	return inUse, []api.Transport{forward, proxy}
}
