package tun

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/wire/nonblock"
)

const (
	devicePath = "/dev/net/tun"
	// offloads is the work that the kernel leaves to this program in packets that the program reads. In packets that it
	// writes, the program may leave the same work to the kernel.
	offloads = unix.TUN_F_CSUM | unix.TUN_F_TSO4 | unix.TUN_F_TSO6
	// queueLen is the number of packets that may wait for Read. Windows bound TCP flows, so the queue is long only for
	// moments. It must not overflow then: a lost SYN delays its application by a second.
	queueLen = 4096
)

// GSO is the result of [Device.GSO] for every device on this operating system.
const GSO = true

// checkName returns an error unless name is a literal name that no interface has: CreateTUN would take a pattern, or
// join a device that another program keeps.
func checkName(name string) error {
	if name == "" || len(name) >= unix.IFNAMSIZ || strings.ContainsAny(name, "%/ ") {
		return fmt.Errorf("%q cannot be the name of a network interface", name)
	}
	if _, err := net.InterfaceByName(name); err == nil {
		return fmt.Errorf("creating interface %s: %w", name, unix.EBUSY)
	}
	return nil
}

// lacksTUN reports whether err, of the creation of a device, says that the machine has none. Sandboxes put a file or
// /dev/null in the place of /dev/net/tun.
func lacksTUN(err error) bool {
	_, missing := os.Stat(devicePath)
	return errors.Is(missing, os.ErrNotExist) || slices.ContainsFunc(
		[]error{unix.ENODEV, unix.ENXIO, unix.ENOTTY}, func(no error) bool { return errors.Is(err, no) })
}

// tune sets the queue length of the device.
func tune(_ int, name string) error {
	request, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	// Any socket of the network namespace can set it.
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(socket)
	request.SetUint32(queueLen)
	return unix.IoctlIfreq(socket, unix.SIOCSIFTXQLEN, request)
}

// Adopt makes a Device from a file that [Create] returned, here or in another process. It requires no privilege. It
// owns f and closes it, also after an error. name and mtu are the arguments of Create.
func Adopt(f *os.File, name string, mtu int) (Device, error) {
	a, err := adopt(f, name, mtu)
	if err != nil {
		return nil, err
	}
	d := &device{adopted: a}
	d.tryRead = func(fd uintptr) bool {
		d.n, d.readErr = nonblock.Read(fd, d.buf)
		return d.readErr != unix.EAGAIN
	}
	return d, nil
}

// check returns an error unless fd is the TUN device name in the mode that type device requires. It reports whether UDP
// super-packets can be written to the device.
func check(fd int, name string) (uso bool, err error) {
	request, err := unix.NewIfreq("")
	if err != nil {
		return false, err
	}
	if err := unix.IoctlIfreq(fd, unix.TUNGETIFF, request); err != nil {
		return false, fmt.Errorf("the file of %s is not a TUN device: %w", name, err)
	}
	const want = unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_VNET_HDR
	if request.Name() != name || request.Uint16()&want != want {
		return false, fmt.Errorf("the file of %s is the device %s with flags %#x", name, request.Name(),
			request.Uint16())
	}
	if n, err := unix.IoctlGetInt(fd, unix.TUNGETVNETHDRSZ); err != nil || n != packet.VirtioLen {
		return false, fmt.Errorf("the virtio-net header of %s has %d bytes, not %d (%v)", name, n, packet.VirtioLen,
			err)
	}
	return takesUDP(fd, name)
}

// takesUDP sets the offloads of the device, and reports whether UDP super-packets can be written to it. A kernel that
// knows the offload for reading knows it for writing.
func takesUDP(fd int, name string) (bool, error) {
	known := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, offloads|unix.TUN_F_USO4|unix.TUN_F_USO6) == nil
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, offloads); err != nil {
		return false, fmt.Errorf("setting the offloads of %s: %w", name, err)
	}
	return known, nil
}

type device struct {
	adopted

	// The state of the Read in progress; there is one at a time.
	tryRead func(fd uintptr) bool
	buf     []byte
	n       int
	readErr error
}

func (d *device) Read(p []byte) (int, error) {
	d.buf = p
	err := d.raw.Read(d.tryRead)
	d.buf = nil
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
	case err != nil:
		err = os.ErrClosed // RawConn fails without calling tryRead only after a deadline or Close
	case d.readErr != nil:
		err = d.readErr
	default:
		return d.n, nil
	}
	return 0, &os.PathError{Op: "read", Path: d.name, Err: err}
}

// writeOp is one Writev in progress. Pooled with it are the functions that RawConn calls, because each packet would
// allocate them otherwise.
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
	// RawConn.Write admits one writer at a time, but a write to a TUN device runs the receiver's TCP. So writers use
	// Control, which admits all of them, and Write only to wait in the poller when the device is full.
	err := d.raw.Control(op.try)
	if err == nil && op.err == unix.EAGAIN {
		err = d.raw.Write(op.wait)
	}
	if err != nil {
		err = os.ErrClosed // RawConn fails without calling op only after Close
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
