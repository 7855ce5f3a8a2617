package supervisor

import (
	"context"
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/subreaper"
	"kubevpn/pkg/wakeup"
)

// command starts and ends the command. It belongs to one goroutine.
type command struct {
	*Supervisor
	family  *subreaper.Family
	program subreaper.Program
	signals chan os.Signal
	backoff time.Duration // before the next start
}

// runCommand runs the command until a signal ends it, and returns its exit code.
func (s *Supervisor) runCommand(ctx context.Context) (int, error) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	c := &command{
		Supervisor: s, family: &subreaper.Family{}, signals: make(chan os.Signal, 8), backoff: backoffFirst,
		program: subreaper.Program{Args: s.cfg.Command, Env: os.Environ(), Stdin: null.Fd(), Group: true},
	}
	defer wakeup.Go(context.WithoutCancel(ctx), c.family.Reap)()
	signal.Notify(c.signals, unix.SIGTERM, unix.SIGINT, unix.SIGQUIT, unix.SIGHUP, unix.SIGUSR1, unix.SIGUSR2)
	defer signal.Stop(c.signals)

	if len(s.dirs) > 0 {
		s.cfg.Logger.Info("waiting for the first files")
	}
	if _, sig := c.wait(ctx, s.copied, nil); sig != 0 {
		return 128 + int(sig), nil
	}
	select {
	case <-s.changed: // the command will see these files
	default:
	}
	return c.loop(ctx)
}

// loop starts the command again and again, until a signal ends it, or it has succeeded and does not run again.
func (c *command) loop(ctx context.Context) (int, error) {
	for first := true; ; first = false {
		began := time.Now()
		p, err := c.family.Start(c.program)
		if err != nil && first && len(c.dirs) == 0 {
			return 0, err
		}
		succeeded := false
		if err != nil { // the program may still arrive as a file
			c.cfg.Logger.Error("cannot start the command", "err", err)
		} else {
			reason := c.attend(ctx, p)
			exit, _ := p.Exit()
			switch reason {
			case ending:
				return exit, nil
			case newFiles:
				c.backoff = backoffFirst
				continue
			}
			succeeded = c.cfg.Once && exit == 0
			if succeeded && !c.cfg.Restart {
				return 0, nil
			}
			c.cfg.Logger.Warn("the command ended", "exit", exit, "after", time.Since(began).Round(time.Millisecond))
		}
		if time.Since(began) >= steady {
			c.backoff = backoffFirst
		}
		if sig := c.pause(ctx, succeeded); sig != 0 {
			return 128 + int(sig), nil
		}
	}
}

// pause waits before the command starts again: for the backoff or for files, or with filesOnly for files only. It
// returns the signal that ended the wait, or 0.
func (c *command) pause(ctx context.Context, filesOnly bool) unix.Signal {
	elapsed, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.backoff)
	defer cancel()
	until := elapsed.Done()
	if filesOnly {
		until = nil
	}
	changed, sig := c.wait(ctx, until, c.changed)
	if changed {
		c.backoff = backoffFirst
	} else {
		c.backoff = min(2*c.backoff, backoffMost)
	}
	return sig
}

// wait returns when until or changed is ready, and reports whether it was changed. It also returns for a signal that
// ends the supervisor. No command runs meanwhile.
func (c *command) wait(ctx context.Context, until, changed <-chan struct{}) (isChanged bool, sig unix.Signal) {
	for {
		select {
		case <-until:
			return false, 0
		case <-changed:
			return true, 0
		case sig := <-c.signals:
			if ends(sig) { // others are for the command
				return false, sig.(unix.Signal)
			}
		case <-ctx.Done():
			return false, unix.SIGTERM
		}
	}
}

// ends reports whether a signal ends the supervisor.
func ends(s os.Signal) bool { return s == unix.SIGTERM || s == unix.SIGINT || s == unix.SIGQUIT }

// endReason is why the command ended.
type endReason int

const (
	itself endReason = iota
	newFiles
	ending
)

// attend waits for the end of the command. It ends the command for new files and forwards signals.
func (c *command) attend(ctx context.Context, p *subreaper.Process) endReason {
	reason := itself
	var killAt <-chan time.Time
	done := ctx.Done()
	for {
		select {
		case <-p.Done():
			p.SignalGroup(unix.SIGKILL) // processes that it left behind would keep its ports
			return reason
		case <-c.changed:
			if reason == itself {
				c.cfg.Logger.Info("files arrived; restarting the command")
				reason, killAt = newFiles, time.After(stopGrace)
				p.SignalGroup(unix.SIGTERM)
			}
		case <-killAt:
			c.cfg.Logger.Warn("the command ignores SIGTERM; killing it", "after", stopGrace)
			p.SignalGroup(unix.SIGKILL)
		case sig := <-c.signals:
			if ends(sig) {
				reason = ending
			}
			p.Signal(sig.(unix.Signal))
		case <-done:
			done = nil
			reason = ending
			p.Signal(unix.SIGTERM)
		}
	}
}
