// Package fusefs shows files of another machine as a file system of the kernel, by FUSE.
//
//	program ─ VFS ─ /dev/fuse ─▶ go-fuse ─▶ node ─▶ remotefs.Client ══▶ remotefs.Server
//
// https://docs.kernel.org/filesystems/fuse/fuse.html
package fusefs

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"

	"kubevpn/pkg/wire/remotefs"
)

// Serve answers the kernel's requests on device, an open /dev/fuse that is mounted, with the files of c, until it is
// unmounted or ctx ends. All files belong to the user of this process. It owns device.
func Serve(ctx context.Context, device *os.File, c *remotefs.Client) error {
	defer device.Close()
	fresh := remotefs.Fresh
	root := newNode(c)
	server, err := fuse.NewServer(fs.NewNodeFS(root, &fs.Options{
		EntryTimeout: &fresh, AttrTimeout: &fresh, NegativeTimeout: &fresh, NullPermissions: true,
	}), fmt.Sprintf("/dev/fd/%d", device.Fd()), &fuse.MountOptions{MaxWrite: remotefs.MaxData,
		MaxReadAhead: remotefs.MaxData, EnableLocks: true, DisableXAttrs: true, Name: "kubevpn", FsName: "kubevpn"})
	if err != nil {
		return fmt.Errorf("serving files by FUSE: %w", err)
	}
	defer context.AfterFunc(ctx, func() { device.Close() })()
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
	n.inode.Path = func() string {
		if _, parent := n.Parent(); parent == nil && !n.IsRoot() {
			return "" // it was removed, and is still open
		}
		return n.at("")
	}
	return n
}

var (
	_ fs.NodeLookuper   = (*node)(nil)
	_ fs.NodeGetattrer  = (*node)(nil)
	_ fs.NodeSetattrer  = (*node)(nil)
	_ fs.NodeReaddirer  = (*node)(nil)
	_ fs.NodeReadlinker = (*node)(nil)
	_ fs.NodeOpener     = (*node)(nil)
	_ fs.NodeCreater    = (*node)(nil)
	_ fs.NodeMkdirer    = (*node)(nil)
	_ fs.NodeUnlinker   = (*node)(nil)
	_ fs.NodeRmdirer    = (*node)(nil)
	_ fs.NodeRenamer    = (*node)(nil)
	_ fs.NodeLinker     = (*node)(nil)
	_ fs.NodeSymlinker  = (*node)(nil)
	_ fs.NodeStatfser   = (*node)(nil)
	_ fs.NodeFsyncer    = (*node)(nil)
)

// at returns the path of a name in the directory; "": of the node.
func (n *node) at(name string) string {
	p := path.Join(n.Path(nil), name)
	if p == "" {
		return "."
	}
	return p
}

// errno returns the error for the kernel.
func errno(err error) syscall.Errno {
	if err == nil {
		return fs.OK
	}
	if no, ok := errors.AsType[syscall.Errno](err); ok {
		return no
	}
	return syscall.EIO
}

// fill sets attributes for the kernel.
func fill(out *fuse.Attr, a *remotefs.Attr) {
	out.Ino, out.Mode, out.Nlink, out.Size, out.Blocks = a.Inode, a.Mode, a.Links, a.Size, a.Blocks
	out.Uid, out.Gid, out.Blksize = uint32(os.Geteuid()), uint32(os.Getegid()), remotefs.MaxData
	access, modify, change := time.Unix(0, a.Access), time.Unix(0, a.Modify), time.Unix(0, a.Change)
	out.SetTimes(&access, &modify, &change)
}

// child returns the node of a name.
func (n *node) child(ctx context.Context, a *remotefs.Attr, out *fuse.EntryOut) *fs.Inode {
	fill(&out.Attr, a)
	return n.NewInode(ctx, newNode(n.files), fs.StableAttr{Mode: a.Mode & syscall.S_IFMT, Ino: a.Inode})
}

// settle waits for writes to the file of a name.
func (n *node) settle(name string) error {
	if child := n.GetChild(name); child != nil {
		if c, ok := child.Operations().(*node); ok {
			return c.inode.Settle(n.files)
		}
	}
	return nil
}

func (n *node) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	if err := n.settle(name); err != nil {
		return nil, errno(err)
	}
	a, err := n.files.Stat(ctx, n.at(name))
	if err != nil {
		return nil, errno(err)
	}
	return n.child(ctx, &a, out), fs.OK
}

func (n *node) Getattr(ctx context.Context, _ fs.FileHandle, out *fuse.AttrOut) (no syscall.Errno) {
	if err := n.inode.Settle(n.files); err != nil {
		return errno(err)
	}
	var a remotefs.Attr
	r := n.inode.On(n.files, remotefs.Request{Op: remotefs.OpStat})
	var err error
	if r.Handle != 0 {
		a, err = n.files.DoAttr(ctx, r)
	} else {
		a, err = n.files.Stat(ctx, r.Path)
	}
	if err == nil {
		fill(&out.Attr, &a)
	}
	return errno(err)
}

func (n *node) Setattr(ctx context.Context, _ fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	var s remotefs.Set
	if size, ok := in.GetSize(); ok {
		s.Size = &size
	}
	if mode, ok := in.GetMode(); ok {
		s.Mode = &mode
	}
	uid, setsUser := in.GetUID()
	gid, setsGroup := in.GetGID()
	if setsUser && uid != uint32(os.Geteuid()) || setsGroup && gid != uint32(os.Getegid()) {
		return syscall.EPERM // other users of this machine are not those of the other end
	}
	if at, ok := in.GetATime(); ok {
		s.Access = new(at.UnixNano())
	}
	if at, ok := in.GetMTime(); ok {
		s.Modify = new(at.UnixNano())
	}
	if err := n.inode.Flush(n.files); err != nil {
		return errno(err)
	}
	a, err := n.files.DoAttr(ctx, n.inode.On(n.files, remotefs.Request{Op: remotefs.OpSet, Set: &s}))
	if err == nil {
		n.inode.Resized(&s)
		fill(&out.Attr, &a)
	}
	return errno(err)
}

func (n *node) Readdir(ctx context.Context) (fs.DirStream, syscall.Errno) {
	entries, err := n.files.List(ctx, n.at(""))
	if err != nil {
		return nil, errno(err)
	}
	all := make([]fuse.DirEntry, len(entries))
	for i, e := range entries {
		all[i] = fuse.DirEntry{Name: e.Name, Mode: e.Attr.Mode & syscall.S_IFMT, Ino: e.Attr.Inode}
	}
	return fs.NewListDirStream(all), fs.OK
}

func (n *node) Readlink(ctx context.Context) ([]byte, syscall.Errno) {
	a, err := n.files.Do(ctx, remotefs.Request{Op: remotefs.OpReadlink, Path: n.at("")})
	return a.Data, errno(err)
}

// flagsOf translates flags of open(2).
func flagsOf(flags uint32) (of int) {
	switch flags & syscall.O_ACCMODE {
	case syscall.O_RDONLY:
		of = remotefs.FlagRead
	case syscall.O_WRONLY:
		of = remotefs.FlagWrite
	default:
		of = remotefs.FlagRead | remotefs.FlagWrite
	}
	for is, flag := range map[uint32]int{syscall.O_APPEND: remotefs.FlagAppend, syscall.O_TRUNC: remotefs.FlagTruncate,
		syscall.O_EXCL: remotefs.FlagExclusive} {
		if flags&is != 0 {
			of |= flag
		}
	}
	return of
}

func (n *node) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	if err := n.inode.Flush(n.files); err != nil {
		return nil, 0, errno(err)
	}
	f, _, err := n.files.Open(ctx, n.at(""), flagsOf(flags), 0)
	if err != nil {
		return nil, 0, errno(err)
	}
	f.Use(&n.inode)
	return &file{f, n}, 0, fs.OK // without FOPEN_KEEP_CACHE: close-to-open
}

func (n *node) Create(ctx context.Context, name string, flags, mode uint32,
	out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	f, a, err := n.files.Open(ctx, n.at(name), flagsOf(flags)|remotefs.FlagCreate, mode)
	if err != nil {
		return nil, nil, 0, errno(err)
	}
	inode := n.child(ctx, &a, out)
	made, ok := inode.Operations().(*node) // the one that the kernel knew already, perhaps
	if !ok {
		return nil, nil, 0, syscall.EIO
	}
	f.Use(&made.inode)
	return inode, &file{f, made}, 0, fs.OK
}

// made finishes an operation that makes a name.
func (n *node) made(ctx context.Context, r remotefs.Request, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	a, err := n.files.DoAttr(ctx, r)
	if err != nil {
		return nil, errno(err)
	}
	return n.child(ctx, &a, out), fs.OK
}

func (n *node) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return n.made(ctx, remotefs.Request{Op: remotefs.OpMkdir, Path: n.at(name), Mode: mode}, out)
}

func (n *node) Symlink(ctx context.Context, target, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return n.made(ctx, remotefs.Request{Op: remotefs.OpSymlink, Path: n.at(name), To: target}, out)
}

func (n *node) Link(ctx context.Context, target fs.InodeEmbedder, name string,
	out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	of := target.EmbeddedInode().Path(nil)
	return n.made(ctx, remotefs.Request{Op: remotefs.OpLink, Path: of, To: n.at(name)}, out)
}

func (n *node) Unlink(ctx context.Context, name string) syscall.Errno {
	_, err := n.files.Do(ctx, remotefs.Request{Op: remotefs.OpRemove, Path: n.at(name)})
	return errno(err)
}

func (n *node) Rmdir(ctx context.Context, name string) syscall.Errno {
	_, err := n.files.Do(ctx, remotefs.Request{Op: remotefs.OpRemove, Path: n.at(name), Flags: remotefs.FlagDir})
	return errno(err)
}

func (n *node) Rename(ctx context.Context, name string, parent fs.InodeEmbedder, to string,
	flags uint32) syscall.Errno {
	if flags != 0 {
		return syscall.EINVAL // RENAME_EXCHANGE and RENAME_NOREPLACE
	}
	if err := n.settle(name); err != nil {
		return errno(err)
	}
	dir := parent.EmbeddedInode().Path(nil)
	_, err := n.files.Do(ctx, remotefs.Request{Op: remotefs.OpRename, Path: n.at(name), To: path.Join(dir, to)})
	return errno(err)
}

func (n *node) Statfs(ctx context.Context, out *fuse.StatfsOut) syscall.Errno {
	a, err := n.files.Do(ctx, remotefs.Request{Op: remotefs.OpStatfs})
	if err == nil && a.Statfs == nil {
		err = syscall.EIO
	}
	if err != nil {
		return errno(err)
	}
	s := a.Statfs
	out.Bsize, out.Frsize, out.NameLen = s.BlockSize, s.BlockSize, 255
	out.Blocks, out.Bfree, out.Bavail, out.Files, out.Ffree = s.Blocks, s.Free, s.Available, s.Files, s.FilesFree
	return fs.OK
}

// Fsync is that of a directory.
func (n *node) Fsync(ctx context.Context, _ fs.FileHandle, _ uint32) syscall.Errno {
	_, err := n.files.Do(ctx, remotefs.Request{Op: remotefs.OpFsync, Path: n.at("")})
	return errno(err)
}

// file is an open file.
type file struct {
	*remotefs.File
	n *node
}

var (
	_ fs.FileReader   = (*file)(nil)
	_ fs.FileWriter   = (*file)(nil)
	_ fs.FileFlusher  = (*file)(nil)
	_ fs.FileFsyncer  = (*file)(nil)
	_ fs.FileReleaser = (*file)(nil)
	_ fs.FileGetlker  = (*file)(nil)
	_ fs.FileSetlker  = (*file)(nil)
	_ fs.FileSetlkwer = (*file)(nil)
)

func (f *file) Read(ctx context.Context, dest []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	data, err := f.File.Read(ctx, off, len(dest))
	return fuse.ReadResultData(data), errno(err)
}

func (f *file) Write(_ context.Context, data []byte, off int64) (uint32, syscall.Errno) {
	if err := f.File.Write(data, off); err != nil {
		return 0, errno(err)
	}
	return uint32(len(data)), fs.OK
}

func (f *file) Flush(context.Context) syscall.Errno { return errno(f.n.inode.Flush(f.n.files)) }

func (f *file) Fsync(ctx context.Context, _ uint32) syscall.Errno { return errno(f.File.Fsync(ctx)) }

func (f *file) Release(context.Context) syscall.Errno { return errno(f.Close()) }

// lock converts a lock and carries it out. A lock of a range belongs to the open file, as with F_OFD_SETLK: the kernel
// names its owner only here, and not when a process closes a file.
func (f *file) lock(ctx context.Context, lk *fuse.FileLock, flags uint32, how remotefs.Lock,
	patient bool) (*remotefs.Lock, syscall.Errno) {
	how.Type, how.File, how.Start = uint8(lk.Typ), flags&fuse.FUSE_LK_FLOCK != 0, int64(lk.Start)
	if lk.End < math.MaxInt64 {
		how.Len = int64(lk.End-lk.Start) + 1
	}
	found, err := f.Lock(ctx, how, patient)
	return found, errno(err)
}

func (f *file) Getlk(ctx context.Context, _ uint64, lk *fuse.FileLock, flags uint32, out *fuse.FileLock) syscall.Errno {
	found, no := f.lock(ctx, lk, flags, remotefs.Lock{Ask: true}, false)
	if no == fs.OK && found != nil {
		out.Typ, out.Start, out.End = uint32(found.Type), uint64(found.Start), math.MaxInt64
		if found.Len > 0 {
			out.End = uint64(found.Start + found.Len - 1)
		}
	}
	return no
}

func (f *file) Setlk(ctx context.Context, _ uint64, lk *fuse.FileLock, flags uint32) syscall.Errno {
	_, no := f.lock(ctx, lk, flags, remotefs.Lock{}, false)
	return no
}

func (f *file) Setlkw(ctx context.Context, _ uint64, lk *fuse.FileLock, flags uint32) syscall.Errno {
	_, no := f.lock(ctx, lk, flags, remotefs.Lock{}, true)
	return no
}
