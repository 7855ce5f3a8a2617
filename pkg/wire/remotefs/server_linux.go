package remotefs

import (
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"os"
	"path"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/unixsocket"
)

func deviceOf(info fs.FileInfo) uint64 { return info.Sys().(*syscall.Stat_t).Dev }

// errnoOf returns the number of an error: EIO for a link that leads out of the directory, say.
func errnoOf(err error) uint32 {
	errno := syscall.EIO
	errors.As(err, &errno)
	return uint32(errno)
}

const pathOnly = unix.O_PATH // for attributes, also of a link

// openAt opens a file. It does not follow a link at the end of the path, as os.Root would: somebody may have put it in
// the place of a file. A pipe does not block.
func (s *Server) openAt(p string, flags int, mode uint32) (f *os.File, err error) {
	err = s.in(p, func(dir int, name string) (err error) {
		f, err = openIn(dir, name, p, flags, mode)
		return err
	})
	return f, err
}

func openIn(dir int, name, p string, flags int, mode uint32) (*os.File, error) {
	for {
		fd, err := unix.Openat(dir, name, flags|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC, mode)
		switch err {
		case nil:
			return os.NewFile(uintptr(fd), p), nil
		case unix.EINTR:
		default:
			return nil, err
		}
	}
}

// put carries out OpPut, and returns the attributes of what is new. Whoever reads the path sees what was there, or all
// that is new. A file that was made aside stays so if that fails.
func (s *Server) put(r *Request) (a *Attr, err error) {
	s.mu.Lock()
	f := s.open[r.Handle]
	aside := s.aside[f]
	s.mu.Unlock()
	if !aside && r.Handle != 0 {
		return nil, syscall.EBADF
	}
	err = s.in(r.Path, func(dir int, name string) (err error) {
		temp := path.Base(besides(""))
		switch {
		case aside:
			temp = path.Base(f.Name())
			err = set(f, r.Set)
		case r.To != "":
			err = unix.Symlinkat(r.To, dir, temp)
		default:
			err = create(dir, temp, r)
		}
		if err == nil {
			a, err = s.attrIn(dir, temp)
		}
		if err == nil {
			err = unix.Renameat(dir, temp, dir, name)
		}
		switch {
		case err == nil && aside:
			s.mu.Lock()
			s.aside[f] = false
			s.mu.Unlock()
			err = s.drop(r.Handle, f)
		case err != nil && !aside:
			_ = unix.Unlinkat(dir, temp, 0) // it may not exist
		}
		return err
	})
	return a, err
}

// create makes a file with the data and the attributes of an OpPut.
func create(dir int, name string, r *Request) error {
	f, err := openIn(dir, name, r.Path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(r.Data)
	if err == nil {
		err = set(f, r.Set)
	}
	return errors.Join(err, f.Close())
}

// in calls do with the directory of a path, and the name there.
func (s *Server) in(p string, do func(dir int, name string) error) error {
	name := path.Base(p)
	switch {
	case p == "":
		return syscall.ENOENT
	case name == "..": // which os.Root does not see
		return syscall.EINVAL
	}
	dir, err := s.root.OpenFile(path.Dir(p), pathOnly, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	return unixsocket.Control(dir, func(fd int) error { return do(fd, name) })
}

func (s *Server) remove(p string, flags int) error {
	how := (flags & FlagDir) / FlagDir * unix.AT_REMOVEDIR
	return s.in(p, func(dir int, name string) error { return unix.Unlinkat(dir, name, how) })
}

func (s *Server) rename(p, to string) error {
	return s.in(p, func(from int, name string) error {
		return s.in(to, func(to int, as string) error { return unix.Renameat(from, name, to, as) })
	})
}

// special carries out what differs between operating systems.
func (s *Server) special(r *Request, f *os.File, a *Answer) (err error) {
	switch r.Op {
	case OpLock:
		a.Lock, err = lock(f, r.Lock)
	case OpSet:
		if err = set(f, r.Set); err == nil {
			a.Attr, err = s.attr(f, "", "")
		}
	case OpStatfs:
		var st unix.Statfs_t
		err = unixsocket.Control(f, func(fd int) error { return unix.Fstatfs(fd, &st) })
		a.Statfs = &Statfs{BlockSize: uint32(st.Bsize), Blocks: st.Blocks, Free: st.Bfree, Available: st.Bavail,
			Files: st.Files, FilesFree: st.Ffree}
	default:
		err = syscall.ENOSYS
	}
	return err
}

// attr returns the attributes of a name in an open directory; "": of the file itself.
func (s *Server) attr(f *os.File, _, name string) (a *Attr, err error) {
	err = unixsocket.Control(f, func(fd int) error {
		a, err = s.attrIn(fd, name)
		return err
	})
	return a, err
}

func (s *Server) attrIn(dir int, name string) (*Attr, error) {
	var st unix.Statx_t
	err := unix.Statx(dir, name, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT,
		unix.STATX_BASIC_STATS|unix.STATX_BTIME, &st)
	nano := func(t unix.StatxTimestamp) int64 { return t.Sec*1e9 + int64(t.Nsec) }
	device := unix.Mkdev(st.Dev_major, st.Dev_minor)
	inode := st.Ino ^ bits.RotateLeft64(device-s.device, 40) // a file system may be mounted below
	return &Attr{Inode: inode, Mode: uint32(st.Mode), Links: st.Nlink, UID: st.Uid, GID: st.Gid, Size: st.Size,
		Blocks: st.Blocks, Access: nano(st.Atime), Modify: nano(st.Mtime), Change: nano(st.Ctime),
		Birth: nano(st.Btime)}, err
}

// lock sets, removes or looks for a lock. It does not wait: the Client tries again.
func lock(f *os.File, l *Lock) (*Lock, error) {
	if l == nil || l.Type > unix.F_UNLCK {
		return nil, syscall.EINVAL
	}
	at := unix.Flock_t{Type: int16(l.Type), Start: l.Start, Len: l.Len}
	err := unixsocket.Control(f, func(fd int) error {
		switch {
		case l.File:
			how := []int{unix.F_RDLCK: unix.LOCK_SH, unix.F_WRLCK: unix.LOCK_EX, unix.F_UNLCK: unix.LOCK_UN}[l.Type]
			return unix.Flock(fd, how|unix.LOCK_NB)
		case l.Ask:
			return unix.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, &at)
		}
		return unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &at)
	})
	return &Lock{Type: uint8(at.Type), Start: at.Start, Len: at.Len}, err
}

// set changes attributes of a file, which may be a link, and opened by O_PATH.
func set(f *os.File, c *Set) error {
	if c == nil {
		return syscall.EINVAL
	}
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_OMIT}}
	for n, t := range []*int64{c.Access, c.Modify} {
		if t != nil {
			times[n] = unix.NsecToTimespec(*t)
		}
	}
	return unixsocket.Control(f, func(fd int) (err error) {
		name := fmt.Sprintf("/proc/self/fd/%d", fd)
		if c.Size != nil {
			err = unix.Ftruncate(fd, int64(*c.Size)) // whatever its mode is now
			if err == unix.EBADF || err == unix.EINVAL {
				err = unix.Truncate(name, int64(*c.Size)) // it is not open for writing
			}
		}
		if err == nil && c.Mode != nil {
			err = unix.Chmod(name, *c.Mode&0o7777)
		}
		if err == nil {
			err = unix.UtimesNanoAt(unix.AT_FDCWD, name, times, 0)
		}
		return err
	})
}
