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
	"slices"
	"strings"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/subreaper"
	"kubevpn/pkg/host/unixsocket"
)

// Descriptors that init inherits.
const (
	controlFD = 3
	configFD  = 4
)

// initCapabilities are the capabilities of init in the sandbox's namespaces: to mount, to configure the network, and to
// drop the program's capabilities.
var initCapabilities = []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_NET_ADMIN, unix.CAP_SETPCAP}

// Process is a program that runs in a sandbox. Its methods are safe for concurrent use.
type Process struct {
	log      *slog.Logger
	remote   *Remote
	program  subreaper.Program
	init     *os.Process
	isolated bool
	volumes  []Volume
	ran      atomic.Bool // Run was called
	terminal *terminal

	done   chan struct{} // closed when every process has ended; status and err are set then
	status ExitStatus
	err    error
}

// Start starts the program and returns when it runs. The error wraps that of the program's execve: syscall.ENOENT
// if the program does not exist. With Config.Network or Config.Names, Start returns when the sandbox is ready, and
// [Process.Run] starts the program. When ctx ends, Start kills every process of the sandbox.
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
	terminal := foreground()
	remote := newRemote(ours, Interface, s.cfg.Logger)
	remote.serve = s.cfg.Serve
	// Outside the terminal's foreground job a group signal reaches this process only, which forwards it.
	cmd.SysProcAttr.Setpgid = terminal == nil
	p := &Process{
		log: s.cfg.Logger, remote: remote, isolated: s.cfg.Network,
		program: subreaper.Program{Args: s.cfg.Args, Env: s.cfg.Env}, volumes: s.cfg.Volumes, terminal: terminal,
		done: make(chan struct{}),
	}
	begun := make(chan error, 1)
	go p.watch(ctx, cmd, begun)
	if err := <-begun; err != nil {
		<-p.done
		return nil, explain(err)
	}
	go p.remote.listen()
	if err := p.remote.wait(ctx); err != nil {
		return nil, p.fail(ctx, err)
	}
	if !s.cfg.Network && !s.cfg.Names {
		if err := p.Run(ctx); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// Run starts the program of a sandbox with Config.Network or Config.Names. It may be called once. Errors are those of
// [Sandbox.Start]; after one, every process of the sandbox has ended.
func (p *Process) Run(ctx context.Context) error {
	if !p.ran.CompareAndSwap(false, true) {
		return errors.New("the sandbox's program has already been started")
	}
	if err := p.remote.Run(ctx, p.program); err != nil {
		return p.fail(ctx, err)
	}
	return nil
}

// fail ends every process of the sandbox, and returns the cause of err.
func (p *Process) fail(ctx context.Context, err error) error {
	if e := p.init.Kill(); e != nil && !errors.Is(e, os.ErrProcessDone) {
		err = errors.Join(err, e)
	}
	<-p.done
	var failure *subreaper.Failure
	switch {
	case errors.As(err, &failure):
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case p.err != nil:
		err = p.err // the error of the socket is only a consequence
	}
	return err
}

// SetNetwork sets the addresses of the interface, routes everything to it, and makes n.DNS the nameservers. It
// replaces the settings of an earlier call, and may be called before and after Run. It fails for addresses without
// Config.Network, and has no effect on names without Config.Names.
func (p *Process) SetNetwork(ctx context.Context, n Network) error {
	if p.isolated != (len(n.Addresses) > 0) {
		return errors.New("a sandbox has addresses if, and only if, it has a network of its own")
	}
	return p.remote.SetNetwork(ctx, n)
}

// command returns the command that runs init, without the files that connect adds.
func (s *Sandbox) command() (*exec.Cmd, error) {
	cmd := exec.Command("/proc/self/exe", s.cfg.Init...)
	cmd.Args[0] = os.Args[0]
	// Init needs only the variables that the Go runtime reads.
	cmd.Env = []string{}
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); strings.HasPrefix(name, "GO") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	// A nil *os.File in an io.Reader or io.Writer would not compare equal to nil.
	if s.cfg.Stdin != nil {
		cmd.Stdin = s.cfg.Stdin
	}
	if s.cfg.Stdout != nil {
		cmd.Stdout = s.cfg.Stdout
	}
	if s.cfg.Stderr != nil {
		cmd.Stderr = s.cfg.Stderr
	}
	all := HasCapability(unix.CAP_SETUID) && HasCapability(unix.CAP_SETGID)
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
	if s.cfg.Hostname != "" {
		attr.Cloneflags |= unix.CLONE_NEWUTS
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

// connect adds init's configuration and one end of the control socket to cmd.ExtraFiles, which the caller closes. It
// returns the other end.
func (s *Sandbox) connect(cmd *exec.Cmd) (*unixsocket.Conn, error) {
	dir := s.cfg.Dir
	if dir == "" {
		var err error
		if dir, err = os.Getwd(); err != nil {
			return nil, fmt.Errorf("finding the working directory: %w", err)
		}
	}
	configFile, err := inMemory(initConfig{
		Dir: dir, Mounts: s.cfg.Mounts, Volumes: s.cfg.Volumes, Network: s.cfg.Network, Names: s.cfg.Names,
		Hostname: s.cfg.Hostname,
	})
	if err != nil {
		return nil, err
	}
	ours, theirs, err := newPair()
	if err != nil {
		configFile.Close()
		return nil, err
	}
	cmd.ExtraFiles = make([]*os.File, 2)
	cmd.ExtraFiles[controlFD-3] = theirs
	cmd.ExtraFiles[configFD-3] = configFile
	return ours, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// watch starts init and waits until every process of the sandbox has ended.
func (p *Process) watch(ctx context.Context, cmd *exec.Cmd, begun chan<- error) {
	// The kernel sends Pdeathsig when this thread ends, so the thread must live as long as init.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer close(p.done)
	if err := cmd.Start(); err != nil {
		p.remote.control.Close()
		p.terminal.close()
		begun <- err
		return
	}
	p.init = cmd.Process
	closeAll(cmd.ExtraFiles) // only init holds them now, so its end closes the socket
	begun <- nil
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	err := cmd.Wait()
	killed := !stop()
	<-p.remote.done // it has read the last report
	if e := p.remote.Close(); e != nil {
		p.log.Warn("cannot close the files of a sandbox", "err", e)
	}
	p.terminal.restore(p.log)
	switch {
	case p.remote.ended != nil:
		p.status = *p.remote.ended
		return
	case killed:
		p.err = context.Cause(ctx)
	case err == nil:
		p.err = errors.New("the sandbox's init ended without a report")
	default:
		p.err = fmt.Errorf("the sandbox's init ended: %w", err)
	}
	p.status = ExitStatus{Code: 128 + int(unix.SIGKILL), Signal: unix.SIGKILL}
}

// TUN returns the device [Interface], for tun.Adopt, or nil without Config.Network. Its Name is the interface name.
// The network namespace exists as long as this file or a duplicate is open, even when the program has ended. The
// Process closes this file when the sandbox has ended.
func (p *Process) TUN() *os.File { return p.remote.tun }

// Forward sends the program one of [Signals] that this process has received. It does not repeat a signal that the
// terminal sent to the whole foreground job (interrupt, quit, hangup) if the program is part of that job. Before Run
// the signal is lost. After the program has ended, Forward returns os.ErrProcessDone.
func (p *Process) Forward(sig os.Signal) error {
	ofTerminal := p.terminal != nil && slices.Contains([]os.Signal{unix.SIGINT, unix.SIGQUIT, unix.SIGHUP}, sig)
	return p.signal(sig, ofTerminal)
}

func (p *Process) signal(sig os.Signal, ofTerminal bool) error {
	number, ok := sig.(syscall.Signal)
	if !ok || number <= 0 {
		return fmt.Errorf("%v is not a signal of this system", sig)
	}
	select {
	case <-p.done:
		return os.ErrProcessDone
	default:
	}
	return p.remote.signal(number, ofTerminal)
}

// Wait waits until every process of the sandbox has ended. It returns an error if the program did not end by
// itself: the ctx of Start ended, or another process killed init. It may be called any number of times.
func (p *Process) Wait() (ExitStatus, error) {
	<-p.done
	return p.status, p.err
}

// Dial connects to an address from inside, where loopback is the program's. Errors are those of net.Dialer. The
// caller owns the connection, which may outlive the sandbox.
func (p *Process) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	if !p.isolated {
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	return p.remote.Dial(ctx, network, address)
}

// Update atomically replaces the files of the volume with the name of v.
func (p *Process) Update(ctx context.Context, v Volume) error {
	if !hasVolume(p.volumes, v.Name) {
		return fmt.Errorf("there is no volume %q", v.Name)
	}
	if err := p.remote.Update(ctx, v); err != nil {
		return fmt.Errorf("updating the volume %s of the sandbox: %w", v.Name, err)
	}
	return nil
}
