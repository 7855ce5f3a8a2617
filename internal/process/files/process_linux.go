package files

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
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
	for _, pid := range pids {
		// The kubelet mounts a file of this directory in each container: /dev/termination-log.
		mounts, err := os.ReadFile(pid + "/mountinfo")
		if err != nil || !bytes.Contains(mounts, []byte("/containers/"+container+"/")) {
			continue // also if it has ended
		}
		return pid + "/root", become(pid)
	}
	return "", fmt.Errorf("%w: no process of it is seen", errUnseen)
}

// errUnseen means that another way to the files may work.
var errUnseen = errors.New("kubevpn cannot look into the container")

// become gives this process the user and the groups of another, if it may.
func become(pid string) error {
	u, err := userOf(pid)
	if err == nil && os.Geteuid() == 0 && u.uid != 0 {
		err = errors.Join(syscall.Setgroups(u.groups), syscall.Setgid(u.gid), syscall.Setuid(u.uid))
	}
	if err != nil {
		err = fmt.Errorf("%w: becoming its user: %w", errUnseen, err)
	}
	return err
}

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
