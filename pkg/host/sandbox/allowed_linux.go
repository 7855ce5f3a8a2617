package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Allowed returns an error if a setting of this machine forbids sandboxes, or sandboxes with their own network. It
// cannot detect every restriction. [New] calls it.
func Allowed(network bool) error {
	if err := namespacesAllowed(os.DirFS("/"), HasCapability(unix.CAP_SYS_ADMIN)); err != nil {
		return err
	}
	if !network {
		return nil
	}
	const device = "/dev/net/tun"
	switch err := unix.Access(device, unix.R_OK|unix.W_OK); {
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("%w: %s does not exist: load the kernel module (sudo modprobe tun), or pass the device to "+
			"this container",
			ErrNoTUN, device)
	case err != nil:
		return fmt.Errorf("%w: cannot open %s: %w; allow every user, as most distributions do (sudo chmod 0666 %[2]s)",
			ErrNoTUN, device, err)
	}
	return nil
}

// namespacesAllowed checks the settings for user namespaces below root, which is the root directory.
func namespacesAllowed(root fs.FS, privileged bool) error {
	read := func(name string) string {
		b, err := fs.ReadFile(root, name)
		if err != nil {
			return "" // the kernel does not have the setting
		}
		return strings.TrimSpace(strings.TrimRight(string(b), "\x00"))
	}
	if read("proc/sys/user/max_user_namespaces") == "0" {
		return fmt.Errorf("%w: user namespaces are turned off: user.max_user_namespaces is 0 "+
			"(sudo sysctl user.max_user_namespaces=15000)", ErrNotAllowed)
	}
	if privileged {
		return nil
	}
	if read("proc/sys/kernel/unprivileged_userns_clone") == "0" {
		return fmt.Errorf("%w: only root may create user namespaces: kernel.unprivileged_userns_clone is 0 "+
			"(sudo sysctl kernel.unprivileged_userns_clone=1)", ErrNotAllowed)
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
		return fmt.Errorf("%w: AppArmor forbids user namespaces to programs without a profile: "+
			"kernel.apparmor_restrict_unprivileged_userns is 1 "+
			"(load the profile `profile kubevpn %s flags=(unconfined) { userns, }`, "+
			"or sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0)", ErrNotAllowed, program)
	}
	return nil
}

// explain adds the possible cause to an error of clone.
func explain(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EUSERS):
		return fmt.Errorf("%w: creating namespaces: %w: too many, or nested too deep (see the sysctls "+
			"user.max_*_namespaces)",
			ErrNotAllowed, err)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return fmt.Errorf("%w: creating namespaces: %w: a seccomp profile, a chroot or a security module may forbid "+
			"them",
			ErrNotAllowed, err)
	}
	return fmt.Errorf("creating namespaces: %w", err)
}

// HasCapability reports whether the calling thread has a capability in its user namespace.
func HasCapability(capability uint) bool {
	data, err := capabilities()
	return err == nil && data[capability/32].Effective&(1<<(capability%32)) != 0
}

func capabilities() ([2]unix.CapUserData, error) {
	var data [2]unix.CapUserData
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	err := unix.Capget(&header, &data[0])
	return data, err
}

// identity returns mappings that keep user or group IDs the same inside and outside. Without all it maps only id, which
// needs no capability. table is the content of this process's uid_map or gid_map.
func identity(id int, all bool, table string) ([]syscall.SysProcIDMap, error) {
	if !all {
		return []syscall.SysProcIDMap{{ContainerID: id, HostID: id, Size: 1}}, nil
	}
	var maps []syscall.SysProcIDMap
	for line := range strings.Lines(table) {
		var first, outside, size uint32
		if _, err := fmt.Sscanf(line, "%d%d%d\n", &first, &outside, &size); err != nil {
			return nil, fmt.Errorf("reading a map of user IDs: %q: %w", line, err)
		}
		maps = append(maps, syscall.SysProcIDMap{ContainerID: int(first), HostID: int(first), Size: int(size)})
	}
	if len(maps) == 0 {
		return nil, errors.New("reading a map of user IDs: it is empty")
	}
	return maps, nil
}
