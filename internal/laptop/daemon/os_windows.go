package daemon

import (
	"context"
	"errors"
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

// restrict returns the listener. Only processes of this user can use it: Windows compares a process that connects with
// the access list of the file, which is that of the user's local application data.
func restrict(l net.Listener, _ string, _ *slog.Logger) (net.Listener, error) { return l, nil }

// errNoHelper is the error of everything that a root helper would do: Windows has none.
var errNoHelper = errors.New("there is no root helper on Windows")

func connect(context.Context, *os.File, netip.AddrPort) (net.Conn, error) { return nil, errNoHelper }
