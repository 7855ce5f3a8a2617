package tun

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
	wg "golang.zx2c4.com/wireguard/tun"
)

// Create creates the TUN interface name with the given MTU, and returns the file that keeps it alive. name must be utun
// and a number, or utun for the first free number. The name of the file is that of the interface. It requires root.
func Create(name string, mtu int) (*os.File, error) {
	tun, err := wg.CreateTUN(name, mtu)
	if err != nil {
		return nil, fmt.Errorf("creating interface %s: %w", name, err)
	}
	defer tun.Close() // ends wireguard's goroutines; the copy of the descriptor keeps the interface
	created, err := tun.Name()
	if err != nil {
		return nil, fmt.Errorf("reading the name of the new interface %s: %w", name, err)
	}
	fd, err := unix.FcntlInt(tun.File().Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("copying the file of %s: %w", created, err)
	}
	return os.NewFile(uintptr(fd), created), nil
}

// Adopt makes a Device from a file that [Create] returned, here or in another process. It owns f.
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
	// Create has set the MTU, which requires root; 0 does not change it.
	tun, err := wg.CreateTUNFromFile(os.NewFile(uintptr(fd), name), 0)
	if err != nil {
		return nil, fmt.Errorf("taking over interface %s: %w", name, err)
	}
	return newDevice(tun, mtu)
}

// Open calls Create and Adopt in one process.
func Open(name string, mtu int) (Device, error) {
	f, err := Create(name, mtu)
	if err != nil {
		return nil, err
	}
	return Adopt(f, name, mtu)
}
