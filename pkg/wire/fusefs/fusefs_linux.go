// Package fusefs shows files of another machine as a file system of the kernel, by FUSE.
//
//	program ─ VFS ─ /dev/fuse ─▶ go-fuse ─▶ node ─▶ remotefs.Client ══▶ remotefs.Server
//
// https://docs.kernel.org/filesystems/fuse/fuse.html
package fusefs

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math"
	"os"
	"path"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"kubevpn/pkg/wire/remotefs"
)

// Serve answers the kernel's requests on device, an open /dev/fuse that is mounted, with the files of c, until it is
// unmounted. All files belong to the user of this process. It owns device.
func Serve(device *os.File, c *remotefs.Client) error {
	defer device.Close()
	fd, err := unix.FcntlInt(device.Fd(), unix.F_DUPFD_CLOEXEC, 0) // go-fuse closes it
	if err != nil {
		return err
	}
	fresh := remotefs.Fresh
	server, err := fuse.NewServer(fs.NewNodeFS(newNode(c), &fs.Options{
		EntryTimeout: &fresh, AttrTimeout: &fresh, NegativeTimeout: &fresh, NullPermissions: true,
	}), fmt.Sprintf("/dev/fd/%d", fd), &fuse.MountOptions{MaxWrite: remotefs.MaxData,
		MaxReadAhead: remotefs.MaxData, EnableLocks: true, DisableXAttrs: true, Name: "kubevpn", FsName: "kubevpn"})
	poll := []unix.PollFd{{Fd: int32(device.Fd())}}
	if _, e := unix.Poll(poll, 0); err != nil && e == nil && poll[0].Revents&unix.POLLERR != 0 {
		return nil // the mount has ended before its first request
	}
	if err != nil {
		return fmt.Errorf("serving files by FUSE: %w", err)
	}
	server.Serve()
	return nil
}

// node is a file, a directory or a link.
type node struct {
	fs.Inode
	files *remotefs.Client
	inode remotefs.Inode
}

func newNode(files *remotefs.Client) *node {
	n := &node{files: files}
	n.inode.Path = func() string { return n.at("") }
	return n
}

// at returns the path of a name in the directory, or of the node if the name is "". It returns "" if the node has none:
// it was removed, and is still open.
func (n *node) at(name string) string {
	for i := n.EmbeddedInode(); !i.IsRoot(); {
		up, parent := i.Parent()
		if parent == nil || len(name) > syscall.PathMax { // a server may say that a directory is below itself
			return ""
		}
		name, i = path.Join(up, name), parent
	}
	return cmp.Or(name, ".")
}

// interruptible carries out what may wait for writes on the way.
func interruptible(ctx context.Context, do func() error) syscall.Errno {
	done := make(chan error, 1)
	go func() { done <- do() }()
	err, late := remotefs.Await(ctx, done)
	return fs.ToErrno(cmp.Or(late, err))
}

// flush waits for all writes to the file, and returns an error of theirs.
func (n *node) flush(ctx context.Context) syscall.Errno {
	return interruptible(ctx, func() error { return n.inode.Flush(n.files) })
}

// settle waits for all writes to the file. flush returns an error of theirs.
func (n *node) settle(ctx context.Context) syscall.Errno {
	return interruptible(ctx, func() error { _ = n.inode.Settle(n.files); return nil })
}

// fill sets attributes for the kernel.
func fill(out *fuse.Attr, a *remotefs.Attr) {
	out.Ino, out.Mode, out.Nlink, out.Size, out.Blocks = a.Inode, a.Mode, a.Links, a.Size, a.Blocks
	out.Uid, out.Gid, out.Blksize = uint32(os.Geteuid()), uint32(os.Getegid()), remotefs.MaxData
	access, modify, change := time.Unix(0, a.Access), time.Unix(0, a.Modify), time.Unix(0, a.Change)
	out.SetTimes(&access, &modify, &change)
}

// child returns the node of a name that an operation has returned the attributes of.
func (n *node) child(ctx context.Context, a remotefs.Attr, err error, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	if err != nil {
		return nil, fs.ToErrno(err)
	}
	fill(&out.Attr, &a)
	id := fs.StableAttr{Mode: a.Mode & syscall.S_IFMT, Ino: a.Inode, Gen: uint64(a.Birth)}
	return n.NewInode(ctx, newNode(n.files), id), fs.OK
}

// do carries out an operation without a result.
func (n *node) do(ctx context.Context, r remotefs.Request) syscall.Errno {
	_, err := n.files.Do(ctx, r)
	return fs.ToErrno(err)
}

func (n *node) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	if c := n.GetChild(name); c != nil {
		if no := c.Operations().(*node).settle(ctx); no != fs.OK {
			return nil, no
		}
	}
	a, err := n.files.Stat(ctx, n.at(name))
	return n.child(ctx, a, err, out)
}

func (n *node) Getattr(ctx context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	if no := n.settle(ctx); no != fs.OK {
		return no
	}
	a, err := n.files.DoAttr(ctx, n.inode.On(n.files, remotefs.Request{Op: remotefs.OpStat}))
	fill(&out.Attr, &a)
	return fs.ToErrno(err)
}

func (n *node) Setattr(ctx context.Context, _ fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	uid, setsUser := in.GetUID()
	gid, setsGroup := in.GetGID()
	if setsUser && uid != uint32(os.Geteuid()) || setsGroup && gid != uint32(os.Getegid()) {
		return syscall.EPERM // other users of this machine are not those of the other end
	}
	var s remotefs.Set
	if size, ok := in.GetSize(); ok {
		s.Size = &size
	}
	if mode, ok := in.GetMode(); ok {
		s.Mode = &mode
	}
	if at, ok := in.GetATime(); ok {
		s.Access = new(at.UnixNano())
	}
	if at, ok := in.GetMTime(); ok {
		s.Modify = new(at.UnixNano())
	}
	if no := n.flush(ctx); no != fs.OK {
		return no
	}
	a, err := n.files.DoAttr(ctx, n.inode.On(n.files, remotefs.Request{Op: remotefs.OpSet, Set: &s}))
	n.inode.Resized(&s)
	fill(&out.Attr, &a)
	return fs.ToErrno(err)
}

func (n *node) Readdir(ctx context.Context) (fs.DirStream, syscall.Errno) {
	entries, err := n.files.List(ctx, n.at(""))
	all := make([]fuse.DirEntry, len(entries))
	for i, e := range entries {
		all[i] = fuse.DirEntry{Name: e.Name, Mode: e.Attr.Mode & syscall.S_IFMT, Ino: e.Attr.Inode}
	}
	return fs.NewListDirStream(all), fs.ToErrno(err)
}

func (n *node) Readlink(ctx context.Context) ([]byte, syscall.Errno) {
	a, err := n.files.Do(ctx, remotefs.Request{Op: remotefs.OpReadlink, Path: n.at("")})
	if len(a.Data) >= syscall.PathMax {
		return nil, syscall.EIO
	}
	return a.Data, fs.ToErrno(err)
}

// flagsOf translates flags of open(2).
func flagsOf(flags uint32) int {
	same := uint32(remotefs.FlagAppend | remotefs.FlagTruncate | remotefs.FlagExclusive)
	return int(flags&same | (flags+1)&syscall.O_ACCMODE) // O_RDONLY is 0, O_WRONLY 1, O_RDWR 2
}

func (n *node) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	if no := n.flush(ctx); no != fs.OK {
		return nil, 0, no
	}
	f, _, err := n.files.Open(ctx, n.at(""), flagsOf(flags), 0)
	if err != nil {
		return nil, 0, fs.ToErrno(err)
	}
	f.Use(&n.inode)
	return &file{f, n}, 0, fs.OK // without FOPEN_KEEP_CACHE: close-to-open
}

func (n *node) Create(ctx context.Context, name string, flags, mode uint32,
	out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	f, a, err := n.files.Open(ctx, n.at(name), flagsOf(flags)|remotefs.FlagCreate, mode)
	inode, no := n.child(ctx, a, err, out)
	if no != fs.OK {
		return nil, nil, 0, no
	}
	made := inode.Operations().(*node)
	f.Use(&made.inode)
	return inode, &file{f, made}, 0, fs.OK
}

// make carries out an operation that makes a name.
func (n *node) make(ctx context.Context, r remotefs.Request, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	a, err := n.files.DoAttr(ctx, r)
	return n.child(ctx, a, err, out)
}

func (n *node) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return n.make(ctx, remotefs.Request{Op: remotefs.OpMkdir, Path: n.at(name), Mode: mode}, out)
}

func (n *node) Symlink(ctx context.Context, target, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return n.make(ctx, remotefs.Request{Op: remotefs.OpSymlink, Path: n.at(name), To: target}, out)
}

func (n *node) Link(ctx context.Context, target fs.InodeEmbedder, name string,
	out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return n.make(ctx, remotefs.Request{Op: remotefs.OpLink, Path: target.(*node).at(""), To: n.at(name)}, out)
}

func (n *node) Unlink(ctx context.Context, name string) syscall.Errno {
	return n.do(ctx, remotefs.Request{Op: remotefs.OpRemove, Path: n.at(name)})
}

func (n *node) Rmdir(ctx context.Context, name string) syscall.Errno {
	return n.do(ctx, remotefs.Request{Op: remotefs.OpRemove, Path: n.at(name), Flags: remotefs.FlagDir})
}

func (n *node) Rename(ctx context.Context, name string, parent fs.InodeEmbedder, to string,
	flags uint32) syscall.Errno {
	if flags != 0 {
		return syscall.EINVAL // RENAME_EXCHANGE and RENAME_NOREPLACE
	}
	return n.do(ctx, remotefs.Request{Op: remotefs.OpRename, Path: n.at(name), To: parent.(*node).at(to)})
}

func (n *node) Statfs(ctx context.Context, out *fuse.StatfsOut) syscall.Errno {
	a, err := n.files.Do(ctx, remotefs.Request{Op: remotefs.OpStatfs, Path: "."})
	if s := a.Statfs; s != nil {
		out.Bsize, out.Frsize, out.NameLen = s.BlockSize, s.BlockSize, 255
		out.Blocks, out.Bfree, out.Bavail, out.Files, out.Ffree = s.Blocks, s.Free, s.Available, s.Files, s.FilesFree
	}
	return fs.ToErrno(err)
}

func (n *node) Fsync(ctx context.Context, open fs.FileHandle, _ uint32) syscall.Errno {
	if f, ok := open.(*file); ok { // not a directory
		return interruptible(ctx, func() error { return f.File.Fsync(ctx) })
	}
	return n.do(ctx, remotefs.Request{Op: remotefs.OpFsync, Path: n.at("")})
}

// file is an open file.
type file struct {
	*remotefs.File
	n *node
}

func (f *file) Read(ctx context.Context, dest []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	data, err := f.File.Read(ctx, off, len(dest))
	return fuse.ReadResultData(data), fs.ToErrno(err)
}

func (f *file) Write(ctx context.Context, data []byte, off int64) (uint32, syscall.Errno) {
	kept := bytes.Clone(data)
	return uint32(len(data)), interruptible(ctx, func() error { return f.File.Write(kept, off) })
}

func (f *file) Flush(ctx context.Context) syscall.Errno { return f.n.flush(ctx) }

func (f *file) Release(context.Context) syscall.Errno { return fs.ToErrno(f.Close()) }

// lock converts a lock and carries it out. A lock of a range belongs to the open file, as with F_OFD_SETLK: the kernel
// names its owner only here, and not when a process closes a file.
func (f *file) lock(ctx context.Context, lk *fuse.FileLock, flags uint32, ask, patient bool) (*remotefs.Lock, error) {
	l := remotefs.Lock{Type: uint8(lk.Typ), File: flags&fuse.FUSE_LK_FLOCK != 0, Ask: ask, Start: int64(lk.Start)}
	if lk.End < math.MaxInt64 {
		l.Len = int64(lk.End-lk.Start) + 1
	}
	return f.Lock(ctx, l, patient)
}

func (f *file) Getlk(ctx context.Context, _ uint64, lk *fuse.FileLock, flags uint32, out *fuse.FileLock) syscall.Errno {
	found, err := f.lock(ctx, lk, flags, true, false)
	if found != nil {
		out.Typ, out.Start, out.End = uint32(found.Type), uint64(found.Start), math.MaxInt64
		if found.Len > 0 {
			out.End = uint64(found.Start + found.Len - 1)
		}
	}
	return fs.ToErrno(err)
}

func (f *file) Setlk(ctx context.Context, _ uint64, lk *fuse.FileLock, flags uint32) syscall.Errno {
	_, err := f.lock(ctx, lk, flags, false, false)
	return fs.ToErrno(err)
}

func (f *file) Setlkw(ctx context.Context, _ uint64, lk *fuse.FileLock, flags uint32) syscall.Errno {
	_, err := f.lock(ctx, lk, flags, false, true)
	return fs.ToErrno(err)
}
