package filesync

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	quiet      = 15 * time.Millisecond // without an event, until a save counts as complete
	quietAtMax = 50 * time.Millisecond // since the first event
	maxDirty   = 50_000                // paths: with more of them all is looked at
	pollEvery  = time.Second
)

// mark says what happened to a path.
type mark byte

const (
	changed mark = 1 << iota
	created      // it may be another directory than before
	gone         // removed, or renamed to something else
)

// watcher collects the paths that may have changed. What it watches is the business of one goroutine, which add, forget and poll
// belong to; the events come on another.
type watcher struct {
	logger *slog.Logger

	notify *fsnotify.Watcher // nil: there is none to be had, all is polled
	events sync.WaitGroup
	root   string
	dirs   map[string]bool                  // that are watched, relative
	polled map[string]map[string]entryStamp // directories that are not, and what was in them
	told   bool                             // that they are polled

	mu       sync.Mutex
	dirty    map[string]mark
	overflow bool // what is dirty is not all
	first    time.Time
	wake     chan struct{}
}

// entryStamp is what polling compares.
type entryStamp struct {
	mode  fs.FileMode
	size  int64
	mtime int64
}

func newWatcher(logger *slog.Logger) *watcher {
	return &watcher{
		logger: logger, dirs: make(map[string]bool), polled: make(map[string]map[string]entryStamp),
		dirty: make(map[string]mark), wake: make(chan struct{}, 1),
	}
}

// reset forgets what is watched and begins with another root.
func (w *watcher) reset(root string) {
	w.close()
	w.root = root
	clear(w.dirs)
	clear(w.polled)
	notify, err := fsnotify.NewWatcher()
	if err != nil {
		w.tell(err)
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
		w.logger.Debug("closing the watcher", "err", err)
	}
	w.events.Wait()
	w.notify = nil
}

// tell says once that directories are polled, and what helps.
func (w *watcher) tell(err error) {
	if w.told {
		return
	}
	w.told = true
	advice := ""
	switch {
	case errors.Is(err, syscall.ENOSPC):
		advice = "sudo sysctl fs.inotify.max_user_watches=1048576"
	case errors.Is(err, syscall.EMFILE):
		advice = "sudo sysctl fs.inotify.max_user_instances=1024, or ulimit -n 10240"
	}
	w.logger.Warn("the system does not watch all directories: they are looked at every second", "err", err, "advice", advice)
}

// add watches a directory, or polls it. It may be watched already: under this name, or because it was renamed under another.
func (w *watcher) add(p string) {
	err := error(syscall.EMFILE)
	if w.notify != nil {
		err = w.notify.Add(filepath.Join(w.root, filepath.FromSlash(p)))
	}
	switch {
	case err == nil:
		w.dirs[p] = true
		delete(w.polled, p)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission): // reading it says the same
	default:
		w.tell(err)
		if w.polled[p] == nil {
			w.polled[p] = w.stamps(p)
		}
	}
}

func (w *watcher) knows(p string) bool { return w.dirs[p] || w.polled[p] != nil }

// forget ends the watching of a directory that is not there any more, and of those in it: when it was renamed, the kernel would
// go on and report them by their old names.
func (w *watcher) forget(p string) {
	if !w.knows(p) {
		return
	}
	below := p + "/"
	for dir := range w.dirs {
		if dir == p || strings.HasPrefix(dir, below) {
			// The kernel ended it by itself if the directory was removed.
			if err := w.notify.Remove(filepath.Join(w.root, filepath.FromSlash(dir))); err != nil && !errors.Is(err, fsnotify.ErrNonExistentWatch) {
				w.logger.Debug("ending a watch", "path", dir, "err", err)
			}
			delete(w.dirs, dir)
		}
	}
	for dir := range w.polled {
		if dir == p || strings.HasPrefix(dir, below) {
			delete(w.polled, dir)
		}
	}
}

// stamps reads a directory that is polled.
func (w *watcher) stamps(p string) map[string]entryStamp {
	stamps := make(map[string]entryStamp)
	entries, err := os.ReadDir(filepath.Join(w.root, filepath.FromSlash(p)))
	if err != nil {
		return stamps
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			stamps[e.Name()] = entryStamp{info.Mode(), info.Size(), info.ModTime().UnixNano()}
		}
	}
	return stamps
}

// poll looks at the directories that are not watched. Its result is when to do it again.
func (w *watcher) poll() time.Duration {
	began := time.Now()
	for p, before := range w.polled {
		now := w.stamps(p)
		for name, stamp := range now {
			old, known := before[name]
			switch {
			case !known || old.mode.Type() != stamp.mode.Type():
				w.mark(path.Join(p, name), created)
			case old != stamp && !stamp.mode.IsDir() || old.mode != stamp.mode: // a directory's time is of its entries
				w.mark(path.Join(p, name), changed)
			}
		}
		for name := range before {
			if _, still := now[name]; !still {
				w.mark(path.Join(p, name), gone)
			}
		}
		w.polled[p] = now
	}
	return max(pollEvery, 10*time.Since(began))
}

func (w *watcher) read(notify *fsnotify.Watcher, root string) {
	for notify.Events != nil {
		select {
		case e, ok := <-notify.Events:
			if !ok {
				return
			}
			if p, err := filepath.Rel(root, e.Name); err == nil && e.Name != "" {
				w.mark(filepath.ToSlash(p), marks(e.Op))
			}
		case err, ok := <-notify.Errors:
			if !ok {
				return
			}
			if !errors.Is(err, fsnotify.ErrEventOverflow) {
				w.logger.Debug("watching", "err", err)
			}
			w.lose()
		}
	}
}

func marks(op fsnotify.Op) mark {
	m := changed
	if op.Has(fsnotify.Create) {
		m |= created
	}
	if op.Has(fsnotify.Remove) || op.Has(fsnotify.Rename) {
		m |= gone
	}
	return m
}

// mark notes a path. With too many of them, it is cheaper to look at everything.
func (w *watcher) mark(p string, m mark) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.dirty) >= maxDirty {
		w.overflow = true
		clear(w.dirty)
	}
	if !w.overflow {
		w.dirty[p] |= m
	}
	w.wakeUp()
}

// lose notes that events were lost.
func (w *watcher) lose() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.overflow = true
	clear(w.dirty)
	w.wakeUp()
}

func (w *watcher) wakeUp() {
	if w.first.IsZero() {
		w.first = time.Now()
	}
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// changes is what a watcher collected.
type changes struct {
	paths map[string]mark
	all   bool      // look at everything
	lost  bool      // events were lost, so that the watches may be wrong
	since time.Time // the first of them
}

func (w *watcher) take() changes {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := changes{w.dirty, w.overflow, w.overflow, w.first}
	w.dirty, w.overflow, w.first = make(map[string]mark), false, time.Time{}
	return c
}

// merge adds later changes.
func (c *changes) merge(later changes) {
	for p, m := range later.paths {
		c.paths[p] |= m
	}
	c.all = c.all || later.all
	c.lost = c.lost || later.lost
	if c.since.IsZero() {
		c.since = later.since
	}
}
