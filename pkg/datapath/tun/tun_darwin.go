package tun

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/datapath/packet"
)

// From <net/if_utun.h> and <sys/sys_domain.h>.
const (
	sysprotoControl = 2  // SYSPROTO_CONTROL
	optName         = 2  // UTUN_OPT_IFNAME
	optMaxPending   = 16 // UTUN_OPT_MAX_PENDING_PACKETS
	devicePath      = "com.apple.net.utun_control"
)

const (
	// maxPending is the number of packets that may wait for Read. The default is 1.
	maxPending = 16
	// fullInterval is the pause before another attempt to write to a full device, and fullAttempts their number.
	fullInterval = time.Millisecond
	fullAttempts = 1000
	// familyLen is the length of the address family that precedes each packet, in network byte order, and familyOffset
	// its offset in the virtio-net header.
	familyLen    = 4
	familyOffset = packet.VirtioLen - familyLen
)

// GSO is the result of [Device.GSO] for every device on this operating system.
const GSO = false

func checkName(name string) error {
	number, ok := strings.CutPrefix(name, "utun")
	if _, err := strconv.ParseUint(number, 10, 16); !ok || err != nil && number != "" {
		return fmt.Errorf("%q cannot be the name of a TUN interface: it must be utun and a number", name)
	}
	return nil
}

func lacksTUN(error) bool { return false }

// tune sets the queue length of the device.
func tune(fd int, _ string) error {
	return unix.SetsockoptInt(fd, sysprotoControl, optMaxPending, maxPending)
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

// frames are packets as a utun takes them, so that none is allocated for each packet.
var frames = sync.Pool{New: func() any { return new([]byte) }}

// Writev writes the packet with its address family in the place of the virtio-net header's end.
func (d *device) Writev(pieces [][]byte) error {
	frame := frames.Get().(*[]byte)
	defer frames.Put(frame)
	*frame = (*frame)[:0]
	for _, p := range pieces {
		*frame = append(*frame, p...)
	}
	if len(*frame) <= packet.VirtioLen {
		return &os.PathError{Op: "write", Path: d.name, Err: unix.EINVAL}
	}
	family := byte(unix.AF_INET)
	if (*frame)[packet.VirtioLen]>>4 == 6 {
		family = unix.AF_INET6
	}
	whole := append((*frame)[:familyOffset], 0, 0, 0, family)[familyOffset:len(*frame)]
	_, err := d.file.Write(whole)
	// The kernel's queue is full, for which the poller has no event.
	for i := 0; errors.Is(err, unix.ENOBUFS) && i < fullAttempts; i++ {
		time.Sleep(fullInterval)
		_, err = d.file.Write(whole)
	}
	return err
}
