package filecopy

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"kubevpn/pkg/wire/remotefs"
)

// end is the source or the destination of a copy, with the methods of remotefs.Client.
type end interface {
	Do(context.Context, remotefs.Request) (remotefs.Answer, error)
	DoAttr(context.Context, remotefs.Request) (remotefs.Attr, error) // OpStat
	List(ctx context.Context, dir string) ([]remotefs.Entry, error)
	open(ctx context.Context, p string, flags int) (file, remotefs.Attr, error)
}

// file is an open file of an end, with methods of remotefs.File.
type file interface {
	Read(ctx context.Context, off int64, n int) ([]byte, error)
	Write(data []byte, off int64) error
	Close() error
}

func asking(op remotefs.Op, p string) remotefs.Request { return remotefs.Request{Op: op, Path: p} }

func setting(p string, a remotefs.Attr) remotefs.Request {
	set := remotefs.Set{Mode: new(a.Mode & 0o777), Modify: &a.Modify}
	return remotefs.Request{Op: remotefs.OpSet, Path: p, Set: &set}
}

// textOf describes an error. A bare Errno comes from the other end: its number is that of Linux, and means something
// else on Windows.
func textOf(err error) string {
	if no, ok := err.(syscall.Errno); ok && linuxTexts[no] != "" {
		return linuxTexts[no]
	}
	return err.Error()
}

var linuxTexts = map[syscall.Errno]string{1: "operation not permitted", 5: "input/output error",
	13: "permission denied", 20: "not a directory", 28: "no space left on device", 30: "read-only file system"}

// remote is the end behind a Client.
type remote struct{ *remotefs.Client }

func (r remote) open(ctx context.Context, p string, flags int) (file, remotefs.Attr, error) {
	f, a, err := r.Open(ctx, p, flags, 0o600)
	if err != nil {
		return nil, a, err
	}
	f.Use(&remotefs.Inode{Path: func() string { return p }})
	return f, a, nil
}

// local is the end on this machine.
type local struct{ *os.Root }

// locate returns the directory that a path names, and ".", or else the parent, and the name. It follows a link to a
// source.
func locate(p string, source bool) (l local, name string, err error) {
	if to, err := filepath.EvalSymlinks(p); source && err == nil {
		p = to
	}
	if l.Root, err = os.OpenRoot(p); err == nil {
		return l, ".", nil
	}
	l.Root, err = os.OpenRoot(filepath.Dir(p))
	return l, filepath.Base(p), err
}

func attrOf(info fs.FileInfo) remotefs.Attr {
	kinds := map[fs.FileMode]uint32{0: syscall.S_IFREG, fs.ModeDir: syscall.S_IFDIR, fs.ModeSymlink: syscall.S_IFLNK}
	return remotefs.Attr{Mode: uint32(info.Mode().Perm()) | kinds[info.Mode().Type()], Size: uint64(info.Size()),
		Modify: info.ModTime().UnixNano()}
}

func (l local) DoAttr(_ context.Context, r remotefs.Request) (a remotefs.Attr, err error) {
	info, err := l.Lstat(r.Path)
	if err == nil {
		a = attrOf(info)
	}
	return a, err
}

func (l local) Do(_ context.Context, r remotefs.Request) (a remotefs.Answer, err error) {
	switch r.Op {
	case remotefs.OpReadlink:
		var to string
		to, err = l.Readlink(r.Path)
		a.Data = []byte(to)
	case remotefs.OpSum:
		a.Data, err = l.sum(r.Path)
	case remotefs.OpMkdir:
		err = l.Mkdir(r.Path, fs.FileMode(r.Mode))
	case remotefs.OpSymlink:
		err = l.Symlink(r.To, r.Path)
	case remotefs.OpRename:
		err = l.Rename(r.Path, r.To)
	case remotefs.OpRemove:
		err = l.Remove(r.Path)
	case remotefs.OpSet:
		err = errors.Join(l.Chtimes(r.Path, time.Time{}, time.Unix(0, *r.Set.Modify)),
			l.Chmod(r.Path, fs.FileMode(*r.Set.Mode)))
	}
	return a, err
}

func (l local) List(_ context.Context, dir string) (all []remotefs.Entry, err error) {
	entries, err := fs.ReadDir(l.FS(), dir)
	for _, e := range entries {
		if info, err := e.Info(); err == nil { // it may have gone
			all = append(all, remotefs.Entry{Name: e.Name(), Attr: attrOf(info)})
		}
	}
	return all, err
}

func (l local) sum(p string) ([]byte, error) {
	f, err := l.Open(p)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	sum := sha256.New()
	_, err = io.Copy(sum, f)
	return sum.Sum(nil), err
}

func (l local) open(ctx context.Context, p string, flags int) (file, remotefs.Attr, error) {
	how := os.O_RDONLY
	if flags&remotefs.FlagWrite != 0 {
		how = os.O_WRONLY
	}
	if flags&remotefs.FlagExclusive != 0 {
		how |= os.O_CREATE | os.O_EXCL
	}
	f, err := l.OpenFile(p, how, 0o600)
	a, e := l.DoAttr(ctx, asking(remotefs.OpStat, p))
	return localFile{f}, a, cmp.Or(err, e)
}

type localFile struct{ *os.File }

func (f localFile) Read(_ context.Context, off int64, n int) ([]byte, error) {
	data := make([]byte, n)
	n, err := f.ReadAt(data, off)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return data[:n], err
}

func (f localFile) Write(data []byte, off int64) error {
	_, err := f.WriteAt(data, off)
	return err
}
