package cli

import (
	"context"
	"errors"

	"kubevpn/internal/api"
)

// question is a request to the daemon that takes its time.
type question struct {
	path string
	body any
	on   func(api.Event)
	// quiet takes moving things off the terminal.
	quiet func()
	// held questions let go of what they began at Ctrl-C, and are told what becomes of it. For others, interrupted waits until
	// the daemon has cleaned up what it had begun on the connection.
	held        bool
	interrupted func(ctx context.Context, c *client, connection string, on func(api.Event)) error
}

// ask puts a question to the daemon, and brings it what it lacks: itself, or a helper. It returns the connection that the
// answer is about.
func (a *app) ask(ctx context.Context, q question) (*api.Connection, error) {
	const tries = 4 // a daemon or a helper may end by itself in between, once each
	for try := 1; ; try++ {
		client, err := a.daemon(ctx)
		if err != nil {
			return nil, err
		}
		id := ""
		var c *api.Connection
		if q.held {
			c, err = client.hold(ctx, q.path, q.body, q.on)
		} else {
			c, err = client.stream(ctx, q.path, q.body, func(begun string) { id = begun }, q.on)
		}
		switch {
		case q.held && ctx.Err() != nil:
			return c, err
		case err == nil && c == nil:
			return nil, api.Errorf(api.ExitDaemon, "the daemon gave no answer").WithHint("`kubevpn logs` may tell why")
		case err == nil:
			return c, nil
		case ctx.Err() != nil:
			if id == "" {
				return nil, ctx.Err() // it had not begun
			}
			if err := q.interrupted(ctx, client, id, q.on); err != nil {
				return nil, api.Errorf(api.ExitInterrupted, "interrupted, and cleaning up was not seen to end: %w", err).
					WithHint("`kubevpn status` shows what is there; `kubevpn quit` ends it")
			}
			return c, ctx.Err()
		case errors.Is(err, errNeedsHelper) && try < tries:
			q.quiet() // sudo may ask for a password
			// A daemon that ended meanwhile is seen, and replaced, at the next try.
			if err := a.newHelper(ctx, client); err != nil && !errors.Is(err, errNoDaemon) {
				return nil, err
			}
		case errors.Is(err, errNoDaemon) && try < tries:
			if err := client.gone(ctx); err != nil {
				return nil, err
			}
		case errors.Is(err, errNeedsHelper), errors.Is(err, errNoDaemon):
			return nil, api.Errorf(api.ExitDaemon, "%w, again and again", err).WithHint("`kubevpn logs` may tell why")
		default:
			return nil, err
		}
	}
}

// settle shows a step that lasts until settled is content with the daemon's status, or there is no daemon any more.
func (c *client) settle(ctx context.Context, on func(api.Event), step string, settled func(api.Status) bool) error {
	on(api.Event{Step: step})
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	defer cancel()
	for {
		status, err := c.status(ctx)
		switch {
		case errors.Is(err, errNoDaemon): // it goes when nothing is left
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

// report runs a command that shows what happens, for people, or as lines of JSON of which the last has the end of it. do may
// call quiet to take moving things off the terminal.
func (a *app) report(ctx context.Context, output *format, do func(ctx context.Context, on func(api.Event), quiet func()) error) error {
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

// interruptedOr is err for a program that reads our output.
func interruptedOr(ctx context.Context, err error) *api.Error {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return api.Errorf(api.ExitInterrupted, "interrupted")
	}
	return api.AsError(err)
}
