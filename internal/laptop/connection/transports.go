package connection

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/podconn"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/nonblock"
	"kubevpn/pkg/wire/transport"
)

// transports dials api-proxy and direct, and describes all transports. A session begins over a port-forward. It gives
// the laptop a ticket, with which the laptop dials the manager over the other transports as well:
//
//	port-forward:  TLS ─ API server ─ TLS ─ kubelet ─ container runtime ─ 127.0.0.1 of the pod
//	api-proxy:     TLS ─ API server ─ TCP ─ the pod's IP; inside, TLS of kubevpn's own, with the ticket's certificates
//	direct:        TCP ─ the pod's IP, a node port or a load balancer; inside, the same
//
// pkg/wire/transport lets the first of optional that works carry the session.
type transports struct {
	*shared
	manager *manager
	tickets *tickets
	direct  *direct
	prober  wakeup.Value[[]transport.PreferredStatus] // of used; immutable
}

// optional are the transports besides port-forward, the best first. Every throughput in docs/performance.md has this
// order, and so has the work that they spare the API server, the kubelet and the container runtime.
var optional = []string{api.TransportDirect, api.TransportAPIProxy}

// used returns those of optional that the user allows.
func (t *transports) used() []string {
	switch asked := t.cfg.Request.Transport; asked {
	case "", api.TransportAuto:
		return optional
	case api.TransportPortForward:
		return nil
	default:
		return []string{asked}
	}
}

// forced returns the one of optional that the user asks for; empty: none.
func (t *transports) forced() string {
	if asked := t.cfg.Request.Transport; slices.Contains(optional, asked) {
		return asked
	}
	return ""
}

// preferred returns the dial functions of used.
func (t *transports) preferred() (dials []func(context.Context) (net.Conn, error)) {
	for _, name := range t.used() {
		dial := t.dialDirect
		if name == api.TransportAPIProxy {
			dial = t.dialProxy
		}
		dials = append(dials, dial)
	}
	return dials
}

// ticket waits for a session, and returns it with its ticket and the ticket's key.
func (t *transports) ticket(ctx context.Context) (*transport.Session, api.Ticket, *ecdsa.PrivateKey, error) {
	ts, err := t.current.wait(ctx)
	if err != nil {
		return nil, api.Ticket{}, nil, err
	}
	ticket, key, err := t.tickets.get(ctx, ts)
	return ts, ticket, key, err
}

// dialProxy opens a conn through the API server's pod proxy.
func (t *transports) dialProxy(ctx context.Context) (net.Conn, error) {
	ts, ticket, key, err := t.ticket(ctx)
	if err != nil {
		return nil, err
	}
	at := t.manager.location.Load()
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
	return t.secure(ctx, nonblock.NewBatch(conn), "", ticket, key)
}

// dialDirect opens a conn without the API server.
func (t *transports) dialDirect(ctx context.Context) (net.Conn, error) {
	ts, ticket, key, err := t.ticket(ctx)
	if err != nil {
		return nil, err
	}
	return t.direct.dial(ctx, func(ctx context.Context, conn net.Conn, to netip.AddrPort) (net.Conn, error) {
		batch := nonblock.NewBatch(conn)
		if err := requestUpgrade(ctx, batch, ticket.HeaderValue(ts.ID())); err != nil {
			if errors.Is(err, errSilent) {
				t.tickets.forget(ticket)
			}
			return nil, err
		}
		return t.secure(ctx, batch, fmt.Sprintf("the direct connection to %v", to), ticket, key)
	})
}

// secure speaks TLS on a conn that has switched to kubevpn's protocol; via is that of the ticketConn. If it fails, it
// closes the conn.
func (t *transports) secure(ctx context.Context, batch *nonblock.Batch, via string, ticket api.Ticket,
	key *ecdsa.PrivateKey) (net.Conn, error) {
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
		batch.Close()
		t.tickets.forget(ticket)
		return nil, managerError("TLS with the traffic manager", err)
	}
	return &ticketConn{TLS: &nonblock.TLS{Conn: inside, Batch: batch}, via: via}, nil
}

// ticketConn is TLS with the manager, with the certificates of a ticket.
type ticketConn struct {
	*nonblock.TLS
	via string // describes a conn without the API server, in its errors; else empty
}

// Read returns what the manager sent. A rejection of the laptop's certificate arrives here: with TLS 1.3 the laptop's
// side of the handshake is complete before.
func (c *ticketConn) Read(p []byte) (int, error) {
	n, err := c.TLS.Read(p)
	return n, c.attribute(err)
}

// Write sends p.
func (c *ticketConn) Write(p []byte) (int, error) {
	n, err := c.TLS.Write(p)
	return n, c.attribute(err)
}

// attribute attributes an error to the traffic manager, unless it may be the API server's.
func (c *ticketConn) attribute(err error) error {
	if op := (*net.OpError)(nil); errors.As(err, &op) && op.Op == "remote error" {
		err = managerError("TLS with the traffic manager", err)
	}
	if err != nil && c.via != "" {
		err = managerError(c.via, err)
	}
	return err
}

// managerError attributes err to the traffic manager. Otherwise client.Explain would attribute the end of a connection
// or a TLS alert to the API server.
func managerError(doing string, err error) error {
	if said := (*api.Error)(nil); errors.As(err, &said) {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return api.Errorf(api.ExitUnreachable, "%s: %w", doing, err)
}

// onPreferred takes the status of the transports from pkg/wire/transport.
func (t *transports) onPreferred(all []transport.PreferredStatus) {
	before := t.prober.Load()
	for i, name := range t.used() {
		if now := all[i]; i >= len(before) || before[i].State != now.State {
			t.log.Info(name, "state", now.State, "reason", now.Reason)
		}
	}
	t.prober.Update(func(s *[]transport.PreferredStatus) { *s = all })
}

// awaitForced waits for the transport that the user asked for, and returns an error if it does not work.
func (t *transports) awaitForced(ctx context.Context) error {
	name := t.forced()
	if name == "" {
		return nil
	}
	status, err := t.awaitTried(ctx)
	if err != nil {
		return err
	}
	if reason := status[0].Reason; reason != nil {
		e := t.cluster.Explain(reason)
		return api.Errorf(e.Code, "the transport %s does not work: %s", name, e.Message).
			WithHint("`kubevpn connect --transport port-forward` works without it")
	}
	return nil
}

// awaitTried waits until each of used was tried.
func (t *transports) awaitTried(ctx context.Context) ([]transport.PreferredStatus, error) {
	return t.prober.Await(ctx, func(all []transport.PreferredStatus) bool {
		return len(all) > 0 && !slices.ContainsFunc(all, func(p transport.PreferredStatus) bool {
			return p.State == transport.PreferredTrying
		})
	})
}

// describe returns the transport in use, and the state of all. since is the time when the connection came up.
func (t *transports) describe(since time.Time) (inUse string, all []api.Transport) {
	status := t.prober.Load()
	inUse = t.pods.Transport()
	var stats transport.SessionStats
	if ts := t.current.now(); ts != nil {
		stats = ts.Stats()
	}
	forward := api.Transport{Name: api.TransportPortForward, State: api.TransportInUse, Since: since}
	addTraffic(&forward, stats.Fallback)
	used := t.used()
	for i, st := range status {
		if st.State == transport.PreferredInUse {
			inUse = used[i]
			forward.State, forward.Since = api.TransportStandby, st.Since
		}
	}
	if forced := t.forced(); forced != "" && forward.State == api.TransportInUse && t.status.report.Load().established {
		forward.State, forward.Reason = api.TransportStandby, "--transport "+forced
		inUse = forced
	}
	all = []api.Transport{forward}
	for _, name := range slices.Backward(optional) {
		one := api.Transport{Name: name, State: api.TransportOff, Reason: "--transport " + t.cfg.Request.Transport}
		if i := slices.Index(used, name); i >= 0 {
			var st transport.PreferredStatus
			if i < len(status) {
				st = status[i]
			}
			one = api.Transport{Name: name, State: api.TransportState(st.State.String()), Since: st.Since}
			switch {
			case st.Reason != nil:
				one.Reason = t.cluster.Explain(st.Reason).Message
			case st.State == transport.PreferredStandby:
				one.Reason = inUse + " is in use"
			}
			addTraffic(&one, stats.Preferred[i])
		}
		all = append(all, one)
	}
	return inUse, all
}

func addTraffic(to *api.Transport, t transport.Traffic) {
	to.Seconds, to.Sent, to.Received = t.RTT.Seconds(), t.Sent, t.Received
}
