package docker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/signal"
	"path"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/sandbox"
	"kubevpn/pkg/host/subreaper"
)

// runProgram is the first process of a container. It starts the program that kubevpn names and returns its exit code.
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
	p, err := i.start()
	// An error means that kubevpn has ended, which handle detects.
	_ = i.out.Encode(report{Error: subreaper.NewFailure(err)})
	if err != nil {
		return notStarted(err), nil
	}
	go i.family.Reap(context.Background()) // until this process ends
	go i.handle(p)
	for {
		select {
		case s := <-passed:
			p.Signal(s.(syscall.Signal))
		case <-p.Done():
			code, _ := p.Exit()
			_ = i.out.Encode(report{Ended: &code})
			return code, nil
		}
	}
}

// notStarted returns the exit code of shells and docker for a program that cannot be started.
func notStarted(err error) int {
	if errors.Is(err, os.ErrNotExist) {
		return 127
	}
	return 126
}

type initProcess struct {
	*wire
	program program
	family  subreaper.Family
}

// signals catches the signals that this process passes to the program. It drops those of a terminal, which reach the
// program directly.
func (i *initProcess) signals() <-chan os.Signal {
	passed := make(chan os.Signal, 16)
	dropped := make(chan os.Signal, 1)
	for n := syscall.Signal(1); n < 32; n++ {
		switch n {
		// cannot be caught, or concern this process itself
		case unix.SIGKILL, unix.SIGSTOP, unix.SIGCHLD, unix.SIGURG, unix.SIGPIPE,
			unix.SIGSEGV, unix.SIGBUS, unix.SIGFPE, unix.SIGILL, unix.SIGTRAP, unix.SIGABRT, unix.SIGSYS, unix.SIGPROF,
			unix.SIGTTIN, unix.SIGTTOU:
		case unix.SIGINT, unix.SIGQUIT, unix.SIGTSTP, unix.SIGWINCH:
			if i.program.TTY {
				signal.Notify(dropped, n)
			} else {
				signal.Notify(passed, n)
			}
		default:
			signal.Notify(passed, n)
		}
	}
	return passed
}

// handle executes the orders of kubevpn. When kubevpn has ended, it ends this process, and the kernel kills all others
// in the container.
func (i *initProcess) handle(p *subreaper.Process) {
	for {
		var o order
		if err := i.in.Decode(&o); err != nil {
			os.Exit(128 + int(unix.SIGKILL))
		}
		if o.Signal > 0 {
			p.Signal(syscall.Signal(o.Signal))
		}
	}
}

// start starts the program. Its environment overrides the one that the engine gave this process.
func (i *initProcess) start() (*subreaper.Process, error) {
	// Orphans must come here also when this process is not PID 1: with --pid host.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("becoming the parent of orphans: %w", err)
	}
	env := merge(slices.DeleteFunc(os.Environ(), isProxy), i.program.Env)
	p, err := i.family.Start(subreaper.Program{Args: i.program.Args, Env: env})
	if err != nil {
		return nil, err
	}
	// Otherwise the reader of the program's output sees no EOF when the program closes it.
	return p, subreaper.CloseStandardFiles()
}

// isProxy reports whether the docker command's setting "proxies" adds this variable. Such a proxy belongs to the user's
// network and would receive the names of the cluster.
func isProxy(entry string) bool {
	name, _, _ := strings.Cut(entry, "=")
	return slices.Contains([]string{"HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY"},
		strings.ToUpper(name))
}

// merge returns the entries of base and over, sorted. A later entry replaces an earlier one of the same name.
func merge(base, over []string) []string {
	entries := map[string]string{} // by name
	for _, entry := range slices.Concat(base, over) {
		name, _, _ := strings.Cut(entry, "=")
		entries[name] = entry
	}
	return slices.Sorted(maps.Values(entries))
}

// runNetwork is the first process of the network container. It creates the TUN and writes the volumes, until kubevpn or
// a signal ends it.
func runNetwork() error {
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path.Join(control, socketName), Net: "unixpacket"})
	if err != nil {
		return fmt.Errorf("%w (%w)", errByHand, err)
	}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT)
	served := make(chan error, 1)
	go func() { served <- sandbox.Serve(conn, volumesAt) }()
	select {
	case <-served: // kubevpn has received the error
	case <-ended:
	}
	return nil
}
