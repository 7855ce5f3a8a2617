package daemonclient

import (
	"context"
	"encoding/json"
	"fmt"
	"net"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/unixsocket"
)

// startHelper starts a root helper and sends its socket to the daemon.
func (c *Client) startHelper(ctx context.Context) error {
	socket, err := c.cfg.StartHelper(ctx, c.cfg.Announce)
	if err != nil {
		return err
	}
	defer socket.Close()
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", c.cfg.Paths.HelperSocket())
	if err != nil {
		return c.explain(ctx, err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if _, err := unixsocket.Send(conn.(*net.UnixConn), []byte{0}, socket); err != nil {
		return c.explain(ctx, fmt.Errorf("cannot send the socket of the root helper: %w", err))
	}
	var answer *api.Error
	if err := json.NewDecoder(conn).Decode(&answer); err != nil {
		return c.explain(ctx, err)
	}
	if answer != nil {
		return answer
	}
	return nil
}
