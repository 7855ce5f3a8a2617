package nonblock_test

import (
	"errors"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/wire/nonblock"
)

// option asks the kernel about a connection's socket.
func option[T any](t *testing.T, c *nonblock.Conn, ask func(fd int) (T, error)) (v T) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { v, failed = ask(int(fd)) }); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
	return v
}

// TestLimitUnsent writes to a connection whose other end does not read.
func TestLimitUnsent(t *testing.T) {
	const limit = 128 << 10
	a, _ := pair(t)
	c := a.(*nonblock.Conn)
	if err := c.LimitUnsent(limit); err != nil {
		t.Fatal(err)
	}
	if err := c.SetWriteDeadline(time.Now().Add(500 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	piece := make([]byte, 64<<10)
	for {
		if _, err := c.Write(piece); errors.Is(err, os.ErrDeadlineExceeded) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	unsent := option(t, c, func(fd int) (int, error) { return unix.IoctlGetInt(fd, unix.SIOCOUTQNSD) })
	if unsent > limit+len(piece) {
		t.Errorf("%d bytes are in the kernel and were not sent, want at most %d and a piece", unsent, limit)
	}
}

func TestSetCongestion(t *testing.T) {
	a, _ := pair(t)
	c := a.(*nonblock.Conn)
	if err := c.SetCongestion("reno"); err != nil { // every kernel has it, for everyone
		t.Fatal(err)
	}
	name := option(t, c, func(fd int) (string, error) {
		return unix.GetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION)
	})
	if name != "reno" {
		t.Errorf("the kernel says %q", name)
	}
	if err := c.SetCongestion("nonesuch"); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("a congestion control that does not exist: %v", err)
	}
}
