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
		home = "" // place says what to do where it is needed
	}
	if os.Geteuid() == 0 {
		run := "/run/kubevpn"
		if runtime.GOOS != "linux" {
			run = "/var/run/kubevpn"
		}
		return dirs{home: home, runtime: run, state: "/var/lib/kubevpn"}
	}
	// /tmp, not $TMPDIR: every process of the user must find the same place, and macOS's is too long for sockets.
	return dirs{home: home, runtime: "/tmp/kubevpn-" + strconv.Itoa(os.Geteuid())}
}

// checkOwner is an error unless this process's user owns the file.
func checkOwner(path string, info fs.FileInfo) error {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("the owner of %s is not known", path)
	}
	if uid := os.Geteuid(); int(stat.Uid) != uid {
		return fmt.Errorf("%s belongs to user %d, and this is user %d", path, stat.Uid, uid)
	}
	return nil
}

// checkMode is an error unless only the owner may enter the directory.
func checkMode(path string, info fs.FileInfo) error {
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return fmt.Errorf("%s has mode %04o, and must be closed to others (0700)", path, mode)
	}
	return nil
}
