package filesync

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
)

// tree is what the laptop has: its entries as of the last read or update. It belongs to one goroutine.
type tree struct {
	dir    string // as configured
	logger *slog.Logger
	watch  *watcher

	root    string // absolute, links resolved; of one file, its directory
	only    string // the one file's name in root; "": a directory
	ignored ignore

	entries    map[string]entry
	unreadable map[string]bool // paths of which, and below which, nothing is known
	failed     []Failure       // since takeFailed
}

func newTree(dir string, logger *slog.Logger) *tree {
	return &tree{dir: dir, logger: logger, watch: newWatcher(logger), entries: make(map[string]entry),
		unreadable: make(map[string]bool)}
}

// open finds the directory and reads its ignore file.
func (t *tree) open() error {
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

// full is the path in the file system.
func (t *tree) full(p string) string { return filepath.Join(t.root, filepath.FromSlash(p)) }

// skips reports whether a path is not copied. Its parent is.
func (t *tree) skips(p string, isDir bool) bool {
	if t.only != "" {
		return p != t.only
	}
	return t.ignored.ignores(p, isDir)
}

// readAll reads everything. If the root cannot be read, the entries stay as they were.
func (t *tree) readAll() error {
	before, unreadable := t.entries, t.unreadable
	t.entries, t.unreadable = make(map[string]entry, len(before)), make(map[string]bool)
	if err := t.readDir("."); err != nil {
		t.entries, t.unreadable = before, unreadable
		return err
	}
	for name, e := range t.entries {
		if e.writes = before[name].writes; e.writes > 0 {
			t.entries[name] = e
		}
	}
	return nil
}

// readDir reads what is below a directory. It starts to watch first, so that no change is missed.
func (t *tree) readDir(p string) error {
	t.watch.add(p)
	list, err := os.ReadDir(t.full(p))
	if err != nil {
		return err
	}
	for _, d := range list {
		if child := path.Join(p, d.Name()); !t.skips(child, d.IsDir()) {
			t.read(child, created)
		}
	}
	return nil
}

// update reads the paths that may have changed.
func (t *tree) update(paths map[string]mark) {
	names := make([]string, 0, len(paths))
	for name, m := range paths {
		if m&gone != 0 {
			t.watch.forget(name)
		}
		if name != "." {
			names = append(names, name)
		}
	}
	slices.Sort(names) // parents first
	for _, name := range names {
		// What is below a link or an ignored directory is not copied.
		if parent := path.Dir(name); parent == "." || t.entries[parent].kind == dir {
			t.read(name, paths[name])
		}
	}
}

// read takes over what is at a path, and below a directory that is new.
func (t *tree) read(p string, m mark) {
	info, err := os.Lstat(t.full(p))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || err == nil && t.skips(p, info.IsDir()) {
		t.remove(p)
		return
	}
	var e entry
	if err == nil {
		e = localEntry(info)
	}
	if e.kind == link {
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
	before := t.entries[p]
	if before.kind == dir && (e.kind != dir || m&created != 0) {
		t.remove(p)
	}
	e.writes = before.writes
	if e.kind == file && m&written != 0 && coarse(e.mtime) {
		e.writes++
	}
	t.entries[p] = e
	delete(t.unreadable, p)
	if e.kind == dir && (m&created != 0 || !t.watch.dirs[p]) {
		if err := t.readDir(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.fail(p, err)
		}
	}
}

// localEntry is newEntry with the permissions that the target is to have.
func localEntry(info fs.FileInfo) entry {
	e := newEntry(info)
	switch {
	case runtime.GOOS == "windows": // the target keeps its own
		e.perm = 0
	case e.kind == dir:
		e.perm |= ownerAll
	}
	return e
}

// coarse reports whether a second write may have the same modification time: some file systems count in seconds, or in
// steps of 10 ms, and such a time is most likely from one of them.
func coarse(mtime int64) bool { return mtime%10e6 == 0 }

// remove drops the entry of a path and those below it.
func (t *tree) remove(p string) {
	if t.entries[p].kind == dir {
		for name := range t.entries {
			if strings.HasPrefix(name, p+"/") {
				delete(t.entries, name)
			}
		}
	}
	delete(t.entries, p)
	delete(t.unreadable, p)
}

func (t *tree) fail(p string, err error) {
	t.unreadable[p] = true
	t.failed = addFailure(t.failed, p, err)
}

// takeFailed returns what could not be read since the last call.
func (t *tree) takeFailed() []Failure {
	failed := t.failed
	t.failed = nil
	return failed
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

// within reports whether a path is one of those, or below one.
func within(p string, dirs map[string]bool) bool {
	if len(dirs) == 0 {
		return false
	}
	for ; p != "."; p = path.Dir(p) {
		if dirs[p] {
			return true
		}
	}
	return dirs["."]
}
