package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
)

// listen creates a unix socket at path that only processes of this user can use. The caller holds the lock, so an
// existing socket is stale.
func listen(path string, logger *slog.Logger) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("cannot remove the socket of an earlier daemon: %w", err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("cannot create the daemon's socket: %w", err)
	}
	own, err := restrict(l, path, logger)
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("cannot close the daemon's socket to other users: %w", err)
	}
	return own, nil
}
