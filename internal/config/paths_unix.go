//go:build unix

package config

import (
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"syscall"
)

func systemDirs() dirs {
	home, err := os.UserHomeDir()
	if err != nil {
		home = "" // place returns an error if it needs the directory
	}
	if os.Geteuid() == 0 {
		run := "/run/kubevpn"
		if runtime.GOOS != "linux" {
			run = "/var/run/kubevpn"
		}
		return dirs{home: home, runtime: run, state: "/var/lib/kubevpn"}
	}
	// /tmp, not $TMPDIR: all processes of the user must use the same directory, and that of macOS is too long for
	// sockets.
	return dirs{home: home, runtime: "/tmp/kubevpn-" + strconv.Itoa(os.Geteuid())}
}

// checkOwner returns an error unless the user of this process owns the file.
func checkOwner(path string, info fs.FileInfo) error {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("cannot determine the owner of %s", path)
	}
	if uid := os.Geteuid(); int(stat.Uid) != uid {
		return fmt.Errorf("%s belongs to user %d, not to user %d", path, stat.Uid, uid)
	}
	return nil
}

// checkMode returns an error if other users can access the file or directory. The error names the mode want.
func checkMode(path string, info fs.FileInfo, want fs.FileMode) error {
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return fmt.Errorf("%s has mode %04o, but must not be accessible to others (%04o)", path, mode, want)
	}
	return nil
}
