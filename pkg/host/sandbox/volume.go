package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
)

// A Volume is a directory in memory that only the sandbox sees. It is never on the laptop's disk and ends with the
// sandbox. [Process.Update] changes it while the program runs.
type Volume struct {
	Name  string
	Files []File // if empty, the program may write to the directory
}

// A File is one file of a Volume.
type File struct {
	Path string // relative, with slashes
	Mode fs.FileMode
	Data []byte
}

func (v *Volume) check() error {
	if v.Name == "" || !fs.ValidPath(v.Name) || strings.Contains(v.Name, "/") {
		return fmt.Errorf("%q is not a valid volume name", v.Name)
	}
	seen := make(map[string]bool, len(v.Files))
	for _, f := range v.Files {
		switch {
		case f.Path == "." || !fs.ValidPath(f.Path) || strings.HasPrefix(f.Path, ".."):
			return fmt.Errorf("volume %s: %q is not a valid file path", v.Name, f.Path)
		case seen[f.Path]:
			return fmt.Errorf("volume %s contains the file %s twice", v.Name, f.Path)
		}
		seen[f.Path] = true
	}
	return nil
}

// A reader sees either all old or all new files of a volume, as in the kubelet (pkg/volume/util/atomic_writer.go): each
// name is a link through ..data, and ..data is a link to the current directory.
//
//	config ─▶ ..data/config      ..data ─▶ ..3/       ..3/config
const (
	current = "..data"
	next    = "..data_tmp"
)

// writer writes a volume into its directory.
type writer struct {
	root   *os.Root
	round  int
	settle func(dir string) error // called before the files become visible; may be nil
}

// write replaces the files of the volume with those of v.
func (w *writer) write(v Volume) error {
	if len(v.Files) == 0 && w.round == 0 {
		return nil
	}
	w.round++
	dir := ".." + strconv.Itoa(w.round)
	if err := w.root.Mkdir(dir, 0o755); err != nil {
		return err
	}
	names, err := w.create(dir, v.Files)
	if err != nil {
		return err
	}
	before, err := w.root.Readlink(current)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := w.root.Symlink(dir, next); err != nil {
		return err
	}
	if err := w.root.Rename(next, current); err != nil {
		return err
	}
	for name := range names {
		if _, err := w.root.Lstat(name); errors.Is(err, fs.ErrNotExist) {
			err = w.root.Symlink(path.Join(current, name), name)
			if err != nil {
				return err
			}
		}
	}
	if before == "" {
		return nil
	}
	return w.remove(before, names)
}

// create writes files into dir and returns the names of its entries.
func (w *writer) create(dir string, files []File) (names map[string]bool, err error) {
	names = map[string]bool{}
	for _, f := range files {
		name := path.Join(dir, f.Path)
		if err := w.root.MkdirAll(path.Dir(name), 0o755); err != nil {
			return nil, err
		}
		if err := w.root.WriteFile(name, f.Data, 0o600); err != nil {
			return nil, err
		}
		if err := w.root.Chmod(name, f.Mode.Perm()); err != nil {
			return nil, err
		}
		first, _, _ := strings.Cut(f.Path, "/")
		names[first] = true
	}
	if w.settle != nil {
		err = w.settle(dir)
	}
	return names, err
}

// remove removes the previous directory, and the links to files that v does not contain.
func (w *writer) remove(before string, names map[string]bool) error {
	old, err := fs.ReadDir(w.root.FS(), before)
	if err != nil {
		return err
	}
	for _, e := range old {
		if !names[e.Name()] {
			if err := w.root.Remove(e.Name()); err != nil {
				return err
			}
		}
	}
	return w.root.RemoveAll(before)
}

// resolve returns the current location of a path of the volume. A mount of one file shows that location for ever.
func (w *writer) resolve(sub string) (string, error) {
	first, rest, _ := strings.Cut(sub, "/")
	to, err := w.root.Readlink(first)
	if err != nil { // not a link, or missing
		return sub, nil
	}
	dir, err := w.root.Readlink(current)
	if err != nil {
		return "", err
	}
	return path.Join(dir, strings.TrimPrefix(to, current+"/"), rest), nil
}

// A Directory shows a Volume to programs outside a sandbox, such as containers. It is not safe for concurrent use.
type Directory struct{ writer writer }

// NewDirectory returns a Directory in the empty directory root, which the caller closes. Before new files become
// visible, Write calls settle, unless it is nil, with their directory within root; settle may change their owners.
func NewDirectory(root *os.Root, settle func(dir string) error) *Directory {
	return &Directory{writer{root: root, settle: settle}}
}

// Write atomically replaces the files of the Directory with those of v.
func (d *Directory) Write(v Volume) error {
	if err := v.check(); err != nil {
		return err
	}
	return d.writer.write(v)
}

// Resolve returns the current location of a path of the Volume, for a mount of that path. The mount does not follow
// later changes.
func (d *Directory) Resolve(sub string) (string, error) { return d.writer.resolve(sub) }

// volumeOf returns the volume of that name.
func volumeOf(volumes []Volume, name string) (Volume, bool) {
	i := slices.IndexFunc(volumes, func(v Volume) bool { return v.Name == name })
	if i < 0 {
		return Volume{}, false
	}
	return volumes[i], true
}
