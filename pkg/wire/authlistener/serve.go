package authlistener

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"kubevpn/pkg/wakeup"
)

// maxPause is the longest pause after a failed accept.
const maxPause = time.Second

// Serve passes each conn that l accepts to f, until ctx ends, which returns nil, or until l is closed. It logs other
// errors and goes on after a pause: no file descriptors are left, or the client has closed the conn already. It does
// not close l.
func Serve(ctx context.Context, l net.Listener, log *slog.Logger, f func(net.Conn)) error {
	pause := time.Duration(0)
	for {
		conn, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				conn.Close()
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("accepting connections on %s: %w", l.Addr(), err)
		case err != nil:
			pause = min(max(2*pause, 5*time.Millisecond), maxPause)
			log.Warn("cannot accept a conn", "address", l.Addr(), "err", err, "pause", pause)
			wakeup.Pause(ctx, pause)
		default:
			pause = 0
			f(conn)
		}
	}
}
