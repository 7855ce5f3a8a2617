package daemon

import (
	"context"
	"errors"
	"log/slog"

	"kubevpn/internal/api"
)

// ForegroundConfig configures Foreground.
type ForegroundConfig struct {
	Request  api.ConnectRequest
	Owner    Owner
	Helper   Helper          // Foreground owns it
	Factory  Factory         // nil: NewFactory
	Progress func(api.Event) // receives each event; one with Connection set means connected
	Logger   *slog.Logger
}

// Foreground makes one connection in this process and keeps it until ctx ends, then removes it. It returns nil if the
// connection was established before ctx ended, else the cause of ctx. It closes the Helper.
func Foreground(ctx context.Context, cfg ForegroundConfig) error {
	if cfg.Factory == nil {
		cfg.Factory = NewFactory()
	}
	client, err := cfg.Owner.client()
	if err != nil {
		return err
	}
	cs := newConnections(cfg.Factory, client, cfg.Owner, cfg.Logger)
	if err := cs.adopt(cfg.Helper); err != nil {
		return err
	}
	err = cs.keep(ctx, cfg.Request, cfg.Progress)
	err = errors.Join(err, cs.shutDown(cfg.Progress))
	cs.group.Wait()
	return err
}

// keep makes the connection and returns when it or ctx has ended.
func (cs *connections) keep(ctx context.Context, req api.ConnectRequest, progress func(api.Event)) error {
	t, err := cs.hold(ctx, req, progress)
	if err != nil {
		return err
	}
	cs.retain(t) // shutDown ends it
	c := t.status()
	progress(api.Event{Connection: &c})
	select {
	case <-ctx.Done():
		return nil
	case <-t.done:
		return t.err
	}
}
