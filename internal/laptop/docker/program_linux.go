package docker

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"kubevpn/pkg/host/sandbox"
	"kubevpn/pkg/host/subreaper"
)

// runProgram is the first process of a container. It starts the program that kubevpn names and returns its exit code.
func runProgram() (exit int, err error) {
	passed := signals(term.IsTerminal(0)) // before kubevpn may learn that this process runs
	conn, err := connect()
	if err != nil {
		return 0, err
	}
	return sandbox.ServeProgram(conn, func(p subreaper.Program) (*subreaper.Process, error) { return start(p, passed) })
}

// signals catches the signals that this process passes to the program. With a terminal it drops those that the terminal
// sends to the program directly.
func signals(terminal bool) <-chan os.Signal {
	passed := make(chan os.Signal, 16)
	dropped := make(chan os.Signal, 1)
	for n := syscall.Signal(1); n < 32; n++ {
		switch n {
		// cannot be caught, or concern this process itself
		case unix.SIGKILL, unix.SIGSTOP, unix.SIGCHLD, unix.SIGURG, unix.SIGPIPE,
			unix.SIGSEGV, unix.SIGBUS, unix.SIGFPE, unix.SIGILL, unix.SIGTRAP, unix.SIGABRT, unix.SIGSYS, unix.SIGPROF,
			unix.SIGTTIN, unix.SIGTTOU:
		case unix.SIGINT, unix.SIGQUIT, unix.SIGTSTP, unix.SIGWINCH:
			if terminal {
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

// start starts the program. Its environment overrides the one that the engine gave this process.
func start(program subreaper.Program, passed <-chan os.Signal) (*subreaper.Process, error) {
	// Orphans must come here also when this process is not PID 1: with --pid host.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("cannot become the parent of orphans: %w", err)
	}
	program.Env = merge(slices.DeleteFunc(os.Environ(), isProxy), program.Env)
	var family subreaper.Family
	p, err := family.Start(program)
	if err != nil {
		return nil, err
	}
	go family.Reap(context.Background()) // until this process ends, as the next
	go func() {
		for s := range passed {
			p.Signal(s.(syscall.Signal))
		}
	}()
	return p, nil
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
	conn, err := connect()
	if err != nil {
		return err
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
