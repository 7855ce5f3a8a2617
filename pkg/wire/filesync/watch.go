package filesync

import (
	"errors"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"kubevpn/pkg/wakeup"

	"github.com/fsnotify/fsnotify"
)

const (
	quiet     = 15 * time.Millisecond // without an event, until a save counts as complete
	quietMost = 50 * time.Millisecond // since the first event
	maxPaths  = 50_000                // with more changed paths than that, everything is read
)

// watcher collects the paths that may have changed. One goroutine controls it (add, forget, reset, close); the events
// arrive on another one.
type watcher struct {
	logger *slog.Logger
	notify *fsnotify.Watcher // nil: there is none
	events sync.WaitGroup
	root   string
	dirs   map[string]bool // relative, that are watched
	poll   bool            // the system does not watch all directories
	warned bool

	mu   sync.Mutex
	next changes
	wake wakeup.Signal // next is not empty
}

// changes are the events that a watcher collected.
type changes struct {
	paths map[string]fsnotify.Op
	all   bool      // everything has to be read
	lost  bool      // events were lost, so that the watches may be wrong
	since time.Time // of the first one
}

func newWatcher(logger *slog.Logger) *watcher {
	return &watcher{logger: logger, dirs: make(map[string]bool), wake: wakeup.NewSignal()}
}

// reset ends all watches. Those that follow are below root.
func (w *watcher) reset(root string) {
	w.close()
	w.root, w.poll = root, false
	clear(w.dirs)
	notify, err := fsnotify.NewWatcher()
	if err != nil {
		w.warn(err)
		return
	}
	w.notify = notify
	w.events.Go(func() { w.read(notify, root) })
}

func (w *watcher) close() {
	if w.notify == nil {
		return
	}
	if err := w.notify.Close(); err != nil {
		w.logger.Debug("cannot close the file watcher", "err", err)
	}
	w.events.Wait()
	w.notify = nil
}

// warn notes that directories have to be polled, and logs it once.
func (w *watcher) warn(err error) {
	w.poll = true
	if w.warned {
		return
	}
	w.warned = true
	advice := ""
	switch {
	case errors.Is(err, syscall.ENOSPC):
		advice = "sudo sysctl fs.inotify.max_user_watches=1048576"
	case errors.Is(err, syscall.EMFILE):
		advice = "sudo sysctl fs.inotify.max_user_instances=1024, or ulimit -n 10240"
	}
	w.logger.Warn("cannot watch all directories; polling them every second", "err", err, "advice", advice)
}

// add watches a directory. Adding it again is harmless, also under another name after a rename.
func (w *watcher) add(p string) {
	if w.notify == nil {
		return
	}
	err := w.notify.Add(filepath.Join(w.root, filepath.FromSlash(p)))
	switch {
	case err == nil:
		w.dirs[p] = true
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission): // reading the directory fails too
	default:
		w.warn(err)
	}
}

// forget ends the watches of a directory that is gone and of those below it. The kernel would otherwise report a
// renamed directory by its old name.
func (w *watcher) forget(p string) {
	if !w.dirs[p] && !w.poll {
		return
	}
	for d := range w.dirs {
		if d != p && !strings.HasPrefix(d, p+"/") {
			continue
		}
		delete(w.dirs, d)
		// The kernel has ended it already if the directory was removed.
		if err := w.notify.Remove(filepath.Join(w.root, filepath.FromSlash(d))); err != nil &&
			!errors.Is(err, fsnotify.ErrNonExistentWatch) {
			w.logger.Debug("cannot end a watch", "path", d, "err", err)
		}
	}
}

func (w *watcher) read(notify *fsnotify.Watcher, root string) {
	for {
		select {
		case e, ok := <-notify.Events:
			if !ok {
				return
			}
			if p, err := filepath.Rel(root, e.Name); err == nil && e.Name != "" {
				w.mark(filepath.ToSlash(p), e.Op)
			}
		case err, ok := <-notify.Errors:
			if !ok {
				return
			}
			if !errors.Is(err, fsnotify.ErrEventOverflow) {
				w.logger.Debug("cannot watch", "err", err)
			}
			w.lose()
		}
	}
}

// isGone reports whether a path was removed or renamed.
func isGone(op fsnotify.Op) bool { return op&(fsnotify.Remove|fsnotify.Rename) != 0 }

// mark notes that a path may have changed, and how if that is known.
func (w *watcher) mark(p string, op fsnotify.Op) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.next.lost:
	case len(w.next.paths) < maxPaths:
		w.next.add(p, op)
	default:
		w.next = changes{all: true, lost: true, since: w.next.since}
	}
	w.wakeUp()
}

// lose notes that events were lost.
func (w *watcher) lose() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next = changes{all: true, lost: true, since: w.next.since}
	w.wakeUp()
}

func (w *watcher) wakeUp() {
	if w.next.since.IsZero() {
		w.next.since = time.Now()
	}
	w.wake.Raise()
}

// take returns the changes since the last call.
func (w *watcher) take() changes {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := w.next
	w.next = changes{}
	return c
}

// add notes a path.
func (c *changes) add(p string, op fsnotify.Op) {
	if c.paths == nil {
		c.paths = make(map[string]fsnotify.Op)
	}
	c.paths[p] |= op
}

// merge adds later changes.
func (c *changes) merge(later changes) {
	for p, op := range later.paths {
		c.add(p, op)
	}
	c.all, c.lost = c.all || later.all, c.lost || later.lost
	if c.since.IsZero() {
		c.since = later.since
	}
}
