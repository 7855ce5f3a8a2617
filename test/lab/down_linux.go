package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// Down removes the lab in any state, including partial remains. It reports whether there was anything to remove.
func (l *Lab) Down() (bool, error) {
	if err := l.config.validate(); err != nil {
		return false, err
	}
	if os.Geteuid() != 0 {
		return false, errors.New("removing a lab needs root")
	}
	unlock, err := l.lock()
	if err != nil {
		return false, err
	}
	defer unlock()
	if l.cgroups, err = newCgroups(l.config.Name); err != nil {
		return false, err
	}
	left, err := l.remains()
	if err != nil || len(left) == 0 {
		return false, err
	}
	return true, l.remove()
}

// remains lists the parts of the lab on this machine, for messages.
func (l *Lab) remains() ([]string, error) {
	var left []string
	if _, err := os.Stat(l.dir()); err == nil {
		left = append(left, l.dir())
	}
	for _, dir := range []string{netnsDir, etcNetns} {
		names, err := l.namesIn(dir)
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			left = append(left, filepath.Join(dir, name))
		}
	}
	if l.cgroups.exists() {
		left = append(left, "control groups "+l.cgroups.name)
	}
	return left, nil
}

// namesIn lists the entries of a directory that have the name of one of the lab's namespaces, for any number of nodes,
// or the name of a namespace that a suite adds and may leave: another laptop, a Docker Engine.
func (l *Lab) namesIn(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	ours := regexp.MustCompile("^" + regexp.QuoteMeta(l.config.Name) + "-(laptop2?|docker|router|control|node[0-9]+)$")
	var names []string
	for _, e := range entries {
		if ours.MatchString(e.Name()) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// remove removes everything that remains lists: first the processes, then what they used.
func (l *Lab) remove() error {
	done := l.progress.step("removing lab %q", l.config.Name)
	err := l.removeAll()
	done(err)
	return err
}

func (l *Lab) removeAll() error {
	s, err := readState(l.stateFile())
	if err != nil {
		s = state{} // missing or incomplete: control groups and namespaces list the processes too
	}
	if err := killAll(func() ([]int, error) { return l.allProcesses(s.Processes) }); err != nil {
		return err
	}
	namespaces, err := l.namesIn(netnsDir)
	if err != nil {
		return err
	}
	for _, name := range namespaces {
		if err := removeNet(name); err != nil {
			return err
		}
	}
	files, err := l.namesIn(etcNetns)
	if err != nil {
		return err
	}
	for _, name := range files {
		if err := os.RemoveAll(filepath.Join(etcNetns, name)); err != nil {
			return err
		}
	}
	if len(files) > 0 {
		removeIfEmpty(etcNetns)
	}
	if err := l.cgroups.remove(); err != nil {
		return err
	}
	if err := removeTree(l.dir()); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state = state{}
	return nil
}

// allProcesses lists the live processes of the lab: those in the state, in its control groups and in its network
// namespaces. The network namespaces also contain what tests and users started on the laptop.
func (l *Lab) allProcesses(noted []Process) ([]int, error) {
	pids, err := l.cgroups.processes()
	if err != nil {
		return nil, err
	}
	for _, p := range noted {
		if p.Running() {
			pids = append(pids, p.PID)
		}
	}
	names, err := l.namesIn(netnsDir)
	if err != nil {
		return nil, err
	}
	inside, err := processesIn(names)
	if err != nil {
		return nil, err
	}
	pids = append(pids, inside...)
	slices.Sort(pids)
	pids = slices.Compact(pids)
	self := os.Getpid()
	return slices.DeleteFunc(pids, func(pid int) bool { return pid == self || zombie(pid) }), nil
}

func zombie(pid int) bool {
	_, dead, err := processStart(pid)
	return err != nil || dead
}

// processesIn lists the processes in the named network namespaces.
func processesIn(namespaces []string) ([]int, error) {
	type id struct{ device, inode uint64 }
	wanted := map[id]bool{}
	var own unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &own); err != nil {
		return nil, err
	}
	for _, name := range namespaces {
		var s unix.Stat_t
		if err := unix.Stat(filepath.Join(netnsDir, name), &s); err != nil {
			return nil, fmt.Errorf("looking at network namespace %s: %w", name, err)
		}
		wanted[id{s.Dev, s.Ino}] = true
	}
	// A plain file without a mounted namespace has no processes.
	delete(wanted, id{own.Dev, own.Ino})
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		var s unix.Stat_t
		if unix.Stat(filepath.Join("/proc", e.Name(), "ns/net"), &s) == nil && wanted[id{s.Dev, s.Ino}] {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// removeTree removes a directory after unmounting everything below it, so that it never removes files through a mount.
func removeTree(dir string) error {
	points, err := mounts()
	if err != nil {
		return err
	}
	for _, m := range slices.Backward(points) {
		if !below(m.path, dir) {
			continue
		}
		if err := unix.Unmount(m.path, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmounting %s: %w", m.path, err)
		}
	}
	return os.RemoveAll(dir)
}
