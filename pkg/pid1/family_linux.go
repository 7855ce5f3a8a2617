package pid1

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

// Family is all children of this process. Reap takes every child's end, so a process that has a Family starts nothing by
// os/exec, which would wait for ends that are gone. The zero value is ready.
type Family struct {
	mu      sync.Mutex // held while a child starts, ends or is signalled
	running map[int]*Process
}

// Program is what is to be run.
type Program struct {
	Args  []string // the first is looked for in the last PATH of Env unless it has a slash
	Env   []string // "NAME=value"
	Stdin uintptr  // its standard input, a descriptor of this process; standard output and error are this process's
	Group bool     // it leads a process group of its own
}

// defaultPath is where programs are looked for when an environment has no PATH: as Docker has it for images without.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Start finds and starts a program as execvp(3) does: what may not be executed is passed over for what may, further back in PATH.
// It runs with the calling thread's credentials and capabilities. Errors wrap their errno.
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
			found = err // what says more than that there is none elsewhere
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
	f.mu.Lock() // until it is known whose end is waited for
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

// Reap waits for children that have ended, until ctx does. One goroutine may be in it.
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
			return // nobody, or nobody who has ended
		}
		if p := f.running[pid]; p != nil {
			delete(f.running, pid)
			p.status = status
			close(p.ended)
		}
	}
}

// Process is a program that was started. Its methods may be called at any time by any goroutine.
type Process struct {
	family *Family
	pid    int
	ended  chan struct{}
	status unix.WaitStatus // when ended is closed
}

// Done is closed when it has ended.
func (p *Process) Done() <-chan struct{} { return p.ended }

// Exit is how it has ended: its exit code, or the signal that ended it and 128 more than that. Only after Done.
func (p *Process) Exit() (code int, by unix.Signal) {
	if p.status.Signaled() {
		return 128 + int(p.status.Signal()), p.status.Signal()
	}
	return p.status.ExitStatus(), 0
}

// Signal sends it a signal, as the kubelet would: not to what it has started. One that has ended gets none, nor does who has its
// number by then.
func (p *Process) Signal(s unix.Signal) {
	p.family.mu.Lock()
	defer p.family.mu.Unlock()
	if p.family.running[p.pid] == p {
		_ = unix.Kill(p.pid, s) // it may be ending, or s no signal
	}
}

// SignalGroup sends a signal to its process group, to what is left of that when it has ended too.
func (p *Process) SignalGroup(s unix.Signal) {
	p.family.mu.Lock()
	defer p.family.mu.Unlock()
	_ = unix.Kill(-p.pid, s) // there may be nobody
}

// SharesGroup reports whether it is in this process's process group, so that what is sent to that is sent to both.
func (p *Process) SharesGroup() bool {
	p.family.mu.Lock()
	defer p.family.mu.Unlock()
	if p.family.running[p.pid] != p {
		return false
	}
	group, err := unix.Getpgid(p.pid)
	return err == nil && group == unix.Getpgrp() // in a new PID namespace both may be 0: a group from outside
}

// CloseStandardFiles has this process's standard input, output and error lead nowhere. After a program has started they would
// keep waiting whoever reads what it writes, although the program has closed them.
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
