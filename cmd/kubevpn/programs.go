package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"log/slog"
	"os"

	"kubevpn/internal/api"
	"kubevpn/internal/cli"
	"kubevpn/internal/config"
	"kubevpn/internal/daemon"
	"kubevpn/internal/helper"
	"kubevpn/internal/trim"
)

func runDaemon(ctx context.Context, paths config.Paths, ready func()) error {
	trim.Processors()
	return daemon.Run(ctx, daemon.Config{
		Paths: paths, NewHelper: newClient, Interceptor: daemon.NewInterceptor(), Ready: ready,
	})
}

// newClient returns the Helper behind a socket.
func newClient(socket *os.File, logger *slog.Logger) (daemon.Helper, error) {
	c, err := helper.NewClient(socket, logger)
	if err != nil {
		return nil, err // a bare return of (c, err) would be a typed nil in the interface
	}
	return c, nil
}

func startHelper(ctx context.Context) (*os.File, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, api.Errorf(api.ExitPrivilege, "the root helper cannot be started: %w", err)
	}
	cfg := helper.StartConfig{Executable: executable}
	if os.Geteuid() > 0 {
		cfg.Stderr = os.Stderr // sudo's "try again"
	}
	return helper.Start(ctx, cfg)
}

// foreground logs to stderr, and only what is wrong: what happens is shown as progress.
func foreground(ctx context.Context, paths config.Paths, req api.ConnectRequest, progress func(api.Event)) error {
	trim.Processors()
	logger := warnings()
	if err := paths.MakeStateDir(); err != nil {
		return err
	}
	client, err := paths.ClientID()
	if err != nil {
		return err
	}
	h, err := ownHelper(ctx, logger)
	if err != nil {
		return err
	}
	return daemon.Foreground(ctx, daemon.ForegroundConfig{
		Request: req, ClientID: client, Helper: h, Progress: progress, Logger: logger,
	})
}

// isolated has nobody to log to: the terminal is the program's.
func isolated(ctx context.Context, req api.InterceptRequest, place cli.Place, ready func(), progress func(api.Event)) error {
	trim.Processors()
	owner, err := daemon.NewOwner()
	if err != nil {
		return err
	}
	var id [16]byte
	rand.Read(id[:]) // never fails (crypto/rand)
	return daemon.Isolated(ctx, daemon.IsolatedConfig{
		Request: req, Place: place, Owner: owner, ClientID: hex.EncodeToString(id[:]), Progress: progress, Ready: ready,
		Logger: slog.New(slog.DiscardHandler),
	})
}

func reset(ctx context.Context, req api.ResetRequest, progress func(api.Event)) error {
	return daemon.Reset(ctx, req, progress, warnings())
}

// warnings logs to stderr what is wrong.
func warnings() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

// ownHelper is a Helper of this process alone: root needs no other process for it.
func ownHelper(ctx context.Context, logger *slog.Logger) (daemon.Helper, error) {
	if os.Geteuid() == 0 {
		return helper.NewLocal(helper.LocalConfig{Logger: logger}), nil
	}
	socket, err := startHelper(ctx)
	if err != nil {
		return nil, err
	}
	return newClient(socket, logger)
}
