package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const netnsDir = "/run/netns"

// onThread runs f on an operating-system thread that ends with it, so that f may change the thread's namespaces and
// control groups. Processes and sockets of f keep them. onThread never uses the process's first thread, which stands
// for the whole process in /proc/self.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends with this goroutine
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

// createNet creates a named network namespace like `ip netns add`.
func createNet(name string) error {
	unlock, err := lockNetns()
	if err != nil {
		return err
	}
	defer unlock()
	if err := shareNetns(); err != nil {
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

// shareNetns makes /run/netns a shared mount, unless it is one. The removal of a namespace then takes effect in all
// mount namespaces. Otherwise ip would mount it over our namespaces at its next `netns add`.
func shareNetns() error {
	err := unix.Mount("", netnsDir, "", unix.MS_SHARED|unix.MS_REC, "")
	if err == unix.EINVAL { // not yet a mount
		if err = unix.Mount(netnsDir, netnsDir, "", unix.MS_BIND|unix.MS_REC, ""); err == nil {
			err = unix.Mount("", netnsDir, "", unix.MS_SHARED|unix.MS_REC, "")
		}
	}
	if err != nil {
		return fmt.Errorf("sharing %s: %w", netnsDir, err)
	}
	return nil
}

// lockNetns locks the directory /run/netns against other programs, as ip does.
func lockNetns() (unlock func(), err error) {
	if err := os.MkdirAll(netnsDir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.Open(netnsDir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("locking %s: %w", netnsDir, err)
	}
	return func() { f.Close() }, nil
}

// removeNet undoes createNet, even if that failed midway. With the last namespace it also removes /run/netns.
func removeNet(name string) error {
	unlock, err := lockNetns()
	if err != nil {
		return err
	}
	defer unlock()
	file := filepath.Join(netnsDir, name)
	if err := unix.Unmount(file, unix.MNT_DETACH); err != nil && err != unix.EINVAL && err != unix.ENOENT {
		return fmt.Errorf("unmounting %s: %w", file, err)
	}
	err = os.Remove(file)
	if errors.Is(err, unix.EBUSY) {
		err = removeCovered(file)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if left, err := os.ReadDir(netnsDir); err != nil || len(left) > 0 {
		return err
	}
	if err := unix.Unmount(netnsDir, unix.MNT_DETACH); err != nil && err != unix.EINVAL {
		return fmt.Errorf("unmounting %s: %w", netnsDir, err)
	}
	removeIfEmpty(netnsDir)
	return nil
}

// removeCovered removes the file of a namespace that is mounted below another mount of /run/netns, where it cannot be
// unmounted. In a mount namespace without either mount, the file can be removed. The kernel then drops the mounts on it
// in all other mount namespaces.
func removeCovered(file string) error {
	return onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("making a mount namespace: %w", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("making mounts private: %w", err)
		}
		return uncover(file)
	})
}

// uncover unmounts /run/netns in the current thread's mount namespace until it can remove the file.
func uncover(file string) error {
	for {
		if err := unix.Unmount(file, unix.MNT_DETACH); err == nil {
			continue
		}
		err := os.Remove(file)
		if !errors.Is(err, unix.EBUSY) {
			return err
		}
		if err := unix.Unmount(netnsDir, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmounting %s: %w", netnsDir, err)
		}
	}
}

// forgetNamespaces unmounts the current mount namespace's copies of named namespaces. The copies would keep namespaces
// alive after their removal elsewhere. The mount namespace must be private.
func forgetNamespaces() error {
	for unix.Unmount(netnsDir, unix.MNT_DETACH) == nil {
		continue // the mount below it is next
	}
	points, err := mounts()
	if err != nil {
		return err
	}
	for _, m := range slices.Backward(points) {
		if m.kind != "nsfs" {
			continue
		}
		if err := unix.Unmount(m.path, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmounting %s: %w", m.path, err)
		}
	}
	return nil
}

// removeIfEmpty removes a directory that a lab may have created. If it contains something or is a mount point, another
// program uses it, and it stays.
func removeIfEmpty(dir string) { _ = os.Remove(dir) }

// sysctl sets a kernel setting of the current network namespace: "net.ipv4.ip_forward", "1".
func sysctl(name, value string) error {
	return os.WriteFile("/proc/sys/"+strings.ReplaceAll(name, ".", "/"), []byte(value), 0o644)
}

// mountPoint is a line of /proc/self/mountinfo.
type mountPoint struct{ path, kind, options string }

// mounts lists the mounts of the current thread's mount namespace in the order of their creation.
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

// unescapeMount decodes the octal escapes (\040 for a space) in a path of mountinfo.
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

// below reports whether path is dir or inside it.
func below(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}
