package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/windows"
)

// lockFile locks a byte far behind the content, because nobody can read what is locked, or returns ErrRunning.
func lockFile(f *os.File) error {
	const flags = windows.LOCKFILE_EXCLUSIVE_LOCK | windows.LOCKFILE_FAIL_IMMEDIATELY
	err := windows.LockFileEx(windows.Handle(f.Fd()), flags, 0, 1, 0, &windows.Overlapped{Offset: 1 << 30})
	if errors.Is(err, windows.ERROR_LOCK_VIOLATION) {
		return ErrRunning
	}
	return err
}

// listen creates a unix socket at path. Only processes of this user can use it: Windows compares a process that
// connects with the access list of the file, which is that of the user's local application data. The caller holds the
// lock, so an existing socket is stale.
func listen(path string, _ *slog.Logger) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("cannot remove the socket of an earlier daemon: %w", err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("cannot create the daemon's socket: %w", err)
	}
	return l, nil
}

// errNoHelper is the error of everything that a root helper would do: Windows has none.
var errNoHelper = errors.New("there is no root helper on Windows")

func connect(context.Context, *os.File, netip.AddrPort) (net.Conn, error) { return nil, errNoHelper }
