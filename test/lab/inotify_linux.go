package lab

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// The inotify instances that a lab's programs take, counted in /proc/PID/fd: containerd, kubelet and kube-proxy on each
// node, and the control plane. One user's instances are limited by fs.inotify.max_user_instances, which is Debian's 128
// and not the lab's to change: it is the whole machine's.
const (
	inotifyPerNode = 10
	inotifyShared  = 14
)

// checkInotify fails if the programs of a lab of this many nodes would run out of inotify instances: they die of it,
// with "too many open files". It takes as many as they will, and gives them back.
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
