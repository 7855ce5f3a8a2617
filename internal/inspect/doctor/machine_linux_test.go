package doctor

import (
	"io/fs"
	"syscall"
	"testing"
	"testing/fstest"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
)

func TestKernelOf(t *testing.T) {
	finding{fine, 0, "Linux 6.1.0-13-amd64", ""}.check(t, kernelOf("6.1.0-13-amd64", ""))
	finding{fine, 0, "WSL 2", ""}.check(t, kernelOf("5.15.167.4-microsoft-standard-WSL2", "WSL 2"))
	finding{fine, 0, "Linux 5.4.0", ""}.check(t, kernelOf("5.4.0", ""))
	finding{fails, api.ExitNoTUN, "WSL 1", "wsl --set-version"}.check(t, kernelOf("4.4.0-19041-Microsoft", "WSL 1"))
	finding{fine, 0, "Linux odd", ""}.check(t, kernelOf("odd", ""))
}

func TestNFTablesNeedTablesThatEndWithTheirProcess(t *testing.T) {
	finding{warns, 0, "Linux 5.4.0 is older than 5.12", "upgrade the kernel"}.check(t, nftablesOf("5.4.0"))
}

func TestDeviceIn(t *testing.T) {
	device := func(major, minor uint32) *fstest.MapFile {
		return &fstest.MapFile{Mode: fs.ModeDevice | fs.ModeCharDevice,
			Sys: &syscall.Stat_t{Mode: unix.S_IFCHR, Rdev: unix.Mkdev(major, minor)}}
	}
	file := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }
	tun := device(tunMajor, tunMinor)
	for name, tt := range map[string]struct {
		root      fstest.MapFS
		container bool
		want      finding
	}{
		"loaded":            {root: fstest.MapFS{tunPath: tun, "proc/misc": file("229 fuse\n200 tun\n"), "lib/modules/6.1/modules.dep": file("")}, want: finding{fine, 0, "has its driver or loads it", ""}},
		"a module":          {root: fstest.MapFS{tunPath: tun, "lib/modules/6.1/modules.dep": file("kernel/drivers/net/tun.ko.xz:\n")}, want: finding{fine, 0, "has its driver or loads it", ""}},
		"built in":          {root: fstest.MapFS{tunPath: tun, "lib/modules/6.1/modules.builtin": file("kernel/drivers/net/tun.ko\n")}, want: finding{fine, 0, "has its driver or loads it", ""}},
		"unknown":           {root: fstest.MapFS{tunPath: tun}, want: finding{fine, 0, "has its driver or loads it", ""}},
		"no module":         {root: fstest.MapFS{tunPath: tun, "lib/modules/6.1/modules.dep": file("kernel/net/vtun.ko.other:\n")}, want: finding{fails, api.ExitNoTUN, "no module tun", "modprobe tun"}},
		"no file":           {root: fstest.MapFS{}, want: finding{fails, api.ExitNoTUN, "does not exist", "modprobe tun"}},
		"in a container":    {root: fstest.MapFS{}, container: true, want: finding{fails, api.ExitNoTUN, "does not exist", "--device /dev/net/tun"}},
		"/dev/null instead": {root: fstest.MapFS{tunPath: device(1, 3)}, want: finding{fails, api.ExitNoTUN, "something else", "modprobe tun"}},
	} {
		t.Run(name, func(t *testing.T) { tt.want.check(t, deviceIn(tt.root, "6.1", tt.container)) })
	}
}

func TestPortsIn(t *testing.T) {
	in := func(text string) api.Finding {
		return portsIn(fstest.MapFS{"proc/sys/net/ipv4/ip_local_port_range": {Data: []byte(text)}})
	}
	finding{fine, 0, "28232 local ports", ""}.check(t, in("32768\t60999\n"))
	finding{warns, 0, "only 200 local ports", "sysctl"}.check(t, in("40000\t40199\n"))
	finding{passed, 0, "cannot read", ""}.check(t, in(""))
	finding{passed, 0, "cannot read", ""}.check(t, in("a b"))
}

func TestNewerReleasesAreAtLeast(t *testing.T) {
	for release, want := range map[string]bool{"5.12.0": true, "5.11.9": false, "6.0-rc1": true, "4.19.0-26-amd64": false, "": true} {
		if got := atLeast(release, 5, 12); got != want {
			t.Errorf("atLeast(%q) = %v", release, got)
		}
	}
}
