package remotefs

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/bits"
	"os"
	"path"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// maxBusy limits the requests that are carried out at once. More wait in the stream.
	maxBusy = 64
	// maxOpen limits the handles of one Client.
	maxOpen    = 4096
	maxEntries = 1 << 16 // of one directory
)

// Server carries out the requests of one Client in a directory.
type Server struct {
	root     *os.Root
	device   uint64
	readOnly bool
	listing  sync.Mutex // one OpList at a time, until its answer is sent: these are long

	mu   sync.Mutex
	last uint64
	open map[uint64]*os.File // nil: Serve has ended
}

// NewServer returns a Server of the directory, which it owns. With readOnly, it changes nothing. The umask of this
// process applies to new files, too: 0 leaves it to the Client's programs.
func NewServer(root *os.Root, readOnly bool) (*Server, error) {
	info, err := root.Stat(".")
	if err != nil {
		return nil, errors.Join(err, root.Close())
	}
	device := info.Sys().(*syscall.Stat_t).Dev
	return &Server{root: root, device: device, readOnly: readOnly, open: make(map[uint64]*os.File)}, nil
}

// Serve carries out requests until the stream ends, which is no error, or ctx does. It closes the stream, and all
// files. It is called once.
func (s *Server) Serve(ctx context.Context, conn io.ReadWriteCloser) error {
	defer s.close()
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	stream, slots := newStream(conn), make(chan struct{}, maxBusy)
	for {
		r := new(Request)
		if err := stream.receive(maxRequest, r); err != nil {
			if errors.Is(err, io.EOF) || ctx.Err() != nil {
				return nil
			}
			return err
		}
		slots <- struct{}{}
		go func() {
			defer func() { <-slots }()
			if r.Op == OpList {
				s.listing.Lock()
				defer s.listing.Unlock()
			}
			a, err := s.do(r)
			a.ID = r.ID
			if errno := syscall.EIO; err != nil { // EIO: for a link that leads out of the directory, say
				errors.As(err, &errno)
				a.Errno = uint32(errno)
			}
			stream.send(a)
		}()
	}
}

func (s *Server) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.open {
		f.Close()
	}
	s.open = nil
	s.root.Close()
}

// do carries out one request.
func (s *Server) do(r *Request) (a Answer, err error) {
	if err := r.check(s.readOnly); err != nil {
		return a, err
	}
	made := "" // by an operation whose answer has the attributes of that
	switch r.Op {
	case OpList:
		a.Dirs, err = s.list(r.Path, min(r.Size, maxListed))
	case OpReadlink:
		var to string
		to, err = s.root.Readlink(r.Path)
		a.Data = []byte(to)
	case OpOpen:
		a, err = s.openFor(r)
	case OpMkdir:
		made, err = r.Path, s.root.Mkdir(r.Path, fs.FileMode(r.Mode&0o777))
	case OpLink:
		made, err = r.To, s.root.Link(r.Path, r.To)
	case OpSymlink:
		made, err = r.Path, s.root.Symlink(r.To, r.Path)
	case OpRemove:
		how := (r.Flags & FlagDir) / FlagDir * unix.AT_REMOVEDIR
		err = s.in(r.Path, func(dir int, name string) error { return unix.Unlinkat(dir, name, how) })
	case OpRename:
		err = s.in(r.Path, func(from int, name string) error {
			return s.in(r.To, func(to int, as string) error { return unix.Renameat(from, name, to, as) })
		})
	default:
		err = s.with(r, func(f *os.File) error { return s.onFile(r, f, &a) })
	}
	if made != "" && err == nil {
		return s.do(&Request{Op: OpStat, Path: made})
	}
	return a, err
}

// with calls do with the open file of a request. If there is none, because it was closed meanwhile perhaps, do gets the
// file at the path.
func (s *Server) with(r *Request, do func(*os.File) error) error {
	s.mu.Lock()
	f := s.open[r.Handle]
	s.mu.Unlock()
	if f != nil {
		if err := do(f); !errors.Is(err, fs.ErrClosed) {
			return err
		}
	}
	flags := unix.O_PATH
	switch r.Op {
	case OpRead, OpWrite, OpLock, OpClose:
		return syscall.EBADF
	case OpFsync, OpSum, OpList:
		flags = unix.O_NONBLOCK // a pipe must not block
	}
	f, err := s.root.OpenFile(r.Path, flags|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return do(f)
}

// in calls do with the directory of a path, and the name there.
func (s *Server) in(p string, do func(dir int, name string) error) error {
	return s.with(&Request{Op: OpStat, Path: path.Dir(p)}, func(f *os.File) error {
		return control(f, func(fd int) error { return do(fd, path.Base(p)) })
	})
}

// openFor carries out OpOpen.
func (s *Server) openFor(r *Request) (a Answer, err error) {
	access := r.Flags&(FlagRead|FlagWrite) - 1 // O_RDONLY, O_WRONLY or O_RDWR
	if access < 0 {
		return a, syscall.EINVAL
	}
	flags := access | r.Flags&(FlagCreate|FlagExclusive|FlagTruncate|FlagAppend) | unix.O_NONBLOCK
	f, err := s.root.OpenFile(r.Path, flags, fs.FileMode(r.Mode&0o777))
	if err != nil {
		return a, err
	}
	a.Attr, err = s.attr(f, "")
	switch kind := a.Attr.Mode & unix.S_IFMT; {
	case err != nil:
	case kind != unix.S_IFREG && kind != unix.S_IFDIR:
		err = syscall.ENXIO // as for a socket
	case kind == unix.S_IFREG && 0 < r.Size && a.Attr.Size <= uint64(min(r.Size, MaxData)):
		a.Data, err = io.ReadAll(io.LimitReader(f, MaxData))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil && (s.open == nil || len(s.open) >= maxOpen) {
		err = syscall.EMFILE
	}
	if err != nil {
		f.Close()
		return a, err
	}
	s.last++
	s.open[s.last], a.Handle = f, s.last
	return a, nil
}

// onFile carries out an operation of a file.
func (s *Server) onFile(r *Request, f *os.File, a *Answer) (err error) {
	switch r.Op {
	case OpStat:
		a.Attr, err = s.attr(f, "")
	case OpRead:
		var n int
		a.Data = make([]byte, min(r.Size, MaxData))
		if n, err = f.ReadAt(a.Data, r.Offset); errors.Is(err, io.EOF) {
			err = nil
		}
		a.Data = a.Data[:n]
	case OpWrite:
		if r.Flags&FlagAppend != 0 {
			_, err = f.Write(r.Data) // the file is open for that
		} else {
			_, err = f.WriteAt(r.Data, r.Offset)
		}
	case OpFsync:
		err = f.Sync()
	case OpClose:
		s.mu.Lock()
		delete(s.open, r.Handle)
		s.mu.Unlock()
		err = f.Close()
	case OpSum:
		if a.Attr, err = s.attr(f, ""); err == nil && a.Attr.Mode&unix.S_IFMT != unix.S_IFREG {
			return syscall.EINVAL
		}
		sum := sha256.New()
		_, err = io.Copy(sum, f)
		a.Data = sum.Sum(nil)
	case OpLock:
		a.Lock, err = lock(f, r.Lock)
	case OpSet:
		if err = set(f, r.Set); err == nil {
			a.Attr, err = s.attr(f, "")
		}
	case OpStatfs:
		var st unix.Statfs_t
		err = control(f, func(fd int) error { return unix.Fstatfs(fd, &st) })
		a.Statfs = &Statfs{BlockSize: uint32(st.Bsize), Blocks: st.Blocks, Free: st.Bfree, Available: st.Bavail,
			Files: st.Files, FilesFree: st.Ffree}
	default:
		err = syscall.ENOSYS
	}
	return err
}

// control calls do with the file's descriptor.
func control(f *os.File, do func(fd int) error) (err error) {
	raw, e := f.SyscallConn()
	if e == nil {
		e = raw.Control(func(fd uintptr) { err = do(int(fd)) })
	}
	return cmp.Or(e, err)
}

// attr returns the attributes of a name in an open directory; "": of the file itself.
func (s *Server) attr(f *os.File, name string) (*Attr, error) {
	var st unix.Statx_t
	err := control(f, func(fd int) error {
		return unix.Statx(fd, name, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT,
			unix.STATX_BASIC_STATS|unix.STATX_BTIME, &st)
	})
	nano := func(t unix.StatxTimestamp) int64 { return t.Sec*1e9 + int64(t.Nsec) }
	device := unix.Mkdev(st.Dev_major, st.Dev_minor)
	inode := st.Ino ^ bits.RotateLeft64(device-s.device, 40) // a file system may be mounted below
	return &Attr{Inode: inode, Mode: uint32(st.Mode), Links: st.Nlink, UID: st.Uid, GID: st.Gid, Size: st.Size,
		Blocks: st.Blocks, Access: nano(st.Atime), Modify: nano(st.Mtime), Change: nano(st.Ctime),
		Birth: nano(st.Btime)}, err
}

// list returns a directory and, breadth first, as many of the directories below as have no more than size entries
// together. It omits those that it cannot read.
func (s *Server) list(p string, size int) (dirs []Dir, err error) {
	for next := []string{p}; len(next) > 0; next = next[1:] {
		d := Dir{Path: next[0]}
		err := s.with(&Request{Op: OpList, Path: d.Path}, func(f *os.File) error { return s.readDir(f, &d) })
		if size -= len(d.Entries); len(dirs) > 0 && size < 0 {
			break
		}
		switch {
		case err == nil:
			dirs = append(dirs, d)
		case len(dirs) == 0:
			return nil, err
		}
		for _, e := range d.Entries {
			if e.Attr.dir() {
				next = append(next, path.Join(d.Path, e.Name))
			}
		}
	}
	return dirs, nil
}

func (s *Server) readDir(f *os.File, d *Dir) error {
	names, err := f.Readdirnames(maxEntries + 1)
	if err != nil && err != io.EOF {
		return err
	}
	if len(names) > maxEntries {
		return syscall.EFBIG
	}
	for _, name := range slices.Sorted(slices.Values(names)) { // programs go through them in this order
		if a, err := s.attr(f, name); err == nil { // it may be gone
			d.Entries = append(d.Entries, Entry{Name: name, Attr: *a})
		}
	}
	return nil
}

// lock sets, removes or looks for a lock. It does not wait: the Client tries again.
func lock(f *os.File, l *Lock) (*Lock, error) {
	if l == nil || l.Type > unix.F_UNLCK {
		return nil, syscall.EINVAL
	}
	at := unix.Flock_t{Type: int16(l.Type), Start: l.Start, Len: l.Len}
	err := control(f, func(fd int) error {
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
	return control(f, func(fd int) (err error) {
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
