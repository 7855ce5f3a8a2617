package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"

	"golang.org/x/sys/unix"
)

// store holds the volumes of a sandbox on a tmpfs that only mounts make visible.
//
//	tmpfs ─┬─ config/ ── open_tree ──▶ a mount's source
//	       └─ token/      ...
//
// newStore mounts the tmpfs, opens its directories and unmounts it. The open files keep it alive for Process.Update.
type store struct {
	writers map[string]*writer
	trees   map[Mount]int // detached mounts
}

// newStore creates the volumes and a detached mount for each Mount of one.
func newStore(volumes []Volume, mounts []Mount) (_ *store, err error) {
	s := &store{writers: map[string]*writer{}, trees: map[Mount]int{}}
	if len(volumes) == 0 {
		return s, nil
	}
	at := os.TempDir() // any directory
	if err := unix.Mount("tmpfs", at, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0700"); err != nil {
		return nil, fmt.Errorf("mounting a tmpfs for volumes: %w", err)
	}
	defer func() {
		if e := unix.Unmount(at, unix.MNT_DETACH); e != nil && err == nil {
			err = fmt.Errorf("unmounting the tmpfs at %s: %w", at, e)
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
		tree, err := unix.OpenTree(unix.AT_FDCWD, path.Join(at, m.Volume, sub),
			unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		if err != nil {
			return nil, fmt.Errorf("volume %s has nothing at %q: %w", m.Volume, m.SubPath, err)
		}
		s.trees[m] = tree
	}
	return s, nil
}

// update executes Process.Update. f contains the Volume as JSON.
func (s *store) update(f *os.File) error {
	if f == nil {
		return errors.New("an update of a volume arrived without a file")
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

// inMemory returns an anonymous file in memory that contains v as JSON.
func inMemory(name string, v any) (*os.File, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("creating a file in memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.WriteAt(b, 0); err != nil {
		f.Close()
		return nil, fmt.Errorf("writing to a file in memory: %w", err)
	}
	return f, nil
}
