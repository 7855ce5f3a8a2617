package filesync

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"

	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/remotefs"
)

// SourceConfig is the configuration of a Source.
type SourceConfig struct {
	Dir string // a directory, or one file
	// Dial connects to a remotefs.Server of the destination, if that is a directory, or else of the directory that it
	// is in. It returns "." or the name of the destination there. Run calls it again when the connection breaks.
	Dial func(ctx context.Context) (conn net.Conn, dest string, err error)
	// after each round that did, completed or failed anything; nil: nothing
	OnSync func(Batch)
	Logger *slog.Logger
}

// Source is the laptop's end. It remembers what the container received, so there is one Source for all connections.
type Source struct {
	cfg    SourceConfig
	tree   *tree
	has    map[string]received
	untold bool // the container has changes of which Server.Synced does not know

	restMost time.Duration // how long a file may change until it is sent as it is

	mu     sync.Mutex
	status Status
}

// Status is a snapshot of a Source.
type Status struct {
	Synced bool      // connected, and nothing is known to differ, except what failed
	Files  int       // files, directories and links in the container
	Last   Batch     // the last one that OnSync received
	LastAt time.Time // when it was acknowledged
	Err    error     // why there is no connection, or why the directory cannot be read
}

// NewSource returns a Source that does not run yet.
func NewSource(cfg SourceConfig) *Source {
	return &Source{cfg: cfg, tree: newTree(cfg.Dir, cfg.Logger), has: make(map[string]received), restMost: restMost}
}

// Status is safe for concurrent use.
func (s *Source) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status
}

func (s *Source) set(change func(*Status)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.status)
}

const (
	dialTimeout = 20 * time.Second
	// The backoff between two attempts to connect, which doubles.
	backoffFirst = 100 * time.Millisecond
	backoffMost  = 5 * time.Second
)

// Run keeps the container equal until ctx ends. After an error it connects again.
func (s *Source) Run(ctx context.Context) {
	defer s.tree.watch.close()
	defer s.set(func(st *Status) { st.Synced = false })
	backoff := backoffFirst
	for ctx.Err() == nil {
		completed, err := s.connect(ctx)
		if ctx.Err() != nil {
			return
		}
		if completed {
			backoff = backoffFirst
		}
		if last := s.Status().Err; last == nil || last.Error() != err.Error() {
			s.cfg.Logger.Warn("file sync interrupted", "err", err)
		}
		s.set(func(st *Status) { st.Synced, st.Err = false, err })
		wakeup.Pause(ctx, backoff)
		backoff = min(2*backoff, backoffMost)
	}
}

// connect runs one connection. It reports whether the container had everything once. The error is not nil.
func (s *Source) connect(ctx context.Context) (completed bool, err error) {
	if err := s.tree.open(); err != nil {
		return false, rootError(err)
	}
	conn, dest, err := s.dial(ctx)
	if err != nil {
		return false, err
	}
	ctx, end := context.WithCancelCause(ctx)
	client := remotefs.NewClient()
	se := newSender(s, client, dest, end)
	var work sync.WaitGroup
	work.Go(func() { end(client.Serve(ctx, conn)) })
	work.Go(func() { se.keepAlive(ctx) })
	if err := se.run(ctx); !errors.Is(err, syscall.EIO) { // else Serve knows why
		end(err)
	}
	conn.Close()
	work.Wait()
	return se.completed, context.Cause(ctx)
}

func (s *Source) dial(ctx context.Context) (net.Conn, string, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn, dest, err := s.cfg.Dial(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("the other end of the file sync has not answered within %v", dialTimeout)
	}
	return conn, dest, err
}

// rootError adds to the error of a missing directory that no files are removed at the other end.
func rootError(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: the files at the other end stay as they are", err)
	}
	return err
}
