package subreaper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Family holds the children of this process. Reap waits for every child, so a process with a Family must not use
// os/exec, whose Wait would then fail. The zero value is ready to use.
type Family struct {
	mu      sync.Mutex // held while a child is started, reaped or signaled
	running map[int]*Process
}

// defaultPath is the PATH for an environment without one, the same as Docker's.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Start finds and starts a program as execvp(3) does: it skips files in PATH that it may not execute. The program
// gets the credentials and capabilities of the calling thread. Errors wrap their errno.
func (f *Family) Start(p Program) (*Process, error) {
	name := p.Args[0]
	candidates := []string{name}
	if !strings.Contains(name, "/") {
		candidates = nil
		for _, dir := range filepath.SplitList(searchPath(p.Env)) {
			candidates = append(candidates, filepath.Join(dir, name))
		}
	}
	attr := &syscall.ProcAttr{Env: p.Env, Files: []uintptr{p.Stdin, 1, 2}, Sys: &syscall.SysProcAttr{Setpgid: p.Group}}
	var found error = unix.ENOENT
	for _, candidate := range candidates {
		one, err := f.fork(candidate, p.Args, attr)
		switch {
		case err == nil:
			return one, nil
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		case errors.Is(err, unix.EACCES):
			found = err // more useful than ENOENT
		default:
			return nil, fmt.Errorf("starting %s: %w", candidate, err)
		}
	}
	return nil, fmt.Errorf("starting %s: %w", name, found)
}

func searchPath(env []string) string {
	path := defaultPath
	for _, v := range env {
		if value, ok := strings.CutPrefix(v, "PATH="); ok {
			path = value
		}
	}
	return path
}

func (f *Family) fork(path string, args []string, attr *syscall.ProcAttr) (*Process, error) {
	f.mu.Lock() // collect must not reap the child before it is in running
	defer f.mu.Unlock()
	pid, err := syscall.ForkExec(path, args, attr)
	if err != nil {
		return nil, err
	}
	p := &Process{family: f, pid: pid, ended: make(chan struct{})}
	if f.running == nil {
		f.running = map[int]*Process{}
	}
	f.running[pid] = p
	return p, nil
}

// Reap waits for children until ctx ends. Only one goroutine may call it.
func (f *Family) Reap(ctx context.Context) {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, unix.SIGCHLD)
	defer signal.Stop(ended)
	for {
		f.collect()
		select {
		case <-ended:
		case <-ctx.Done():
			return
		}
	}
}

func (f *Family) collect() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return // no children, or none has ended
		}
		if p := f.running[pid]; p != nil {
			delete(f.running, pid)
			p.status = status
			close(p.ended)
		}
	}
}

// Process is a started program. Its methods are safe for concurrent use.
type Process struct {
	family *Family
	pid    int
	ended  chan struct{}
	status unix.WaitStatus // valid once ended is closed
}

// Done returns a channel that is closed when the program has ended.
func (p *Process) Done() <-chan struct{} { return p.ended }

// Exit returns the exit code, or the signal that killed the program and 128 plus its number. It is valid after Done.
func (p *Process) Exit() (code int, by unix.Signal) {
	if p.status.Signaled() {
		return 128 + int(p.status.Signal()), p.status.Signal()
	}
	return p.status.ExitStatus(), 0
}

// Signal sends the program a signal, but not the processes that it started, as the kubelet does. It does nothing
// when the program has ended, so it never reaches another process with the same PID.
func (p *Process) Signal(s unix.Signal) {
	p.family.mu.Lock()
	defer p.family.mu.Unlock()
	if p.family.running[p.pid] == p {
		_ = unix.Kill(p.pid, s) // it may be ending, or s may be invalid
	}
}

// SignalGroup sends a signal to the program's process group, which may outlive the program.
func (p *Process) SignalGroup(s unix.Signal) {
	p.family.mu.Lock()
	defer p.family.mu.Unlock()
	_ = unix.Kill(-p.pid, s) // the group may be empty
}

// SharesGroup reports whether the program is in the process group of this process, so that signals to the group
// reach both.
func (p *Process) SharesGroup() bool {
	p.family.mu.Lock()
	defer p.family.mu.Unlock()
	if p.family.running[p.pid] != p {
		return false
	}
	group, err := unix.Getpgid(p.pid)
	return err == nil && group == unix.Getpgrp() // in a new PID namespace both may be 0: a group from outside
}

// CloseStandardFiles replaces standard input, output and error of this process by /dev/null. Call it after a
// program has started: otherwise the reader of the program's output sees no EOF when the program closes it.
func CloseStandardFiles() error {
	null, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(null)
	for fd := range 3 {
		if err := unix.Dup3(null, fd, 0); err != nil {
			return err
		}
	}
	return nil
}
