package project

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
)

const (
	// cleanTimeout is how long a process may clean up before it is killed.
	cleanTimeout = 15 * time.Second
	// afterTimeout limits a command after an entry, or after the project.
	afterTimeout = time.Minute
	maxLine      = 1 << 20 // of events and of output
)

// unit runs one entry in a process of its own.
type unit struct {
	set     *Set
	entry   Entry
	environ []string
	after   []string // connections that come first
	cancel  context.CancelFunc
	ended   chan struct{} // closed by run
}

// run waits for what the entry needs, and runs it until ctx ends or the process does.
func (u *unit) run(ctx context.Context) {
	defer close(u.ended)
	err := u.await(ctx)
	if err == nil {
		u.set.set(u.entry, api.ProjectStarting, "")
		err = u.command(ctx, "before", u.entry.Before)
	}
	if err == nil {
		err = u.process(ctx)
		err = cmp.Or(err, u.command(context.WithoutCancel(ctx), "after", u.entry.After))
	}
	switch {
	case ctx.Err() != nil: // the Set has ended it
	case err != nil:
		u.set.change(api.ProjectEntry{Kind: u.entry.Kind, Name: u.entry.Name, State: api.ProjectFailed,
			Detail: api.OneLine(err.Error()), Code: api.AsError(err).Code})
	default:
		u.set.set(u.entry, api.ProjectCompleted, "")
	}
}

// follows reports whether other must have started before this unit.
func (u *unit) follows(other *unit) bool {
	_, needs := u.entry.Needs[other.entry.Name]
	return needs || slices.Contains(u.after, other.entry.Name)
}

func (u *unit) say(text string) { u.set.out(u.entry.Name, text) }

// await waits for the conditions of the needs.
func (u *unit) await(ctx context.Context) error {
	needs := map[string]Need{}
	for _, name := range u.after {
		needs[name] = Started
	}
	for name, need := range u.entry.Needs {
		needs[name] = need
	}
	for name, need := range needs {
		var broken error
		if _, err := u.set.state.Await(ctx, func(m map[string]api.ProjectEntry) bool {
			met := false
			met, broken = meets(m[name], need)
			return met || broken != nil
		}); err != nil {
			return err
		}
		if broken != nil {
			return broken
		}
	}
	return nil
}

// meets reports whether a state meets a need, or why it never will.
func meets(e api.ProjectEntry, need Need) (bool, error) {
	switch e.State {
	case api.ProjectFailed, api.ProjectStopping:
		return false, fmt.Errorf("%s has failed, which must come first", e.Name)
	case api.ProjectCompleted:
		if need == Healthy {
			return false, fmt.Errorf("%s has ended, and must be healthy first", e.Name)
		}
		return true, nil
	case api.ProjectHealthy, api.ProjectUnhealthy:
		return need == Started || need == Healthy && e.State == api.ProjectHealthy, nil
	case api.ProjectRunning:
		return need == Started, nil
	}
	return false, nil
}

// command runs a command of this machine to its end.
func (u *unit) command(ctx context.Context, what string, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if what == "after" {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, afterTimeout)
		defer cancel()
	}
	cmd := u.cmd(ctx, args[0], args[1:]...)
	out := u.lines()
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Run(); err != nil {
		err = fmt.Errorf("%s: %s: %w", what, strings.Join(args, " "), err)
		u.say("! " + err.Error())
		return err
	}
	return nil
}

// cmd returns a command that is asked to end when ctx does.
func (u *unit) cmd(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env, cmd.WaitDelay = u.entry.Directory, u.environ, cleanTimeout
	apart(cmd)
	cmd.Cancel = func() error { return endProcess(cmd.Process) }
	return cmd
}

// process runs the command of the entry.
func (u *unit) process(ctx context.Context) error {
	// The process is told when the thread that started it ends (PR_SET_PDEATHSIG): the thread must live as long.
	runtime.LockOSThread()
	events, theirs, err := os.Pipe()
	if err != nil {
		return err
	}
	defer events.Close()
	cmd := u.cmd(ctx, u.set.executable, append([]string{"--events=3"}, u.entry.Held()...)...)
	out := u.lines()
	defer out.Close()
	cmd.ExtraFiles, cmd.Stdout, cmd.Stderr = []*os.File{theirs}, out, out
	err = cmd.Start()
	theirs.Close()
	if err != nil {
		return err
	}
	checking, stop := context.WithCancel(ctx)
	var following sync.WaitGroup
	var failure *api.Error
	following.Go(func() { failure = u.follow(checking, events) })
	err = cmd.Wait()
	stop()
	following.Wait()
	if err != nil && ctx.Err() == nil {
		u.say(fmt.Sprintf("exited with code %d", cmd.ProcessState.ExitCode()))
	}
	if failure != nil { // it has said more
		return failure
	}
	return err
}

// follow reads the events of the process, and checks its health once it is ready. It returns the error that ended it.
func (u *unit) follow(ctx context.Context, events io.Reader) (failure *api.Error) {
	scanner := bufio.NewScanner(events)
	scanner.Buffer(nil, maxLine)
	var checks sync.WaitGroup
	defer checks.Wait()
	for ready := false; scanner.Scan(); {
		var e api.Event
		if err := json.Unmarshal(scanner.Bytes(), &e); err != nil {
			return api.Errorf(api.ExitUnexpected, "reading the events of %s: %w", u.entry.Name, err)
		}
		failure = cmp.Or(e.Error, failure)
		if e.Held && !ready {
			ready = true
			u.set.set(u.entry, api.ProjectRunning, "")
			if h := u.entry.Health; h != nil {
				checks.Go(func() { u.check(ctx, h) })
			}
		}
	}
	return failure
}

// check runs the healthcheck until ctx ends. As with compose, failures in the start period do not count.
func (u *unit) check(ctx context.Context, h *Healthcheck) {
	begun, failures := time.Now(), 0
	for {
		test, cancel := context.WithTimeout(ctx, h.Timeout)
		out, err := u.cmd(test, h.Test[0], h.Test[1:]...).CombinedOutput()
		cancel()
		was := u.set.state.Load()[u.entry.Name].State
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			if failures = 0; was != api.ProjectHealthy {
				u.say("✓ healthy")
				u.set.set(u.entry, api.ProjectHealthy, "")
			}
		case was == api.ProjectHealthy || time.Since(begun) >= h.StartPeriod:
			if failures++; failures == h.Retries {
				detail := fmt.Sprintf("the healthcheck fails: %v: %s", err, api.OneLine(lastLine(string(out))))
				u.say("! " + detail)
				u.set.set(u.entry, api.ProjectUnhealthy, detail)
			}
		}
		if !wakeup.Pause(ctx, h.Interval) {
			return
		}
	}
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}

// lines returns a writer that prints each line behind the name of the entry. Close prints an unfinished one.
func (u *unit) lines() io.WriteCloser {
	r, w := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		reader := bufio.NewReaderSize(r, 64<<10)
		for {
			line, err := reader.ReadSlice('\n') // of a longer line, parts
			if len(line) > 0 {
				u.say(strings.TrimRight(string(slices.Clone(line)), "\r\n"))
			}
			if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
				return
			}
		}
	}()
	return &lineWriter{w, done}
}

type lineWriter struct {
	*io.PipeWriter
	done <-chan struct{}
}

func (w *lineWriter) Close() error {
	err := w.PipeWriter.Close()
	<-w.done
	return err
}
