package daemonclient

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/project"
)

// Prepare asks a running daemon to open what the request needs of the API server. The request that follows reports any
// error.
func (c *Client) Prepare(ctx context.Context, req api.ConnectRequest) {
	if _, err := call[any](ctx, c, http.MethodPost, api.PathPrepare, req); err != nil {
		c.cfg.Log.Debug("the daemon prepares nothing", "err", err)
	}
}

// Connect requests a connection and returns it. At Ctrl-C it returns when the daemon has cleaned up. It calls on with
// each event, and quiet before sudo uses the terminal. It starts the daemon and the root helper if they do not run.
func (c *Client) Connect(ctx context.Context, req api.ConnectRequest, on func(api.Event),
	quiet func()) (*api.Connection, error) {
	return c.ask(ctx, api.PathConnect, req, on, quiet)
}

// Intercept requests intercepts, like Connect. At Ctrl-C the daemon ends the intercepts, and the connection if the
// request began it, and on receives the events of the cleanup.
func (c *Client) Intercept(ctx context.Context, req api.InterceptRequest, on func(api.Event), quiet func()) error {
	_, err := c.ask(ctx, api.PathIntercept, req, on, quiet)
	return err
}

// Up makes the project of a request as the file says. An attached request returns when ctx or the project has ended.
func (c *Client) Up(ctx context.Context, req project.Request, on func(api.Event)) error {
	if _, err := c.Start(ctx); err != nil {
		return err
	}
	_, err := c.hold(ctx, api.PathUp, req, on)
	return err
}

// Down ends the project of a file. It fails with ErrNoDaemon if no daemon runs.
func (c *Client) Down(ctx context.Context, file string, on func(api.Event)) error {
	return c.end(ctx, api.PathDown, file, on)
}

// ask is hold for a request that requires the root helper.
func (c *Client) ask(ctx context.Context, path string, req any, on func(api.Event),
	quiet func()) (*api.Connection, error) {
	const tries = 4 // meanwhile a daemon or a helper may end by itself, once each
	for try := 1; ; try++ {
		status, err := c.Start(ctx)
		if err != nil {
			return nil, err
		}
		var last *api.Connection
		if status.Helper == "" {
			quiet()
			err = c.startHelper(ctx)
		}
		if err == nil {
			last, err = c.hold(ctx, path, req, on)
		}
		switch {
		case ctx.Err() != nil:
			return last, err
		case errors.Is(err, errNeedsHelper), errors.Is(err, ErrNoDaemon):
			if try == tries {
				return nil, api.Errorf(api.ExitDaemon, "%w, after %d attempts", err, tries).
					WithHint("see `kubevpn logs` for the cause")
			}
			if errors.Is(err, errNeedsHelper) {
				continue
			}
			if err := c.gone(ctx); err != nil {
				return nil, err
			}
		case err == nil && last == nil:
			return nil, api.Errorf(api.ExitDaemon, "the daemon did not answer").
				WithHint("see `kubevpn logs` for the cause")
		default:
			return last, err
		}
	}
}

// cleanTimeout limits the cleanup after an interrupted request.
const cleanTimeout = 20 * time.Second

// hold posts a request that needs a connection. It returns when the daemon has answered, for an attached request after
// the end of the body. It returns the connection of the last event that has one. When ctx ends, hold ends the body,
// calls on with the events of the cleanup, and returns the error of ctx.
func (c *Client) hold(ctx context.Context, path string, body any, on func(api.Event)) (*api.Connection, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, fmt.Errorf("cannot encode the request: %w", err)
	}
	request, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	content, release := io.Pipe()
	defer release.Close()
	defer content.Close()
	go func() { _, _ = release.Write(text) }() // an error also fails the request
	// If the daemon dies, net/http waits for the end of the body before it returns an error: that of the body.
	c = &Client{cfg: c.cfg, paths: c.paths, http: httpClient(c.paths, func() { release.CloseWithError(errLostDaemon) })}
	defer context.AfterFunc(ctx, func() {
		release.Close()
		select {
		case <-time.After(cleanTimeout):
			cancel()
		case <-request.Done():
		}
	})()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	last, err := c.follow(request, path, content, func(e api.Event) {
		if e.Error == nil || ctx.Err() == nil { // the caller reports the interrupt
			on(e)
		}
	})
	switch {
	case ctx.Err() == nil:
		return last, err
	case request.Err() != nil:
		return last, api.Errorf(api.ExitInterrupted, "interrupted, but cleanup did not finish within %v", cleanTimeout).
			WithHint("`kubevpn status` shows what remains; `kubevpn quit` removes it")
	}
	return last, ctx.Err()
}
