package workload

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/diff"
)

// programEnd is how long the program has to end by itself.
const programEnd = 5 * time.Second

// start starts the command, and waits until it listens. Without a command, a program must listen already. stop ends the
// command with its process group. If it ends earlier, start calls cancel.
func (d *diffRun) start(ctx context.Context, p *diff.Program, cancel context.CancelCauseFunc) (stop func(),
	err error) {
	place := p.Listens(ctx)
	switch {
	case len(d.command) == 0 && place == "":
		return nil, api.Errorf(api.ExitLocalPort, "no program listens on %s", d.ports()).
			WithHint("start it, or let this command start it: `kubevpn diff %s -- ./server`; if it listens on another "+
				"port, add --port LOCAL:CONTAINER", d.intercept.Workload)
	case len(d.command) == 0:
		return func() {}, nil
	case place != "":
		return nil, api.Errorf(api.ExitLocalPort, "another program already listens on %s", place).
			WithHint("stop it, or compare with it: omit the command after --")
	}
	running, end := context.WithCancel(ctx)
	cmd := exec.CommandContext(running, d.command[0], d.command[1:]...)
	cmd.Env, cmd.Stdout, cmd.Stderr = d.o.f.Environ, os.Stderr, os.Stderr // the result alone is on standard output
	cmd.Cancel = func() error { return endGroup(cmd, false) }
	cmd.WaitDelay = programEnd
	ownGroup(cmd)
	d.quiet()
	if err := cmd.Start(); err != nil {
		end()
		return nil, api.Errorf(api.ExitUsage, "cannot start %s: %w", d.command[0], err).
			WithHint("Check the command after --. A program outside of PATH needs its path.")
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		err := cmd.Wait()
		_ = endGroup(cmd, true) // what is left of it
		if running.Err() == nil {
			if err == nil {
				err = errors.New("exit status 0")
			}
			cancel(api.Errorf(api.ExitLocalPort, "%s ended: %w", d.command[0], err).
				WithHint("the program must run until the comparison ends"))
		}
	}()
	stop = sync.OnceFunc(func() {
		end()
		<-ended
	})
	d.o.f.Note("waiting until %s listens on %s", d.command[0], d.ports())
	listens := func(ctx context.Context) (bool, error) { return p.Listens(ctx) != "", nil }
	if err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, programStart, true, listens); err != nil {
		stop()
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, api.Errorf(api.ExitLocalPort, "%s does not listen on %s after %v", d.command[0], d.ports(),
			programStart).
			WithHint("if it listens on another port, add --port LOCAL:CONTAINER")
	}
	return stop, nil
}

// programStart is how long the program may take until it listens: it may have to be compiled first.
const programStart = 5 * time.Minute

// ports returns text like "port 8080 of this machine or 172.17.0.5:9090".
func (d *diffRun) ports() string {
	return strings.Join(api.Texts(d.intercept.Ports, api.PortMap.Where), " or ")
}
