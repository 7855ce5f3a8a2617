package connection

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/podconn"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

// tryTimeout limits what Try does.
const tryTimeout = 15 * time.Second

// Try opens a session with the traffic manager in a pod, tries the transports as every session does, and ends the
// session. It takes no lease. If the time is over or the session ends before all transports have been tried, the rest
// is TransportTrying. Errors are *api.Error, or ctx's.
func Try(ctx context.Context, c *client.Cluster, namespace, pod string) (api.ManagerHello, []api.Transport, error) {
	t := newTrying(c, namespace, pod)
	return t.try(ctx, func(ctx context.Context) (net.Conn, error) {
		return t.pods.PortForward(ctx, namespace, pod, api.ManagerPort)
	})
}

// try is Try with the dial function of the port-forward.
func (t *transports) try(ctx context.Context,
	dial func(context.Context) (net.Conn, error)) (hello api.ManagerHello, all []api.Transport, err error) {
	bounded, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	err = greet(bounded, transport.ClientConfig{
		Dial: dial, Preferred: t.preferred(), OnPreferred: t.onPreferred,
	}, func(ctx context.Context, ts *transport.Session, _ *control, h *api.ManagerHello) {
		t.view.Update(func(v *view) { v.hello, v.state = h, h.State })
		t.current.set(ts)
		_, _ = t.awaitTried(ctx) // an error means that ctx has ended: the other transports stay TransportTrying
		hello = *h
		_, all = t.describe(time.Now())
	})
	if err != nil && bounded.Err() != nil {
		err = noAnswer(t.manager.location.Load().namespace)
	}
	return hello, all, t.cluster.ExplainContext(ctx, err)
}

// newTrying returns the transports to the traffic manager in a pod, without a connection. It sets those fields of
// shared that transports use.
func newTrying(c *client.Cluster, namespace, pod string) *transports {
	s := &shared{
		cfg: new(Config), log: slog.New(slog.DiscardHandler), cluster: c, pods: podconn.New(c),
		view: new(wakeup.Value[view]), current: new(current), reached: new(wakeup.Value[[]netip.Addr]),
		changed: wakeup.NewSignal(),
	}
	at := &manager{shared: s}
	at.location.Update(func(p *managerLocation) { p.namespace, p.pod = namespace, pod })
	return &transports{shared: s, manager: at, tickets: newTickets(), direct: newDirect(s)}
}
