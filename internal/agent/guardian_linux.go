package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/pkg/redirect"
)

// lockFile is where iptables-legacy locks. Its own place, /run, is read-only in the agent's container; /dev never is.
const lockFile = "/dev/kubevpn-agent-xtables.lock"

// guard is all of the process if its redirects would outlive it, as those of iptables do on kernels before Linux 5.12. Then it
// is the guardian of an agent, to which the same program is started again:
//
//	process 1, the guardian ── starts ──▶ agent ──▶ rules in the kernel, for 5 s at most
//	          │       signals ───────────▶  │            ▲         ▲
//	          │ ◀──── its end, however ─────┘ renewed ───┘         │
//	          └── removed, the agent's exit code ──────────────────┘
//
// It is the first process, as that one's end is the end of all others of a container: then the clock ends the rules. Where
// redirects end with their process, there is no guardian, and the process is the agent itself.
func guard(log *slog.Logger) (guarded bool, err error) {
	if err := os.Setenv("XTABLES_LOCKFILE", lockFile); err != nil {
		return true, fmt.Errorf("choosing the lock of iptables: %w", err)
	}
	if os.Getenv(guardedVariable) != "" {
		return false, nil
	}
	cfg := redirectConfig(log)
	why := redirect.Owned(cfg)
	if why == nil {
		return false, nil
	}
	log = log.With("of", "guardian")
	cfg.Logger = log
	log.Info("guarding the agent's redirects, which do not end with it", "why", why)
	state, err := supervise(cfg.Name)
	if err != nil {
		return true, fmt.Errorf("guarding the agent: %w", err)
	}
	if err := redirect.Remove(cfg); err != nil {
		log.Error("removing redirects of an agent that has ended", "err", err)
	}
	code := state.ExitCode()
	if s, ok := state.Sys().(syscall.WaitStatus); ok && s.Signaled() {
		code = 128 + int(s.Signal())
	}
	if code != 0 {
		return true, api.Errorf(api.ExitCode(code), "the agent has ended: %v", state)
	}
	return true, nil
}

// supervise runs the agent until it has ended, and with it all that it has started.
func supervise(name string) (*os.ProcessState, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	// What the agent leaves is waited for here: iptables at work must not come after what removes its rules.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("becoming the parent of what the agent leaves: %w", err)
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer signal.Stop(signals)

	agent := exec.Command(program, os.Args[1:]...)
	agent.Env = append(os.Environ(), guardedVariable+"="+name)
	agent.Stdout, agent.Stderr = os.Stdout, os.Stderr
	// The agent ends with its guardian, as with every first process. The kernel goes by the thread that has started it.
	agent.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := agent.Start(); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- agent.Wait() }()
	for {
		select {
		case s := <-signals:
			if err := agent.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
				return nil, err
			}
			continue
		case err := <-ended:
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				return nil, err
			}
		}
		break
	}
	for {
		if _, err := unix.Wait4(-1, nil, 0, nil); err != nil && !errors.Is(err, unix.EINTR) { // ECHILD: nobody is left
			return agent.ProcessState, nil
		}
	}
}
