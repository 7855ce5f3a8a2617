package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/trim"
	"kubevpn/internal/version"
)

// idleTimeout is how long the daemon stays without connections: long enough for the next command of a script,
// short enough that nobody wonders what it does. Failed connections keep it, so that `status` can tell.
const idleTimeout = time.Minute

// Config is what a daemon needs. Paths and NewHelper must be set.
type Config struct {
	Paths config.Paths
	// NewHelper makes the Helper behind a socket that the CLI handed over. It takes ownership of the file.
	NewHelper func(socket *os.File, logger *slog.Logger) (Helper, error)
	// NewConnection makes a Connection: no I/O, no goroutine before Run. Nil: NewSession.
	NewConnection func(ConnectionConfig) (Connection, error)
	// Interceptor makes the intercepts. Nil: none can be had.
	Interceptor Interceptor
	// Ready is called once, when the sockets accept connections; nil: nobody waits.
	Ready func()
	// Idle is how long the daemon stays without connections; 0: a minute.
	Idle time.Duration
}

// ErrRunning means that this user has a daemon already.
var ErrRunning = errors.New("a daemon is running already")

// Run is the daemon. It returns when ctx ends, when it is told to quit, or after it was idle; then no
// connection and no helper is left. It logs to its own file, and klog's messages with it.
func Run(ctx context.Context, cfg Config) error {
	if err := errors.Join(cfg.Paths.MakeRuntimeDir(), cfg.Paths.MakeStateDir()); err != nil {
		return err
	}
	unlock, err := lock(cfg.Paths.Lock())
	if err != nil {
		return err
	}
	defer unlock()

	logger, closeLog := openLog(cfg.Paths.LogFile())
	defer closeLog()

	client, err := cfg.Paths.ClientID()
	if err != nil {
		return err
	}
	owner, err := NewOwner()
	if err != nil {
		return err
	}
	listener, err := listen(cfg.Paths.Socket(), logger)
	if err != nil {
		return err
	}
	defer listener.Close()
	helpers, err := listen(cfg.Paths.HelperSocket(), logger)
	if err != nil {
		return err
	}
	defer helpers.Close()

	logger.Info("daemon begins", "version", version.Full(), "pid", os.Getpid())
	err = newDaemon(cfg, client, owner, logger).serve(ctx, listener, helpers)
	if err != nil {
		logger.Error("daemon ends", "err", err)
		return err
	}
	logger.Info("daemon ends")
	return nil
}

// daemon is what Run runs once files, lock and sockets are there.
type daemon struct {
	cfg      Config
	set      *set
	logger   *slog.Logger
	quit     chan struct{} // receives once somebody asked the daemon to end
	kick     chan struct{} // something that idle looks at may have changed
	requests atomic.Int64  // being answered
}

func newDaemon(cfg Config, client string, owner Owner, logger *slog.Logger) *daemon {
	if cfg.NewConnection == nil {
		cfg.NewConnection = NewSession
	}
	if cfg.Idle == 0 {
		cfg.Idle = idleTimeout
	}
	d := &daemon{cfg: cfg, logger: logger, quit: make(chan struct{}, 1), kick: make(chan struct{}, 1)}
	d.set = newSet(cfg.NewConnection, newIntercepts(cfg.Interceptor, owner, logger), client, logger)
	d.set.changed = d.wake
	return d
}

// wake makes the idle watch look again.
func (d *daemon) wake() {
	select {
	case d.kick <- struct{}{}:
	default:
	}
}

// serve answers on both listeners until ctx ends or the daemon is told to quit or was idle, then ends every
// intercept, connection and the helper. Both listeners are closed then.
func (d *daemon) serve(ctx context.Context, listener, helpers net.Listener) error {
	server := &http.Server{
		Handler:           d.handler(),
		ReadHeaderTimeout: 10 * time.Second,
		ErrorLog:          slog.NewLogLogger(d.logger.Handler(), slog.LevelWarn),
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serving the daemon's socket: %w", err)
		}
		return nil
	})
	group.Go(func() error { return d.serveHelpers(ctx, helpers) })
	group.Go(func() error { return trim.Run(ctx) })
	group.Go(func() error {
		defer cancel()
		d.waitForEnd(ctx)
		err := d.set.shutDown(func(api.Event) {})
		helpers.Close()
		// Requests see their connections end, and answer; one that reads nothing must not hold us up.
		grace, stop := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
		defer stop()
		if server.Shutdown(grace) != nil {
			server.Close()
		}
		return err
	})
	if d.cfg.Ready != nil {
		d.cfg.Ready()
	}
	return group.Wait()
}

// waitForEnd returns when the daemon should end.
func (d *daemon) waitForEnd(ctx context.Context) {
	idle := time.NewTimer(d.cfg.Idle)
	defer idle.Stop()
	for {
		select {
		case <-ctx.Done():
			d.logger.Info("daemon is ending", "reason", "signal")
			return
		case <-d.quit:
			d.logger.Info("daemon is ending", "reason", "quit")
			return
		case <-idle.C:
			if !d.busy() {
				d.logger.Info("daemon is ending", "reason", "idle", "for", d.cfg.Idle)
				return
			}
		case <-d.kick:
			idle.Reset(d.cfg.Idle)
		}
	}
}

// busy says whether there is a reason to stay. Whatever makes it false wakes the idle watch.
func (d *daemon) busy() bool { return d.requests.Load() > 0 || d.set.inUse() }
