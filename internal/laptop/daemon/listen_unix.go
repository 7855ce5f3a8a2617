//go:build unix

package daemon

import (
	"errors"
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

// restrict returns the listener for processes of this user. Its directory is closed to other users. In addition, the
// listener checks the user of each connection: a process could hold a descriptor of an old directory.
func restrict(l net.Listener, path string, logger *slog.Logger) (net.Listener, error) {
	return &ownListener{l.(*net.UnixListener), logger}, os.Chmod(path, 0o600)
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
