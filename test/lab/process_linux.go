package lab

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Process is a long-running program of the lab.
type Process struct {
	Name  string   `json:"name"`  // "kubelet-node1": also the name of its log
	Place string   `json:"place"` // "node1": the place whose namespaces and control group it uses
	Args  []string `json:"args"`
	PID   int      `json:"pid"`
	Start uint64   `json:"start"` // clock ticks since boot: together with PID, identifies the process
}

// Running reports whether the process is alive.
func (p Process) Running() bool {
	start, zombie, err := processStart(p.PID)
	return err == nil && !zombie && start == p.Start
}

// processStart returns the start time of a process in clock ticks since boot, from /proc/PID/stat (proc(5), field 22).
func processStart(pid int) (start uint64, zombie bool, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false, err
	}
	return parseStat(string(b))
}

func parseStat(stat string) (start uint64, zombie bool, err error) {
	// The second field is the program's name in parentheses, which may contain any character.
	end := strings.LastIndexByte(stat, ')')
	if end < 0 {
		return 0, false, errors.New("not a line of /proc/PID/stat")
	}
	fields := strings.Fields(stat[end+1:])
	if len(fields) < 20 {
		return 0, false, errors.New("not a line of /proc/PID/stat")
	}
	start, err = strconv.ParseUint(fields[19], 10, 64)
	// If the first thread has ended, the process has not ended while other threads still close its sockets.
	alone := fields[17] == "0" || fields[17] == "1"
	return start, fields[0] == "X" || fields[0] == "Z" && alone, err
}

// start starts a long-running program in its place, in its own session, with its output in the log directory, and adds
// it to the state. prepare, if not nil, runs on the thread that becomes the process's parent, in its network namespace
// and control group; it may change the command.
func (l *Lab) start(p Process, prepare func(*exec.Cmd) error) error {
	log, err := os.OpenFile(l.logFile(p.Name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	group, err := l.cgroups.open(p.Place)
	if err != nil {
		return err
	}
	command := exec.Command(p.Args[0], p.Args[1:]...)
	command.Stdout, command.Stderr = log, log
	command.Dir = "/"
	command.Env = []string{
		"PATH=" + systemPath, "HOME=/root", "LANG=C.UTF-8",
		"GOGC=400", // Kubernetes then needs a sixth less processor time, and 200 MB more
	}
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if group != nil {
		defer group.Close()
		command.SysProcAttr.UseCgroupFD, command.SysProcAttr.CgroupFD = true, int(group.Fd())
	}
	err = onThread(func() error {
		if err := l.cgroups.enterThread(p.Place); err != nil {
			return err
		}
		if err := l.enterPlace(p.Place); err != nil {
			return err
		}
		if prepare != nil {
			if err := prepare(command); err != nil {
				return err
			}
		}
		return command.Start()
	})
	if err != nil {
		return fmt.Errorf("starting %s: %w", p.Name, err)
	}
	p.PID = command.Process.Pid
	started, _, err := processStart(p.PID)
	// Reap the process if it ends while this program runs; its log contains the reason.
	go func() { _ = command.Wait() }()
	if err != nil {
		return fmt.Errorf("starting %s: %w", p.Name, err)
	}
	p.Start = started
	return l.record(p)
}

// systemPath contains Debian's programs, whatever PATH the caller has (su and cron leave out sbin).
const systemPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// systemProgram finds a program of Debian.
func systemProgram(name string) (string, error) {
	for _, dir := range filepath.SplitList(systemPath) {
		file := filepath.Join(dir, name)
		if unix.Access(file, unix.X_OK) == nil {
			return file, nil
		}
	}
	return "", fmt.Errorf("%s is not installed: run 'lab install'", name)
}

// enterPlace moves the current thread into a place's network namespace and, if the place is a node that has been
// started, its mount namespace. The place of a guest is the namespace from which the guest is reached.
func (l *Lab) enterPlace(place string) error {
	if err := enterNet(l.config.namespace(place)); err != nil {
		return err
	}
	pid := l.holder(place)
	if pid == 0 || l.inGuest(place) {
		return nil
	}
	// a thread that shares its working directory may not change mounts
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unsharing the working directory: %w", err)
	}
	if err := enter(fmt.Sprintf("/proc/%d/ns/uts", pid), unix.CLONE_NEWUTS); err != nil {
		return err
	}
	return enter(fmt.Sprintf("/proc/%d/ns/mnt", pid), unix.CLONE_NEWNS)
}

// holder returns a live process that has a node's mount namespace: the node's own, or one of its remaining daemons. It
// returns 0 if there is none.
func (l *Lab) holder(place string) int {
	for _, p := range l.processes() {
		if p.Place == place && strings.HasPrefix(place, "node") && !controlPlane(p.Name) && p.Running() {
			return p.PID
		}
	}
	return 0
}

// run runs a short program in a place and returns its output. input, if not nil, is its standard input.
func (l *Lab) run(place string, input io.Reader, argv ...string) (string, error) {
	program, err := systemProgram(argv[0])
	if err != nil {
		return "", err
	}
	whole := l.inPlace(place, "", append([]string{program}, argv[1:]...)...)
	command := exec.Command(whole[0], whole[1:]...)
	command.Env = []string{"PATH=" + systemPath, "HOME=/root", "LANG=C.UTF-8"}
	command.Stdin = input
	var output strings.Builder
	command.Stdout, command.Stderr = &output, &output
	err = onThread(func() error {
		if err := l.enterPlace(place); err != nil {
			return err
		}
		return command.Start()
	})
	if err == nil {
		err = command.Wait()
	}
	if err != nil {
		return output.String(), fmt.Errorf("%s on %s: %w\n%s", strings.Join(argv, " "), place, err,
			strings.TrimSpace(output.String()))
	}
	return output.String(), nil
}

// killAll kills processes and waits until list finds no more. It sends SIGKILL, because the lab has nothing to save.
func killAll(list func() ([]int, error)) error {
	deadline := time.Now().Add(20 * time.Second)
	for {
		pids, err := list()
		if err != nil || len(pids) == 0 {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes %v do not end", pids)
		}
		for _, pid := range pids {
			if err := kill(pid); err != nil {
				return err
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// kill sends SIGKILL to a process; a process that has already ended is no error.
func kill(pid int) error {
	if err := unix.Kill(pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
		return fmt.Errorf("killing process %d: %w", pid, err)
	}
	return nil
}
