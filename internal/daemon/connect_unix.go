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

// connect connects an unconnected UDP or TCP socket that another process made, and returns it as a net.Conn.
// f stays open; the conn has a descriptor of its own.
func connect(ctx context.Context, f *os.File, addr netip.AddrPort) (net.Conn, error) {
	fd := int(f.Fd())
	if err := unix.SetNonblock(fd, true); err != nil { // Fd may have made it blocking
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

// awaitConnected waits for the end of a connect that is in progress. It polls in slices, as only a descriptor
// that the runtime made can be woken by a context; few connections come this way (truncated answers).
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
	return fmt.Errorf("connecting: %w", ctx.Err())
}

func sockaddr(addr netip.AddrPort) unix.Sockaddr {
	if addr.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(addr.Port()), Addr: addr.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(addr.Port()), Addr: addr.Addr().As16(), ZoneId: zoneID(addr.Addr().Zone())}
}

// zoneID is the index of the interface that a link-local address names, 0 where there is none.
func zoneID(zone string) uint32 {
	if zone == "" {
		return 0
	}
	ifi, err := net.InterfaceByName(zone)
	if err != nil {
		return 0 // connect will say that the address is unusable
	}
	return uint32(ifi.Index)
}
