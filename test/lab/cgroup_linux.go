package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const cgroupRoot = "/sys/fs/cgroup"

// cgroups are a lab's control groups. Under each hierarchy of the machine (one with cgroup v2):
//
//	kubevpn-lab-NAME/router            the router's services
//	kubevpn-lab-NAME/nodeN/daemons     etcd, API server, ..., containerd and its shims, kubelet, kube-proxy
//	kubevpn-lab-NAME/nodeN/kubepods    pods, by kubelet
//
// The groups limit nothing. The lab uses them to find every process.
type cgroups struct {
	name        string   // kubevpn-lab-NAME
	root        string   // the mount point of v2, if it is the only hierarchy
	hierarchies []string // the mount points of the hierarchies for processes: all of v1, or the one of v2
	all         []string // hierarchies, and v2 beside v1: runc creates groups there too
}

func newCgroups(lab string) (*cgroups, error) {
	c := &cgroups{name: "kubevpn-lab-" + lab}
	if _, err := os.Stat(filepath.Join(cgroupRoot, "cgroup.controllers")); err == nil {
		return unifiedCgroups(lab, cgroupRoot), nil
	}
	points, err := mounts()
	if err != nil {
		return nil, err
	}
	for _, m := range points {
		if m.kind == "cgroup" && !slices.Contains(c.hierarchies, m.path) {
			c.hierarchies = append(c.hierarchies, m.path)
		}
		if (m.kind == "cgroup" || m.kind == "cgroup2") && !slices.Contains(c.all, m.path) {
			c.all = append(c.all, m.path)
		}
	}
	if len(c.hierarchies) == 0 {
		return nil, fmt.Errorf("no control groups are mounted below %s", cgroupRoot)
	}
	return c, nil
}

func unifiedCgroups(lab, root string) *cgroups {
	return &cgroups{name: "kubevpn-lab-" + lab, root: root, hierarchies: []string{root}, all: []string{root}}
}

// unified reports whether the machine uses only cgroup v2.
func (c *cgroups) unified() bool { return c.root != "" }

// create creates the group of a place, and the group "daemons" in it if the place is a node.
func (c *cgroups) create(place string, node bool) error {
	for _, h := range c.hierarchies {
		dirs := []string{c.name, place}
		if node {
			dirs = append(dirs, "daemons")
		}
		dir := h
		for i, d := range dirs {
			if c.unified() && (i == 0 || node) {
				if err := c.delegate(dir); err != nil {
					return err
				}
			}
			parent := dir
			dir = filepath.Join(dir, d)
			if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
				return err
			}
			if err := inheritCPUs(parent, dir); err != nil {
				return err
			}
		}
	}
	return nil
}

// delegate lets children of a v2 group use all its controllers.
func (c *cgroups) delegate(dir string) error {
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return err
	}
	for controller := range strings.FieldsSeq(string(b)) {
		err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+controller), 0o644)
		if err != nil && dir != c.root { // in the root a controller may be in use by v1, or taken by real-time tasks
			return fmt.Errorf("delegating %s in %s: %w", controller, dir, err)
		}
	}
	return nil
}

// inheritCPUs initializes a new v1 cpuset, which accepts no process before that.
func inheritCPUs(parent, dir string) error {
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		b, err := os.ReadFile(filepath.Join(parent, file))
		if errors.Is(err, os.ErrNotExist) {
			continue // another controller's hierarchy, or v2's root
		}
		if err != nil {
			return err
		}
		if len(strings.TrimSpace(string(b))) == 0 {
			continue // v2: empty means the parent's
		}
		if err := os.WriteFile(filepath.Join(dir, file), b, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// daemons returns the group of a place's own processes, relative to a hierarchy.
func (c *cgroups) daemons(place string) string {
	if strings.HasPrefix(place, "node") {
		return filepath.Join(c.name, place, "daemons")
	}
	return filepath.Join(c.name, place)
}

// enterThread moves the current thread into a place's groups if v1 is in use. Its child processes start there.
func (c *cgroups) enterThread(place string) error {
	if c.unified() {
		return nil // see open
	}
	tid := strconv.Itoa(unix.Gettid())
	for _, h := range c.hierarchies {
		if err := os.WriteFile(filepath.Join(h, c.daemons(place), "tasks"), []byte(tid), 0o644); err != nil {
			return fmt.Errorf("entering control group: %w", err)
		}
	}
	return nil
}

// open returns the directory of a place's v2 group for clone3's CLONE_INTO_CGROUP, or nil if v1 is in use.
func (c *cgroups) open(place string) (*os.File, error) {
	if !c.unified() {
		return nil, nil
	}
	return os.Open(filepath.Join(c.root, c.daemons(place)))
}

// exists reports whether any of the lab's groups exists.
func (c *cgroups) exists() bool {
	return slices.ContainsFunc(c.all, func(h string) bool {
		_, err := os.Stat(filepath.Join(h, c.name))
		return err == nil
	})
}

// processes lists all processes in the lab's groups. With v1 it also lists processes that have a thread there, such as
// this one just after it has started a program.
func (c *cgroups) processes() ([]int, error) {
	var pids []int
	for _, h := range c.all {
		err := c.walk(h, func(dir string) error {
			b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) {
				return nil // another process has removed it
			}
			if err != nil {
				return err
			}
			for word := range strings.FieldsSeq(string(b)) {
				if pid, err := strconv.Atoi(word); err == nil && pid > 0 {
					pids = append(pids, pid)
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

// remove removes all groups of the lab. The kernel releases them shortly after their last process ends.
func (c *cgroups) remove() error {
	deadline := time.Now().Add(10 * time.Second)
	for {
		err := c.removeOnce()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (c *cgroups) removeOnce() error {
	for _, h := range c.all {
		var dirs []string
		err := c.walk(h, func(dir string) error { dirs = append(dirs, dir); return nil })
		if err != nil {
			return err
		}
		slices.Reverse(dirs) // children first
		for _, dir := range dirs {
			if err := unix.Rmdir(dir); err != nil && err != unix.ENOENT {
				return fmt.Errorf("removing control group %s: %w", dir, err)
			}
		}
	}
	return nil
}

// walk calls visit for the lab's group in a hierarchy and all below, parents first.
func (c *cgroups) walk(hierarchy string, visit func(dir string) error) error {
	err := filepath.WalkDir(filepath.Join(hierarchy, c.name), func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if !d.IsDir() {
			return nil
		}
		return visit(path)
	})
	return err
}
