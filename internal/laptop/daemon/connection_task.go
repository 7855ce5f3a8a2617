package daemon

import (
	"context"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
)

// connectionTask runs one Connection.
type connectionTask struct {
	task
	id      string
	cluster string // ID of the cluster
	conn    Connection
	request api.ConnectRequest
	network *scopedNetwork
	proxy   *proxy // nil: programs reach the connection through its device
	left    error  // the error of the cleanup; read it after over
}

// status returns the status of the connection, with its ID.
func (t *connectionTask) status() api.Connection {
	c := t.conn.Status()
	c.ID = t.id
	if t.proxy != nil {
		c.SOCKS = t.proxy.status()
	}
	return c
}

func (t *connectionTask) run(ctx context.Context) error {
	run := t.conn.Run
	if t.proxy != nil {
		run = func(ctx context.Context) error { return t.proxy.run(ctx, t.conn, t.network.host.resolver) }
	}
	err := run(ctx)
	switch {
	case wakeup.IsClosed(t.network.host.helper.Done()):
		err = errHelperEnded() // the cause of the error of Run
	case err == nil && ctx.Err() == nil:
		err = api.Errorf(api.ExitLost, "the connection ended").
			WithHint("run `kubevpn connect` again; `kubevpn logs` has the details")
	}
	if t.left = t.network.close(); t.left != nil {
		t.logger.Error("cannot remove the network of a connection", "err", t.left)
	}
	return err
}
