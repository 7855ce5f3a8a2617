package filesync

import (
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"kubevpn/pkg/wire/remotefs"
)

const (
	inFlight  = 256      // paths that are sent at once: a far line needs many small files on their way
	maxMemory = 16 << 20 // bytes of their content
)

// The errors of a remotefs.Client, which have the numbers of Linux on each system.
const (
	errNotExist, errBusy, errExists  = syscall.Errno(2), syscall.Errno(16), syscall.Errno(17)
	errNotDir, errIsDir, errNotEmpty = syscall.Errno(20), syscall.Errno(21), syscall.Errno(39)
)

var (
	// errHolds explains why a directory cannot become a file.
	errHolds = errors.New("it is a directory that contains files that are not from the laptop")
	// errNoFile means that something else took the place of a file.
	errNoFile = errors.New("not a regular file any more")
	// errChanging means that a file changed while it was read.
	errChanging = errors.New("it changes")
)

// unread is an error of reading a file of the laptop.
type unread struct{ error }

// received is an entry that the container received.
type received struct {
	sent   entry // zero: it has to be sent again
	stored entry // how the container's file system describes it: it may round times and change permissions
}

// delivery is one round on its way. Its methods are safe for concurrent use.
type delivery struct {
	*sender
	result *Batch
	memory *semaphore.Weighted
	alone  bool // OpPut is the only request, and also acknowledges the round: a save takes one round trip

	mu     sync.Mutex // guards result, and what the sender, its Source and its tree remember
	failed map[string]entry
}

// at returns the path at the Server.
func (se *sender) at(name string) string {
	switch {
	case se.tree.only == "":
		return path.Join(se.dest, name)
	case se.dest == ".":
		return filepath.Base(se.cfg.Dir)
	}
	return se.dest
}

// verify finds out what the container still has of what it received.
func (se *sender) verify(ctx context.Context) error {
	d := &delivery{sender: se}
	d.each(ctx, slices.Collect(maps.Keys(se.has)), func(name string) {
		now, err := d.stat(ctx, name)
		d.mu.Lock()
		defer d.mu.Unlock()
		switch has := se.has[name]; {
		case err == errNotExist || err == errNotDir:
			delete(se.has, name)
		case err != nil || now != has.stored:
			se.has[name] = received{now, now}
		}
	})
	return ctx.Err()
}

// stat describes what the container has.
func (d *delivery) stat(ctx context.Context, name string) (entry, error) {
	attr, err := d.client.Stat(ctx, d.at(name))
	e := remoteEntry(attr)
	if err == nil && e.kind == symlink {
		var to remotefs.Answer
		to, err = d.client.Do(ctx, remotefs.Request{Op: remotefs.OpReadlink, Path: d.at(name)})
		e.link = string(to.Data)
	}
	return e, err
}

// remoteEntry describes what the container has, but for where a link leads.
func remoteEntry(a remotefs.Attr) entry {
	perm := fs.FileMode(a.Mode) & fs.ModePerm
	switch a.Mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		return entry{kind: file, perm: perm, size: int64(a.Size), mtime: a.Modify}
	case syscall.S_IFDIR:
		return entry{kind: dir, perm: perm}
	case syscall.S_IFLNK:
		return entry{kind: symlink}
	}
	return entry{kind: other}
}

// deliver carries out a plan, and has the Server acknowledge it.
func (se *sender) deliver(ctx context.Context, p plan, result *Batch) error {
	d := &delivery{sender: se, result: result, failed: make(map[string]entry), memory: semaphore.NewWeighted(maxMemory)}
	d.alone = se.completed && len(p.send) == 1 && len(p.remove) == 0
	d.inSteps(ctx, p.send, se.rank, d.send)
	d.inSteps(ctx, p.remove, depth, d.remove)
	if d.alone && result.Files == 1 && !se.untold {
		return nil
	}
	complete := !se.completed && len(se.changing) == 0
	flags := 0
	if se.untold {
		flags |= remotefs.SyncedChanges
	}
	if complete {
		flags |= remotefs.SyncedAll
	}
	if _, err := se.client.Do(ctx, remotefs.Request{Op: remotefs.OpSynced, Path: ".", Flags: flags}); err != nil {
		for name, e := range d.failed { // it may have arrived
			se.has[name], se.untold = received{e, e}, true
		}
		return err
	}
	for name, e := range d.failed {
		se.rejected[name] = e
		if has, ok := se.has[name]; ok && e.kind != other { // the container may still have what was sent earlier
			se.has[name] = received{stored: has.stored}
		}
	}
	se.untold, result.Complete = false, complete
	se.completed = se.completed || complete
	return nil
}

// inSteps calls do for all paths of the same rank at once, and then for those of the next one.
func (d *delivery) inSteps(
	ctx context.Context, names []string, rank func(string) int, do func(context.Context, string),
) {
	for len(names) > 0 {
		n := 1
		for n < len(names) && rank(names[n]) == rank(names[0]) {
			n++
		}
		d.each(ctx, names[:n], func(name string) { do(ctx, name) })
		names = names[n:]
	}
}

func (d *delivery) each(ctx context.Context, names []string, do func(name string)) {
	var work errgroup.Group
	work.SetLimit(inFlight)
	for _, name := range names {
		work.Go(func() error {
			if ctx.Err() == nil {
				do(name)
			}
			return nil
		})
	}
	_ = work.Wait() // none returns an error
}

// send makes the container have an entry.
func (d *delivery) send(ctx context.Context, name string) {
	d.mu.Lock()
	e := d.tree.entries[name]
	d.mu.Unlock()
	var has remotefs.Attr
	var err error
	switch e.kind {
	case dir:
		has, err = d.makeDir(ctx, name, e)
	case symlink:
		has, err = d.put(ctx, name, remotefs.Request{Op: remotefs.OpPut, To: e.link})
	default:
		has, err = d.sendFile(ctx, name, &e)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if local, ok := errors.AsType[unread](err); ok {
		d.unread(name, e, local.error)
		return
	}
	switch {
	case err == errChanging:
	case err != nil:
		d.fail(name, e, err)
	default:
		stored := remoteEntry(has)
		stored.link = e.link
		d.has[name], d.untold = received{e, stored}, !d.alone || e.kind == dir
		d.result.Files++
		d.result.Bytes += e.size
	}
}

// unread notes that a file could not be read. It marks a path that is gone or no regular file to be read again. The
// caller holds mu.
func (d *delivery) unread(name string, e entry, err error) {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errNoFile) {
		d.tree.watch.mark(name, 0)
		return
	}
	d.rejected[name] = e
	d.result.Failed = addFailure(d.result.Failed, name, err)
}

// fail notes that the container does not take an entry, or keeps one of kind other. The caller holds mu.
func (d *delivery) fail(name string, e entry, err error) {
	d.failed[name] = e
	d.result.Rejected++
	d.result.Failed = addFailure(d.result.Failed, name, errors.New(remotefs.Text(err)))
}

// put carries out a request that makes something at a path. It makes the directory above, which the container may have
// removed, and clears a directory in its place.
func (d *delivery) put(ctx context.Context, name string, r remotefs.Request) (remotefs.Attr, error) {
	r.Path = d.at(name)
	if d.alone && r.Op == remotefs.OpPut {
		r.Flags = remotefs.SyncedChanges
	}
	attr, err := d.client.DoAttr(ctx, r)
	switch err {
	case errNotExist:
		err = d.makeAbove(ctx, r.Path)
	case errIsDir:
		err = d.clear(ctx, name)
	default:
		return attr, err
	}
	if err != nil {
		return attr, err
	}
	return d.client.DoAttr(ctx, r)
}

// makeAbove makes the directories above a path at the Server.
func (d *delivery) makeAbove(ctx context.Context, at string) error {
	var err error
	for n, c := range at {
		if c == '/' {
			_, err = d.client.Do(ctx, remotefs.Request{Op: remotefs.OpMkdir, Path: at[:n], Mode: 0o755})
		}
	}
	if err == errExists {
		return nil
	}
	return err
}

// clear removes a directory and everything that was sent into it.
func (d *delivery) clear(ctx context.Context, name string) error {
	d.mu.Lock()
	below := slices.DeleteFunc(slices.Collect(maps.Keys(d.has)), func(other string) bool {
		return !strings.HasPrefix(other, name+"/")
	})
	d.mu.Unlock()
	slices.SortFunc(below, backward)
	for _, other := range below {
		d.remove(ctx, other)
	}
	err := d.unlink(ctx, d.at(name), true)
	if err == errNotEmpty {
		return errHolds
	}
	return err
}

// makeDir makes a directory, unless there is one.
func (d *delivery) makeDir(ctx context.Context, name string, e entry) (remotefs.Attr, error) {
	mkdir := remotefs.Request{Op: remotefs.OpMkdir, Mode: uint32(e.perm)}
	attr, err := d.put(ctx, name, mkdir)
	if err == errExists {
		attr, err = d.client.Stat(ctx, d.at(name))
		if err == nil && remoteEntry(attr).kind != dir {
			if err = d.unlink(ctx, d.at(name), false); err == nil {
				attr, err = d.put(ctx, name, mkdir)
			}
		}
	}
	if err == nil && remoteEntry(attr).perm != e.perm { // that of OpMkdir is subject to the umask
		set := &remotefs.Set{Mode: &mkdir.Mode}
		attr, err = d.client.DoAttr(ctx, remotefs.Request{Op: remotefs.OpSet, Path: d.at(name), Set: set})
	}
	return attr, err
}

// remove removes an entry that was sent. A directory that contains anything else stays.
func (d *delivery) remove(ctx context.Context, name string) {
	d.mu.Lock()
	has, ok := d.has[name]
	d.mu.Unlock()
	if !ok {
		return
	}
	err := d.unlink(ctx, d.at(name), has.stored.kind == dir)
	d.mu.Lock()
	defer d.mu.Unlock()
	switch err {
	case nil:
		d.result.Removed++
		d.untold = true
	case errNotExist, errNotDir, errNotEmpty, errBusy: // gone, or something else is in it
	default:
		d.fail(name, entry{kind: other}, err)
		return
	}
	delete(d.has, name)
}

// unlink removes a file or an empty directory; isDir says which it is most likely.
func (d *delivery) unlink(ctx context.Context, at string, isDir bool) error {
	rm := remotefs.Request{Op: remotefs.OpRemove, Path: at}
	dir := remotefs.Request{Op: remotefs.OpRemove, Path: at, Flags: remotefs.FlagDir}
	if isDir {
		rm, dir = dir, rm
	}
	_, err := d.client.Do(ctx, rm)
	if err == errIsDir || err == errNotDir {
		_, err = d.client.Do(ctx, dir)
	}
	return err
}

// sendFile sends a file as it is now, which it stores in e. A small one is one request.
func (d *delivery) sendFile(ctx context.Context, name string, e *entry) (has remotefs.Attr, err error) {
	f, err := os.Open(d.tree.full(name))
	if err != nil {
		return has, unread{err}
	}
	defer f.Close()
	now, err := statFile(f)
	if err != nil {
		return has, unread{err}
	}
	*e = now
	d.mu.Lock()
	d.tree.entries[name] = now
	d.mu.Unlock()
	buffer := min(now.size, remotefs.MaxData)
	if err := d.memory.Acquire(ctx, buffer); err != nil {
		return has, err
	}
	defer d.memory.Release(buffer)
	request := remotefs.Request{Op: remotefs.OpPut,
		Set: &remotefs.Set{Mode: new(uint32(now.perm)), Modify: &now.mtime}}
	if now.size > remotefs.MaxData {
		return d.sendBig(ctx, name, f, now, request)
	}
	request.Data = make([]byte, now.size)
	n, err := f.ReadAt(request.Data, 0)
	if err := d.check(name, f, now, int64(n), err); err != nil {
		return has, err
	}
	return d.put(ctx, name, request)
}

// sendBig sends the pieces of a file to a place beside its own.
func (d *delivery) sendBig(
	ctx context.Context, name string, f *os.File, now entry, request remotefs.Request,
) (has remotefs.Attr, err error) {
	const flags = remotefs.FlagWrite | remotefs.FlagAside
	to, _, err := d.client.Open(ctx, d.at(name), flags, 0)
	if err == errNotExist {
		if err = d.makeAbove(ctx, d.at(name)); err == nil {
			to, _, err = d.client.Open(ctx, d.at(name), flags, 0)
		}
	}
	if err != nil {
		return has, err
	}
	inode := &remotefs.Inode{Path: func() string { return d.at(name) }}
	to.Use(inode)
	defer to.Close()
	buf := make([]byte, remotefs.MaxData)
	size, readErr := int64(0), error(nil)
	for size < now.size && err == nil && readErr == nil && ctx.Err() == nil {
		var n int
		n, readErr = f.ReadAt(buf[:min(int64(len(buf)), now.size-size)], size)
		err = to.Write(buf[:n], size)
		size += int64(n)
	}
	if err = cmp.Or(err, inode.Flush(d.client), d.check(name, f, now, size, readErr)); err != nil {
		return has, err
	}
	return d.put(ctx, name, inode.On(d.client, request))
}

// check returns an error if what was read of a file must not be kept.
func (d *delivery) check(name string, f *os.File, before entry, size int64, readErr error) error {
	if readErr != nil && readErr != io.EOF {
		return unread{readErr}
	}
	after, err := statFile(f)
	d.mu.Lock()
	defer d.mu.Unlock()
	whole := size == before.size
	if whole && err == nil && after == before || whole && !d.later(name) {
		delete(d.changing, name)
		return nil
	}
	if !whole {
		d.later(name)
	}
	return errChanging
}

func statFile(f *os.File) (entry, error) {
	info, err := f.Stat()
	if err != nil {
		return entry{}, err
	}
	if e := localEntry(info); e.kind == file {
		return e, nil
	}
	return entry{}, errNoFile
}
