package lab

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// The number of inotify instances that the lab's programs use, counted in /proc/PID/fd: containerd, kubelet and
// kube-proxy on each node, and the control plane. fs.inotify.max_user_instances limits the instances of a user.
// Debian's default is 128. The setting belongs to the whole machine, so the lab does not change it.
const (
	inotifyPerNode = 10
	inotifyShared  = 14
)

// checkInotify fails if the programs of a lab with this many nodes would run out of inotify instances and die with "too
// many open files". It creates as many instances as they use, and closes them again.
func checkInotify(nodes int) error {
	return tryInotify(nodes, func() (int, error) { return unix.InotifyInit1(unix.IN_CLOEXEC) })
}

func tryInotify(nodes int, open func() (int, error)) error {
	need := nodes*inotifyPerNode + inotifyShared
	fds := make([]int, 0, need)
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	for range need {
		fd, err := open()
		if errors.Is(err, unix.EMFILE) {
			limit, _ := os.ReadFile("/proc/sys/fs/inotify/max_user_instances") // only for the message
			return fmt.Errorf("only %d inotify instances are left for root, of %s, and %d nodes take up to %d: "+
				"take another lab down, or run 'sysctl -w fs.inotify.max_user_instances=1024'",
				len(fds), strings.TrimSpace(string(limit)), nodes, need)
		}
		if err != nil {
			return fmt.Errorf("making an inotify instance: %w", err)
		}
		fds = append(fds, fd)
	}
	return nil
}
