package cli

import (
	"context"
	"errors"

	"kubevpn/internal/api"
)

// ask calls send, which posts a request that requires the root helper. It first starts the daemon and the root helper
// if they do not run. quiet stops the progress display, so that sudo can use the terminal. ask returns the connection
// that the answer describes.
func (a *app) ask(ctx context.Context, quiet func(),
	send func(*daemonClient) (*api.Connection, error)) (*api.Connection, error) {
	const tries = 4 // meanwhile a daemon or a helper may end by itself, once each
	for try := 1; ; try++ {
		client, info, err := a.daemon(ctx)
		if err != nil {
			return nil, err
		}
		var c *api.Connection
		if !info.Helper {
			quiet()
			err = a.newHelper(ctx, client)
		}
		if err == nil {
			c, err = send(client)
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

// intercept posts a request for intercepts. At Ctrl-C the daemon ends the intercepts, and the connection if the request
// began it, and on receives the events of the cleanup.
func (a *app) intercept(ctx context.Context, req api.InterceptRequest, on func(api.Event), quiet func()) error {
	_, err := a.ask(ctx, quiet, func(c *daemonClient) (*api.Connection, error) {
		return c.hold(ctx, api.PathIntercept, req, on)
	})
	return err
}
