package cli

import (
	"context"
	"errors"

	"kubevpn/internal/api"
)

// question is a request to the daemon that needs the root helper and takes a while.
type question struct {
	path string
	body any
	on   func(api.Event)
	// quiet stops the progress display, so that sudo can use the terminal.
	quiet func()
	// held requests release what they began at Ctrl-C, and receive the events of the cleanup. For others, interrupted
	// waits until the daemon has cleaned up what it had begun on the connection.
	held        bool
	interrupted func(ctx context.Context, c *client, connection string, on func(api.Event)) error
}

// ask sends a request to the daemon. It first starts the daemon and the root helper if they do not run. It returns the
// connection that the answer is about.
func (a *app) ask(ctx context.Context, q question) (*api.Connection, error) {
	const tries = 4 // a daemon or a helper may end by itself in between, once each
	for try := 1; ; try++ {
		client, info, err := a.daemon(ctx)
		if err != nil {
			return nil, err
		}
		var c *api.Connection
		if !info.Helper {
			q.quiet()
			err = a.newHelper(ctx, client)
		}
		if err == nil {
			c, err = a.send(ctx, client, q)
		}
		switch {
		case ctx.Err() != nil:
			return c, err
		case errors.Is(err, errNeedsHelper), errors.Is(err, errNoDaemon):
			if try == tries {
				return nil, api.Errorf(api.ExitDaemon, "%w, after %d attempts", err, tries).
					WithHint("see `kubevpn logs` for the cause")
			}
			if errors.Is(err, errNeedsHelper) {
				continue
			}
			if err := client.gone(ctx); err != nil {
				return nil, err
			}
		case err == nil && c == nil:
			return nil, api.Errorf(api.ExitDaemon, "the daemon did not answer").
				WithHint("see `kubevpn logs` for the cause")
		default:
			return c, err
		}
	}
}

// send sends the request once.
func (a *app) send(ctx context.Context, client *client, q question) (*api.Connection, error) {
	if q.held {
		return client.hold(ctx, q.path, q.body, q.on)
	}
	id := ""
	c, err := client.stream(ctx, q.path, q.body, func(begun string) { id = begun }, q.on)
	if err == nil || ctx.Err() == nil {
		return c, err
	}
	if id == "" {
		return nil, ctx.Err() // the daemon had not begun
	}
	if err := q.interrupted(ctx, client, id, q.on); err != nil {
		return nil, api.Errorf(api.ExitInterrupted, "interrupted, and cannot tell whether the cleanup ended: %w", err).
			WithHint("`kubevpn status` shows what is left; `kubevpn quit` ends it")
	}
	return c, ctx.Err()
}

// settle shows a step until settled accepts the daemon's status, or the daemon has ended.
func (c *client) settle(ctx context.Context, on func(api.Event), step string, settled func(api.Status) bool) error {
	on(api.Event{Step: step})
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	defer cancel()
	for {
		status, err := c.status(ctx)
		switch {
		case errors.Is(err, errNoDaemon): // it ends when nothing is left
		case err != nil:
			return err
		case !settled(status):
			pause(ctx, pollInterval)
			continue
		}
		on(api.Event{Step: step, Done: true})
		return nil
	}
}

// report runs a command that shows its progress: as text, or as lines of JSON of which the last has the result. do may
// call quiet to stop the progress display.
func (a *app) report(
	ctx context.Context, output *format, do func(ctx context.Context, on func(api.Event), quiet func()) error,
) error {
	p := a.newProgress()
	if output.value == "json" {
		p = jsonLines{a.out}
	}
	defer p.stop()
	told := false
	err := do(ctx, func(e api.Event) {
		told = told || e.Error != nil
		p.show(e)
	}, p.stop)
	p.stop()
	if err != nil && output.value == "json" && !told {
		p.show(api.Event{Error: interruptedOr(ctx, err)})
	}
	return err
}

// interruptedOr converts err for a program that reads our output.
func interruptedOr(ctx context.Context, err error) *api.Error {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return api.Errorf(api.ExitInterrupted, "interrupted")
	}
	return api.AsError(err)
}
