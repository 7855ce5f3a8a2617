package connection

import (
	"context"
	"net"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/podconn"
	"kubevpn/pkg/wire/transport"
)

const (
	// othersTimeout limits the question to the traffic manager.
	othersTimeout = 10 * time.Second
	// leaveTimeout limits the time in which the manager may still count a session that has just ended: its end can
	// arrive after this question.
	leaveTimeout = time.Second
)

// Others asks the traffic manager in a pod how many other laptops are connected through it.
func Others(ctx context.Context, c *client.Cluster, namespace, pod string) (int, error) {
	return others(ctx, func(ctx context.Context) (net.Conn, error) {
		return podconn.New(c).PortForward(ctx, namespace, pod, api.ManagerPort)
	})
}

// others returns the lowest number of others that the manager states within leaveTimeout.
func others(ctx context.Context, dial func(context.Context) (net.Conn, error)) (n int, err error) {
	ctx, cancel := context.WithTimeout(ctx, othersTimeout)
	defer cancel()
	err = greet(ctx, transport.ClientConfig{Dial: dial},
		func(_ context.Context, _ *transport.Session, c *control, hello *api.ManagerHello) {
			n = max(hello.State.Sessions-1, 0)
			defer time.AfterFunc(leaveTimeout, cancel).Stop()
			for n > 0 {
				m, err := c.next()
				if err != nil {
					break // leaveTimeout is over, or the manager ended the stream
				}
				if m.State != nil {
					n = min(n, max(m.State.Sessions-1, 0))
				}
			}
		})
	return n, err
}
