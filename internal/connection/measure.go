package connection

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/internal/podconn"
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
// the session. It takes no lease, and sends some hundred kilobytes. If the time is over or the session ends before all
// transports have been measured, the rest is TransportTrying. Errors are *api.Error, or ctx's.
func Measure(ctx context.Context, c *cluster.Cluster, namespace, pod string) (Measurement, error) {
	t := newMeasuring(c, namespace, pod)
	return t.measure(ctx, func(ctx context.Context) (net.Conn, error) {
		return t.pods.PortForward(ctx, namespace, pod, api.ManagerPort)
	})
}

// measure is Measure with the dial function of the port-forward.
func (t *transports) measure(ctx context.Context,
	dial func(context.Context) (net.Conn, error)) (out Measurement, err error) {
	bounded, cancel := context.WithTimeout(ctx, measureTimeout)
	defer cancel()
	err = greet(bounded, transport.ClientConfig{
		Dial: dial, Preferred: t.preferred(), OnPreferred: t.onPreferred,
	}, func(ctx context.Context, ts *transport.Session, _ *control, hello *api.ManagerHello) {
		t.view.Update(func(v *view) { v.hello, v.state = hello, hello.State })
		t.current.set(ts)
		// An error means that ctx has ended: the other transports stay TransportTrying.
		_, _ = t.prober.Await(ctx, func(s transport.ProberStatus) bool {
			return s.Fallback.RTT > 0 && !slices.ContainsFunc(s.Preferred, func(p transport.PreferredStatus) bool {
				return p.State == transport.PreferredTrying
			})
		})
		out.Hello = *hello
		_, out.Transports = t.describe(time.Now())
	})
	if err != nil && bounded.Err() != nil {
		err = noAnswer(t.manager.place.Load().namespace)
	}
	return out, t.cluster.ExplainContext(ctx, err)
}

// newMeasuring returns the transports to the traffic manager in a pod, without a connection. It sets those fields of
// shared that transports use.
func newMeasuring(c *cluster.Cluster, namespace, pod string) *transports {
	s := &shared{
		cfg: new(Config), log: slog.New(slog.DiscardHandler), cluster: c, pods: podconn.New(c),
		view: new(wakeup.Value[view]), current: new(current), reached: new(wakeup.Value[[]netip.Addr]),
		changed: wakeup.NewSignal(),
	}
	at := &manager{shared: s}
	at.place.Update(func(p *place) { p.namespace, p.pod = namespace, pod })
	return &transports{shared: s, manager: at, tickets: newTickets(), direct: newDirect(s)}
}
