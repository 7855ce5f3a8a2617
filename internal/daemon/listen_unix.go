//go:build unix

package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
)

// listen makes a unix socket at path that only this user's processes may use: it is in a directory that is
// closed to others, and the kernel is asked who connects (who holds a descriptor of an old directory, or
// enters by a fault of ours, is still rejected). The lock is held, so a socket that is there is stale.
func listen(path string, logger *slog.Logger) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("removing the socket of an earlier daemon: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("making the daemon's socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("closing the daemon's socket to others: %w", err)
	}
	return &ownListener{UnixListener: l, logger: logger}, nil
}

// ownListener accepts only connections from this user's processes.
type ownListener struct {
	*net.UnixListener
	logger *slog.Logger
}

func (l *ownListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		uid, err := peerUID(conn)
		if err == nil && uid == os.Geteuid() {
			return conn, nil
		}
		l.logger.Warn("connection refused", "uid", uid, "err", err)
		conn.Close()
	}
}
