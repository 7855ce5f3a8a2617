package daemon

import (
	"context"

	"kubevpn/internal/api"
)

// connectionTask runs one Connection.
type connectionTask struct {
	task
	id      string
	conn    Connection
	request api.ConnectRequest
	network *scopedNetwork
	left    error // why something of it could not be removed; read it after done
}

// status is the connection's own status.
func (t *connectionTask) status() api.Connection {
	c := t.conn.Status()
	c.ID = t.id
	return c
}

func (t *connectionTask) run(ctx context.Context) error {
	err := t.conn.Run(ctx)
	switch {
	case isClosed(t.network.host.helper.Done()):
		err = errHelperEnded() // Run's error is a consequence
	case err == nil && ctx.Err() == nil:
		err = api.Errorf(api.ExitLost, "the connection ended").
			WithHint("run `kubevpn connect` again; `kubevpn logs` has the details")
	}
	if t.left = t.network.close(); t.left != nil {
		t.logger.Error("removing what a connection left", "err", t.left)
	}
	return err
}
