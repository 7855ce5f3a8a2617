package daemon

import (
	"context"
	"errors"
	"log/slog"

	"kubevpn/internal/api"
)

// ForegroundConfig is one connection without a daemon.
type ForegroundConfig struct {
	Request       api.ConnectRequest
	ClientID      string
	Helper        Helper // closed by Foreground
	NewConnection func(ConnectionConfig) (Connection, error)
	Progress      func(api.Event) // what happens; one has Connection set: connected
	Logger        *slog.Logger
}

// Foreground makes one connection in this process and keeps it until ctx ends, then removes it. It returns nil
// if the connection had been made and was ended by ctx; if ctx ended before that, it returns ctx's cause.
func Foreground(ctx context.Context, cfg ForegroundConfig) error {
	newConnection := cfg.NewConnection
	if newConnection == nil {
		newConnection = NewSession
	}
	none := newIntercepts(nil, Owner{}, cfg.Logger) // nobody can ask for one
	s := newSet(newConnection, none, cfg.ClientID, cfg.Logger)
	if err := s.adopt(cfg.Helper); err != nil {
		return err
	}
	err := s.keep(ctx, cfg)
	err = errors.Join(err, s.shutDown(cfg.Progress))
	s.tasks.Wait()
	return err
}

// keep makes the connection and returns when it or ctx has ended.
func (s *set) keep(ctx context.Context, cfg ForegroundConfig) error {
	var id string
	c, err := s.connect(ctx, cfg.Request, func(begun string) { id = begun }, cfg.Progress)
	if err != nil {
		return err
	}
	cfg.Progress(api.Event{Connection: &c})
	s.mu.Lock()
	l := s.byID[id] // failed or not, nobody else takes it away
	s.mu.Unlock()
	select {
	case <-ctx.Done():
		return nil
	case <-l.done:
		return l.err
	}
}
