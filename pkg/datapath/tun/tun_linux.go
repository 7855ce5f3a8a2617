package tun

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/wire/nonblock"
)

const (
	devicePath = "/dev/net/tun"
	// offloads are taken on by us for packets that we read, and by the kernel for packets that we write.
	offloads = unix.TUN_F_CSUM | unix.TUN_F_TSO4 | unix.TUN_F_TSO6
	// queueLen is how many packets wait for our Read. TCP flows are bounded by their windows, so the queue is long
	// only for moments, and then it must not overflow: a lost SYN costs its application a second.
	queueLen = 4096
)

// GSO is what [Device.GSO] says of every device on this system, for who has to say it before there is one.
const GSO = true

// Create makes the TUN interface name with the given MTU, and returns the file that keeps it alive. It needs
// CAP_NET_ADMIN. name is taken as it is; an interface of that name must not exist. The interface is down, without
// addresses. The error is [ErrNoTUN] where there are no TUN devices.
func Create(name string, mtu int) (*os.File, error) {
	if name == "" || len(name) >= unix.IFNAMSIZ || strings.ContainsAny(name, "%/ ") {
		return nil, fmt.Errorf("%q cannot be the name of a network interface", name)
	}
	fd, err := unix.Open(devicePath, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return nil, fmt.Errorf("opening %s: %w: %w", devicePath, ErrNoTUN, err)
	case err != nil:
		return nil, fmt.Errorf("opening %s: %w", devicePath, err)
	}
	if err := configure(fd, name, mtu); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), devicePath), nil
}

func configure(fd int, name string, mtu int) error {
	request, err := unix.NewIfreq(name)
	if err != nil {
		return fmt.Errorf("naming interface %s: %w", name, err)
	}
	request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_VNET_HDR | unix.IFF_TUN_EXCL)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); errors.Is(err, unix.ENOTTY) {
		// As sandboxes have it, which put a file or /dev/null in its place.
		return fmt.Errorf("creating interface %s: %s: %w: it is another device", name, devicePath, ErrNoTUN)
	} else if err != nil {
		return fmt.Errorf("creating interface %s: %w", name, err)
	}
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, offloads); err != nil {
		return fmt.Errorf("setting the offloads of %s: %w", name, err)
	}
	// These two are set through any socket of the network namespace.
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening a socket to configure %s: %w", name, err)
	}
	defer unix.Close(socket)
	request.SetUint32(uint32(mtu))
	if err := unix.IoctlIfreq(socket, unix.SIOCSIFMTU, request); err != nil {
		return fmt.Errorf("setting the MTU of %s to %d: %w", name, mtu, err)
	}
	request.SetUint32(queueLen)
	if err := unix.IoctlIfreq(socket, unix.SIOCSIFTXQLEN, request); err != nil {
		return fmt.Errorf("setting the queue length of %s: %w", name, err)
	}
	return nil
}

// Adopt makes a Device of a file that [Create] returned, here or in another process. It needs no privilege. It takes
// ownership of f: f is closed in any case. name and mtu are what Create was called with.
func Adopt(f *os.File, name string, mtu int) (Device, error) {
	defer f.Close()
	fd, err := duplicate(f)
	if err != nil {
		return nil, fmt.Errorf("taking over the file of %s: %w", name, err)
	}
	if err := check(fd, name); err != nil {
		unix.Close(fd)
		return nil, err
	}
	file := os.NewFile(uintptr(fd), name) // nonblocking, so it is served by the runtime's poller
	raw, err := file.SyscallConn()
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("taking over the file of %s: %w", name, err)
	}
	d := &device{file: file, raw: raw, name: name, mtu: mtu}
	d.tryRead = func(fd uintptr) bool {
		d.n, d.readErr = nonblock.Read(fd, d.buf)
		return d.readErr != unix.EAGAIN
	}
	return d, nil
}

// duplicate gives a nonblocking copy of f's descriptor. os.File decides when it is made whether it can wait in the
// poller, and f may have been made of a blocking descriptor.
func duplicate(f *os.File) (int, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd, dupErr := -1, error(nil)
	if err := raw.Control(func(old uintptr) {
		fd, dupErr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0)
	}); err != nil {
		return -1, err
	}
	if dupErr != nil {
		return -1, dupErr
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// check makes sure that fd is the TUN device name in the mode that device relies on.
func check(fd int, name string) error {
	request, err := unix.NewIfreq("")
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.TUNGETIFF, request); err != nil {
		return fmt.Errorf("the file of %s is not a TUN device: %w", name, err)
	}
	const want = unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_VNET_HDR
	if request.Name() != name || request.Uint16()&want != want {
		return fmt.Errorf("the file of %s is the device %s with flags %#x", name, request.Name(), request.Uint16())
	}
	if n, err := unix.IoctlGetInt(fd, unix.TUNGETVNETHDRSZ); err != nil || n != VirtioHeaderLen {
		return fmt.Errorf("the virtio-net header of %s has %d bytes, not %d (%v)", name, n, VirtioHeaderLen, err)
	}
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, offloads); err != nil {
		return fmt.Errorf("setting the offloads of %s: %w", name, err)
	}
	return nil
}

// Open is Create and Adopt in one process.
func Open(name string, mtu int) (Device, error) {
	f, err := Create(name, mtu)
	if err != nil {
		return nil, err
	}
	return Adopt(f, name, mtu)
}

type device struct {
	file *os.File
	raw  syscall.RawConn
	name string
	mtu  int

	// The Read under way: there is one at a time.
	tryRead func(fd uintptr) bool
	buf     []byte
	n       int
	readErr error
}

func (d *device) Name() string { return d.name }
func (d *device) MTU() int     { return d.mtu }
func (d *device) GSO() bool    { return GSO }
func (d *device) Close() error { return d.file.Close() }

func (d *device) Read(p []byte) (int, error) {
	d.buf = p
	err := d.raw.Read(d.tryRead)
	d.buf = nil
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
	case err != nil:
		err = os.ErrClosed // the other reason for which RawConn does not call us
	case d.readErr != nil:
		err = d.readErr
	default:
		return d.n, nil
	}
	return 0, &os.PathError{Op: "read", Path: d.name, Err: err}
}

// SetReadDeadline makes Read return os.ErrDeadlineExceeded at t, as for a net.Conn. netstack ends its reading with it
// without closing the device.
func (d *device) SetReadDeadline(t time.Time) error { return d.file.SetReadDeadline(t) }

// A writeOp is one Writev under way. It is pooled together with the functions that RawConn calls, which would
// otherwise be allocated for every packet.
type writeOp struct {
	vector nonblock.Vector
	err    error
	try    func(fd uintptr)
	wait   func(fd uintptr) bool
}

var writeOps = sync.Pool{New: func() any {
	op := new(writeOp)
	op.try = func(fd uintptr) { _, op.err = nonblock.Writev(fd, op.vector) }
	op.wait = func(fd uintptr) bool {
		op.try(fd)
		return op.err != unix.EAGAIN
	}
	return op
}}

func (d *device) Writev(pieces [][]byte) error {
	op := writeOps.Get().(*writeOp)
	op.vector.Set(pieces)
	// RawConn.Write lets one writer in at a time. A write to a TUN device runs the receiver's TCP, so writers are
	// let in together by Control, and queue up only when the device is full, to wait in the poller.
	err := d.raw.Control(op.try)
	if err == nil && op.err == unix.EAGAIN {
		err = d.raw.Write(op.wait)
	}
	if err != nil {
		err = os.ErrClosed // the one reason for which RawConn does not call us
	} else {
		err = op.err
	}
	op.vector.Clear()
	writeOps.Put(op)
	if err != nil {
		return &os.PathError{Op: "write", Path: d.name, Err: err}
	}
	return nil
}
