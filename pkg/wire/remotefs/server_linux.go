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
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// maxBusy limits the requests that are carried out at once. More wait in the stream.
	maxBusy = 64
	// maxOpen limits the handles of one Client.
	maxOpen = 4096
	// maxListed limits the entries of an answer to OpList. A larger directory has an answer of its own, up to
	// maxEntries.
	maxListed  = 4096
	maxEntries = 1 << 16
)

// Server carries out the requests of one Client in a directory.
type Server struct {
	root     *os.Root
	device   uint64
	readOnly bool

	mu   sync.Mutex
	last uint64
	open map[uint64]*os.File
}

// NewServer returns a Server of the directory, which it owns. With readOnly, it changes nothing.
func NewServer(root *os.Root, readOnly bool) (*Server, error) {
	info, err := root.Stat(".")
	if err != nil {
		return nil, errors.Join(err, root.Close())
	}
	s := &Server{root: root, readOnly: readOnly, open: make(map[uint64]*os.File)}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		s.device = st.Dev
	}
	return s, nil
}

// Serve carries out requests until the stream ends, which is no error, or ctx does. It closes the stream, and all
// files. It is called once.
func (s *Server) Serve(ctx context.Context, conn io.ReadWriteCloser) error {
	var busy sync.WaitGroup
	defer s.close()
	defer busy.Wait()
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	w, slots := newWire(conn, maxRequest), make(chan struct{}, maxBusy)
	for {
		r := new(Request)
		if err := w.receive(r); err != nil {
			if errors.Is(err, io.EOF) || ctx.Err() != nil {
				return nil
			}
			return err
		}
		slots <- struct{}{}
		busy.Go(func() {
			defer func() { <-slots }()
			a, err := s.do(r)
			a.ID, a.Errno = r.ID, errnoOf(err)
			if w.send(a) != nil {
				conn.Close() // receive reports it
			}
		})
	}
}

func (s *Server) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.open {
		f.Close()
	}
	s.root.Close()
}

// errnoOf returns the number of the error that the Client's program gets.
func errnoOf(err error) uint32 {
	var errno syscall.Errno
	switch {
	case err == nil:
		return 0
	case errors.As(err, &errno):
		return uint32(errno)
	case errors.Is(err, fs.ErrNotExist):
		return uint32(syscall.ENOENT)
	case errors.Is(err, fs.ErrExist):
		return uint32(syscall.EEXIST)
	case errors.Is(err, fs.ErrPermission):
		return uint32(syscall.EACCES)
	}
	return uint32(syscall.EIO) // a link that leads out of the directory, say
}

// do carries out one request.
func (s *Server) do(r *Request) (a Answer, err error) {
	if err := r.check(); err != nil {
		return a, err
	}
	if s.readOnly && r.changes() {
		return a, syscall.EROFS
	}
	switch r.Op {
	case OpStat:
		a.Attr, err = s.statOf(r)
	case OpList:
		a.Dirs, err = s.list(r.Path, min(r.Size, maxListed))
	case OpReadlink:
		var to string
		to, err = s.root.Readlink(r.Path)
		a.Data = []byte(to)
	case OpOpen:
		return s.openFile(r)
	case OpRead, OpWrite, OpClose, OpLock:
		return s.onHandle(r)
	case OpFsync:
		err = s.fsync(r)
	case OpSum:
		a.Data, err = s.sum(r.Path)
	case OpSet:
		if r.Set == nil {
			return a, syscall.EINVAL
		}
		if err = s.set(r); err == nil {
			a.Attr, err = s.statOf(r)
		}
	case OpMkdir:
		if err = s.root.Mkdir(r.Path, fs.FileMode(r.Mode&0o777)); err == nil {
			a.Attr, err = s.stat(r.Path)
		}
	case OpRemove:
		err = s.remove(r.Path, r.Flags&FlagDir != 0)
	case OpRename:
		err = s.root.Rename(r.Path, r.To)
	case OpLink:
		if err = s.root.Link(r.Path, r.To); err == nil {
			a.Attr, err = s.stat(r.To)
		}
	case OpSymlink:
		if err = s.root.Symlink(r.To, r.Path); err == nil {
			a.Attr, err = s.stat(r.Path)
		}
	case OpStatfs:
		a.Statfs, err = s.statfs()
	default:
		err = syscall.ENOSYS
	}
	return a, err
}

func (s *Server) stat(p string) (*Attr, error) {
	info, err := s.root.Lstat(p)
	if err != nil {
		return nil, err
	}
	return s.attrOf(info)
}

// statOf returns the attributes of an open file, or of a path.
func (s *Server) statOf(r *Request) (*Attr, error) {
	if r.Handle == 0 {
		return s.stat(r.Path)
	}
	f, err := s.file(r.Handle)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return s.attrOf(info)
}

func (s *Server) attrOf(info fs.FileInfo) (*Attr, error) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return nil, fmt.Errorf("%s has no attributes", info.Name())
	}
	inode := st.Ino ^ bits.RotateLeft64(st.Dev-s.device, 40) // a file system may be mounted below
	return &Attr{Inode: inode, Mode: st.Mode, Links: uint32(st.Nlink), UID: st.Uid, GID: st.Gid, Size: uint64(st.Size),
		Blocks: uint64(st.Blocks), Access: st.Atim.Nano(), Modify: st.Mtim.Nano(), Change: st.Ctim.Nano()}, nil
}

// list returns a directory and, breadth first, as many of the directories below as have no more than size entries
// together. It omits those that it cannot read.
func (s *Server) list(p string, size int) (dirs []Dir, err error) {
	next := []string{p}
	for len(next) > 0 {
		at := next[0]
		next = next[1:]
		d, err := s.readDir(at)
		if err != nil && len(dirs) == 0 {
			return nil, err
		}
		if err != nil {
			continue
		}
		if size -= len(d.Entries); size < 0 && len(dirs) > 0 {
			return dirs, nil
		}
		dirs = append(dirs, d)
		for _, e := range d.Entries {
			if e.Attr.Mode&syscall.S_IFMT == syscall.S_IFDIR {
				next = append(next, path.Join(at, e.Name))
			}
		}
	}
	return dirs, nil
}

func (s *Server) readDir(p string) (d Dir, err error) {
	f, err := s.root.Open(p)
	if err != nil {
		return d, err
	}
	defer f.Close()
	infos, err := f.Readdir(maxEntries + 1)
	switch {
	case err != nil && !errors.Is(err, io.EOF):
		return d, err
	case len(infos) > maxEntries:
		return d, syscall.EFBIG
	}
	d.Path = p
	for _, info := range infos {
		a, err := s.attrOf(info)
		if err != nil {
			return d, err
		}
		d.Entries = append(d.Entries, Entry{info.Name(), *a})
	}
	return d, nil
}

func (s *Server) openFile(r *Request) (a Answer, err error) {
	flags := syscall.O_NOFOLLOW | syscall.O_NONBLOCK // a pipe must not block, and a link is the Client's business
	switch {
	case r.Flags&(FlagRead|FlagWrite) == FlagRead|FlagWrite:
		flags |= os.O_RDWR
	case r.Flags&FlagWrite != 0:
		flags |= os.O_WRONLY
	}
	for flag, is := range map[int]int{FlagCreate: os.O_CREATE, FlagExclusive: os.O_EXCL, FlagTruncate: os.O_TRUNC,
		FlagAppend: os.O_APPEND} {
		if r.Flags&flag != 0 {
			flags |= is
		}
	}
	f, err := s.root.OpenFile(r.Path, flags, fs.FileMode(r.Mode&0o777))
	if err != nil {
		return a, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() && !info.IsDir() {
		err = syscall.ENXIO // as for a socket
	}
	if err == nil {
		a.Attr, err = s.attrOf(info)
	}
	if err == nil && 0 < r.Size && info.Size() <= int64(min(r.Size, MaxData)) && info.Mode().IsRegular() {
		a.Data, err = io.ReadAll(io.LimitReader(f, MaxData))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil && len(s.open) >= maxOpen {
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

// file returns an open file.
func (s *Server) file(handle uint64) (*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.open[handle]; f != nil {
		return f, nil
	}
	return nil, syscall.EBADF
}

// onHandle carries out an operation of an open file.
func (s *Server) onHandle(r *Request) (a Answer, err error) {
	f, err := s.file(r.Handle)
	if err != nil {
		return a, err
	}
	switch r.Op {
	case OpRead:
		a.Data = make([]byte, min(r.Size, MaxData))
		n, err := f.ReadAt(a.Data, r.Offset)
		a.Data = a.Data[:n]
		if errors.Is(err, io.EOF) {
			err = nil
		}
		return a, err
	case OpWrite:
		if r.Flags&FlagAppend != 0 {
			_, err = f.Write(r.Data) // the file is open for that
		} else {
			_, err = f.WriteAt(r.Data, r.Offset)
		}
	case OpLock:
		a.Lock, err = lock(f, r.Lock)
	case OpClose:
		s.mu.Lock()
		delete(s.open, r.Handle)
		s.mu.Unlock()
		err = f.Close()
	}
	return a, err
}

// fsync writes an open file, or a directory, to the disk.
func (s *Server) fsync(r *Request) error {
	if r.Handle != 0 {
		f, err := s.file(r.Handle)
		if err != nil {
			return err
		}
		return f.Sync()
	}
	f, err := s.root.Open(r.Path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

func (s *Server) sum(p string) ([]byte, error) {
	f, err := s.root.OpenFile(p, syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	sum := sha256.New()
	_, err = io.Copy(sum, f)
	return sum.Sum(nil), err
}

// lock sets, removes or looks for a lock. It does not wait: the Client tries again.
func lock(f *os.File, l *Lock) (found *Lock, err error) {
	how, ok := map[uint8]int{unix.F_RDLCK: unix.LOCK_SH, unix.F_WRLCK: unix.LOCK_EX, unix.F_UNLCK: unix.LOCK_UN}[l.Type]
	if !ok {
		return nil, syscall.EINVAL
	}
	at := unix.Flock_t{Type: int16(l.Type), Start: l.Start, Len: l.Len}
	do := func(fd uintptr) error {
		switch {
		case l.File:
			return unix.Flock(int(fd), how|unix.LOCK_NB)
		case l.Ask:
			return unix.FcntlFlock(fd, unix.F_OFD_GETLK, &at)
		}
		return unix.FcntlFlock(fd, unix.F_OFD_SETLK, &at)
	}
	if err = control(f, do); err == nil && l.Ask {
		found = &Lock{Type: uint8(at.Type), Start: at.Start, Len: at.Len}
	}
	return found, err
}

func control(f *os.File, do func(fd uintptr) error) (err error) {
	raw, e := f.SyscallConn()
	if e == nil {
		e = raw.Control(func(fd uintptr) { err = do(fd) })
	}
	return cmp.Or(e, err)
}

// set changes attributes, of an open file if the Request has one. It does not follow a link at the end of a path.
func (s *Server) set(r *Request) error {
	c, open := r.Set, r.Handle != 0
	var f *os.File
	var err error
	if open {
		f, err = s.file(r.Handle)
	} else if f, err = s.root.OpenFile(r.Path, unix.O_PATH|syscall.O_NOFOLLOW, 0); err == nil {
		defer f.Close()
	}
	if err != nil {
		return err
	}
	name := fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	if c.Size != nil {
		if open {
			err = f.Truncate(int64(*c.Size)) // whatever its mode is now
		} else {
			err = unix.Truncate(name, int64(*c.Size))
		}
	}
	if err == nil && c.Mode != nil {
		err = unix.Chmod(name, *c.Mode&0o7777)
	}
	if err == nil && (c.Access != nil || c.Modify != nil) {
		at := func(t *int64) unix.Timespec {
			if t == nil {
				return unix.Timespec{Nsec: unix.UTIME_OMIT}
			}
			return unix.NsecToTimespec(*t)
		}
		err = unix.UtimesNanoAt(unix.AT_FDCWD, name, []unix.Timespec{at(c.Access), at(c.Modify)}, 0)
	}
	runtime.KeepAlive(f)
	return err
}

// remove removes a file or an empty directory, as unlink(2) and rmdir(2) do.
func (s *Server) remove(p string, dir bool) error {
	info, err := s.root.Lstat(p)
	switch {
	case err != nil:
		return err
	case dir && !info.IsDir():
		return syscall.ENOTDIR
	case !dir && info.IsDir():
		return syscall.EISDIR
	}
	return s.root.Remove(p)
}

func (s *Server) statfs() (*Statfs, error) {
	f, err := s.root.Open(".")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var st unix.Statfs_t
	if err := control(f, func(fd uintptr) error { return unix.Fstatfs(int(fd), &st) }); err != nil {
		return nil, err
	}
	return &Statfs{BlockSize: uint32(st.Bsize), Blocks: st.Blocks, Free: st.Bfree, Available: st.Bavail,
		Files: st.Files, FilesFree: st.Ffree}, nil
}
