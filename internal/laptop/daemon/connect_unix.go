//go:build unix

package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// connect connects an unconnected UDP or TCP socket of another process, and returns it as a net.Conn. The Conn has its
// own descriptor: f stays open.
func connect(ctx context.Context, f *os.File, addr netip.AddrPort) (net.Conn, error) {
	waiting, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	defer waiting.Close()
	defer context.AfterFunc(ctx, func() { _ = waiting.SetWriteDeadline(time.Unix(1, 0)) })()
	raw, err := waiting.(syscall.Conn).SyscallConn()
	if err != nil {
		return nil, err
	}
	to := sockaddr(addr)
	var failed error
	err = raw.Write(func(fd uintptr) bool { // again once the socket is writable, for the result
		failed = unix.Connect(int(fd), to)
		return !errors.Is(failed, unix.EINPROGRESS) && !errors.Is(failed, unix.EALREADY)
	})
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("cannot connect: %w", ctx.Err())
	case err != nil:
		return nil, err
	case failed != nil && failed != unix.EISCONN: // which macOS returns for a connect that has succeeded meanwhile
		return nil, os.NewSyscallError("connect", failed)
	}
	return net.FileConn(f)
}

func sockaddr(addr netip.AddrPort) unix.Sockaddr {
	if addr.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(addr.Port()), Addr: addr.Addr().As4()}
	}
	to := &unix.SockaddrInet6{Port: int(addr.Port()), Addr: addr.Addr().As16()}
	if ifi, err := net.InterfaceByName(addr.Addr().Zone()); err == nil { // of a link-local address, which needs a zone
		to.ZoneId = uint32(ifi.Index)
	}
	return to
}
