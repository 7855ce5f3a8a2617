package sandbox

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path"

	"golang.org/x/sys/unix"
)

// store is the volumes of a sandbox: a tmpfs that is nowhere but where mounts show parts of it.
//
//	tmpfs ─┬─ config/ ── open_tree ──▶ a mount's source
//	       └─ token/      ...
//	mounted, opened, and unmounted again: what was opened keeps it, and Process.Update writes by it
type store struct {
	writers map[string]*writer
	trees   map[Mount]int // detached mounts
}

// newStore makes the volumes, and opens what mounts show of them.
func newStore(volumes []Volume, mounts []Mount) (_ *store, err error) {
	s := &store{writers: map[string]*writer{}, trees: map[Mount]int{}}
	if len(volumes) == 0 {
		return s, nil
	}
	at := os.TempDir() // any directory does
	if err := unix.Mount("tmpfs", at, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0700"); err != nil {
		return nil, fmt.Errorf("making a file system in memory: %w", err)
	}
	defer func() {
		if e := unix.Unmount(at, unix.MNT_DETACH); e != nil && err == nil {
			err = fmt.Errorf("taking the file system in memory from %s: %w", at, e)
		}
	}()
	for _, v := range volumes {
		dir := path.Join(at, v.Name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			return nil, err
		}
		root, err := os.OpenRoot(dir)
		if err != nil {
			return nil, err
		}
		w := &writer{root: root}
		s.writers[v.Name] = w
		if err := w.write(v); err != nil {
			return nil, fmt.Errorf("volume %s: %w", v.Name, err)
		}
	}
	for _, m := range mounts {
		if m.Volume == "" {
			continue
		}
		sub, err := s.writers[m.Volume].resolve(m.SubPath)
		if err != nil {
			return nil, err
		}
		if v, _ := volumeOf(volumes, m.Volume); len(v.Files) == 0 && m.SubPath != "" {
			if err := s.writers[m.Volume].root.MkdirAll(m.SubPath, 0o755); err != nil { // as the kubelet does
				return nil, err
			}
		}
		tree, err := unix.OpenTree(unix.AT_FDCWD, path.Join(at, m.Volume, sub), unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		if err != nil {
			return nil, fmt.Errorf("volume %s has nothing at %q: %w", m.Volume, m.SubPath, err)
		}
		s.trees[m] = tree
	}
	return s, nil
}

// update does what Process.Update asks for: the file has the volume.
func (s *store) update(f *os.File) error {
	if f == nil {
		return fmt.Errorf("an update of a volume came without it")
	}
	var v Volume
	if err := json.NewDecoder(io.NewSectionReader(f, 0, 1<<40)).Decode(&v); err != nil {
		return fmt.Errorf("reading a volume: %w", err)
	}
	w := s.writers[v.Name]
	if w == nil {
		return fmt.Errorf("there is no volume %q", v.Name)
	}
	if err := w.write(v); err != nil {
		return fmt.Errorf("volume %s: %w", v.Name, err)
	}
	return nil
}

// inMemory gives a file without a name that holds v as JSON.
func inMemory(name string, v any) (*os.File, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("making a file in memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.WriteAt(b, 0); err != nil {
		f.Close()
		return nil, fmt.Errorf("writing to a file in memory: %w", err)
	}
	return f, nil
}
