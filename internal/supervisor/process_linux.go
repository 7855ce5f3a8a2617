package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// family is this process's children: the command, and what becomes an orphan in the container, which PID 1 gets and has to wait
// for.
type family struct {
	mu      sync.Mutex
	waiting map[int]chan<- unix.WaitStatus
}

// reap waits for children that have ended, until ctx does.
func (f *family) reap(ctx context.Context) {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, unix.SIGCHLD)
	defer signal.Stop(ended)
	for {
		f.collect()
		select {
		case <-ended:
		case <-ctx.Done():
			return
		}
	}
}

func (f *family) collect() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return // nobody, or nobody who has ended
		}
		if tell, ok := f.waiting[pid]; ok {
			delete(f.waiting, pid)
			tell <- status
		}
	}
}

// child is a command that runs, with a process group of its own.
type child struct {
	pid   int
	ended <-chan unix.WaitStatus // one value
}

func (f *family) start(argv []string) (child, error) {
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return child{}, err
	}
	f.mu.Lock() // until it is known whose end is waited for
	defer f.mu.Unlock()
	p, err := os.StartProcess(path, argv, &os.ProcAttr{
		Files: []*os.File{nil, os.Stdout, os.Stderr}, Sys: &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		return child{}, err
	}
	ended := make(chan unix.WaitStatus, 1)
	c := child{p.Pid, ended}
	f.waiting[c.pid] = ended
	return c, p.Release() // which forgets p.Pid
}

// signal sends a signal to the command, as the kubelet would: not to what it started.
func (c child) signal(s unix.Signal) { c.tell(c.pid, s) }

// signalAll sends it to its whole process group.
func (c child) signalAll(s unix.Signal) { c.tell(-c.pid, s) }

// tell does without the error: that the process has gone is heard from its parent.
func (c child) tell(whom int, s unix.Signal) { _ = unix.Kill(whom, s) }

func exitCode(s unix.WaitStatus) int {
	if s.Signaled() {
		return 128 + int(s.Signal())
	}
	return s.ExitStatus()
}

// runCommand is the command's life.
func (s *Supervisor) runCommand(ctx context.Context) (int, error) {
	f := &family{waiting: make(map[int]chan<- unix.WaitStatus)}
	var reaping sync.WaitGroup
	reapCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer reaping.Wait()
	defer cancel()
	reaping.Go(func() { f.reap(reapCtx) })
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGQUIT, unix.SIGHUP, unix.SIGUSR1, unix.SIGUSR2)
	defer signal.Stop(signals)

	if s.cfg.Once {
		select {
		case <-s.copied:
			select {
			case <-s.changed: // which the command will see
			default:
			}
		case sig := <-signals:
			return 128 + int(sig.(unix.Signal)), nil
		case <-ctx.Done():
			return 128 + int(unix.SIGTERM), nil
		}
	}
	for pause, first := pauseFirst, true; ; first = false {
		well := false
		c, err := f.start(s.cfg.Command)
		if err != nil && first && len(s.targets) == 0 {
			return 0, fmt.Errorf("starting %s: %w", s.cfg.Command[0], err)
		}
		began := time.Now()
		if err != nil { // the file may be on its way
			s.cfg.Logger.Error("the command cannot be started", "err", err)
		} else {
			status, why := s.attend(ctx, c, signals)
			switch why {
			case ending:
				return exitCode(status), nil
			case files:
				pause = pauseFirst
				continue
			}
			if well = s.cfg.Once && exitCode(status) == 0; well && !s.cfg.Restart {
				return 0, nil
			}
			s.cfg.Logger.Warn("the command has ended", "exit", exitCode(status), "after", time.Since(began).Round(time.Millisecond))
		}
		if time.Since(began) >= steady {
			pause = pauseFirst
		}
		wait := time.NewTimer(pause)
		if well { // until there are files
			wait.Stop()
		}
		select {
		case <-wait.C:
			pause = min(2*pause, pauseMost)
		case <-s.changed:
			pause = pauseFirst
		case sig := <-signals:
			wait.Stop()
			return 128 + int(sig.(unix.Signal)), nil
		case <-ctx.Done():
			wait.Stop()
			return 128 + int(unix.SIGTERM), nil
		}
		wait.Stop()
	}
}

// why a command that was attended has ended.
type why int

const (
	itself why = iota
	files
	ending
)

// attend waits for the command's end, and brings it about when there are files, or a signal says so.
func (s *Supervisor) attend(ctx context.Context, c child, signals <-chan os.Signal) (unix.WaitStatus, why) {
	reason := itself
	var patience <-chan time.Time
	done := ctx.Done()
	for {
		select {
		case status := <-c.ended:
			if reason == files {
				c.signalAll(unix.SIGKILL) // what it left of itself would keep its ports
			}
			return status, reason
		case <-s.changed:
			if reason == itself {
				s.cfg.Logger.Info("files came: the command is started again")
				reason, patience = files, time.After(stopGrace)
				c.signalAll(unix.SIGTERM)
			}
		case <-patience:
			s.cfg.Logger.Warn("the command takes no notice of SIGTERM", "after", stopGrace)
			c.signalAll(unix.SIGKILL)
		case sig := <-signals:
			if sig == unix.SIGTERM || sig == unix.SIGINT || sig == unix.SIGQUIT {
				reason = ending
			}
			c.signal(sig.(unix.Signal))
		case <-done:
			done = nil
			reason = ending
			c.signal(unix.SIGTERM)
		}
	}
}
