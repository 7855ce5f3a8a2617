package docker

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// runProgram is the first process of a container: it runs what kubevpn says, and ends with it. exit is the program's exit code.
func runProgram() (exit int, err error) {
	conn, err := net.Dial("unix", path.Join(control, socketName))
	if err != nil {
		return 0, fmt.Errorf("%w (%w)", errByHand, err)
	}
	i := &initProcess{wire: newWire(conn)}
	var first order
	if err := i.in.Decode(&first); err != nil || first.Program == nil {
		return 0, fmt.Errorf("being told what to run: %w", errors.Join(errByHand, err))
	}
	i.program = *first.Program
	passed := i.signals()
	pid, err := i.start()
	// Whoever is told of it may have gone, which obey sees.
	_ = i.out.Encode(report{Error: newFailure(err)})
	if err != nil {
		// Kubevpn says it, with what may help.
		return notStarted(err), nil
	}
	go i.obey()
	go func() {
		for s := range passed {
			i.signal(s.(syscall.Signal))
		}
	}()
	code, err := i.reap(pid)
	if err != nil {
		return 0, err
	}
	_ = i.out.Encode(report{Ended: &code})
	return code, nil
}

// notStarted are the exit codes that shells and docker have for a program that cannot be started.
func notStarted(err error) int {
	if errors.Is(err, os.ErrNotExist) {
		return 127
	}
	return 126
}

type initProcess struct {
	*wire
	program program

	mu  sync.Mutex
	pid int // of the program; 0: it does not run
}

// signals catches what is for the program. What a terminal sends reaches the program as well as this process, and is not
// passed on.
func (i *initProcess) signals() <-chan os.Signal {
	passed := make(chan os.Signal, 16)
	nobody := make(chan os.Signal, 1)
	for n := syscall.Signal(1); n < 32; n++ {
		switch n {
		case unix.SIGKILL, unix.SIGSTOP, unix.SIGCHLD, unix.SIGURG, unix.SIGPIPE, // not to be had, or this process's own
			unix.SIGSEGV, unix.SIGBUS, unix.SIGFPE, unix.SIGILL, unix.SIGTRAP, unix.SIGABRT, unix.SIGSYS, unix.SIGPROF, unix.SIGTTIN, unix.SIGTTOU:
		case unix.SIGINT, unix.SIGQUIT, unix.SIGTSTP, unix.SIGWINCH:
			if i.program.TTY {
				signal.Notify(nobody, n)
			} else {
				signal.Notify(passed, n)
			}
		default:
			signal.Notify(passed, n)
		}
	}
	return passed
}

func (i *initProcess) signal(s syscall.Signal) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.pid != 0 {
		_ = unix.Kill(i.pid, s) // it may be ending
	}
}

// obey does what kubevpn says. When that is gone everything ends: the kernel kills what is left when this process has ended.
func (i *initProcess) obey() {
	for {
		var o order
		if err := i.in.Decode(&o); err != nil {
			os.Exit(128 + int(unix.SIGKILL))
		}
		if o.Signal > 0 {
			i.signal(syscall.Signal(o.Signal))
		}
	}
}

// start finds and starts the program as execvp does. Its environment is what the image says, as the engine has given it to
// this process, below what the pod says.
func (i *initProcess) start() (int, error) {
	// Orphans come here even where another process is the first: with the machine's PID namespace.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return 0, fmt.Errorf("becoming the parent of orphans: %w", err)
	}
	env := merge(os.Environ(), i.program.Env)
	name := i.program.Args[0]
	candidates := []string{name}
	if !strings.Contains(name, "/") {
		candidates = nil
		for _, dir := range filepath.SplitList(searchPath(env)) {
			candidates = append(candidates, filepath.Join(dir, name))
		}
	}
	var found error = unix.ENOENT
	for _, candidate := range candidates {
		i.mu.Lock()
		pid, err := syscall.ForkExec(candidate, i.program.Args, &syscall.ProcAttr{Env: env, Files: []uintptr{0, 1, 2}})
		if err == nil {
			i.pid = pid
		}
		i.mu.Unlock()
		switch {
		case err == nil:
			return pid, release()
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		case errors.Is(err, unix.EACCES):
			found = err // what says more than that there is none elsewhere
		default:
			return 0, fmt.Errorf("starting %s: %w", candidate, err)
		}
	}
	return 0, fmt.Errorf("starting %s: %w", name, found)
}

// release closes this process's standard files: they would keep who reads them waiting after the program has closed them.
func release() error {
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

// merge is base, with other values for what over has too.
func merge(base, over []string) []string {
	at := map[string]int{}
	var all []string
	for _, list := range [][]string{base, over} {
		for _, entry := range list {
			name, _, _ := strings.Cut(entry, "=")
			if n, there := at[name]; there {
				all[n] = entry
				continue
			}
			at[name] = len(all)
			all = append(all, entry)
		}
	}
	return all
}

func searchPath(env []string) string {
	for _, v := range env {
		if value, ok := strings.CutPrefix(v, "PATH="); ok {
			return value
		}
	}
	return "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
}

// reap waits for the program, and for every orphan until then.
func (i *initProcess) reap(program int) (int, error) {
	for {
		// Looked at first and reaped under the lock, so that no signal goes to a number that is free again.
		var info unix.Siginfo
		if err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
			if errors.Is(err, unix.EINTR) {
				continue
			}
			return 0, fmt.Errorf("waiting for the program: %w", err)
		}
		var status syscall.WaitStatus
		i.mu.Lock()
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if pid == program {
			i.pid = 0
		}
		i.mu.Unlock()
		switch {
		case err != nil || pid != program:
		case status.Signaled():
			return 128 + int(status.Signal()), nil
		default:
			return status.ExitStatus(), nil
		}
	}
}

// dialSocket connects to one of the network container's sockets.
func dialSocket(network, name string) (*net.UnixConn, error) {
	conn, err := net.DialUnix(network, nil, &net.UnixAddr{Name: path.Join(control, name), Net: network})
	if err != nil {
		return nil, fmt.Errorf("%w (%w)", errByHand, err)
	}
	return conn, nil
}

// closed reports whether err is how a socket ends.
func closed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, net.ErrClosed)
}
