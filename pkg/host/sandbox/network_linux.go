package sandbox

import (
	"fmt"
	"io/fs"
	"log/slog"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// queueLen is the number of packets that the device queues for the reader, as in pkg/datapath/tun.
const queueLen = 4096

// makeNetwork configures the new network namespace of this process and returns the file of its TUN device.
func (i *initProcess) makeNetwork() (*os.File, error) {
	loopback, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("finding loopback: %w", err)
	}
	if err := netlink.LinkSetUp(loopback); err != nil {
		return nil, fmt.Errorf("bringing loopback up: %w", err)
	}
	// As in containerd: programs without capabilities may listen on port 80 and ping.
	for file, value := range map[string]string{
		"ip_unprivileged_port_start": "0",
		"ping_group_range":           fmt.Sprintf("%d %[1]d", os.Getegid()),
	} {
		if err := os.WriteFile("/proc/sys/net/ipv4/"+file, []byte(value), 0); err != nil {
			i.log(slog.LevelWarn, "cannot change a setting of the sandbox's network", "err", err.Error())
		}
	}
	return openTUN(Interface)
}

// openTUN creates the interface for tun.Adopt. It does not use tun.Create, which sets the queue length by an ioctl that
// needs CAP_NET_ADMIN in the initial namespace; pkg/host/route sets it by netlink, which needs it in this one only.
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
