package filesync

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"
)

// SourceConfig is what a Source is made of.
type SourceConfig struct {
	Dir    string                                      // a directory, or one file
	Ignore []string                                    // patterns of gitignore(5), after those of the ignore file
	Dial   func(ctx context.Context) (net.Conn, error) // to the Target; Run calls it again when the connection breaks
	OnSync func(Batch)                                 // after each round that did or named anything, and each comparison; nil: nothing
	Logger *slog.Logger
}

// Source is the laptop's end. Status may be called while it runs.
type Source struct {
	cfg   SourceConfig
	given ignore
	watch *watcher
	tree  tree

	restless time.Duration // tests have less patience

	mu     sync.Mutex
	status Status
}

// Status is how it goes.
type Status struct {
	Connected bool      // to a Target
	Synced    bool      // nothing is known to differ, but what Last names as failed, and files that never rest
	Files     int       // that are kept in sync: files, directories, links
	Polled    int       // directories that the system does not watch
	Last      Batch     // the last round
	LastAt    time.Time // when it was acknowledged
	Err       error     // why there is no connection, or why the directory cannot be read
}

// NewSource checks the configuration. It touches no file: Run does.
func NewSource(cfg SourceConfig) (*Source, error) {
	switch {
	case cfg.Dir == "":
		return nil, errors.New("no directory to keep in sync")
	case cfg.Dial == nil:
		return nil, errors.New("no way to the other end of the file sync")
	case cfg.Logger == nil:
		return nil, errors.New("no logger")
	}
	s := &Source{cfg: cfg, watch: newWatcher(cfg.Logger), restless: restless}
	for _, line := range cfg.Ignore {
		rules, err := parseIgnore(line)
		if err != nil {
			return nil, err
		}
		s.given = append(s.given, rules...)
	}
	return s, nil
}

// Status may be called at any time.
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

// The pauses between two attempts to reach the target, which double.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 5 * time.Second
)

// Run keeps the target the same until ctx ends, and gives nil then. It gives up only when the other end is of another
// version, which is ErrVersion.
func (s *Source) Run(ctx context.Context) error {
	defer s.watch.close()
	defer s.set(func(st *Status) { st.Connected, st.Synced = false, false })
	pause := firstPause
	for ctx.Err() == nil {
		compared, err := s.connect(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, ErrVersion):
			return err
		}
		if compared {
			pause = firstPause
		}
		if again := s.Status().Err; again == nil || again.Error() != err.Error() {
			s.cfg.Logger.Warn("the file sync is interrupted", "err", err)
		}
		s.set(func(st *Status) { st.Connected, st.Synced, st.Err = false, false, err })
		select {
		case <-time.After(pause):
			pause = min(2*pause, lastPause)
		case <-ctx.Done():
		}
	}
	return nil
}

// connect runs one connection. It reports whether everything was compared over it.
func (s *Source) connect(ctx context.Context) (compared bool, err error) {
	if err := s.open(); err != nil {
		return false, unreadable(err)
	}
	conn, err := s.cfg.Dial(ctx)
	if err != nil {
		return false, fmt.Errorf("connecting to the other end of the file sync: %w", err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if err := s.open(); err != nil { // that was a while ago
		return false, unreadable(err)
	}
	w := newWire(conn)
	if err := s.greet(w); err != nil {
		return false, err
	}
	ss := &session{
		Source: s, w: w,
		known: make(map[string]known), tries: make(map[string]int), busy: make(map[string]time.Time), again: make(map[string]mark),
		down: make(chan struct{}), listed: make(chan struct{}, 1), done: make(chan done, 1),
	}
	var work sync.WaitGroup
	defer work.Wait()
	defer conn.Close() // before the wait
	work.Go(func() { w.keepAlive(ss.down) })
	work.Go(func() {
		defer close(ss.down)
		defer conn.Close() // what is being sent ends too
		ss.err = ss.receive()
	})
	err = ss.run(ctx)
	conn.Close()
	<-ss.down
	if refused := (*refusal)(nil); errors.As(ss.err, &refused) || errors.Is(err, errDown) || errors.Is(err, net.ErrClosed) || errors.Is(err, io.ErrClosedPipe) {
		err = ss.err
	}
	return ss.compared, err
}

// greet exchanges hellos. Its time is bounded by closing the connection: one that is still being made may know no deadlines, and a
// source's writes have none.
func (s *Source) greet(w *wire) error {
	late := time.AfterFunc(handshake, func() { w.conn.Close() })
	err := w.sendHello(hello{Name: base(s.cfg.Dir), File: s.tree.only != "", NoModes: runtime.GOOS == "windows"})
	if err == nil {
		_, err = w.receiveHello()
	} else if _, _, why := w.receive(); why != nil && !errors.Is(why, io.EOF) {
		err = why // a connection that is down may say so when it is written to, and why when it is read from
	}
	if !late.Stop() {
		return fmt.Errorf("the other end of the file sync has not answered within %v", handshake)
	}
	return err
}

// open finds the directory, and begins to watch it anew if it is another one.
func (s *Source) open() error {
	full, err := filepath.Abs(s.cfg.Dir)
	if err == nil {
		full, err = filepath.EvalSymlinks(full)
	}
	if err != nil {
		return err
	}
	info, err := os.Stat(full)
	if err != nil {
		return err
	}
	t := tree{root: full, watch: s.watch}
	if !info.IsDir() {
		t.root, t.only = filepath.Split(full)
		t.root, t.called = filepath.Clean(t.root), base(s.cfg.Dir)
	} else if t.ignore, err = readIgnore(full, s.given); err != nil {
		s.cfg.Logger.Warn("reading what is to be ignored", "err", err)
	}
	if t.root != s.watch.root || t.only != s.tree.only {
		s.watch.reset(t.root)
	}
	s.tree = t
	return nil
}

// base is what a path is called.
func base(p string) string {
	if full, err := filepath.Abs(p); err == nil {
		p = full
	}
	return filepath.Base(p)
}

// unreadable makes an error of the root's that is no reason to believe that all files are gone.
func unreadable(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: what is at the other end stays as it is", err)
	}
	return err
}
