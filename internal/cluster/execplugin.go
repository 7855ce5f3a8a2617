package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os/exec"
	"runtime"
	"time"
)

// Exit codes of ExecCredential besides the plugin's own. client-go reports nothing of a plugin but its code,
// so Explain knows them. They are timeout(1)'s and the shell's.
const (
	exitExecTimeout  = 124
	exitExecCannot   = 126
	exitExecNotFound = 127
)

// ExecRun is one run of a credential plugin.
type ExecRun struct {
	Argv           []string
	Timeout        time.Duration // 0: ExecTimeout
	Env            []string
	Stdout, Stderr io.Writer
}

// ExecCredential runs the plugin and returns the exit code to end with: its own, 124 when it was killed at
// the timeout, 127 when there is no such program. The plugin has a process group of its own, and the whole
// group is killed at the timeout, or when ctx ends: client-go would wait for ever, holding a lock that every
// request needs. On Linux the plugin is also killed when this process dies.
//
// It returns as soon as the plugin has ended, also when something it started holds its output open: such
// helpers (a token cache's daemon) live on.
func ExecCredential(ctx context.Context, run ExecRun) int {
	if len(run.Argv) == 0 {
		fmt.Fprintln(run.Stderr, "kubevpn: no credential plugin named")
		return exitExecNotFound
	}
	if run.Timeout == 0 {
		run.Timeout = ExecTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, run.Timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, run.Argv[0], run.Argv[1:]...)
	cmd.Env, cmd.Stdout, cmd.Stderr = run.Env, run.Stdout, run.Stderr
	cmd.WaitDelay = 500 * time.Millisecond
	ownGroup(cmd)
	runtime.LockOSThread() // Linux kills the plugin with the thread that started it
	defer runtime.UnlockOSThread()
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		fmt.Fprintf(run.Stderr, "kubevpn: the credential plugin %s did not answer within %v and was killed\n", run.Argv[0], run.Timeout)
		return exitExecTimeout
	case err == nil, errors.Is(err, exec.ErrWaitDelay):
		return 0
	case errors.As(err, &exit) && exit.ExitCode() >= 0:
		return exit.ExitCode()
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, fs.ErrNotExist):
		fmt.Fprintf(run.Stderr, "kubevpn: running the credential plugin: %v\n", err)
		return exitExecNotFound
	default:
		fmt.Fprintf(run.Stderr, "kubevpn: running the credential plugin: %v\n", err)
		return exitExecCannot
	}
}
