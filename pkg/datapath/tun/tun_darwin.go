package tun

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/datapath/packet"
)

// From <net/if_utun.h> and <sys/sys_domain.h>.
const (
	controlName     = "com.apple.net.utun_control"
	sysprotoControl = 2  // SYSPROTO_CONTROL
	optName         = 2  // UTUN_OPT_IFNAME
	optMaxPending   = 16 // UTUN_OPT_MAX_PENDING_PACKETS
)

const (
	// maxPending is the number of packets that may wait for Read. The default is 1.
	maxPending = 16
	// fullInterval is the pause before another attempt to write to a full device, and fullAttempts their number.
	fullInterval = time.Millisecond
	fullAttempts = 1000
)

// GSO is the result of [Device.GSO] for every device on this operating system.
const GSO = false

// Create creates the TUN interface name with the given MTU, and returns the file that keeps it alive: a control socket.
// name must be utun and a number, or utun for the first free number. The name of the file is that of the interface. It
// requires root.
func Create(name string, mtu int) (*os.File, error) {
	unit, err := unitOf(name)
	if err != nil {
		return nil, err
	}
	fd, err := socket(unix.AF_SYSTEM, sysprotoControl)
	if err != nil {
		return nil, fmt.Errorf("creating interface %s: %w", name, err)
	}
	created, err := configure(fd, unit, mtu)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("creating interface %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), created), nil
}

// socket returns a nonblocking datagram socket that no child process inherits.
func socket(family, protocol int) (int, error) {
	syscall.ForkLock.RLock()
	fd, err := unix.Socket(family, unix.SOCK_DGRAM, protocol)
	if err == nil {
		unix.CloseOnExec(fd)
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return -1, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// configure connects fd to a new interface, and returns its name.
func configure(fd int, unit uint32, mtu int) (string, error) {
	info := new(unix.CtlInfo)
	copy(info.Name[:], controlName)
	if err := unix.IoctlCtlInfo(fd, info); err != nil {
		return "", fmt.Errorf("looking up %s: %w", controlName, err)
	}
	if err := unix.Connect(fd, &unix.SockaddrCtl{ID: info.Id, Unit: unit}); err != nil {
		return "", err
	}
	name, err := unix.GetsockoptString(fd, sysprotoControl, optName)
	if err != nil {
		return "", fmt.Errorf("reading its name: %w", err)
	}
	if err := unix.SetsockoptInt(fd, sysprotoControl, optMaxPending, maxPending); err != nil {
		return "", fmt.Errorf("setting its queue length: %w", err)
	}
	any, err := socket(unix.AF_INET, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(any)
	request := &unix.IfreqMTU{MTU: int32(mtu)}
	copy(request.Name[:], name)
	if err := unix.IoctlSetIfreqMTU(any, request); err != nil {
		return "", fmt.Errorf("setting its MTU to %d: %w", mtu, err)
	}
	return name, nil
}

// Adopt makes a Device from a file that [Create] returned, here or in another process. It requires no privilege. It
// owns f and closes it, also after an error. name and mtu are those of the interface.
func Adopt(f *os.File, name string, mtu int) (Device, error) {
	a, err := adopt(f, name, mtu)
	if err != nil {
		return nil, err
	}
	return &device{a}, nil
}

// check returns an error unless fd is the TUN device name. No device takes UDP super-packets.
func check(fd int, name string) (uso bool, err error) {
	if got, err := unix.GetsockoptString(fd, sysprotoControl, optName); err != nil || got != name {
		return false, fmt.Errorf("the file of %s is the device %q (%v)", name, got, err)
	}
	return false, nil
}

type device struct{ adopted }

// Read reads the address family into the end of the virtio-net header, which it then clears.
func (d *device) Read(p []byte) (int, error) {
	n, err := d.file.Read(p[familyOffset:])
	if err != nil {
		return 0, err
	}
	clear(p[:packet.VirtioLen])
	return max(familyOffset+n, packet.VirtioLen), nil
}

// writeOp is one Writev in progress. Pooled with it is the function that RawConn calls, because each packet would
// allocate it otherwise.
type writeOp struct {
	frame frame
	err   error
	try   func(fd uintptr) bool
}

var writeOps = sync.Pool{New: func() any {
	op := new(writeOp)
	op.try = func(fd uintptr) bool {
		_, op.err = unix.Writev(int(fd), op.frame.pieces)
		return op.err != unix.EAGAIN
	}
	return op
}}

func (d *device) Writev(pieces [][]byte) error {
	op := writeOps.Get().(*writeOp)
	op.frame.set(pieces)
	err := d.raw.Write(op.try)
	// The kernel's queue is full, for which the poller has no event.
	for i := 0; err == nil && errors.Is(op.err, unix.ENOBUFS) && i < fullAttempts; i++ {
		time.Sleep(fullInterval)
		err = d.raw.Write(op.try)
	}
	if err != nil {
		err = os.ErrClosed // RawConn fails without calling op only after Close
	} else {
		err = op.err
	}
	clear(op.frame.pieces)
	writeOps.Put(op)
	if err != nil {
		return &os.PathError{Op: "write", Path: d.name, Err: err}
	}
	return nil
}
