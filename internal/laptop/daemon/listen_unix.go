//go:build unix

package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/unixsocket"
)

// lockFile locks a file, or returns ErrRunning.
func lockFile(f *os.File) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return ErrRunning
	}
	return err
}

// listen creates a unix socket at path that only processes of this user can use. Its directory is closed to other
// users. In addition, the listener checks the user of each connection: a process could hold a descriptor of an old
// directory. The caller holds the lock, so an existing socket is stale.
func listen(path string, logger *slog.Logger) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("cannot remove the socket of an earlier daemon: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("cannot create the daemon's socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("cannot close the daemon's socket to other users: %w", err)
	}
	return &ownListener{UnixListener: l, logger: logger}, nil
}

// ownListener accepts connections only from processes of this user.
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
		uid, err := unixsocket.PeerUID(conn)
		if err == nil && uid == os.Geteuid() {
			return conn, nil
		}
		l.logger.Warn("connection rejected", "uid", uid, "err", err)
		conn.Close()
	}
}
