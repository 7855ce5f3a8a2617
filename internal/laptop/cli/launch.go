package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/process/version"
)

// startTimeout limits the start of a daemon.
const startTimeout = 10 * time.Second

// daemon returns a client of a running daemon of this version, and its state. It replaces a daemon of another version,
// unless that has connections. It starts one like this:
//
//	CLI ── kubevpn daemon (own session, stdin and stderr /dev/null, cwd /) ──▶ daemon
//	CLI ◀─ stdout: "null" when it answers, else an api.Error ────────────────┘
func (a *app) daemon(ctx context.Context) (*daemonClient, api.DaemonInfo, error) {
	c, err := a.client()
	if err != nil {
		return nil, api.DaemonInfo{}, err
	}
	for range 3 {
		info, err := c.info(ctx)
		switch {
		case errors.Is(err, errNoDaemon):
			if err := a.startDaemon(ctx, c); err != nil {
				return nil, info, err
			}
			continue
		case err != nil:
			return nil, info, err
		case info.Version == version.Full():
			return c, info, nil
		case info.Connections > 0:
			return nil, info, api.Errorf(api.ExitDaemon,
				"the daemon is kubevpn %s and has connections; this is kubevpn %s", info.Version, version.Full()).
				WithHint("`kubevpn quit` ends it and its connections; then connect again")
		}
		if err := a.quitDaemon(ctx, c, func(api.Event) {}); err != nil {
			return nil, info, err
		}
	}
	return nil, api.DaemonInfo{}, api.Errorf(api.ExitDaemon, "the daemon ends immediately after its start").
		WithHint("see `kubevpn logs` for the cause")
}

// prepare asks a running daemon of this version to open what the request needs of the API server. The request that
// follows reports any error.
func (a *app) prepare(ctx context.Context, req api.ConnectRequest) {
	c, err := a.client()
	if err != nil {
		return
	}
	if info, err := c.info(ctx); err != nil || info.Version != version.Full() {
		return
	}
	resp, err := c.do(ctx, http.MethodPost, api.PathPrepare, req)
	if err != nil {
		a.log.Debug("the daemon prepares nothing", "err", err)
		return
	}
	resp.Body.Close()
}

// startDaemon starts a daemon and waits until it answers. If another command starts one at the same time, it waits for
// the one that holds the lock.
func (a *app) startDaemon(ctx context.Context, c *daemonClient) error {
	if a.executable == "" {
		return api.Errorf(api.ExitDaemon, "cannot start the daemon: the path of this program is unknown")
	}
	if err := c.paths.MakeRuntimeDir(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	ready, process, err := a.spawnDaemon()
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
		_, err := c.info(ctx)
		return err == nil, nil
	}) != nil {
		return answer
	}
	return nil
}

// spawnDaemon starts the process of the daemon, and returns the pipe from its standard output, on which the daemon
// reports that it is ready.
func (a *app) spawnDaemon() (*os.File, *os.Process, error) {
	ready, theirs, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer theirs.Close()
	cmd := exec.Command(a.executable, "daemon")
	cmd.Dir = "/"
	cmd.Env = a.environ
	cmd.Stdout = theirs // every system passes it on, unlike other descriptors
	detach(cmd)
	if err := cmd.Start(); err != nil {
		ready.Close()
		return nil, nil, err
	}
	return ready, cmd.Process, nil
}

// quitDaemon ends the daemon, its connections and its helper, and waits until it is gone.
func (a *app) quitDaemon(ctx context.Context, c *daemonClient, on func(api.Event)) error {
	ctx, cancel := context.WithTimeout(ctx, endTimeout)
	defer cancel()
	if err := c.post(ctx, api.PathQuit, nil, on); err != nil {
		return err
	}
	return c.gone(ctx)
}

// newHelper starts a root helper and sends its socket to the daemon.
func (a *app) newHelper(ctx context.Context, c *daemonClient) error {
	socket, err := a.StartHelper(ctx, func(line string) { a.Note("%s", line) })
	if err != nil {
		return err
	}
	defer socket.Close()
	return c.handOver(ctx, socket)
}
