package helper

import (
	"os"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
)

func markedSocket(network string, mark uint32) (*os.File, error) {
	family, kind := unix.AF_INET, unix.SOCK_DGRAM
	switch network {
	case "udp4":
	case "udp6":
		family = unix.AF_INET6
	case "tcp4":
		kind = unix.SOCK_STREAM
	case "tcp6":
		family, kind = unix.AF_INET6, unix.SOCK_STREAM
	default:
		return nil, refused("a socket of type %q: it must be udp4, udp6, tcp4 or tcp6", network)
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, api.Errorf(api.ExitNetwork, "cannot create a %s socket: %w", network, err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
		unix.Close(fd)
		return nil, api.Errorf(api.ExitNetwork, "cannot mark a socket: %w", err)
	}
	return os.NewFile(uintptr(fd), network), nil
}
