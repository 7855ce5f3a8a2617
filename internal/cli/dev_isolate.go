package cli

import (
	"context"
	"errors"
	"net"
	"os"

	"kubevpn/internal/api"
	"kubevpn/internal/dev"
	"kubevpn/pkg/sandbox"
)

// Place is a network namespace that is not this machine's: a *sandbox.Process, or a *sandbox.Remote.
type Place interface {
	TUN() *os.File
	SetNetwork(ctx context.Context, n sandbox.Network) error
	Dial(ctx context.Context, network, address string) (net.Conn, error)
}

// checkIsolate refuses what does not go together.
func (o *devOptions) checkIsolate() error {
	if o.isolate && o.docker.wanted {
		return api.Errorf(api.ExitUsage, "--isolate and --docker").WithHint("containers have a network of their own: leave --isolate out")
	}
	return nil
}

// runIsolated runs the program in a network of its own, which is connected by this process: there is no daemon, and nothing
// needs root.
func (o *devOptions) runIsolated(ctx context.Context, command []string, show func(api.Event), quiet func()) error {
	on := oneByOne(show) // the connection's events come beside the program's
	own, err := o.local()
	if err != nil {
		return err
	}
	if err := sandbox.Allowed(true); err != nil {
		return notAllowed(err, o.isolate)
	}
	req, workload, err := o.attached(ctx, silent)
	if err != nil {
		return err
	}
	// Ctrl-C ends the attempt, and is the program's from when it runs.
	held, letGo := context.WithCancelCause(context.WithoutCancel(ctx))
	defer letGo(nil)
	stop := context.AfterFunc(ctx, func() { letGo(context.Cause(ctx)) })
	p, err := o.prepare(ctx, req.Connect, workload, command, own, on, func(cfg *dev.Config) {
		cfg.Network = func(ctx context.Context, place *sandbox.Process, ready func()) error {
			return o.app.Isolated(ctx, req, place, func() {
				if stop() {
					quiet()
					ready()
				}
			}, on)
		}
	})
	if err != nil {
		return err
	}
	status, err := p.Run(held)
	if err != nil && held.Err() != nil {
		return ctx.Err()
	}
	return o.ended(command[0], status, err)
}

// notAllowed is the error of a machine that has no sandboxes, or none for this user, with what else there is.
func notAllowed(err error, isolate bool) error {
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return api.Errorf(api.ExitPrivilege, "%w", err).WithHint("`kubevpn dev` needs a Linux machine")
	case isolate && errors.Is(err, sandbox.ErrNoTUN):
		return api.Errorf(api.ExitNoTUN, "%w", err).
			WithHint("without --isolate the program has this machine's network, which `kubevpn dev` connects with sudo")
	}
	return api.Errorf(api.ExitPrivilege, "%w", err).WithHint("`kubevpn dev --docker` runs the workload's containers instead")
}
