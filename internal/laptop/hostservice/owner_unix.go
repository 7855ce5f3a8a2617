//go:build unix

package hostservice

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// RootOwned returns an error if a user besides root can change the file at path, or put another one there. It accepts a
// file that does not exist in a directory of root.
func RootOwned(path string) error {
	target, err := filepath.EvalSymlinks(path)
	if errors.Is(err, fs.ErrNotExist) {
		if path == filepath.Dir(path) {
			return err
		}
		return RootOwned(filepath.Dir(path))
	}
	if err != nil {
		return err
	}
	if err := rootOwned(path); err != nil {
		return err
	}
	return rootOwned(target) // elsewhere, if a part of path is a link
}

func rootOwned(path string) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return &fs.PathError{Op: "lstat", Path: path, Err: err}
	}
	kind := st.Mode & unix.S_IFMT
	// Others cannot move a file of root in a sticky directory. A link has no mode of its own.
	exempt := kind == unix.S_IFLNK || kind == unix.S_IFDIR && st.Mode&unix.S_ISVTX != 0
	if st.Uid != 0 {
		return fmt.Errorf("%s belongs to user %d, not to root", path, st.Uid)
	}
	if st.Mode&0o022 != 0 && !exempt {
		return fmt.Errorf("%s has mode %04o: users besides root can write to it", path, st.Mode&0o7777)
	}
	if path == filepath.Dir(path) {
		return nil
	}
	return rootOwned(filepath.Dir(path))
}
