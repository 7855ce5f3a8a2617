package filesync

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"time"

	"kubevpn/pkg/wakeup"
)

// SourceConfig is the configuration of a Source.
type SourceConfig struct {
	Dir  string                                      // a directory, or one file
	Dial func(ctx context.Context) (net.Conn, error) // to the Target; Run calls it again when the connection breaks
	// after each round that did, completed or failed anything; nil: nothing
	OnSync func(Batch)
	Logger *slog.Logger
}

// Source is the laptop's end.
type Source struct {
	cfg  SourceConfig
	tree *tree

	restMost  time.Duration // how long a file may change until it is sent as it is
	namesMost int           // bytes of the paths that a target may list

	mu     sync.Mutex
	status Status
}

// Status is a snapshot of a Source.
type Status struct {
	Synced bool      // connected, and nothing is known to differ, except what failed
	Files  int       // files, directories and links at the Target
	Last   Batch     // the last one that OnSync received
	LastAt time.Time // when it was acknowledged
	Err    error     // why there is no connection, or why the directory cannot be read
}

// NewSource returns a Source that does not run yet.
func NewSource(cfg SourceConfig) *Source {
	return &Source{cfg: cfg, tree: newTree(cfg.Dir, cfg.Logger), restMost: restMost, namesMost: maxNames}
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

// The backoff between two attempts to reach the target, which doubles.
const (
	backoffFirst = 100 * time.Millisecond
	backoffMost  = 5 * time.Second
)

// Run keeps the target equal until ctx ends, and then returns nil. It returns ErrVersion if the other end speaks
// another version; after any other error it connects again.
func (s *Source) Run(ctx context.Context) error {
	defer s.tree.watch.close()
	defer s.set(func(st *Status) { st.Synced = false })
	backoff := backoffFirst
	for ctx.Err() == nil {
		completed, err := s.connect(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, ErrVersion):
			return err
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
	return nil
}

// connect runs one connection. It reports whether the target had everything once.
func (s *Source) connect(ctx context.Context) (completed bool, err error) {
	if err := s.tree.open(); err != nil {
		return false, rootError(err)
	}
	conn, err := s.cfg.Dial(ctx)
	if err != nil {
		return false, fmt.Errorf("cannot connect to the other end of the file sync: %w", err)
	}
	ctx, end := context.WithCancel(ctx)
	var work sync.WaitGroup
	defer work.Wait()
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	defer end()
	w := newWire(conn)
	if err := s.greet(w); err != nil {
		return false, err
	}
	se := newSender(s, w)
	work.Go(func() { w.keepAlive(ctx.Done()) })
	var received error
	work.Go(func() {
		defer end()
		received = se.receive(ctx)
	})
	err = se.run(ctx)
	end()
	work.Wait()
	if errors.Is(received, errRefused) || errors.Is(err, context.Canceled) || errors.Is(err, net.ErrClosed) ||
		errors.Is(err, io.ErrClosedPipe) {
		err = received
	}
	return se.completed, err
}

// greet exchanges hellos. It limits the time by closing the connection: one that is still being established may ignore
// deadlines.
func (s *Source) greet(w *wire) error {
	late := time.AfterFunc(helloTimeout, func() { w.conn.Close() })
	err := w.sendHello(hello{File: s.tree.only, Name: filepath.Base(s.cfg.Dir)})
	if err == nil {
		_, err = w.receiveHello()
	} else if _, _, readErr := w.receive(); readErr != nil && !errors.Is(readErr, io.EOF) {
		err = readErr // a broken connection may give the reason only to its reader
	}
	if !late.Stop() {
		return fmt.Errorf("the other end of the file sync has not answered within %v", helloTimeout)
	}
	return err
}

// rootError adds to the error of a missing directory that no files are removed at the other end.
func rootError(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: the files at the other end stay as they are", err)
	}
	return err
}
