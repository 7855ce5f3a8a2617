package guest

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// timerSlack is how much later than asked a timer of a guest's programs may fire. The runtime of a busy Go program
// sleeps 20 µs again and again (sysmon), and in a guest each sleep takes more of the processor than that.
const timerSlack = 4 * time.Millisecond

// Boot is the first process of a guest. It sets the guest up as the file says, and then reaps processes until the
// server has ended. It never returns: at the end, or after a failure, it switches the guest off.
func Boot(file string) {
	err := boot(file)
	if err != nil {
		fmt.Println("lab:", err)
	}
	fmt.Println("lab: switching off:", unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF))
}

func boot(file string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var c Config
	if err := json.Unmarshal(b, &c); err != nil {
		return fmt.Errorf("reading %s: %w", file, err)
	}
	self := os.Args[0] // the full path, from the kernel; /proc still belongs to the machine
	if err := ownRoot(); err != nil {
		return err
	}
	if err := mountSystem(); err != nil {
		return err
	}
	if err := mountConfigured(c); err != nil {
		return err
	}
	if err := c.write(self); err != nil {
		return err
	}
	for _, name := range c.Modules {
		if err := Modprobe(name); err != nil {
			return err
		}
	}
	if err := c.settle(); err != nil {
		return err
	}
	if err := c.connect(); err != nil {
		return err
	}
	server := exec.Command(self, "serve", netip.AddrPortFrom(c.Control.Addr(), Port).String(),
		fmt.Sprint(c.Control.Bits()))
	server.Stdout, server.Stderr = os.Stdout, os.Stderr
	server.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root",
		"LANG=C.UTF-8"}
	runtime.LockOSThread() // the children of a thread inherit its timer slack
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(timerSlack.Nanoseconds()), 0, 0, 0); err != nil {
		return fmt.Errorf("setting the timer slack: %w", err)
	}
	if err := server.Start(); err != nil {
		return fmt.Errorf("starting the server: %w", err)
	}
	for {
		pid, err := unix.Wait4(-1, nil, 0, nil)
		if pid == server.Process.Pid {
			return errors.New("the server has ended")
		}
		if err != nil && err != unix.EINTR {
			return fmt.Errorf("waiting for processes: %w", err)
		}
	}
}

// ownRoot mounts a writable layer in memory over the machine's files, and makes that the root.
func ownRoot() error {
	if err := Modprobe("overlay"); err != nil {
		return err
	}
	// Any directory that every machine has; its own content is not needed.
	const base = "/run"
	if err := unix.Mount("tmpfs", base, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mounting a tmpfs on %s: %w", base, err)
	}
	root := filepath.Join(base, "root")
	for _, dir := range []string{"upper", "work", "root"} {
		if err := os.Mkdir(filepath.Join(base, dir), 0o755); err != nil {
			return err
		}
	}
	options := strings.NewReplacer("BASE", base).Replace("lowerdir=/,upperdir=BASE/upper,workdir=BASE/work")
	if err := unix.Mount("overlay", root, "overlay", 0, options); err != nil {
		return fmt.Errorf("mounting an overlay on %s: %w", root, err)
	}
	if err := os.Chdir(root); err != nil {
		return err
	}
	// The old root covers the new one until it is unmounted: see pivot_root(2), "pivot_root(".", ".")".
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("changing the root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leaving the old root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	// kubelet and containerd pass mounts on to containers (mountPropagation).
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("sharing the root: %w", err)
	}
	return nil
}

func mountSystem() error {
	for _, m := range []struct{ kind, target, options string }{
		{"proc", "/proc", ""},
		{"sysfs", "/sys", ""},
		{"devtmpfs", "/dev", ""},
		{"devpts", "/dev/pts", "ptmxmode=666"},
		{"tmpfs", "/dev/shm", ""},
		{"cgroup2", "/sys/fs/cgroup", ""},
	} {
		if err := mountNew(m.kind, m.target, m.kind, 0, m.options); err != nil {
			return err
		}
	}
	for link, target := range map[string]string{"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1",
		"stderr": "fd/2"} {
		if err := os.Symlink(target, filepath.Join("/dev", link)); err != nil {
			return err
		}
	}
	return nil
}

func mountConfigured(c Config) error {
	for _, dir := range c.Hidden {
		// Use nearly all of the memory, because it contains the containers' files.
		if err := mountNew("tmpfs", dir, "tmpfs", 0, "mode=755,size=80%"); err != nil {
			return err
		}
	}
	for _, dir := range c.Visible {
		if err := mountNew("none", dir, "hostfs", unix.MS_RDONLY, dir); err != nil {
			return err
		}
	}
	return nil
}

// mountNew creates a directory and mounts a file system on it.
func mountNew(source, target, kind string, flags uintptr, options string) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(source, target, kind, flags, options); err != nil {
		return fmt.Errorf("mounting %s on %s: %w", kind, target, err)
	}
	return nil
}

// write writes the guest's own files.
func (c Config) write(self string) error {
	release, err := kernelRelease()
	if err != nil {
		return err
	}
	links := map[string]string{
		"/usr/sbin/modprobe":                       self, // Modprobe runs under this name; the machine may have none
		filepath.Join("/usr/lib/modules", release): filepath.Join(Modules, release),
		filepath.Join("/lib/modules", release):     filepath.Join(Modules, release), // where /lib is not /usr/lib
	}
	maps.Copy(links, c.Links)
	for link, target := range links {
		if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
			return err
		}
		if err := os.Remove(link); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if err := os.Symlink(target, link); err != nil {
			return err
		}
	}
	for file, content := range c.Files {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		// Replace an existing file, which may be a link to a hidden directory.
		if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
			return err
		}
	}
	return describeProcessor()
}

// describeProcessor adds to /proc/cpuinfo what user-mode Linux omits and kubelet needs to start.
func describeProcessor() error {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return err
	}
	const file = "/run/cpuinfo"
	text := strings.TrimRight(string(b), "\n") +
		"\ncpu MHz\t\t: 2000.000\nphysical id\t: 0\ncore id\t\t: 0\ncpu cores\t: 1\n"
	if err := os.WriteFile(file, []byte(text), 0o444); err != nil {
		return err
	}
	if err := unix.Mount(file, "/proc/cpuinfo", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mounting %s on /proc/cpuinfo: %w", file, err)
	}
	return nil
}

// settle sets the kernel's settings, the host name and the control groups.
func (c Config) settle() error {
	for _, s := range slices.Concat([]string{"kernel.modprobe=/usr/sbin/modprobe"}, c.Settings) {
		name, value, _ := strings.Cut(s, "=")
		if err := os.WriteFile("/proc/sys/"+strings.ReplaceAll(name, ".", "/"), []byte(value), 0o644); err != nil {
			return err
		}
	}
	if err := unix.Sethostname([]byte(c.Hostname)); err != nil {
		return fmt.Errorf("setting the host name: %w", err)
	}
	const root = "/sys/fs/cgroup"
	controllers, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
	if err != nil {
		return err
	}
	for _, group := range append([]string{""}, c.Groups...) {
		dir := filepath.Join(root, group)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		for controller := range strings.FieldsSeq(string(controllers)) {
			if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+controller),
				0o644); err != nil {
				return fmt.Errorf("delegating %s in %s: %w", controller, dir, err)
			}
		}
	}
	return nil
}

// connect brings up the network.
func (c Config) connect() error {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("opening netlink: %w", err)
	}
	defer handle.Close()
	if err := raise(handle, "lo", "lo", nil); err != nil {
		return err
	}
	if err := raise(handle, NetworkDevice, c.Network.Name, c.Network.Addresses); err != nil {
		return err
	}
	for _, r := range c.Network.Routes {
		if err := handle.RouteReplace(&netlink.Route{Dst: ipNet(r.To), Gw: net.IP(r.Via.AsSlice())}); err != nil {
			return fmt.Errorf("routing %s via %s: %w", r.To, r.Via, err)
		}
	}
	return nil
}

// raise names a link, gives it addresses and brings it up.
func raise(handle *netlink.Handle, device, name string, addresses []netip.Prefix) error {
	link, err := handle.LinkByName(device)
	if err != nil {
		return fmt.Errorf("finding %s: %w", device, err)
	}
	if name != device {
		if err := handle.LinkSetName(link, name); err != nil {
			return fmt.Errorf("naming %s %s: %w", device, name, err)
		}
	}
	for _, a := range addresses {
		if err := handle.AddrAdd(link, &netlink.Addr{IPNet: ipNet(a)}); err != nil {
			return fmt.Errorf("giving %s the address %s: %w", name, a, err)
		}
	}
	if err := handle.LinkSetUp(link); err != nil {
		return fmt.Errorf("bringing up %s: %w", name, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: net.IP(p.Addr().AsSlice()), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// listenApart listens on the control device in a separate network namespace. The guest's programs cannot see or change
// the network there, and their changes do not affect it.
func listenApart(address netip.AddrPort, bits int) (net.Listener, error) {
	type result struct {
		listener net.Listener
		err      error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends with this goroutine
		l, err := func() (net.Listener, error) {
			link, err := netlink.LinkByName(ControlDevice)
			if err != nil {
				return nil, fmt.Errorf("finding %s: %w", ControlDevice, err)
			}
			outer, err := netlink.NewHandle(unix.NETLINK_ROUTE)
			if err != nil {
				return nil, fmt.Errorf("opening netlink: %w", err)
			}
			defer outer.Close()
			apart, err := netns.New() // this thread is now in it
			if err != nil {
				return nil, fmt.Errorf("making a network namespace: %w", err)
			}
			defer apart.Close()
			if err := outer.LinkSetNsFd(link, int(apart)); err != nil {
				return nil, fmt.Errorf("moving %s: %w", ControlDevice, err)
			}
			inner, err := netlink.NewHandle(unix.NETLINK_ROUTE)
			if err != nil {
				return nil, fmt.Errorf("opening netlink: %w", err)
			}
			defer inner.Close()
			if err := raise(inner, ControlDevice, ControlDevice,
				[]netip.Prefix{netip.PrefixFrom(address.Addr(), bits)}); err != nil {
				return nil, err
			}
			return net.Listen("tcp", address.String())
		}()
		done <- result{l, err}
	}()
	r := <-done
	return r.listener, r.err
}
