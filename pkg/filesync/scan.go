package filesync

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// tree is the laptop's side of the files.
type tree struct {
	root   string // the directory, links resolved; of one file, its directory
	only   string // the one file's name in it, or ""
	called string // what the other end knows the one file as
	ignore ignore
	watch  *watcher
}

// full is where a path is on this machine.
func (t *tree) full(p string) string {
	if t.only != "" {
		p = t.only
	}
	return filepath.Join(t.root, filepath.FromSlash(p))
}

// stat gives the entry of a path; false without an error if there is nothing that is to be copied, and fs.ErrNotExist if there is
// nothing at all.
func (t *tree) stat(p string) (entry, bool, error) {
	info, err := os.Lstat(t.full(p))
	if err != nil {
		if errors.Is(err, syscall.ENOTDIR) {
			err = fs.ErrNotExist
		}
		return entry{}, false, err
	}
	return t.entry(p, info)
}

func (t *tree) entry(p string, info fs.FileInfo) (entry, bool, error) {
	e, ok := newEntry(info)
	if e.kind == link {
		to, err := os.Readlink(t.full(p))
		if err != nil {
			return entry{}, false, err
		}
		e.link = to
	}
	return e, ok, nil
}

// walk is a look at everything below a path.
type walk struct {
	tree   *tree
	visit  func(string, entry)
	failed func(string, error) // what is at the path, or below it, is not known
}

// dir visits what a directory holds, which it watches from before it reads it on.
func (w *walk) dir(p string) error {
	w.tree.watch.add(p)
	entries, err := os.ReadDir(w.tree.full(p))
	if err != nil {
		return err
	}
	for _, d := range entries {
		below := path.Join(p, d.Name())
		if w.tree.ignore.ignores(below, d.IsDir()) {
			continue
		}
		info, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var e entry
		var ok bool
		if err == nil {
			e, ok, err = w.tree.entry(below, info)
		}
		if err != nil {
			w.failed(below, err)
			continue
		}
		if !ok {
			continue
		}
		w.visit(below, e)
		if e.kind == dir {
			w.subdir(below)
		}
	}
	return nil
}

func (w *walk) subdir(p string) {
	if err := w.dir(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
		w.failed(p, err)
	}
}

// all visits everything. Its error is about the root itself.
func (w *walk) all() error {
	if w.tree.only == "" {
		return w.dir(".")
	}
	w.tree.watch.add(".")
	e, ok, err := w.tree.stat(w.tree.called)
	if err == nil && ok {
		w.visit(w.tree.called, e)
	}
	return err
}

// solid tells whether a path's directories are directories: below a link to one, the path would be found, but is not ours. It
// remembers what it has seen, so it is for one look only.
type solid struct {
	tree *tree
	seen map[string]bool
}

func (s *solid) parent(p string) bool {
	d := path.Dir(p)
	if d == "." {
		return true
	}
	ok, known := s.seen[d]
	if !known {
		info, err := os.Lstat(s.tree.full(d))
		ok = err == nil && info.IsDir() && s.parent(d)
		s.seen[d] = ok
	}
	return ok
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

// plan is what a round has to do.
type plan struct {
	send   map[string]entry
	touch  map[string]entry
	remove map[string]bool
	failed []Failure
}

func newPlan() *plan {
	return &plan{send: make(map[string]entry), touch: make(map[string]entry), remove: make(map[string]bool)}
}

func (p *plan) empty() bool { return len(p.send) == 0 && len(p.touch) == 0 && len(p.remove) == 0 }

// has reports whether something is done at a path. It may be asked while the plan is sent.
func (p *plan) has(name string) bool {
	_, sent := p.send[name]
	_, touched := p.touch[name]
	return sent || touched || p.remove[name]
}

func (p *plan) fail(name string, err error) {
	if pathErr, ok := errors.AsType[*fs.PathError](err); ok {
		err = pathErr.Err
	}
	if len(p.failed) < maxFailures {
		p.failed = append(p.failed, Failure{name, err})
	}
}

// bigFile is one that others do not wait for, and that is not read while it is being written.
const bigFile = 8 << 20

// order is that in which paths are sent.
func (p *plan) order() []string {
	rank := func(e entry) int {
		switch {
		case e.kind == dir:
			return 0
		case e.kind == file && e.size >= bigFile:
			return 2
		}
		return 1
	}
	paths := make([]string, 0, len(p.send))
	for name := range p.send {
		paths = append(paths, name)
	}
	slices.SortFunc(paths, func(a, b string) int {
		if by := rank(p.send[a]) - rank(p.send[b]); by != 0 {
			return by
		}
		return strings.Compare(a, b)
	})
	return paths
}
