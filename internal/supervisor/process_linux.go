package supervisor

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/pid1"
)

// runCommand is the command's life.
func (s *Supervisor) runCommand(ctx context.Context) (int, error) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	program := pid1.Program{Args: s.cfg.Command, Env: os.Environ(), Stdin: null.Fd(), Group: true}
	f := &pid1.Family{}
	var reaping sync.WaitGroup
	reapCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer reaping.Wait()
	defer cancel()
	reaping.Go(func() { f.Reap(reapCtx) })
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGQUIT, unix.SIGHUP, unix.SIGUSR1, unix.SIGUSR2)
	defer signal.Stop(signals)

	if len(s.targets) > 0 {
		s.cfg.Logger.Info("waiting for the first files")
	}
	if _, by := rest(ctx, signals, s.copied, nil); by != 0 {
		return 128 + int(by), nil
	}
	select {
	case <-s.changed: // which the command will see
	default:
	}
	for pause, first := pauseFirst, true; ; first = false {
		well := false
		c, err := f.Start(program)
		if err != nil && first && len(s.targets) == 0 {
			return 0, err
		}
		began := time.Now()
		if err != nil { // the file may be on its way
			s.cfg.Logger.Error("the command cannot be started", "err", err)
		} else {
			why := s.attend(ctx, c, signals)
			exit, _ := c.Exit()
			switch why {
			case ending:
				return exit, nil
			case files:
				pause = pauseFirst
				continue
			}
			if well = s.cfg.Once && exit == 0; well && !s.cfg.Restart {
				return 0, nil
			}
			s.cfg.Logger.Warn("the command has ended", "exit", exit, "after", time.Since(began).Round(time.Millisecond))
		}
		if time.Since(began) >= steady {
			pause = pauseFirst
		}
		wait, over := context.WithTimeout(context.WithoutCancel(ctx), pause)
		until := wait.Done()
		if well {
			until = nil
		}
		came, by := rest(ctx, signals, until, s.changed)
		over()
		switch {
		case by != 0:
			return 128 + int(by), nil
		case came:
			pause = pauseFirst
		default:
			pause = min(2*pause, pauseMost)
		}
	}
}

// rest waits, while no command runs, for until or for files. If there is a signal that ends everything first it is that.
func rest(ctx context.Context, signals <-chan os.Signal, until, files <-chan struct{}) (came bool, by unix.Signal) {
	for {
		select {
		case <-until:
			return false, 0
		case <-files:
			return true, 0
		case sig := <-signals:
			if ends(sig) { // others are the command's, which does not run
				return false, sig.(unix.Signal)
			}
		case <-ctx.Done():
			return false, unix.SIGTERM
		}
	}
}

// ends reports whether a signal says that everything is to end.
func ends(s os.Signal) bool { return s == unix.SIGTERM || s == unix.SIGINT || s == unix.SIGQUIT }

// why a command that was attended has ended.
type why int

const (
	itself why = iota
	files
	ending
)

// attend waits for the command's end, and brings it about when there are files, or a signal says so.
func (s *Supervisor) attend(ctx context.Context, c *pid1.Process, signals <-chan os.Signal) why {
	reason := itself
	var patience <-chan time.Time
	done := ctx.Done()
	for {
		select {
		case <-c.Done():
			c.SignalGroup(unix.SIGKILL) // what it has left of itself would keep its ports, and be more with each start
			return reason
		case <-s.changed:
			if reason == itself {
				s.cfg.Logger.Info("files came: the command is started again")
				reason, patience = files, time.After(stopGrace)
				c.SignalGroup(unix.SIGTERM)
			}
		case <-patience:
			s.cfg.Logger.Warn("the command takes no notice of SIGTERM", "after", stopGrace)
			c.SignalGroup(unix.SIGKILL)
		case sig := <-signals:
			if ends(sig) {
				reason = ending
			}
			c.Signal(sig.(unix.Signal))
		case <-done:
			done = nil
			reason = ending
			c.Signal(unix.SIGTERM)
		}
	}
}
