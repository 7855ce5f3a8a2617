package gateway

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
)

// tunPath is where pkg/datapath/tun opens the device.
const tunPath = "/dev/net/tun"

// ensureTUN returns an error if this container cannot create TUN devices, which no retry changes. It creates the device
// file if the container has none, and opens it, because the runtime's device rules may forbid that.
func ensureTUN(path string) error {
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return api.Errorf(api.ExitNoTUN, "making the directory of %s: %w", path, err)
		}
		const major, minor = 10, 200 // devices.txt of the kernel
		err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(major, minor)))
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return api.Errorf(api.ExitNoTUN, "making %s: %w; the container needs the capability MKNOD", path, err)
		}
	} else if err != nil {
		return api.Errorf(api.ExitNoTUN, "looking for %s: %w", path, err)
	}
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return api.Errorf(api.ExitNoTUN,
			"opening %s: %w; the container runtime's device rules forbid it (runc 1.2.0 to 1.2.3 have such rules)",
			path, err)
	case errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return api.Errorf(api.ExitNoTUN,
			"opening %s: %w; the node's kernel has no TUN devices; run `modprobe tun` on the node", path, err)
	case err != nil:
		return api.Errorf(api.ExitNoTUN, "opening %s: %w", path, err)
	}
	return unix.Close(fd)
}
