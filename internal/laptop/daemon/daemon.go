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
	"kubevpn/internal/process/footprint"
	"kubevpn/internal/process/version"
	"kubevpn/pkg/wakeup"
)

// idleTimeout limits the time that the daemon runs without connections. It is long enough for the next command of a
// script. Failed connections keep the daemon, so that `status` can report them.
const idleTimeout = time.Minute

// Config configures Run. Paths and NewHelper must be set.
type Config struct {
	Paths config.Paths
	// NewHelper returns the Helper at the other end of a socket that the CLI passed to the daemon. It takes ownership
	// of the file.
	NewHelper func(socket *os.File, logger *slog.Logger) (Helper, error)
	// Factory makes connections and intercepts. Nil: the product's.
	Factory Factory
	// Ready is called once, when the sockets accept connections. It may be nil.
	Ready func()
}

// ErrRunning means that this user already has a daemon.
var ErrRunning = errors.New("a daemon is already running")

// Run runs the daemon. It returns when ctx ends, when a request asks the daemon to quit, or when it was idle for
// a minute; then no connection and no helper is left. It writes its log, and klog's, to a file of its own.
func Run(ctx context.Context, cfg Config) error {
	if err := errors.Join(cfg.Paths.MakeRuntimeDir(), cfg.Paths.MakeStateDir()); err != nil {
		return err
	}
	unlock, err := lock(cfg.Paths.Lock())
	if err != nil {
		return err
	}
	defer func() { _ = unlock() }() // the kernel releases the lock with the process anyway

	recent := &recentLog{}
	logger, closeLog := openLog(cfg.Paths.LogFile(), recent)
	defer func() { _ = closeLog() }() // there is no log left for the error

	key, err := cfg.Paths.ClientKey()
	if err != nil {
		return err
	}
	owner := NewOwner(key)
	client, err := owner.client()
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
	d := newDaemon(cfg, client, owner, logger)
	d.log = recent
	err = d.serve(ctx, listener, helpers)
	if err != nil {
		logger.Error("daemon ends", "err", err)
		return err
	}
	logger.Info("daemon ends")
	return nil
}

// daemon is a daemon that has its files, lock and sockets.
type daemon struct {
	cfg         Config
	connections *connections
	projects    *projects
	logger      *slog.Logger
	log         *recentLog      // what logger wrote
	page        servedPage      // of `kubevpn ui`
	quit        wakeup.Signal   // raised when a request asks the daemon to end
	recheck     wakeup.Signal   // raised when busy may return something else
	requests    atomic.Int64    // in progress
	ending      context.Context // ends when the responses that follow events must end
	end         context.CancelFunc
}

func newDaemon(cfg Config, client []byte, owner Owner, logger *slog.Logger) *daemon {
	d := &daemon{cfg: cfg, logger: logger, log: &recentLog{}, quit: wakeup.NewSignal(), recheck: wakeup.NewSignal()}
	d.ending, d.end = context.WithCancel(context.Background())
	d.connections = newConnections(cfg.Factory, client, owner, logger)
	d.connections.changed = d.recheck.Raise
	program, _ := os.Executable() // a project then fails
	d.projects = &projects{program: program, logs: cfg.Paths.StateDir, changed: d.recheck.Raise,
		all: map[string]*keptProject{}}
	return d
}

// serve answers on both listeners until waitForEnd returns, then ends every intercept, every connection and the helper,
// and closes both listeners.
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
			return fmt.Errorf("cannot serve the daemon's socket: %w", err)
		}
		return nil
	})
	group.Go(func() error { return d.serveHelpers(helpers) })
	group.Go(func() error { return footprint.ReleaseMemory(ctx) })
	group.Go(func() error {
		defer cancel()
		d.waitForEnd(ctx)
		d.end()
		err := errors.Join(d.projects.shutDown(), d.connections.shutDown(func(api.Event) {}))
		d.stopPage()
		helpers.Close()
		// Requests see their connections end, and answer. A client that reads nothing must not block the end.
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
	idle := time.NewTimer(idleTimeout)
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
				d.logger.Info("daemon is ending", "reason", "idle", "for", idleTimeout)
				return
			}
		case <-d.recheck:
			idle.Reset(idleTimeout)
		}
	}
}

// busy reports whether the daemon has a reason to stay. Every change that makes it false raises recheck.
func (d *daemon) busy() bool {
	return d.requests.Load() > 0 || d.connections.inUse() || d.projects.inUse()
}
