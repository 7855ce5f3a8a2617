package files

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// enter becomes the user of the container's first process, and returns the directory that is the container's root. The
// kernel lets a process look at the root of another if it has the same user and at least its capabilities
// (PTRACE_MODE_READ_FSCREDS of ptrace(2)).
func enter(container string) (string, error) {
	pids, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return "", err
	}
	slices.SortStableFunc(pids, func(a, b string) int { return len(a) - len(b) })
	var hidden error
	for _, pid := range pids {
		u, err := userOf(pid)
		if err != nil {
			continue // it has ended
		}
		mounts, err := u.read(pid + "/mountinfo")
		if err != nil {
			hidden = err
			continue
		}
		// The kubelet mounts a file of this directory in each container: /dev/termination-log.
		if strings.Contains(mounts, "/containers/"+container+"/") {
			return pid + "/root", u.become()
		}
	}
	if hidden == nil {
		hidden = errors.New("no process of it is seen")
	}
	return "", unseen(hidden)
}

// errUnseen means that another way to the files may work.
var errUnseen = errors.New("kubevpn cannot look into the container")

func unseen(err error) error { return fmt.Errorf("%w: %w", errUnseen, err) }

// user has the IDs of a process.
type user struct {
	uid, gid int
	groups   []int
}

func userOf(pid string) (u user, err error) {
	b, err := os.ReadFile(pid + "/status")
	if err != nil {
		return u, err
	}
	for line := range strings.Lines(string(b)) {
		name, rest, _ := strings.Cut(line, ":")
		var ids []int
		for _, f := range strings.Fields(rest) {
			id, _ := strconv.Atoi(f) // other lines have no numbers
			ids = append(ids, id)
		}
		switch {
		case name == "Uid" && len(ids) == 4:
			u.uid = ids[1]
		case name == "Gid" && len(ids) == 4:
			u.gid = ids[1]
		case name == "Groups":
			u.groups = ids
		}
	}
	return u, nil
}

// read reads a file as the user.
func (u user) read(name string) (text string, err error) {
	if os.Geteuid() == 0 && u.uid != 0 {
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
			if err = unix.Setfsgid(u.gid); err == nil {
				err = unix.Setfsuid(u.uid)
			}
			if err == nil {
				text, err = readFile(name)
			}
		}()
		<-done
		return text, err
	}
	return readFile(name)
}

func readFile(name string) (string, error) {
	b, err := os.ReadFile(name)
	return string(b), err
}

// become makes this process one of the user's, if it may.
func (u user) become() error {
	if os.Geteuid() != 0 || u.uid == 0 {
		return nil
	}
	for _, err := range []error{syscall.Setgroups(u.groups), syscall.Setgid(u.gid), syscall.Setuid(u.uid)} {
		if err != nil {
			return unseen(fmt.Errorf("becoming its user %d: %w", u.uid, err))
		}
	}
	return nil
}
