package remotefs

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
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
	// Synced is called for each OpSynced with Flags. It is set before Serve, and may be nil.
	Synced func(changes, all bool)

	root     *os.Root
	device   uint64
	readOnly bool
	listing  sync.Mutex // one OpList at a time, until its answer is sent: these are long

	mu    sync.Mutex
	last  uint64
	open  map[uint64]*os.File
	aside map[*os.File]bool // those of FlagAside
}

// Open returns a Server of the directory p and ".", or else of the directory that p is in, and the name.
func Open(p string, readOnly bool) (*Server, string, error) {
	name := "."
	root, err := os.OpenRoot(p)
	if err != nil {
		name = filepath.Base(p)
		root, err = os.OpenRoot(filepath.Dir(p))
	}
	if err != nil {
		return nil, "", err
	}
	s, err := NewServer(root, readOnly)
	return s, name, err
}

// NewServer returns a Server of the directory, which it owns. With readOnly, it changes nothing. The umask of this
// process applies to new files, too: 0 leaves it to the Client's programs.
func NewServer(root *os.Root, readOnly bool) (*Server, error) {
	info, err := root.Stat(".")
	if err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return &Server{root: root, device: deviceOf(info), readOnly: readOnly, open: make(map[uint64]*os.File),
		aside: make(map[*os.File]bool)}, nil
}

// Serve carries out requests until the stream ends, which is no error, or ctx does. It closes the stream, and all
// files. It is called once. No request is carried out after it has returned.
func (s *Server) Serve(ctx context.Context, conn io.ReadWriteCloser) error {
	defer s.close()
	var work sync.WaitGroup
	defer work.Wait()
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
		work.Go(func() {
			defer func() { <-slots }()
			if r.Op == OpList {
				s.listing.Lock()
				defer s.listing.Unlock()
			}
			a, err := s.do(r)
			a.ID = r.ID
			if err != nil {
				a.Errno = errnoOf(err)
			}
			stream.send(frame(a, len(a.Data)), len(slots))
		})
	}
}

func (s *Server) close() {
	for handle, f := range s.open {
		_ = s.drop(handle, f) // the Client is gone
	}
	s.root.Close()
}

// drop closes a file, and removes one that is aside.
func (s *Server) drop(handle uint64, f *os.File) (err error) {
	s.mu.Lock()
	aside := s.aside[f]
	delete(s.open, handle)
	delete(s.aside, f)
	s.mu.Unlock()
	if aside {
		err = s.remove(f.Name(), 0)
	}
	return errors.Join(err, f.Close())
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
		err = s.remove(r.Path, r.Flags)
	case OpRename:
		err = s.rename(r.Path, r.To)
	case OpPut:
		if a.Attr, err = s.put(r); err == nil {
			s.synced(r.Flags)
		}
	case OpSynced:
		s.synced(r.Flags)
	default:
		err = s.with(r, func(f *os.File) error { return s.onFile(r, f, &a) })
	}
	if made != "" && err == nil {
		return s.do(&Request{Op: OpStat, Path: made})
	}
	return a, err
}

func (s *Server) synced(flags int) {
	if s.Synced != nil && flags != 0 {
		s.Synced(flags&SyncedChanges != 0, flags&SyncedAll != 0)
	}
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
	flags := pathOnly
	switch r.Op {
	case OpRead, OpWrite, OpLock, OpClose:
		return syscall.EBADF
	case OpFsync, OpSum, OpList:
		flags = os.O_RDONLY
	}
	f, err := s.openAt(r.Path, flags, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return do(f)
}

// openFor carries out OpOpen.
func (s *Server) openFor(r *Request) (a Answer, err error) {
	access := r.Flags&(FlagRead|FlagWrite) - 1 // O_RDONLY, O_WRONLY or O_RDWR
	if access < 0 {
		return a, syscall.EINVAL
	}
	flags := access | r.Flags&(FlagCreate|FlagExclusive|FlagTruncate|FlagAppend)
	name, mode, aside := r.Path, r.Mode&0o777, r.Flags&FlagAside != 0
	if aside {
		name, flags, mode = besides(name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600
	}
	f, err := s.openAt(name, flags, mode)
	if err != nil {
		return a, err
	}
	a.Attr, err = s.attr(f, r.Path, "")
	switch kind := a.Attr.Mode & syscall.S_IFMT; {
	case err != nil:
	case kind != syscall.S_IFREG && kind != syscall.S_IFDIR:
		err = syscall.ENXIO // as for a socket
	case kind == syscall.S_IFREG && 0 < r.Size && a.Attr.Size <= uint64(min(r.Size, MaxData)):
		a.Data, err = io.ReadAll(io.LimitReader(f, MaxData))
	}
	s.mu.Lock()
	if s.last++; len(s.open) >= maxOpen {
		err = cmp.Or(err, error(syscall.EMFILE))
	}
	s.open[s.last], s.aside[f], a.Handle = f, aside, s.last
	s.mu.Unlock()
	if err != nil {
		_ = s.drop(a.Handle, f) // err says more
	}
	return a, err
}

// besides returns the path of a new file in the directory of p.
func besides(p string) string { return path.Join(path.Dir(p), AsidePrefix+rand.Text()) }

// onFile carries out an operation of a file.
func (s *Server) onFile(r *Request, f *os.File, a *Answer) (err error) {
	switch r.Op {
	case OpStat:
		a.Attr, err = s.attr(f, r.Path, "")
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
		err = s.drop(r.Handle, f)
	case OpSum:
		if a.Attr, err = s.attr(f, r.Path, ""); err == nil && a.Attr.Mode&syscall.S_IFMT != syscall.S_IFREG {
			return syscall.EINVAL
		}
		sum := sha256.New()
		_, err = io.Copy(sum, f)
		a.Data = sum.Sum(nil)
	default:
		err = s.special(r, f, a)
	}
	return err
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
		if a, err := s.attr(f, d.Path, name); err == nil { // it may be gone
			d.Entries = append(d.Entries, Entry{Name: name, Attr: *a})
		}
	}
	return nil
}
