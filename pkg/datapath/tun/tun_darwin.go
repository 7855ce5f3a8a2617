package tun

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
	wg "golang.zx2c4.com/wireguard/tun"
)

// Create makes the TUN interface name, which must be utun and a number, with the given MTU, and returns the file that
// keeps it alive. It needs root.
func Create(name string, mtu int) (*os.File, error) {
	tun, err := wg.CreateTUN(name, mtu)
	if err != nil {
		return nil, fmt.Errorf("creating interface %s: %w", name, err)
	}
	// A copy of the descriptor keeps the interface; wireguard's own state ends here.
	fd, err := unix.FcntlInt(tun.File().Fd(), unix.F_DUPFD_CLOEXEC, 0)
	tun.Close()
	if err != nil {
		return nil, fmt.Errorf("copying the file of %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// Adopt makes a Device of a file that [Create] returned, here or in another process. It takes ownership of f.
func Adopt(f *os.File, name string, mtu int) (Device, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	f.Close()
	if err != nil {
		return nil, fmt.Errorf("taking over the file of %s: %w", name, err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("taking over the file of %s: %w", name, err)
	}
	// The MTU was set by Create; 0 leaves it, since setting it needs root.
	tun, err := wg.CreateTUNFromFile(os.NewFile(uintptr(fd), name), 0)
	if err != nil {
		return nil, fmt.Errorf("taking over interface %s: %w", name, err)
	}
	return newDevice(tun, mtu)
}

// Open is Create and Adopt in one process.
func Open(name string, mtu int) (Device, error) {
	f, err := Create(name, mtu)
	if err != nil {
		return nil, err
	}
	return Adopt(f, name, mtu)
}
