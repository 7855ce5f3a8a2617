package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"strconv"
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

// lock makes this process the only daemon, or returns ErrRunning. The system unlocks the file when the process ends.
// The file stays: after its removal, two processes could lock two files of the same name.
func lock(path string) (unlock func() error, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("cannot open the daemon's lock: %w", err)
	}
	if err = lockFile(f); err == nil {
		err = f.Truncate(0)
	}
	if err == nil { // the CLI shows the PID of a daemon that does not answer
		_, err = f.WriteString(strconv.Itoa(os.Getpid()) + "\n")
	}
	if err != nil {
		f.Close()
		if errors.Is(err, ErrRunning) {
			return nil, err
		}
		return nil, fmt.Errorf("cannot lock %s: %w", path, err)
	}
	return f.Close, nil
}
