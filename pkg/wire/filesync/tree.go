package filesync

import (
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/fsnotify/fsnotify"
)

// tree holds the entries of the laptop as of the last read or update. It belongs to one goroutine.
type tree struct {
	dir    string // as configured
	logger *slog.Logger
	watch  *watcher

	root    string // absolute, links resolved; of one file, its directory
	only    string // the one file's name in root; "": a directory
	ignored ignore

	entries    map[string]entry
	unreadable map[string]bool // paths of which, and below which, nothing is known
	failed     []Failure       // since the last round
}

func newTree(dir string, logger *slog.Logger) *tree {
	return &tree{dir: dir, logger: logger, watch: newWatcher(logger), entries: make(map[string]entry),
		unreadable: make(map[string]bool)}
}

// open finds the directory and reads its ignore file.
func (t *tree) open() error {
	if t.dir == "" {
		return errors.New("no directory to synchronize") // filepath.Abs would take the working directory
	}
	full, err := filepath.Abs(t.dir)
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
	root, only := full, ""
	if !info.IsDir() {
		root, only = filepath.Dir(full), filepath.Base(full)
	} else if t.ignored, err = readIgnore(full); err != nil {
		t.logger.Warn("cannot read the ignore file", "err", err)
	}
	if root != t.watch.root {
		t.watch.reset(root)
	}
	t.root, t.only = root, only
	return nil
}

// full returns the path in the file system.
func (t *tree) full(p string) string { return filepath.Join(t.root, filepath.FromSlash(p)) }

// skips reports whether a path is not copied. Its parent is.
func (t *tree) skips(p string, isDir bool) bool {
	if t.only != "" {
		return p != t.only
	}
	return t.ignored.ignores(p, isDir)
}

// read updates the entries. It returns errRoot if a file is now a directory, or a directory a file.
func (t *tree) read(now changes) error {
	all := now.all || isGone(now.paths["."]) || now.paths["."].Has(fsnotify.Create)
	for _, name := range ignoreFiles {
		_, changed := now.paths[name]
		all = all || changed && t.only == ""
	}
	if !all {
		t.update(now.paths)
		return nil
	}
	only := t.only
	if err := t.open(); err != nil {
		return err
	}
	if t.only != only {
		return errRoot
	}
	if now.lost {
		t.watch.reset(t.root)
	}
	t.update(now.paths)
	return t.readAll()
}

// readAll reads everything. If the root cannot be read, the entries stay as they were.
func (t *tree) readAll() error {
	before, unreadable := t.entries, t.unreadable
	t.entries, t.unreadable = make(map[string]entry, len(before)), make(map[string]bool)
	err := t.readDir(".")
	if err != nil {
		t.entries, t.unreadable = before, unreadable
	}
	return err
}

// readDir reads the entries below a directory. It starts to watch first, so that no change is missed.
func (t *tree) readDir(p string) error {
	t.watch.add(p)
	list, err := os.ReadDir(t.full(p))
	if err != nil {
		return err
	}
	for _, d := range list {
		if child := path.Join(p, d.Name()); !t.skips(child, d.IsDir()) {
			t.readPath(child, fsnotify.Create)
		}
	}
	return nil
}

// update reads the paths that may have changed.
func (t *tree) update(paths map[string]fsnotify.Op) {
	for name, op := range paths {
		if isGone(op) {
			t.watch.forget(name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(paths)) { // parents first
		// Paths below a link or an ignored directory are not copied.
		if parent := path.Dir(name); name != "." && (parent == "." || t.entries[parent].kind == dir) {
			t.readPath(name, paths[name])
		}
	}
}

// readPath updates the entry of a path, and those below it if it is a new directory.
func (t *tree) readPath(p string, op fsnotify.Op) {
	info, err := os.Lstat(t.full(p))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || err == nil && t.skips(p, info.IsDir()) {
		t.remove(p)
		return
	}
	var e entry
	if err == nil {
		e = localEntry(info)
	}
	if e.kind == symlink {
		e.link, err = os.Readlink(t.full(p))
	}
	switch {
	case err != nil:
		t.fail(p, err)
		return
	case e.kind == other:
		t.remove(p)
		return
	}
	created := op.Has(fsnotify.Create)
	if t.entries[p].kind == dir && (e.kind != dir || created) {
		t.remove(p)
	}
	t.entries[p] = e
	delete(t.unreadable, p)
	if e.kind == dir && (created || !t.watch.dirs[p]) {
		if err := t.readDir(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.fail(p, err)
		}
	}
}

// entry describes a file, a directory or a symbolic link. Entries are equal if the container need not be changed.
type entry struct {
	kind  entryKind
	perm  fs.FileMode
	size  int64  // of a file
	mtime int64  // of a file, in nanoseconds
	link  string // destination of a link
}

type entryKind string

const (
	file    entryKind = "file"
	dir     entryKind = "dir"
	symlink entryKind = "link"
	other   entryKind = "other" // what is not copied
)

// ownerAll are the permissions that the owner of a directory needs to put files into it.
const ownerAll fs.FileMode = 0o700

// localEntry describes the result of an Lstat, with the permissions that the container gets. The caller reads the
// destination of a link.
func localEntry(info fs.FileInfo) entry {
	perm := info.Mode().Perm()
	switch info.Mode().Type() {
	case 0:
		return entry{kind: file, perm: perm, size: info.Size(), mtime: info.ModTime().UnixNano()}
	case fs.ModeDir:
		return entry{kind: dir, perm: perm | ownerAll}
	case fs.ModeSymlink:
		return entry{kind: symlink}
	}
	return entry{kind: other}
}

// coarse reports whether a second write may have the same modification time: some file systems count in seconds, or in
// steps of 10 ms, and such a time is most likely from one of them.
func coarse(mtime int64) bool { return mtime%10e6 == 0 }

// remove drops the entry of a path and those below it.
func (t *tree) remove(p string) {
	if t.entries[p].kind == dir {
		maps.DeleteFunc(t.entries, func(name string, _ entry) bool { return strings.HasPrefix(name, p+"/") })
	}
	delete(t.entries, p)
	delete(t.unreadable, p)
}

func (t *tree) fail(p string, err error) {
	t.unreadable[p] = true
	t.failed = addFailure(t.failed, p, err)
}

// addFailure adds a failure, without the file system's own name of the path, as long as there are not too many.
func addFailure(to []Failure, p string, err error) []Failure {
	if len(to) >= maxFailures {
		return to
	}
	return append(to, Failure{p, bareError(err)})
}

// bareError removes the path from an error of package os.
func bareError(err error) error {
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return e.Err
	}
	if e, ok := errors.AsType[*os.LinkError](err); ok {
		return e.Err
	}
	return err
}

// unreadableAbove reports whether a path, or a directory above it, could not be read.
func (t *tree) unreadableAbove(p string) bool {
	for ; len(t.unreadable) > 0 && p != "."; p = path.Dir(p) {
		if t.unreadable[p] {
			return true
		}
	}
	return false
}
