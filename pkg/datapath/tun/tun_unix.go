//go:build linux || darwin

package tun

import (
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/tun"

	"kubevpn/pkg/host/unixsocket"
)

// Create creates the TUN interface name with the given MTU, and returns the file that keeps it alive; its name is that
// of the interface. It requires CAP_NET_ADMIN, or root on macOS. No interface may have the name yet. On Linux it is a
// literal name, not a pattern; on macOS it is utun and a number, or utun for the first free number. The interface is
// down and has no addresses. The error is [ErrNoTUN] if the machine has no TUN devices.
func Create(name string, mtu int) (*os.File, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	created, err := tun.CreateTUN(name, mtu)
	switch {
	case err != nil && lacksTUN(err):
		return nil, fmt.Errorf("creating interface %s: %w: %s: %w", name, ErrNoTUN, devicePath, err)
	case err != nil:
		return nil, fmt.Errorf("creating interface %s: %w", name, err)
	}
	defer created.Close() // ends its goroutines; the duplicate keeps the interface
	if name, err = created.Name(); err != nil {
		return nil, fmt.Errorf("reading the name of the interface: %w", err)
	}
	fd, err := duplicate(created.File())
	if err != nil {
		return nil, fmt.Errorf("keeping the file of %s: %w", name, err)
	}
	if err := tune(fd, name); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("setting the queue length of %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// adopted is the part of a device that Linux and macOS have in common.
type adopted struct {
	file *os.File
	raw  syscall.RawConn
	name string
	mtu  int
	uso  bool
}

// adopt duplicates the descriptor of f, which it closes, and checks that it is the device name.
func adopt(f *os.File, name string, mtu int) (adopted, error) {
	defer f.Close()
	fd, err := duplicate(f)
	if err != nil {
		return adopted{}, fmt.Errorf("taking over the file of %s: %w", name, err)
	}
	uso, err := check(fd, name)
	if err != nil {
		unix.Close(fd)
		return adopted{}, err
	}
	file := os.NewFile(uintptr(fd), name) // nonblocking, so it uses the runtime's poller
	raw, err := file.SyscallConn()
	if err != nil {
		file.Close()
		return adopted{}, fmt.Errorf("taking over the file of %s: %w", name, err)
	}
	return adopted{file: file, raw: raw, name: name, mtu: mtu, uso: uso}, nil
}

// duplicate returns a nonblocking copy of f's descriptor. os.NewFile decides whether a file uses the poller, and f may
// come from a blocking descriptor.
func duplicate(f *os.File) (int, error) {
	fd := -1
	if err := unixsocket.Control(f, func(old int) (err error) {
		fd, err = unix.FcntlInt(uintptr(old), unix.F_DUPFD_CLOEXEC, 0)
		return err
	}); err != nil {
		return -1, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func (a *adopted) Name() string { return a.name }
func (a *adopted) MTU() int     { return a.mtu }
func (a *adopted) GSO() bool    { return GSO }
func (a *adopted) USO() bool    { return a.uso }
func (a *adopted) Close() error { return a.file.Close() }

// SetReadDeadline makes Read return os.ErrDeadlineExceeded at t, as for a net.Conn. netstack stops reading with it
// without closing the device.
func (a *adopted) SetReadDeadline(t time.Time) error { return a.file.SetReadDeadline(t) }
