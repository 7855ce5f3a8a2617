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

// A Volume is a directory that the sandbox alone has, in memory: nothing of it is on the laptop's disk, and it ends with the
// sandbox. [Process.Update] changes it while the program runs.
type Volume struct {
	Name  string
	Files []File // none: an empty directory, which the program may fill
}

// A File is one of a Volume's.
type File struct {
	Path string // relative, with slashes
	Mode fs.FileMode
	Data []byte
}

func (v *Volume) check() error {
	if v.Name == "" || !fs.ValidPath(v.Name) || strings.Contains(v.Name, "/") {
		return fmt.Errorf("%q is no name for a volume", v.Name)
	}
	seen := make(map[string]bool, len(v.Files))
	for _, f := range v.Files {
		switch {
		case f.Path == "." || !fs.ValidPath(f.Path) || strings.HasPrefix(f.Path, ".."):
			return fmt.Errorf("volume %s: %q is no path of a file", v.Name, f.Path)
		case seen[f.Path]:
			return fmt.Errorf("volume %s has the file %s twice", v.Name, f.Path)
		}
		seen[f.Path] = true
	}
	return nil
}

// Files of a volume are seen all old or all new, as the kubelet does it (pkg/volume/util/atomic_writer.go): what has a name
// is a link to what ..data is a link to.
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
	settle func(dir string) error // nil: the files are as they are
}

func (w *writer) write(v Volume) error {
	if len(v.Files) == 0 && w.round == 0 {
		return nil
	}
	w.round++
	dir := ".." + strconv.Itoa(w.round)
	if err := w.root.Mkdir(dir, 0o755); err != nil {
		return err
	}
	names := map[string]bool{}
	for _, f := range v.Files {
		name := path.Join(dir, f.Path)
		if err := w.root.MkdirAll(path.Dir(name), 0o755); err != nil {
			return err
		}
		if err := w.root.WriteFile(name, f.Data, 0o600); err != nil {
			return err
		}
		if err := w.root.Chmod(name, f.Mode.Perm()); err != nil {
			return err
		}
		first, _, _ := strings.Cut(f.Path, "/")
		names[first] = true
	}
	if w.settle != nil {
		if err := w.settle(dir); err != nil {
			return err
		}
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

// resolve is where a path of the volume is at this time: what a mount of one file shows, for ever.
func (w *writer) resolve(sub string) (string, error) {
	first, rest, _ := strings.Cut(sub, "/")
	to, err := w.root.Readlink(first)
	if err != nil { // it is no link, or is not there
		return sub, nil
	}
	dir, err := w.root.Readlink(current)
	if err != nil {
		return "", err
	}
	return path.Join(dir, strings.TrimPrefix(to, current+"/"), rest), nil
}

// A Directory is where a Volume is shown by who gives it to a program by other means than a sandbox. It is for one goroutine.
type Directory struct{ writer writer }

// NewDirectory takes an empty directory, which stays the caller's to close. settle, unless it is nil, is given the directory,
// within root, that has the files of a Volume before anybody sees them: there it may change their owners.
func NewDirectory(root *os.Root, settle func(dir string) error) *Directory {
	return &Directory{writer{root: root, settle: settle}}
}

// Write shows the files of v instead of what was shown: all at once, to who looks for them by their names.
func (d *Directory) Write(v Volume) error {
	if err := v.check(); err != nil {
		return err
	}
	return d.writer.write(v)
}

// Resolve says where a path of the Volume is now: for a mount of it, which would not follow.
func (d *Directory) Resolve(sub string) (string, error) { return d.writer.resolve(sub) }

// volumeOf is the volume of that name.
func volumeOf(volumes []Volume, name string) (Volume, bool) {
	i := slices.IndexFunc(volumes, func(v Volume) bool { return v.Name == name })
	if i < 0 {
		return Volume{}, false
	}
	return volumes[i], true
}
