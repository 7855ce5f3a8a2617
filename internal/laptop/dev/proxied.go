package dev

import (
	"context"
	"errors"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/term"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/sandbox"
)

// proxied runs the program with this machine's network. It reaches the cluster if it uses the proxy that its variables
// name.
func (r *Runner) proxied(ctx context.Context) (int, error) {
	held, release, begin := untilBegin(ctx)
	defer release()
	var proxy *api.SOCKS
	released, err := r.hold(held, func(e *api.Event) {
		if c := e.Connection; c != nil && c.SOCKS != nil {
			proxy, e.Held = c.SOCKS, true
		}
	})
	if err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return 0, err
	}
	defer func() {
		release()
		<-released
	}()
	if !begin() {
		return 0, ctx.Err()
	}
	r.Quiet()
	return r.beside(slices.Concat(r.Environ, proxyVariables(proxy), r.Env))
}

// proxyVariables returns the variables by which most programs find a proxy.
func proxyVariables(p *api.SOCKS) (entries []string) {
	at := url.URL{Scheme: "http", User: url.UserPassword(p.User, p.Password), Host: p.Address}
	http := at.String()
	at.Scheme = "socks5h" // the h: names are resolved in the cluster
	for _, v := range []struct{ name, value string }{
		{"HTTP_PROXY", http}, {"HTTPS_PROXY", http}, {"ALL_PROXY", at.String()},
		{"NO_PROXY", "localhost,127.0.0.1,::1"},
	} {
		entries = append(entries, v.name+"="+v.value, strings.ToLower(v.name)+"="+v.value)
	}
	return entries
}

// beside runs the program as a child of this process, and forwards the signals that this process gets.
func (r *Runner) beside(environ []string) (int, error) {
	// This process must outlive the program, so signals must not end it.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, sandbox.Signals()...)
	defer signal.Stop(signals)
	cmd := exec.Command(r.Args[0], r.Args[1:]...)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = environ, r.Stdin, r.Stdout, r.Stderr
	if err := cmd.Start(); err != nil {
		return 0, api.Errorf(api.ExitUsage, "%w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case err := <-ended:
			if failed := (*exec.ExitError)(nil); err != nil && !errors.As(err, &failed) {
				return 0, err
			}
			return exitStatus(cmd.ProcessState), nil
		case s := <-signals:
			if fromTerminal(s) && r.Stdin != nil && term.IsTerminal(int(r.Stdin.Fd())) {
				continue // the terminal has sent it to the program, too
			}
			if err := cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
				r.warn("cannot forward a signal: " + err.Error())
			}
		}
	}
}

// fromTerminal reports whether a key of the terminal sends the signal to all of its foreground processes.
func fromTerminal(s os.Signal) bool { return s == os.Interrupt || s == syscall.SIGQUIT }

// exitStatus returns the exit code, or 128 plus the signal's number, as in a shell.
func exitStatus(state *os.ProcessState) int {
	if status, ok := state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal())
	}
	return state.ExitCode()
}
