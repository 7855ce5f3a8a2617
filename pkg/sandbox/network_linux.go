package sandbox

import (
	"fmt"
	"io/fs"
	"log/slog"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// queueLen is how many packets wait for the reader, as for pkg/tun's devices.
const queueLen = 4096

// makeNetwork sets up this process's network namespace, which is new, and returns the file of its TUN.
func (i *initProcess) makeNetwork() (*os.File, error) {
	loopback, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("finding loopback: %w", err)
	}
	if err := netlink.LinkSetUp(loopback); err != nil {
		return nil, fmt.Errorf("bringing loopback up: %w", err)
	}
	// As containerd has it: a program without capabilities listens on port 80, and pings.
	for file, value := range map[string]string{
		"ip_unprivileged_port_start": "0",
		"ping_group_range":           fmt.Sprintf("%d %[1]d", os.Getegid()),
	} {
		if err := os.WriteFile("/proc/sys/net/ipv4/"+file, []byte(value), 0); err != nil {
			i.log(slog.LevelWarn, "a setting of the sandbox's network was refused", "err", err.Error())
		}
	}
	return openTUN(Interface)
}

// openTUN makes the interface, as tun.Adopt wants it. tun.Create would set its queue's length by an ioctl, which takes
// CAP_NET_ADMIN over the machine; by netlink, as pkg/route does it, that over the namespace is enough.
func openTUN(name string) (*os.File, error) {
	const device = "/dev/net/tun"
	fd, err := unix.Open(device, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: device, Err: err}
	}
	request, err := unix.NewIfreq(name)
	if err == nil {
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_VNET_HDR | unix.IFF_TUN_EXCL)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("creating interface %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), device), nil
}
