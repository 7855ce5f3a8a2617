package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/pid1"
)

// The descriptors with which init begins.
const (
	controlFD = 3
	planFD    = 4
)

// initCapabilities are those that init keeps in the sandbox's namespaces: for mounts, for the network, and to take the
// last of them from the program.
var initCapabilities = []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_NET_ADMIN, unix.CAP_SETPCAP}

// Process is a program that runs in a sandbox. Its methods may be called from several goroutines.
type Process struct {
	log      *slog.Logger
	near     *near
	init     *os.Process
	isolated bool
	ran      atomic.Bool // Run was called
	terminal *terminal

	tun   *os.File
	ready chan error    // takes one: nil, or why init cannot start the program
	read  chan struct{} // closed: nothing more comes from init
	done  chan struct{} // closed: nothing is left; then status and err are set
	ended *ExitStatus   // as init said, once read is closed

	status ExitStatus
	err    error
}

// Start starts the program, and returns when it runs. The error is that of the program's execve where that failed: it is
// syscall.ENOENT when there is no such program. With Config.Network it returns when all is there but the program, which
// [Process.Run] starts. When ctx ends, the program is killed, and everything with it.
func (s *Sandbox) Start(ctx context.Context) (*Process, error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	cmd, err := s.command()
	if err != nil {
		return nil, err
	}
	ours, err := s.connect(cmd)
	defer closeAll(cmd.ExtraFiles)
	if err != nil {
		return nil, err
	}
	p := &Process{
		log: s.log, near: newNear(ours, Interface, s.log), isolated: s.cfg.Network, terminal: foreground(),
		ready: make(chan error, 1), read: make(chan struct{}), done: make(chan struct{}),
	}
	begun := make(chan error, 1)
	go p.watch(ctx, cmd, begun)
	if err := <-begun; err != nil {
		<-p.done
		return nil, explain(err)
	}
	go p.listen()
	var notReady error
	select {
	case notReady = <-p.ready:
	case <-p.done: // with or without a word
		select {
		case notReady = <-p.ready:
		default:
			notReady = p.err
		}
	}
	if notReady != nil {
		// Init ends by itself after an error, and has ended without one.
		<-p.done
		if ctx.Err() != nil {
			notReady = context.Cause(ctx)
		}
		return nil, notReady
	}
	if !p.isolated {
		if err := p.Run(ctx); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// Run starts the program of a sandbox with Config.Network, once. After an error, which is as that of [Sandbox.Start], nothing
// is left of the sandbox.
func (p *Process) Run(ctx context.Context) error {
	if !p.ran.CompareAndSwap(false, true) {
		return errors.New("the sandbox's program was started before")
	}
	_, err := p.near.ask(ctx, order{Run: true}, nil)
	if err == nil {
		return nil
	}
	if e := p.init.Kill(); e != nil && !errors.Is(e, os.ErrProcessDone) {
		err = errors.Join(err, e)
	}
	<-p.done
	var said *pid1.Failure
	switch {
	case errors.As(err, &said):
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case p.err != nil:
		err = p.err // the socket's is a consequence
	}
	return err
}

// SetNetwork gives the interface of a sandbox with Config.Network its addresses, routes everything to it, and has names asked
// of n.DNS, in the place of what an earlier call has said. It may be called before Run and after.
func (p *Process) SetNetwork(ctx context.Context, n Network) error {
	if !p.isolated {
		return errors.New("the sandbox has the laptop's network")
	}
	return p.near.setNetwork(ctx, n)
}

// command is init, but for the files that connect adds.
func (s *Sandbox) command() (*exec.Cmd, error) {
	cmd := exec.Command("/proc/self/exe", s.cfg.Init...)
	cmd.Args[0] = os.Args[0]
	// Init is a Go program like its parent and gets what the runtime reads; the rest of the environment is not its.
	cmd.Env = []string{}
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); strings.HasPrefix(name, "GO") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	// A nil *os.File in the interface would not be nil.
	for _, std := range []struct {
		from *os.File
		set  func(*os.File)
	}{
		{s.cfg.Stdin, func(f *os.File) { cmd.Stdin = f }},
		{s.cfg.Stdout, func(f *os.File) { cmd.Stdout = f }},
		{s.cfg.Stderr, func(f *os.File) { cmd.Stderr = f }},
	} {
		if std.from != nil {
			std.set(std.from)
		}
	}
	all := hasCapability(unix.CAP_SETUID) && hasCapability(unix.CAP_SETGID)
	users, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return nil, err
	}
	groups, err := os.ReadFile("/proc/self/gid_map")
	if err != nil {
		return nil, err
	}
	attr := &syscall.SysProcAttr{
		Cloneflags:                 unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID,
		GidMappingsEnableSetgroups: all,
		AmbientCaps:                initCapabilities,
		Pdeathsig:                  unix.SIGKILL,
	}
	if s.cfg.Network {
		attr.Cloneflags |= unix.CLONE_NEWNET
	}
	if attr.UidMappings, err = identity(os.Geteuid(), all, string(users)); err != nil {
		return nil, err
	}
	if attr.GidMappings, err = identity(os.Getegid(), all, string(groups)); err != nil {
		return nil, err
	}
	cmd.SysProcAttr = attr
	return cmd, nil
}

// connect gives cmd the plan and the other end of the returned wire. What it adds to cmd is the caller's to close.
func (s *Sandbox) connect(cmd *exec.Cmd) (*wire, error) {
	dir := s.cfg.Dir
	if dir == "" {
		var err error
		if dir, err = os.Getwd(); err != nil {
			return nil, fmt.Errorf("finding the working directory: %w", err)
		}
	}
	// The environment and the volumes have secrets and may have megabytes; this file has no name and is in memory.
	planFile, err := inMemory("plan", plan{
		Args: s.cfg.Args, Env: s.cfg.Env, Dir: dir, Mounts: s.cfg.Mounts, Volumes: s.cfg.Volumes, Network: s.cfg.Network,
	})
	if err != nil {
		return nil, err
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		planFile.Close()
		return nil, fmt.Errorf("making a control socket: %w", err)
	}
	cmd.ExtraFiles = make([]*os.File, 2)
	cmd.ExtraFiles[controlFD-3] = os.NewFile(uintptr(fds[1]), "control")
	cmd.ExtraFiles[planFD-3] = planFile
	return openWire(os.NewFile(uintptr(fds[0]), "control"))
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// watch starts init and waits until nothing of the sandbox is left.
func (p *Process) watch(ctx context.Context, cmd *exec.Cmd, begun chan<- error) {
	// The death signal is that of this thread's death, so the thread must last as long as init.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer close(p.done)
	if err := cmd.Start(); err != nil {
		p.near.wire.conn.Close()
		p.terminal.close()
		begun <- err
		return
	}
	p.init = cmd.Process
	closeAll(cmd.ExtraFiles) // now init's alone, so that its end is the socket's
	begun <- nil
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	err := cmd.Wait()
	killed := !stop()
	<-p.read
	p.near.wire.conn.Close()
	p.terminal.restore(p.log)
	if p.tun != nil {
		p.tun.Close() // the second time if the caller has
	}
	switch {
	case p.ended != nil:
		p.status = *p.ended
		return
	case killed:
		p.err = context.Cause(ctx)
	case err == nil:
		p.err = errors.New("the sandbox's init ended without a word")
	default:
		p.err = fmt.Errorf("the sandbox's init ended: %w", err)
	}
	p.status = ExitStatus{Code: 128 + int(unix.SIGKILL), Signal: unix.SIGKILL}
}

// listen reads what init says.
func (p *Process) listen() {
	defer close(p.read)
	p.near.listen(func(r report, file *os.File) {
		switch {
		case r.Ready:
			if file != nil {
				p.tun, file = file, nil
			}
			p.ready <- nil
		case r.Error != nil:
			p.ready <- r.Error
		case r.Ended != nil:
			p.ended = r.Ended
		}
		if file != nil {
			file.Close()
		}
	})
}

// Pid is the process ID of the sandbox's init, as the parent sees it.
func (p *Process) Pid() int { return p.init.Pid }

// TUN is the device [Interface] of a sandbox with Config.Network, for tun.Adopt; nil without. Its Name is the interface's. The
// network namespace lives for as long as the file, or one made of it, is open, also when the program has ended. Wait closes
// this one.
func (p *Process) TUN() *os.File { return p.tun }

// Signal sends the program a signal. Before Run there is none, and the signal is lost. After the program's end the error is
// os.ErrProcessDone.
func (p *Process) Signal(sig os.Signal) error {
	number, ok := sig.(syscall.Signal)
	if !ok || number <= 0 {
		return fmt.Errorf("%v is not a signal of this system", sig)
	}
	select {
	case <-p.done:
		return os.ErrProcessDone
	default:
	}
	if err := p.near.wire.send(order{Signal: int(number)}, nil); err != nil {
		return os.ErrProcessDone
	}
	return nil
}

// Wait waits until the program has ended, and with it everything that it started. An error says that the program did not
// end by itself: that ctx of Start has ended, or that something has killed init. It may be called any number of times.
func (p *Process) Wait() (ExitStatus, error) {
	<-p.done
	return p.status, p.err
}

// Dial connects to an address from inside, where loopback is the program's own. Errors are as those of net.Dialer. The
// connection is the caller's; it ends with the program's end of it, and not with the sandbox.
func (p *Process) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	if !p.isolated {
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	return p.near.dial(ctx, network, address)
}

// Update makes a volume have other files. Whoever reads sees all of them old, or all of them new.
func (p *Process) Update(ctx context.Context, v Volume) error {
	if err := v.check(); err != nil {
		return err
	}
	f, err := inMemory("volume", v)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := p.near.ask(ctx, order{Update: true}, f); err != nil {
		return fmt.Errorf("changing the volume %s of the sandbox: %w", v.Name, err)
	}
	return nil
}
