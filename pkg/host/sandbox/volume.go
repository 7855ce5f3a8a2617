package sandbox

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
)

// A Volume is a directory in memory that only the sandbox sees, or the containers of a [Remote]. It is never on the
// laptop's disk and ends with them. [Process.Update] and [Remote.Update] change it while programs run.
type Volume struct {
	Name  string
	Files []File // if empty, the program of a sandbox may write to the directory

	// Containers need more, because their programs may have any user.
	Empty bool     // every user may write to the directory, and Files is empty
	Group *int64   // the group that owns the volume and may read its files (fsGroup); nil: that of the writing process
	Dirs  []string // directories to create, as mount points of other volumes
}

// A File is one file of a Volume.
type File struct {
	Path  string // relative, with slashes
	Mode  fs.FileMode
	Owner int // a user ID; 0: the user of the writing process
	Data  []byte
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
	root  *os.Root
	empty bool // Volume.Empty
	round int
}

// newWriter creates the directory of v in root.
func newWriter(root *os.Root, v Volume) (*writer, error) {
	if err := root.Mkdir(v.Name, 0o755); err != nil {
		return nil, err
	}
	dir, err := root.OpenRoot(v.Name)
	if err != nil {
		return nil, err
	}
	mode := fs.FileMode(0o755)
	if v.Empty {
		mode = 0o777
	}
	if v.Group != nil {
		mode |= fs.ModeSetgid
		if err := dir.Chown(".", -1, int(*v.Group)); err != nil {
			return nil, err
		}
	}
	return &writer{root: dir, empty: v.Empty}, dir.Chmod(".", mode)
}

// write replaces the files of the volume with those of v.
func (w *writer) write(v Volume) error {
	if len(v.Files) > 0 || w.round > 0 {
		if err := w.replace(v); err != nil {
			return err
		}
	}
	for _, dir := range v.Dirs {
		if err := w.root.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("creating a mount point: %w", err)
		}
	}
	return nil
}

func (w *writer) replace(v Volume) error {
	w.round++
	dir := ".." + strconv.Itoa(w.round)
	if err := w.root.Mkdir(dir, 0o755); err != nil {
		return err
	}
	names, err := w.create(dir, v)
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

// create writes the files of v into dir and returns the names of its entries. As in the kubelet
// (pkg/volume/volume_linux.go), the group may read every file.
func (w *writer) create(dir string, v Volume) (names map[string]bool, err error) {
	names = map[string]bool{}
	group, groupMode := -1, fs.FileMode(0)
	if v.Group != nil {
		group, groupMode = int(*v.Group), 0o440
	}
	for _, f := range v.Files {
		name := path.Join(dir, f.Path)
		if err := w.root.MkdirAll(path.Dir(name), 0o755); err != nil {
			return nil, err
		}
		if err := w.root.WriteFile(name, f.Data, 0o600); err != nil {
			return nil, err
		}
		if err := w.root.Chown(name, cmp.Or(f.Owner, -1), group); err != nil {
			return nil, err
		}
		if err := w.root.Chmod(name, f.Mode.Perm()|groupMode); err != nil {
			return nil, err
		}
		first, _, _ := strings.Cut(f.Path, "/")
		names[first] = true
	}
	return names, nil
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

// resolve returns the current location of a path of the volume. A mount of one file shows that location for ever. In an
// empty volume, resolve creates a directory there, as the kubelet does.
func (w *writer) resolve(sub string) (string, error) {
	sub = path.Clean(sub)
	if w.empty {
		if sub == "." {
			return sub, nil
		}
		if err := w.root.MkdirAll(sub, 0o777); err != nil {
			return "", err
		}
		return sub, w.root.Chmod(sub, 0o777)
	}
	first, rest, _ := strings.Cut(sub, "/")
	if to, err := w.root.Readlink(first); err == nil {
		dir, err := w.root.Readlink(current)
		if err != nil {
			return "", err
		}
		sub = path.Join(dir, strings.TrimPrefix(to, current+"/"), rest)
	}
	_, err := w.root.Stat(sub)
	return sub, err
}

// hasVolume reports whether there is a volume of that name.
func hasVolume(volumes []Volume, name string) bool {
	return slices.ContainsFunc(volumes, func(v Volume) bool { return v.Name == name })
}
