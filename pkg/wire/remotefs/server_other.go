//go:build !linux

package remotefs

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"syscall"
	"time"
)

func deviceOf(fs.FileInfo) uint64 { return 0 }

// errnos are the numbers that errors have on Linux. Those of Windows are 32, a file that another program uses, and 112,
// a full disk.
var errnos = map[error]uint32{fs.ErrNotExist: 2, fs.ErrPermission: 13, syscall.Errno(32): 16, fs.ErrExist: 17,
	syscall.EISDIR: 21, syscall.EINVAL: 22, syscall.EFBIG: 27, syscall.ENOSPC: 28, syscall.Errno(112): 28,
	syscall.EROFS: 30, syscall.ENOSYS: 38, syscall.ELOOP: 40}

func errnoOf(err error) uint32 {
	for e, no := range errnos {
		if errors.Is(err, e) {
			return no
		}
	}
	return 5 // EIO
}

const pathOnly = 1 << 30

// openAt opens a file. It does not follow a link at the end of the path. With pathOnly, it returns nil: the operation
// uses the path.
func (s *Server) openAt(p string, flags int, mode uint32) (*os.File, error) {
	if flags == pathOnly {
		return nil, nil
	}
	how := flags & (os.O_WRONLY | os.O_RDWR)
	for flag, here := range map[int]int{FlagCreate: os.O_CREATE, FlagExclusive: os.O_EXCL, FlagTruncate: os.O_TRUNC} {
		if flags&flag != 0 {
			how |= here
		}
	}
	f, err := s.root.OpenFile(p, how, fs.FileMode(mode))
	if err != nil {
		return nil, err
	}
	is, err := f.Stat()
	at, e := s.root.Lstat(p)
	if err != nil || e != nil || !os.SameFile(is, at) {
		return nil, errors.Join(syscall.ELOOP, f.Close())
	}
	return f, nil
}

func (s *Server) remove(p string, _ int) error { return s.root.Remove(p) }

// put is for containers only: nothing is synchronized to this machine.
func (s *Server) put(*Request) (*Attr, error) { return nil, syscall.ENOSYS }

func (s *Server) rename(p, to string) error { return s.root.Rename(p, to) }

// attr returns the attributes of a name in a directory; "": of the file, or of the path if it is not open.
func (s *Server) attr(f *os.File, p, name string) (*Attr, error) {
	info, err := s.root.Lstat(path.Join(p, name))
	if name == "" && f != nil {
		info, err = f.Stat()
	}
	if err != nil {
		return nil, err
	}
	kinds := map[fs.FileMode]uint32{0: syscall.S_IFREG, fs.ModeDir: syscall.S_IFDIR, fs.ModeSymlink: syscall.S_IFLNK}
	return &Attr{Mode: uint32(info.Mode().Perm()) | kinds[info.Mode().Type()], Links: 1, Size: uint64(info.Size()),
		Modify: info.ModTime().UnixNano()}, nil
}

// special carries out what differs between operating systems.
func (s *Server) special(r *Request, f *os.File, a *Answer) (err error) {
	if r.Op != OpSet || r.Set == nil || r.Set.Size != nil || r.Set.Modify == nil || r.Set.Mode == nil {
		return syscall.ENOSYS
	}
	err = errors.Join(s.root.Chtimes(r.Path, time.Time{}, time.Unix(0, *r.Set.Modify)),
		s.root.Chmod(r.Path, fs.FileMode(*r.Set.Mode)))
	if err == nil {
		a.Attr, err = s.attr(f, r.Path, "")
	}
	return err
}
