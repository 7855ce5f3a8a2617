package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"
	utilversion "k8s.io/apimachinery/pkg/util/version"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/check"
	"kubevpn/pkg/host/netfilter"
	"kubevpn/pkg/host/sandbox"
)

const (
	tunPath = "dev/net/tun"
	// tunNumber is the device number of /dev/net/tun: see devices.txt of Linux.
	tunMajor, tunMinor = 10, 200
	// leastPorts is the number of local ports below which programs with many flows run out of them.
	leastPorts = 2000
	// leastSpace is the free space that the log needs, in bytes.
	leastSpace = 16 << 20
	// inContainer is the command that gives a container what it needs.
	inContainer = "docker run --cap-add NET_ADMIN --device /dev/net/tun ...\n" + withoutDevice
	// ownerMajor and ownerMinor are the first Linux whose nftables tables end with their process.
	ownerMajor, ownerMinor = 5, 12
)

func release() string {
	text, _ := os.ReadFile("/proc/sys/kernel/osrelease") // without it, any release will do
	return strings.TrimSpace(string(text))
}

func kernel(_ context.Context, f *facts) api.Finding { return kernelOf(release(), f.Machine) }

func kernelOf(release, machine string) api.Finding {
	if strings.HasSuffix(machine, " 1") { // WSL 1
		return broken(api.ExitNoTUN, "`kubevpn connect` cannot create its device",
			"wsl --set-version DISTRIBUTION 2   # in Windows\n"+withoutDevice,
			"this is %s, which has no Linux kernel", machine)
	}
	return check.OK("Linux %s, %s %s", release, runtime.GOARCH, machine)
}

// atLeast reports whether a release such as 6.1.0-13-amd64 is of a version or later. It accepts what it cannot read.
func atLeast(release string, major, minor uint) bool {
	v, err := utilversion.ParseGeneric(release)
	return err != nil || v.AtLeast(utilversion.MajorMinor(major, minor))
}

func device(_ context.Context, f *facts) api.Finding {
	return deviceIn(os.DirFS("/"), release(), f.Machine == "container")
}

// deviceIn checks /dev/net/tun below root without opening it, because that would load the module.
func deviceIn(root fs.FS, release string, container bool) api.Finding {
	isTUN := func(info fs.FileInfo) bool {
		stat, known := info.Sys().(*syscall.Stat_t)
		return !known || stat.Mode&unix.S_IFMT == unix.S_IFCHR && stat.Rdev == unix.Mkdev(tunMajor, tunMinor)
	}
	misc, _ := fs.ReadFile(root, "proc/misc") // has drivers that modules.builtin may not list
	has, known := hasModule(root, release, "tun")
	var cause string
	switch info, err := fs.Stat(root, tunPath); {
	case errors.Is(err, fs.ErrNotExist):
		cause = "does not exist"
	case err != nil:
		cause = "cannot be checked: " + err.Error()
	case !isTUN(info):
		cause = "is not a TUN device: something else is in its place"
	case known && !has && !strings.Contains(string(misc), " tun\n"):
		cause = "has no driver: Linux " + release + " has no module tun"
	default:
		return check.OK("/%s; the kernel has its driver or loads it", tunPath)
	}
	fix := "sudo modprobe tun"
	if container {
		fix = inContainer
	}
	return broken(api.ExitNoTUN, "`kubevpn connect` fails; `kubevpn connect --socks` and `kubevpn run --socks` work",
		fix, "/%s %s", tunPath, cause)
}

// hasModule reports whether the kernel has a module, loaded or not. known is false if the machine does not tell.
func hasModule(root fs.FS, release, name string) (has, known bool) {
	_, err := fs.Stat(root, "sys/module/"+name)
	has, known = err == nil, err == nil
	for _, list := range []string{"modules.builtin", "modules.dep"} {
		text, err := fs.ReadFile(root, path.Join("lib/modules", release, list))
		has, known = has || strings.Contains(string(text), "/"+name+".ko"), known || err == nil
	}
	return has, known
}

// lacksNFTables returns why a root helper cannot use nftables, or nil. known is false if only root can tell.
func lacksNFTables(release string) (err error, known bool) {
	if !atLeast(release, ownerMajor, ownerMinor) {
		return fmt.Errorf("Linux %s is older than %d.%d", release, ownerMajor, ownerMinor), true
	}
	if sandbox.HasCapability(unix.CAP_NET_ADMIN) {
		return netfilter.Available(), true
	}
	has, known := hasModule(os.DirFS("/"), release, "nf_tables")
	if known && !has {
		return errors.New("the kernel has no module nf_tables"), true
	}
	return nil, has
}

func nftables(context.Context, *facts) api.Finding { return nftablesOf(release()) }

func nftablesOf(release string) api.Finding {
	err, known := lacksNFTables(release)
	switch {
	case err != nil:
		return warning("without systemd-resolved, kubevpn edits resolv.conf; neighbours of a machine that forwards "+
			"packets can enter the tunnel", "sudo modprobe nf_tables   # or upgrade the kernel",
			"nftables cannot be used: %v", err)
	case !known:
		return check.Skipped("only root can see whether the kernel has nf_tables; most have it")
	}
	return check.OK("the kernel has nf_tables")
}

// rootCapability checks whether root may configure networks, which a container can forbid.
func rootCapability() api.Finding {
	if !sandbox.HasCapability(unix.CAP_NET_ADMIN) {
		return broken(api.ExitNetwork, "`kubevpn connect` cannot create its device", inContainer,
			"this is root without the capability NET_ADMIN")
	}
	return check.OK("this is root, with the capability NET_ADMIN")
}

// storage checks the directory of the daemon's log, keys and trusted clusters.
func storage(_ context.Context, f *facts) api.Finding {
	dir := f.Paths.StateDir
	for _, err := os.Stat(dir); err != nil && dir != filepath.Dir(dir); _, err = os.Stat(dir) {
		dir = filepath.Dir(dir) // the nearest one that exists
	}
	const effect = "the daemon cannot write its log and its key"
	const fix = "XDG_STATE_HOME=/a/directory/with/space kubevpn connect"
	if err := unix.Access(dir, unix.W_OK); err != nil {
		return broken(api.ExitDaemon, effect, fix, "cannot write to %s: %v", dir, err)
	}
	var stat unix.Statfs_t
	if err := unix.Statfs(dir, &stat); err != nil {
		return check.Skipped("cannot read the free space of %s: %v", dir, err)
	}
	free := stat.Bavail * uint64(stat.Bsize)
	if free < leastSpace {
		return broken(api.ExitDaemon, effect, fix, "%s has only %s of free space", dir, humanize.IBytes(free))
	}
	return check.OK("%s of free space in %s", humanize.IBytes(free), dir)
}

func ports(context.Context, *facts) api.Finding { return portsIn(os.DirFS("/")) }

// portsIn checks the range of the machine's local ports.
func portsIn(root fs.FS) api.Finding {
	const setting = "proc/sys/net/ipv4/ip_local_port_range"
	text, _ := fs.ReadFile(root, setting)
	var low, high int
	if _, err := fmt.Sscan(string(text), &low, &high); err != nil {
		return check.Skipped("cannot read /%s: %v", setting, err)
	}
	if n := high - low + 1; n < leastPorts {
		return warning("programs with many connections fail with \"cannot assign requested address\"",
			"sudo sysctl net.ipv4.ip_local_port_range='32768 60999'",
			"this machine has only %d local ports for outgoing connections (%d to %d)", n, low, high)
	}
	return check.OK("%d local ports for outgoing connections", high-low+1)
}
