package osdns

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// entry is the journal on disk: it describes the original file.
type entry struct {
	Path    string            `json:"path"`
	Missing bool              `json:"missing,omitempty"` // there was no file
	Symlink string            `json:"symlink,omitempty"` // it was a symlink with this target
	Content []byte            `json:"content,omitempty"`
	Mode    uint32            `json:"mode"`
	UID     int               `json:"uid"`
	GID     int               `json:"gid"`
	Atime   int64             `json:"atime"` // ns
	Mtime   int64             `json:"mtime"` // ns
	Xattrs  map[string][]byte `json:"xattrs,omitempty"`
	Ours    []byte            `json:"ours"` // the edited content
}

// fileState is the state of a file compared to a journal entry.
type fileState int

const (
	fileOriginal fileState = iota // not edited, or restored
	fileOurs                      // the edited one, or partly restored in place
	fileForeign                   // another program's
)

func (e *entry) compare(now *entry) fileState {
	switch {
	case now.same(e):
		return fileOriginal
	case now.Missing, now.Symlink != "":
		return fileForeign
	case bytes.Equal(now.Content, e.Ours):
		return fileOurs
	case !e.Missing && e.Symlink == "" && bytes.Equal(now.Content, e.Content):
		return fileOurs // the content is restored, mode or time are not
	case len(e.Content) <= len(e.Ours) &&
		bytes.Equal(now.Content, append(bytes.Clone(e.Content), e.Ours[len(e.Content):]...)):
		return fileOurs // restored in place, but not yet truncated
	default:
		return fileForeign
	}
}

// same reports whether two snapshots are equal in everything that undo restores.
func (e *entry) same(o *entry) bool {
	if e.Missing || o.Missing {
		return e.Missing == o.Missing
	}
	if e.Symlink != "" || o.Symlink != "" {
		return e.Symlink == o.Symlink // its target may have changed
	}
	return bytes.Equal(e.Content, o.Content) && e.Mode == o.Mode && e.UID == o.UID && e.GID == o.GID &&
		e.Mtime == o.Mtime
}

func snapshot(path string) (*entry, error) {
	e := &entry{Path: path}
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); errors.Is(err, unix.ENOENT) {
		e.Missing = true
		return e, nil
	} else if err != nil {
		return nil, &fs.PathError{Op: "lstat", Path: path, Err: err}
	}
	e.Mode, e.UID, e.GID = st.Mode&0o7777, int(st.Uid), int(st.Gid)
	e.Atime, e.Mtime = st.Atim.Nano(), st.Mtim.Nano()
	var err error
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		e.Symlink, err = os.Readlink(path)
		if err == nil {
			// The content is that of the target; a dangling link has none.
			e.Content, err = os.ReadFile(path)
			if errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
		}
	case unix.S_IFREG:
		e.Content, err = os.ReadFile(path)
		e.Xattrs = xattrs(path)
	default:
		err = fmt.Errorf("%s is neither a file nor a symlink", path)
	}
	return e, err
}

// xattrs returns a file's extended attributes (SELinux's label, ACLs); none if it cannot read them.
func xattrs(path string) map[string][]byte {
	names := make([]byte, 4096)
	n, err := unix.Llistxattr(path, names)
	if err != nil || n == 0 {
		return nil
	}
	out := map[string][]byte{}
	for name := range bytes.SplitSeq(bytes.TrimRight(names[:n], "\x00"), []byte{0}) {
		value := make([]byte, 4096)
		if n, err := unix.Lgetxattr(path, string(name), value); err == nil {
			out[string(name)] = value[:n]
		}
	}
	return out
}

// signature changes whenever a program writes or replaces the file.
type signature struct {
	dev, ino uint64
	size     int64
	mtime    time.Time
	link     string
}

func signatureOf(path string) signature {
	var s signature
	s.link, _ = os.Readlink(path) // not a symlink: ""
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return s // missing is a state like any other
	}
	s.dev, s.ino, s.size, s.mtime = st.Dev, st.Ino, st.Size, time.Unix(st.Mtim.Unix())
	return s
}
