package connection

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/internal/podconn"
	"kubevpn/internal/version"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

// measureTimeout limits what Measure does.
const measureTimeout = 15 * time.Second

// Measurement describes a traffic manager and its transports.
type Measurement struct {
	Hello      api.ManagerHello
	Transports []api.Transport // with the round trip and the rate of those that work
}

// Measure opens a session with the traffic manager in a pod, measures the transports as every session does, and ends
// the session. It takes no lease, and sends some hundred kilobytes. If the time is over before all transports have been
// measured, the rest is TransportTrying. Errors are *api.Error, or ctx's.
func Measure(ctx context.Context, c *cluster.Cluster, namespace, pod string) (Measurement, error) {
	ctx, cancel := context.WithTimeout(ctx, measureTimeout)
	defer cancel()
	m := newMeasuring(c, namespace, pod)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = m.client.Run(ctx) // it ends with ctx
	}()
	defer func() {
		cancel()
		<-ended
	}()
	hello, err := m.awaitHello(ctx)
	if err != nil {
		return Measurement{}, c.ExplainContext(ctx, err)
	}
	// An error means that the time is over: the other transports stay TransportTrying.
	_, _ = m.prober.Await(ctx, func(s transport.ProberStatus) bool {
		return s.Fallback.RTT > 0 && !slices.ContainsFunc(s.Preferred, func(p transport.PreferredStatus) bool {
			return p.State == transport.PreferredTrying
		})
	})
	_, all := m.describe(time.Now())
	return Measurement{Hello: *hello, Transports: all}, nil
}

// measuring is a session without a connection.
type measuring struct {
	*transports
	client *transport.Client
	hello  chan *api.ManagerHello // buffered 1
	failed chan error             // buffered 1
}

func newMeasuring(c *cluster.Cluster, namespace, pod string) *measuring {
	log := slog.New(slog.DiscardHandler)
	s := &shared{
		cfg: new(Config), log: log, cluster: c, pods: podconn.New(c), view: new(wakeup.Value[view]),
		current: new(current), reached: new(wakeup.Value[[]netip.Addr]), changed: wakeup.NewSignal(),
	}
	at := &manager{shared: s}
	at.place.Update(func(p *place) { p.namespace, p.pod = namespace, pod })
	m := &measuring{
		transports: &transports{shared: s, manager: at, tickets: newTickets(), direct: newDirect(s)},
		hello:      make(chan *api.ManagerHello, 1), failed: make(chan error, 1),
	}
	m.client = transport.NewClient(transport.ClientConfig{
		Links: 1, Logger: log, Preferred: m.preferred(), OnPreferred: m.onPreferred, OnSession: m.converse,
		Dial: func(ctx context.Context) (net.Conn, error) {
			conn, err := s.pods.PortForward(ctx, namespace, pod, api.ManagerPort)
			if err != nil {
				m.fail(err)
			}
			return conn, err
		},
	})
	return m
}

// fail stores an error, unless there is an earlier one.
func (m *measuring) fail(err error) {
	select {
	case m.failed <- err:
	default:
	}
}

// awaitHello returns the manager's hello.
func (m *measuring) awaitHello(ctx context.Context) (*api.ManagerHello, error) {
	select {
	case hello := <-m.hello:
		return hello, nil
	case err := <-m.failed:
		return nil, err
	case <-ctx.Done():
		return nil, noAnswer(m.manager.place.Load().namespace)
	}
}

// converse keeps the control stream open until the session ends.
func (m *measuring) converse(ctx context.Context, ts *transport.Session) {
	stream, err := ts.Open(ctx, transport.Request{Proto: transport.ProtoControl})
	if err != nil {
		m.fail(fmt.Errorf("opening the control stream: %w", err))
		return
	}
	defer stream.Close()
	_, hello, err := startControl(stream, api.ClientHello{Protocol: api.Protocol, Version: version.String()})
	if err != nil {
		m.fail(err)
		return
	}
	m.view.Update(func(v *view) { v.hello, v.state = hello, hello.State })
	m.current.set(ts)
	select {
	case m.hello <- hello:
	default: // of a later session
	}
	<-ctx.Done()
}
