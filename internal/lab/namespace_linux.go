package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const netnsDir = "/run/netns"

// onThread runs f on an operating-system thread that ends with it, so that f may change the thread's namespaces and
// control groups. What f starts (processes, sockets) keeps them. The process's first thread is never used: it stands
// for the whole process in /proc/self.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with this goroutine
		if unix.Gettid() != unix.Getpid() {
			done <- f()
			return
		}
		done <- onThread(f)
		runtime.UnlockOSThread()
	}()
	return <-done
}

// enterNet moves the current thread into a named network namespace.
func enterNet(name string) error {
	return enter(filepath.Join(netnsDir, name), unix.CLONE_NEWNET)
}

func enter(file string, kind int) error {
	fd, err := unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: file, Err: err}
	}
	defer unix.Close(fd)
	if err := unix.Setns(fd, kind); err != nil {
		return fmt.Errorf("entering %s: %w", file, err)
	}
	return nil
}

// createNet makes a named network namespace as `ip netns add` does, but leaves /run/netns as it is (ip turns it into
// a mount of its own, which stays).
func createNet(name string) error {
	if err := os.MkdirAll(netnsDir, 0o755); err != nil {
		return err
	}
	file := filepath.Join(netnsDir, name)
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	f.Close() // nothing was written
	return onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("making network namespace %s: %w", name, err)
		}
		if err := unix.Mount("/proc/thread-self/ns/net", file, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("naming network namespace %s: %w", name, err)
		}
		return nil
	})
}

// removeNet undoes createNet, as far as that went.
func removeNet(name string) error {
	file := filepath.Join(netnsDir, name)
	if err := unix.Unmount(file, unix.MNT_DETACH); err != nil && err != unix.EINVAL && err != unix.ENOENT {
		return fmt.Errorf("unmounting %s: %w", file, err)
	}
	if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	removeIfEmpty(netnsDir)
	return nil
}

// removeIfEmpty removes a directory that a lab may have made, unless something is in it or mounted on it. It is
// somebody's else then, and stays.
func removeIfEmpty(dir string) { _ = os.Remove(dir) }

// sysctl sets one of the current network namespace's settings: "net.ipv4.ip_forward", "1".
func sysctl(name, value string) error {
	return os.WriteFile("/proc/sys/"+strings.ReplaceAll(name, ".", "/"), []byte(value), 0o644)
}

// mountPoint is a line of /proc/self/mountinfo.
type mountPoint struct{ path, kind, options string }

// mounts lists the mounts of the current thread's mount namespace, in the order they were made.
func mounts() ([]mountPoint, error) {
	b, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, err
	}
	return parseMounts(string(b)), nil
}

func parseMounts(mountinfo string) []mountPoint {
	var points []mountPoint
	for line := range strings.Lines(mountinfo) {
		before, after, found := strings.Cut(line, " - ")
		fields, rest := strings.Fields(before), strings.Fields(after)
		if !found || len(fields) < 6 || len(rest) < 3 {
			continue // not a line that any kernel writes
		}
		points = append(points, mountPoint{path: unescapeMount(fields[4]), kind: rest[0], options: rest[2]})
	}
	return points
}

// unescapeMount undoes the octal escapes (\040 for a space) in a path of mountinfo.
func unescapeMount(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// below says whether path is dir or in it.
func below(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}
