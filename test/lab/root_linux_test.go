package lab

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
)

func netID(t *testing.T, file string) uint64 {
	t.Helper()
	var s unix.Stat_t
	if err := unix.Stat(file, &s); err != nil {
		t.Fatal(err)
	}
	return s.Ino
}

func TestNetNamespacesAreCreatedAndRemoved(t *testing.T) {
	testenv.NeedRoot(t)
	name := fmt.Sprintf("lab-test-%d", os.Getpid())
	own := netID(t, "/proc/self/ns/net")
	if err := createNet(name); err != nil {
		t.Fatal(err)
	}
	defer removeNet(name)
	if err := createNet(name); !errors.Is(err, os.ErrExist) {
		t.Errorf("a second one of the name: %v", err)
	}
	created := netID(t, filepath.Join(netnsDir, name))
	command := exec.Command("sleep", "60")
	err := onThread(func() error {
		if err := enterNet(name); err != nil {
			return err
		}
		return command.Start()
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := netID(t, fmt.Sprintf("/proc/%d/ns/net", command.Process.Pid)); got != created || got == own {
		t.Errorf("a process is in namespace %d, not %d", got, created)
	}
	if got := netID(t, "/proc/self/ns/net"); got != own {
		t.Error("this process has changed its namespace")
	}
	pids, err := processesIn([]string{name})
	if err != nil || !slices.Equal(pids, []int{command.Process.Pid}) {
		t.Errorf("processes in it: %v, %v", pids, err)
	}
	if err := kill(command.Process.Pid); err != nil {
		t.Error(err)
	}
	_ = command.Wait() // the signal makes it fail
	for range 2 {
		if err := removeNet(name); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(filepath.Join(netnsDir, name)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left: %v", err)
	}
}

// TestRemoveCoveredRemovesNamespaces removes namespaces below another program's mount of /run/netns.
func TestRemoveCoveredRemovesNamespaces(t *testing.T) {
	testenv.NeedRoot(t)
	// Use a separate mount namespace, where no other program uses /run/netns.
	err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return err
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		if err := os.MkdirAll(netnsDir, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(t.TempDir(), netnsDir, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		file := filepath.Join(netnsDir, "covered")
		if err := os.WriteFile(file, nil, 0o644); err != nil {
			return err
		}
		if err := unix.Mount("/proc/thread-self/ns/net", file, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		if err := unix.Mount(netnsDir, netnsDir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return err
		}
		if err := unix.Unmount(file, unix.MNT_DETACH); err != nil {
			return err
		}
		if err := os.Remove(file); !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("the file is not covered: %w", err)
		}
		// removeCovered runs on a separate thread, which must see the mounts of this one.
		return uncover(file)
	})
	if err != nil {
		t.Error(err)
	}
}

// TestCgroupsContainProcesses uses every kind of hierarchy of this machine: v1, and v2 even without controllers.
func TestCgroupsContainProcesses(t *testing.T) {
	testenv.NeedRoot(t)
	lab := fmt.Sprintf("test-%d", os.Getpid())
	found, err := newCgroups(lab)
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]*cgroups{"as-found": found}
	points, err := mounts()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range points {
		if m.kind == "cgroup2" {
			kinds["v2"] = unifiedCgroups(lab+"-v2", m.path)
		}
	}
	for name, c := range kinds {
		t.Run(name, func(t *testing.T) {
			defer c.remove()
			for range 2 { // an existing group is no error
				if err := errors.Join(c.create("router", false), c.create("node1", true)); err != nil {
					t.Fatal(err)
				}
			}
			var started []int
			for _, place := range []string{"router", "node1"} {
				command := exec.Command("sleep", "60")
				group, err := c.open(place)
				if err != nil {
					t.Fatal(err)
				}
				if group != nil {
					defer group.Close()
					command.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd())}
				}
				err = onThread(func() error {
					if err := c.enterThread(place); err != nil {
						return err
					}
					return command.Start()
				})
				if err != nil {
					t.Fatal(err)
				}
				started = append(started, command.Process.Pid)
				go command.Wait()
			}
			slices.Sort(started)
			// The threads that started the processes belong to this process, and may not have ended yet.
			others := func() ([]int, error) {
				pids, err := c.processes()
				return slices.DeleteFunc(pids, func(pid int) bool { return pid == os.Getpid() }), err
			}
			if pids, err := others(); err != nil || !slices.Equal(pids, started) {
				t.Errorf("processes: %v, %v, want %v", pids, err, started)
			}
			if err := killAll(others); err != nil {
				t.Error(err)
			}
			if !c.exists() {
				t.Error("the groups are gone with their processes")
			}
			if err := c.remove(); err != nil {
				t.Error(err)
			}
			if c.exists() {
				t.Error("the groups are left")
			}
		})
	}
}

func TestRemoveTreeKeepsMountedFiles(t *testing.T) {
	testenv.NeedRoot(t)
	base := t.TempDir()
	precious := filepath.Join(base, "precious")
	for _, dir := range []string{precious, filepath.Join(base, "lab/mounted")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(precious, "file"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := bind(precious, filepath.Join(base, "lab/mounted")); err != nil {
		t.Fatal(err)
	}
	if err := removeTree(filepath.Join(base, "lab")); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(precious, "file")); err != nil {
		t.Errorf("removeTree removed files through a mount: %v", err)
	}
	if _, err := os.Stat(filepath.Join(base, "lab")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left: %v", err)
	}
}
