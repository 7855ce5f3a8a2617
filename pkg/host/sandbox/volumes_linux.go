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

// store holds volumes, one in each directory of root.
type store struct {
	root    *os.Root
	writers map[string]*writer
}

// openStore returns a store in an empty directory.
func openStore(dir string) (*store, error) {
	root, err := os.OpenRoot(dir)
	return &store{root: root, writers: map[string]*writer{}}, err
}

// newStore creates the volumes of a sandbox on a tmpfs that only mounts make visible, and a detached mount for each
// Mount of one.
//
//	tmpfs ─┬─ config/ ── open_tree ──▶ a mount's source
//	       └─ token/      ...
//
// It unmounts the tmpfs again. The open files keep it alive for Process.Update.
func newStore(volumes []Volume, mounts []Mount) (s *store, trees map[Mount]int, err error) {
	if len(volumes) == 0 {
		return nil, nil, nil
	}
	at := os.TempDir() // any directory
	if err := unix.Mount("tmpfs", at, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0700"); err != nil {
		return nil, nil, fmt.Errorf("mounting a tmpfs for volumes: %w", err)
	}
	defer func() {
		if e := unix.Unmount(at, unix.MNT_DETACH); e != nil && err == nil {
			err = fmt.Errorf("unmounting the tmpfs at %s: %w", at, e)
		}
	}()
	if s, err = openStore(at); err != nil {
		return nil, nil, err
	}
	for _, v := range volumes {
		v.Empty = len(v.Files) == 0
		if err := s.write(v); err != nil {
			return nil, nil, err
		}
	}
	trees = map[Mount]int{}
	for _, m := range mounts {
		if m.Volume == "" {
			continue
		}
		sub, err := s.resolve(position{m.Volume, m.SubPath})
		if err != nil {
			return nil, nil, err
		}
		if trees[m], err = unix.OpenTree(unix.AT_FDCWD, path.Join(at, m.Volume, sub),
			unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC); err != nil {
			return nil, nil, fmt.Errorf("opening %q of volume %s: %w", m.SubPath, m.Volume, err)
		}
	}
	return s, trees, nil
}

// write creates a volume or replaces its files.
func (s *store) write(v Volume) error {
	if err := v.check(); err != nil {
		return err
	}
	var err error
	w := s.writers[v.Name]
	if w == nil {
		if w, err = newWriter(s.root, v); err == nil {
			s.writers[v.Name] = w
		}
	}
	if err == nil {
		err = w.write(v)
	}
	if err != nil {
		return fmt.Errorf("volume %s: %w", v.Name, err)
	}
	return nil
}

// update writes the Volume that f contains.
func (s *store) update(f *os.File) error {
	var v Volume
	if err := fromMemory(f, &v); err != nil {
		return fmt.Errorf("reading a volume: %w", err)
	}
	return s.write(v)
}

// resolve returns where a path of a volume is now, relative to the volume.
func (s *store) resolve(p position) (string, error) {
	w := s.writers[p.Volume]
	if w == nil {
		return "", fmt.Errorf("there is no volume %q", p.Volume)
	}
	at, err := w.resolve(p.Path)
	if err != nil {
		return "", fmt.Errorf("volume %s has nothing at %s: %w", p.Volume, p.Path, err)
	}
	return at, nil
}

// inMemory returns an anonymous file in memory that contains v as JSON. Secrets and megabytes travel in such files.
func inMemory(v any) (*os.File, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("kubevpn", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("creating a file in memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), "memory")
	if _, err := f.WriteAt(b, 0); err != nil {
		f.Close()
		return nil, fmt.Errorf("writing to a file in memory: %w", err)
	}
	return f, nil
}

// fromMemory reads v from a file of inMemory.
func fromMemory(f *os.File, v any) error {
	if f == nil {
		return errors.New("no file arrived")
	}
	return json.NewDecoder(io.NewSectionReader(f, 0, 1<<40)).Decode(v)
}
