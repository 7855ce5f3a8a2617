package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/laptop/daemon"
	"kubevpn/internal/laptop/helper"
	"kubevpn/internal/laptop/hostservice"
	"kubevpn/internal/process/footprint"
	"kubevpn/pkg/host/sandbox"
)

func runDaemon(ctx context.Context, paths config.Paths, ready func()) error {
	footprint.HalveProcessors()
	return daemon.Run(ctx, daemon.Config{Paths: paths, NewHelper: newClient, Ready: ready})
}

// newClient returns a Helper that uses the socket of a helper process.
func newClient(socket *os.File, logger *slog.Logger) (daemon.Helper, error) {
	c, err := helper.NewClient(socket, logger)
	if err != nil {
		return nil, err // a bare return of (c, err) would be a typed nil in the interface
	}
	return c, nil
}

func startHelper(ctx context.Context, announce func(line string)) (*os.File, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, api.Errorf(api.ExitPrivilege, "cannot start the root helper: %w", err)
	}
	cfg := helper.StartConfig{Executable: executable, Service: hostservice.Socket, Announce: announce}
	if os.Geteuid() > 0 {
		cfg.Stderr = os.Stderr // for the messages of sudo
	}
	return helper.Start(ctx, cfg)
}

// hold keeps a connection, and the intercepts of the request, in this process. It logs warnings and errors to stderr,
// but nothing for a sandbox, because its program uses the terminal.
func hold(ctx context.Context, req api.InterceptRequest, place sandbox.Place, proxy net.Listener,
	progress func(api.Event)) (err error) {
	footprint.HalveProcessors()
	cfg := daemon.HoldConfig{Request: req, Place: place, Proxy: proxy, Progress: progress, Logger: warnings()}
	if proxy == nil || req.Connect.Via != "" || len(req.Workloads) > 0 { // agents know the owner
		if cfg.Owner, err = newOwner(); err != nil {
			return err
		}
	}
	switch {
	case place != nil:
		cfg.Logger = slog.New(slog.DiscardHandler)
	case proxy == nil:
		if cfg.Helper, err = newHelper(ctx, cfg.Logger); err != nil {
			return err
		}
	}
	return daemon.Hold(ctx, cfg)
}

func reset(ctx context.Context, c *client.Cluster, req api.ResetRequest, progress func(api.Event)) error {
	owner, err := newOwner()
	if err != nil {
		return err
	}
	return daemon.Reset(ctx, c, req, owner, progress, warnings())
}

// newOwner returns this user on this machine as an owner. It has the same key as the daemon of the user.
func newOwner() (daemon.Owner, error) {
	paths, err := config.Locate(os.Getenv)
	if err != nil {
		return daemon.Owner{}, err
	}
	key, err := paths.ClientKey()
	if err != nil {
		return daemon.Owner{}, err
	}
	return daemon.NewOwner(key), nil
}

// warnings returns a logger of warnings and errors to stderr.
func warnings() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

// newHelper returns a Helper for this process. Root needs no helper process.
func newHelper(ctx context.Context, logger *slog.Logger) (daemon.Helper, error) {
	if os.Geteuid() == 0 {
		return helper.NewLocal(helper.LocalConfig{Logger: logger}), nil
	}
	socket, err := startHelper(ctx, func(line string) { fmt.Fprintln(os.Stderr, line) })
	if err != nil {
		return nil, err
	}
	return newClient(socket, logger)
}
