package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/unixsocket"
)

// handoverTimeout limits the time in which a CLI passes the descriptor of a helper.
const handoverTimeout = 10 * time.Second

// serveHelpers receives helpers, one per connection: the CLI sends one byte with the descriptor of its end of the
// helper's socket pair, and receives one line, an api.Error or null.
func (d *daemon) serveHelpers(l net.Listener) error {
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		d.connections.group.Go(func() { d.takeHelper(conn) })
	}
}

func (d *daemon) takeHelper(conn net.Conn) {
	defer conn.Close()
	err := conn.SetDeadline(time.Now().Add(handoverTimeout))
	if err == nil {
		err = d.adoptFrom(conn)
	}
	if err != nil {
		d.logger.Error("cannot receive the root helper", "err", err)
	}
	if err := json.NewEncoder(conn).Encode(api.AsError(err)); err != nil {
		d.logger.Warn("cannot answer the command that started the root helper", "err", err)
	}
}

func (d *daemon) adoptFrom(conn net.Conn) error {
	_, socket, err := unixsocket.Receive(conn.(*net.UnixConn), make([]byte, 1), "helper")
	if err == nil && socket == nil {
		err = errors.New("received no descriptor")
	}
	if err != nil {
		return fmt.Errorf("cannot receive the socket of the root helper: %w", err)
	}
	helper, err := d.cfg.NewHelper(socket, d.logger)
	if err != nil {
		return err
	}
	return d.connections.adopt(helper)
}
