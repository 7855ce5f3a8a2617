package connection

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/internal/podconn"
	"kubevpn/internal/version"
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
func Others(ctx context.Context, c *cluster.Cluster, namespace, pod string) (int, error) {
	return others(ctx, func(ctx context.Context) (net.Conn, error) {
		return podconn.New(c).PortForward(ctx, namespace, pod, api.ManagerPort)
	})
}

func others(ctx context.Context, dial func(context.Context) (net.Conn, error)) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, othersTimeout)
	defer cancel()
	type answer struct {
		others int
		err    error
	}
	answers := make(chan answer, 1)
	give := func(n int, err error) {
		select {
		case answers <- answer{n, err}:
		default: // the first answer counts
		}
	}
	client := transport.NewClient(transport.ClientConfig{
		Links:  1,
		Logger: slog.New(slog.DiscardHandler),
		Dial: func(ctx context.Context) (net.Conn, error) {
			conn, err := dial(ctx)
			if err != nil {
				give(0, err)
			}
			return conn, err
		},
		OnSession: func(ctx context.Context, ts *transport.Session) { give(countOthers(ctx, ts)) },
	})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = client.Run(ctx) // it ends with ctx; answers has its result
	}()
	defer func() {
		cancel()
		<-ended
	}()
	select {
	case a := <-answers:
		return a.others, a.err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// countOthers sends a hello, as every session does, and returns the lowest number of others that the manager states
// within leaveTimeout.
func countOthers(ctx context.Context, ts *transport.Session) (int, error) {
	stream, err := ts.Open(ctx, transport.Request{Proto: transport.ProtoControl})
	if err != nil {
		return 0, fmt.Errorf("opening the control stream: %w", err)
	}
	defer stream.Close()
	c, hello, err := startControl(stream, api.ClientHello{Protocol: api.Protocol, Version: version.String()})
	if err != nil {
		return 0, err
	}
	n := max(hello.State.Sessions-1, 0)
	if err := stream.SetReadDeadline(time.Now().Add(leaveTimeout)); err != nil {
		return n, nil
	}
	for n > 0 {
		m, err := c.next()
		if err != nil {
			break // leaveTimeout is over, or the manager ended the stream
		}
		if m.State != nil {
			n = min(n, max(m.State.Sessions-1, 0))
		}
	}
	return n, nil
}
