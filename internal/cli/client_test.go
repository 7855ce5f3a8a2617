//go:build unix

package cli

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevpn/internal/config"
)

func TestRequestThatNoDaemonAcceptsReportsNoDaemon(t *testing.T) {
	paths := config.Paths{RuntimeDir: filepath.Join(t.TempDir(), "r")}
	if err := paths.MakeRuntimeDir(); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", paths.Socket())
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan error, 1)
	go func() {
		_, err := newClient(paths).status(t.Context())
		asked <- err
	}()
	raw, err := l.(*net.UnixListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var pollErr error
	err = raw.Control(func(fd uintptr) { // until there is something to accept
		for pollErr = unix.EINTR; pollErr == unix.EINTR; { // a signal of the runtime interrupts poll
			_, pollErr = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
		}
	})
	if err := errors.Join(err, pollErr); err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := <-asked; !errors.Is(err, errNoDaemon) {
		t.Errorf("error %v, want %v", err, errNoDaemon)
	}
	if _, err := os.Stat(paths.Socket()); err == nil {
		t.Error("the socket still exists, so this shows nothing")
	}
	if _, err := newClient(paths).status(context.Background()); !errors.Is(err, errNoDaemon) {
		t.Errorf("without a socket: %v", err)
	}
}
