package daemonclient

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"kubevpn/internal/api"
	"kubevpn/internal/process/version"
	"kubevpn/pkg/host/unixsocket"
)

// startTimeout limits the start of a daemon.
const startTimeout = 10 * time.Second

// Start returns the state of a running daemon of this version. It replaces a daemon of another version, unless that has
// connections. It starts one like this:
//
//	CLI ── kubevpn daemon (own session, stdin and stderr /dev/null, cwd /) ──▶ daemon
//	CLI ◀─ stdout: "null" when it answers, else an api.Error ────────────────┘
func (c *Client) Start(ctx context.Context) (api.Status, error) {
	for range 3 {
		status, err := c.Status(ctx)
		switch {
		case errors.Is(err, ErrNoDaemon):
			if err := c.start(ctx); err != nil {
				return status, err
			}
			continue
		case err != nil, status.Version == version.Full():
			return status, err
		case slices.ContainsFunc(status.Connections, works):
			return status, api.Errorf(api.ExitDaemon,
				"the daemon is kubevpn %s and has connections; this is kubevpn %s", status.Version, version.Full()).
				WithHint("`kubevpn quit` ends it and its connections; then connect again")
		}
		if err := c.Quit(ctx, func(api.Event) {}); err != nil {
			return status, err
		}
	}
	return api.Status{}, api.Errorf(api.ExitDaemon, "the daemon ends immediately after its start").
		WithHint("see `kubevpn logs` for the cause")
}

func works(c api.Connection) bool { return c.Status != api.StatusFailed }

// start starts a daemon and waits until it answers. If another command starts one at the same time, it waits for
// the one that holds the lock.
func (c *Client) start(ctx context.Context) error {
	if c.cfg.Executable == "" {
		return api.Errorf(api.ExitDaemon, "cannot start the daemon: the path of this program is unknown")
	}
	if err := c.paths.MakeRuntimeDir(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	ready, process, err := c.spawn()
	if err != nil {
		return api.Errorf(api.ExitDaemon, "cannot start the daemon: %w", err)
	}
	defer ready.Close()
	defer func() { _ = process.Release() }() // it fails only for a process that is already released
	defer context.AfterFunc(ctx, func() { ready.Close() })()

	var answer *api.Error
	switch err := json.NewDecoder(ready).Decode(&answer); {
	case err == nil && answer == nil:
		return nil
	case ctx.Err() != nil:
		return c.explain(ctx, ctx.Err())
	case errors.Is(err, io.EOF):
		answer = api.Errorf(api.ExitDaemon, "the daemon ended while it was starting").
			WithHint("see `kubevpn logs` for the cause")
	case err != nil:
		return fmt.Errorf("cannot read the answer of the daemon: %w", err)
	}
	// The daemon of another command holds the lock, and will answer soon.
	if poll(ctx, time.Second, func(ctx context.Context) (bool, error) {
		_, err := c.Status(ctx)
		return err == nil, nil
	}) != nil {
		return answer
	}
	return nil
}

// spawn starts the process of the daemon, and returns the pipe from its standard output, on which the daemon
// reports that it is ready.
func (c *Client) spawn() (*os.File, *os.Process, error) {
	ready, theirs, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer theirs.Close()
	cmd := exec.Command(c.cfg.Executable, "daemon")
	cmd.Dir = "/"
	cmd.Env = c.cfg.Environ
	cmd.Stdout = theirs // every system passes it on, unlike other descriptors
	detach(cmd)
	if err := cmd.Start(); err != nil {
		ready.Close()
		return nil, nil, err
	}
	return ready, cmd.Process, nil
}

// Quit ends the daemon, its connections and its helper, and waits until it is gone.
func (c *Client) Quit(ctx context.Context, on func(api.Event)) error {
	if err := c.end(ctx, api.PathQuit, nil, on); err != nil {
		return err
	}
	return c.gone(ctx)
}

// gone waits until the daemon has ended.
func (c *Client) gone(ctx context.Context) error {
	err := poll(ctx, 2*answerTimeout, func(ctx context.Context) (bool, error) {
		_, err := c.Status(ctx)
		return errors.Is(err, ErrNoDaemon), nil
	})
	if err != nil {
		return c.explain(ctx, err)
	}
	return nil
}

// pollInterval is the pause between two checks of a condition that nothing signals.
const pollInterval = 20 * time.Millisecond

// poll calls check until it returns true or an error, or the time is over.
func poll(ctx context.Context, timeout time.Duration, check wait.ConditionWithContextFunc) error {
	return wait.PollUntilContextTimeout(ctx, pollInterval, timeout, true, check)
}

// startHelper starts a root helper and sends its socket to the daemon.
func (c *Client) startHelper(ctx context.Context) error {
	socket, err := c.cfg.StartHelper(ctx, c.cfg.Announce)
	if err != nil {
		return err
	}
	defer socket.Close()
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", c.paths.HelperSocket())
	if err != nil {
		return c.explain(ctx, err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if _, err := unixsocket.Send(conn.(*net.UnixConn), []byte{0}, socket); err != nil {
		return c.explain(ctx, fmt.Errorf("cannot send the socket of the root helper: %w", err))
	}
	var answer *api.Error
	if err := json.NewDecoder(conn).Decode(&answer); err != nil {
		return c.explain(ctx, err)
	}
	if answer != nil {
		return answer
	}
	return nil
}
