package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// errNotInit is what a user reads who runs the hidden command by hand.
var errNotInit = errors.New("this is started in a new sandbox, and there is no use in running it by hand")

// Init is a sandbox's first process. The command that Config.Init names calls it, and it does not return: it ends the
// process when the program ends. It returns an error if this process was not started by [Sandbox.Start].
func Init() error {
	if os.Getpid() != 1 {
		return errNotInit
	}
	unix.CloseOnExec(controlFD)
	unix.CloseOnExec(planFD)
	control, err := openWire(os.NewFile(controlFD, "control"))
	if err != nil {
		return fmt.Errorf("%w (%w)", errNotInit, err)
	}
	var pl plan
	planFile := os.NewFile(planFD, "plan")
	err = json.NewDecoder(io.NewSectionReader(planFile, 0, 1<<40)).Decode(&pl)
	planFile.Close()
	if err != nil {
		return fmt.Errorf("%w (reading the plan: %w)", errNotInit, err)
	}
	i := &initProcess{wire: control, plan: pl, dials: map[uint64]context.CancelFunc{}}
	if err := i.run(); err != nil {
		i.say(report{Error: newFailure(err)}, nil)
	}
	os.Exit(1)
	return nil
}

type initProcess struct {
	wire *wire
	plan plan

	mu      sync.Mutex
	program int // its process ID; 0: it does not run
	store   *store
	dials   map[uint64]context.CancelFunc
}

// say sends a report. When the parent is gone there is nobody to tell, and obey ends us.
func (i *initProcess) say(r report, f syscall.Conn) { _ = i.wire.send(r, f) }

func (i *initProcess) log(level slog.Level, message string, attrs ...string) {
	i.say(report{Log: &logLine{Level: level, Message: message, Attrs: attrs}}, nil)
}

// run returns only if the program was not started.
func (i *initProcess) run() error {
	survive()
	go i.obey()
	var device *os.File
	if i.plan.Network != nil {
		var err error
		if device, err = i.makeNetwork(i.plan.Network); err != nil {
			return fmt.Errorf("making the sandbox's network: %w", err)
		}
	}
	v := &view{log: i.log}
	if err := v.build(i.plan.Mounts, i.plan.Volumes, i.plan.Network); err != nil {
		return err
	}
	i.mu.Lock()
	i.store = v.store
	i.mu.Unlock()
	if err := os.Chdir(i.plan.Dir); err != nil {
		return fmt.Errorf("entering the working directory: %w", err)
	}
	pid, err := i.start()
	if err != nil {
		return err
	}
	i.mu.Lock()
	i.program = pid
	i.mu.Unlock()
	// What is left open here keeps a pipe's reader waiting after the program has closed it.
	if err := closeStandardFiles(); err != nil {
		i.log(slog.LevelWarn, "standard files stay open", "err", err.Error())
	}
	if device != nil {
		i.say(report{Started: true}, device)
		device.Close()
	} else {
		i.say(report{Started: true}, nil)
	}
	go v.follow()
	i.reap(pid)
	return nil
}

// survive makes init deaf to what the terminal sends to the whole process group, and to what somebody may send to every
// process. What was ignored stays ignored, for the program. Signals that stop do not stop the first process of a
// namespace.
func survive() {
	nobody := make(chan os.Signal, 1)
	for _, sig := range []os.Signal{unix.SIGINT, unix.SIGQUIT, unix.SIGHUP, unix.SIGTERM} {
		if !signal.Ignored(sig) {
			signal.Notify(nobody, sig) // ignored signals would be ignored by the program too
		}
	}
}

// obey does what the parent says, and ends everything when the parent is gone.
func (i *initProcess) obey() {
	for {
		var o order
		file, err := i.wire.receive(&o)
		if err != nil {
			os.Exit(128 + int(unix.SIGKILL))
		}
		if o.Update {
			i.update(o.ID, file)
		}
		if file != nil {
			file.Close()
		}
		switch {
		case o.Signal > 0:
			i.mu.Lock()
			if i.program != 0 {
				_ = unix.Kill(i.program, syscall.Signal(o.Signal)) // it may be ending, or be no signal
			}
			i.mu.Unlock()
		case o.Cancel:
			i.mu.Lock()
			cancel := i.dials[o.ID]
			i.mu.Unlock()
			if cancel != nil {
				cancel()
			}
		case o.Dial != nil:
			ctx, cancel := context.WithCancel(context.Background())
			i.mu.Lock()
			i.dials[o.ID] = cancel
			i.mu.Unlock()
			go i.dial(ctx, o.ID, *o.Dial)
		}
	}
}

// update changes a volume.
func (i *initProcess) update(id uint64, file *os.File) {
	i.mu.Lock()
	s := i.store
	i.mu.Unlock()
	err := errors.New("the sandbox has no volumes yet")
	if s != nil {
		err = s.update(file)
	}
	if err != nil {
		i.say(report{ID: id, Error: newFailure(err)}, nil)
		return
	}
	i.say(report{ID: id}, nil)
}

// dial gives the parent a connection that is made here.
func (i *initProcess) dial(ctx context.Context, id uint64, to endpoint) {
	defer func() {
		i.mu.Lock()
		defer i.mu.Unlock()
		i.dials[id]()
		delete(i.dials, id)
	}()
	conn, err := new(net.Dialer).DialContext(ctx, to.Network, to.Address)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) {
			err = op.Err // the rest is said at the other end
		}
		i.say(report{ID: id, Error: newFailure(err)}, nil)
		return
	}
	defer conn.Close()
	if file, ok := conn.(syscall.Conn); ok {
		i.say(report{ID: id}, file)
	} else {
		i.say(report{ID: id, Error: newFailure(fmt.Errorf("%s is not a network of sockets", to.Network))}, nil)
	}
}

// start starts the program from a thread that has given up what the program must not have.
func (i *initProcess) start() (pid int, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err = dropPrivileges(); err != nil {
			err = fmt.Errorf("giving up capabilities: %w", err)
			return
		}
		pid, err = i.execute()
	}()
	<-done
	return pid, err
}

// execute finds and runs the program as execvp does.
func (i *initProcess) execute() (int, error) {
	name := i.plan.Args[0]
	candidates := []string{name}
	if !strings.Contains(name, "/") {
		candidates = nil
		for _, dir := range filepath.SplitList(searchPath(i.plan.Env)) {
			candidates = append(candidates, filepath.Join(dir, name))
		}
	}
	attr := &syscall.ProcAttr{Env: i.plan.Env, Files: []uintptr{0, 1, 2}}
	var found error = unix.ENOENT
	for _, candidate := range candidates {
		pid, err := syscall.ForkExec(candidate, i.plan.Args, attr)
		switch {
		case err == nil:
			return pid, nil
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		case errors.Is(err, unix.EACCES):
			found = err // what says more than that there is none elsewhere
		default:
			return 0, fmt.Errorf("starting %s: %w", candidate, err)
		}
	}
	return 0, fmt.Errorf("starting %s: %w", name, found)
}

// searchPath is the last PATH of an environment, which is the one that counts.
func searchPath(env []string) string {
	path := "/usr/local/bin:/usr/bin:/bin"
	for _, v := range env {
		if value, ok := strings.CutPrefix(v, "PATH="); ok {
			path = value
		}
	}
	return path
}

// dropPrivileges makes that a program that this thread starts has no capabilities and gets none, as root or not.
func dropPrivileges() error {
	for c := uintptr(0); ; c++ {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) && c > 0 {
			break // past the last
		}
		if err != nil {
			return err
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return err
	}
	data, err := capabilities()
	if err != nil {
		return err
	}
	data[0].Inheritable, data[1].Inheritable = 0, 0
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if err := unix.Capset(&header, &data[0]); err != nil {
		return err
	}
	return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
}

func closeStandardFiles() error {
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

// reap waits for the program, and for every orphan until then, and ends the process.
func (i *initProcess) reap(program int) {
	for {
		var status syscall.WaitStatus
		// Looked at first and reaped under the lock, so that no signal goes to a number that is free again.
		var info unix.Siginfo
		if err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
			if errors.Is(err, unix.EINTR) {
				continue
			}
			os.Exit(1)
		}
		i.mu.Lock()
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if pid == program {
			i.program = 0
		}
		i.mu.Unlock()
		if err != nil || pid != program {
			continue
		}
		ended := ExitStatus{Code: status.ExitStatus()}
		if status.Signaled() {
			ended = ExitStatus{Code: 128 + int(status.Signal()), Signal: status.Signal()}
		}
		i.say(report{Ended: &ended}, nil)
		os.Exit(0)
	}
}
