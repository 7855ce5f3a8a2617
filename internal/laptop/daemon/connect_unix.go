//go:build unix

package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// connect connects an unconnected UDP or TCP socket of another process, and returns it as a net.Conn. The Conn has its
// own descriptor: f stays open.
func connect(ctx context.Context, f *os.File, addr netip.AddrPort) (net.Conn, error) {
	fd := int(f.Fd())
	if err := unix.SetNonblock(fd, true); err != nil { // File.Fd may have set blocking mode
		return nil, os.NewSyscallError("fcntl", err)
	}
	err := unix.Connect(fd, sockaddr(addr))
	if err == nil {
		return net.FileConn(f)
	}
	if !errors.Is(err, unix.EINPROGRESS) {
		return nil, os.NewSyscallError("connect", err)
	}
	if err := awaitConnected(ctx, fd); err != nil {
		return nil, err
	}
	return net.FileConn(f)
}

// awaitConnected waits until a connect in progress has ended. It polls in slices, because a context cannot interrupt a
// poll of a descriptor that the runtime does not manage. Connects are rare here: only truncated answers need TCP.
func awaitConnected(ctx context.Context, fd int) error {
	const slice = 50 * time.Millisecond
	for ctx.Err() == nil {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		n, err := unix.Poll(fds, int(slice.Milliseconds()))
		switch {
		case errors.Is(err, unix.EINTR), err == nil && n == 0:
			continue
		case err != nil:
			return os.NewSyscallError("poll", err)
		}
		errno, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		switch {
		case err != nil:
			return os.NewSyscallError("getsockopt", err)
		case errno != 0:
			return os.NewSyscallError("connect", unix.Errno(errno))
		}
		return nil
	}
	return fmt.Errorf("cannot connect: %w", ctx.Err())
}

func sockaddr(addr netip.AddrPort) unix.Sockaddr {
	if addr.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(addr.Port()), Addr: addr.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(addr.Port()), Addr: addr.Addr().As16(), ZoneId: zoneID(addr.Addr().Zone())}
}

// zoneID returns the index of the interface of a link-local address, or 0 if there is none.
func zoneID(zone string) uint32 {
	if zone == "" {
		return 0
	}
	ifi, err := net.InterfaceByName(zone)
	if err != nil {
		return 0 // connect then fails
	}
	return uint32(ifi.Index)
}
