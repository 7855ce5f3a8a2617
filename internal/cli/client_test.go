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

// A daemon that ends while a request waits to be accepted was not there for that request.
func TestDaemonEndsBeforeItAccepts(t *testing.T) {
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
		_, pollErr = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 5000)
	})
	if err := errors.Join(err, pollErr); err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := <-asked; !errors.Is(err, errNoDaemon) {
		t.Errorf("error %v, want %v", err, errNoDaemon)
	}
	if _, err := os.Stat(paths.Socket()); err == nil {
		t.Error("the socket is still there: the test did not test what it should")
	}
	if _, err := newClient(paths).status(context.Background()); !errors.Is(err, errNoDaemon) {
		t.Errorf("without a socket: %v", err)
	}
}
