package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Allowed says what on this machine would refuse a sandbox, with a network of its own or without, as far as that can be known
// before one is tried. [New] asks it, too.
func Allowed(network bool) error {
	if err := namespacesAllowed(os.DirFS("/"), hasCapability(unix.CAP_SYS_ADMIN)); err != nil {
		return err
	}
	if !network {
		return nil
	}
	const device = "/dev/net/tun"
	switch err := unix.Access(device, unix.R_OK|unix.W_OK); {
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("%w: there is no %s: the kernel's module is missing (sudo modprobe tun), or this container was not given the device", ErrNoTUN, device)
	case err != nil:
		return fmt.Errorf("%w: %s: %w: it is for every user in most distributions (sudo chmod 0666 %[2]s)", ErrNoTUN, device, err)
	}
	return nil
}

// namespacesAllowed reads the machine's settings from root, the file system's.
func namespacesAllowed(root fs.FS, privileged bool) error {
	read := func(name string) string {
		b, err := fs.ReadFile(root, name)
		if err != nil {
			return "" // a kernel without the setting, or one that does not show it, does not refuse by it
		}
		return strings.TrimSpace(strings.TrimRight(string(b), "\x00"))
	}
	if read("proc/sys/user/max_user_namespaces") == "0" {
		return fmt.Errorf("%w: user namespaces are turned off: user.max_user_namespaces is 0 (sudo sysctl user.max_user_namespaces=15000)", ErrNotAllowed)
	}
	if privileged {
		return nil
	}
	if read("proc/sys/kernel/unprivileged_userns_clone") == "0" {
		return fmt.Errorf("%w: user namespaces are for root only: kernel.unprivileged_userns_clone is 0 (sudo sysctl kernel.unprivileged_userns_clone=1)", ErrNotAllowed)
	}
	// AppArmor lets a process make the namespace and then refuses it every capability there, unless the program's
	// profile has the rule "userns".
	label := read("proc/self/attr/apparmor/current")
	if label == "" {
		label = read("proc/self/attr/current")
	}
	if read("proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" && (label == "" || label == "unconfined") {
		program, err := os.Executable()
		if err != nil {
			program = "this program"
		}
		return fmt.Errorf("%w: AppArmor keeps user namespaces from programs without a profile: kernel.apparmor_restrict_unprivileged_userns is 1 "+
			"(give it a profile that says `profile kubevpn %s flags=(unconfined) { userns, }`, or sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0)", ErrNotAllowed, program)
	}
	return nil
}

// explain adds to the error of making the namespaces what may be the reason.
func explain(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EUSERS):
		return fmt.Errorf("%w: making the namespaces: %w: too many of them, or too deep (user.max_user_namespaces and its like)", ErrNotAllowed, err)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return fmt.Errorf("%w: making the namespaces: %w: a container's seccomp profile, a chroot or a security module may refuse them", ErrNotAllowed, err)
	}
	return fmt.Errorf("making the namespaces: %w", err)
}

// hasCapability says whether the calling thread has a capability, in its own user namespace.
func hasCapability(capability uint) bool {
	data, err := capabilities()
	return err == nil && data[capability/32].Effective&(1<<(capability%32)) != 0
}

func capabilities() ([2]unix.CapUserData, error) {
	var data [2]unix.CapUserData
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	err := unix.Capget(&header, &data[0])
	return data, err
}

// identity are the mappings with which a user or group ID is the same inside and outside. table is the content of the
// calling process's uid_map or gid_map; only who has the capability to may map more than its own ID.
func identity(id int, all bool, table string) ([]syscall.SysProcIDMap, error) {
	if !all {
		return []syscall.SysProcIDMap{{ContainerID: id, HostID: id, Size: 1}}, nil
	}
	var maps []syscall.SysProcIDMap
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) != 3 {
			return nil, fmt.Errorf("reading a map of user IDs: %q has not three numbers", line)
		}
		first, err1 := strconv.ParseUint(f[0], 10, 32)
		size, err2 := strconv.ParseUint(f[2], 10, 32)
		if err := errors.Join(err1, err2); err != nil {
			return nil, fmt.Errorf("reading a map of user IDs: %w", err)
		}
		maps = append(maps, syscall.SysProcIDMap{ContainerID: int(first), HostID: int(first), Size: int(size)})
	}
	if len(maps) == 0 {
		return nil, errors.New("reading a map of user IDs: it is empty")
	}
	return maps, nil
}
