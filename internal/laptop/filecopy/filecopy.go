// Package filecopy copies files between this machine and a remotefs.Server, in either direction.
//
//	list both trees and make directories ─▶ files, up to 256 at once ─▶ links ─▶ modes and times of directories
//
// Another Server, in this process, serves the files of this machine: both ends of a copy are Clients.
//
// A file is written beside its place, to NAME.kubevpn-part, and renamed when its SHA-256 is that of the source. The
// next copy continues a part that an interrupted one has left, and skips a file that has the size and time of the
// source.
//
// The far Server is not trusted. What it sends stays below the destination, because all writes go through os.Root.
// Nothing is written through a link: links come after all files, an existing directory must not be a link, and a part
// that is a link is replaced.
package filecopy

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"kubevpn/internal/api"
	"kubevpn/pkg/wire/remotefs"
)

const (
	partSuffix           = ".kubevpn-part"
	maxNotes             = 10
	maxDepth, maxEntries = 256, 1 << 20

	// maxMemory limits what each end holds of all files in flight, in bytes: 256 small ones, or 16 with a full window
	// of remotefs.
	maxMemory             = 32 << 20
	minWeight, fullWeight = maxMemory / 256, maxMemory / 16

	// rewind is how much of the end of a part is written again, in bytes. Up to 2 MiB of a file are in flight, and are
	// written in any order: after an interruption, there may be holes.
	rewind = 4 << 20
)

// Copy is one copy.
type Copy struct {
	Conn     io.ReadWriteCloser // to a remotefs.Server; Run closes it
	Remote   string             // the name in the Server's directory, or "."
	Path     string             // the path of Remote, as the user wrote it
	Local    string             // the path on this machine
	Upload   bool               // from this machine
	Progress func(Stats)        // is called for each piece; it must not block
}

// Stats count what a copy has done, and what it has to do. Links count as files.
type Stats struct {
	Files, TotalFiles int
	Bytes, TotalBytes int64 // without those of parts
	Skipped, Failed   int   // files that were there, files and directories with an error
	Notes             []string
}

// Run copies. If the destination is a directory, a file keeps its name in it; a directory does so if the destination
// was written like "data/" or ".", else the two are merged, so that the same copy can continue. Stats has what failed
// with single files, and Notes describes some of it. The error is an *api.Error, or the cause of the end of ctx or of
// Conn.
func (c Copy) Run(ctx context.Context) (Stats, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	var serving sync.WaitGroup
	defer serving.Wait()
	defer cancel(nil)
	far, near := remotefs.NewClient(), remotefs.NewClient()
	serving.Go(func() { cancel(far.Serve(ctx, watched{c.Conn, cancel})) })
	local := c.Local
	if to, err := filepath.EvalSymlinks(local); c.Upload && err == nil {
		local = to
	}
	server, from, err := remotefs.Open(local, c.Upload)
	if err != nil {
		return Stats{}, api.Errorf(api.ExitUsage, "cannot open %s: %w", c.Local, err)
	}
	asks, answers := net.Pipe()
	serving.Go(func() { _ = server.Serve(ctx, answers) }) // it ends with ctx
	serving.Go(func() { _ = near.Serve(ctx, asks) })
	j := &job{src: near, dst: far, memory: semaphore.NewWeighted(maxMemory), stop: cancel, report: c.Progress}
	to, name, written := c.Remote, filepath.Base(c.Local), c.Path
	if !c.Upload {
		j.src, j.dst = far, near
		from, to, name, written = to, from, path.Base(c.Path), filepath.ToSlash(c.Local)
	}
	err = j.run(ctx, &item{from: from, to: to}, name, strings.HasSuffix(written, "/") || nameless(path.Base(written)))
	return j.stats, cmp.Or(context.Cause(ctx), err)
}

// nameless reports whether the last element of a path does not say how a directory is called.
func nameless(base string) bool { return slices.Contains([]string{".", "..", "/", `\`}, base) }

// watched ends a copy before the Client's requests fail because the conn has ended: no file fails for that.
type watched struct {
	io.ReadWriteCloser
	stop context.CancelCauseFunc
}

func (w watched) Read(p []byte) (int, error) {
	n, err := w.ReadWriteCloser.Read(p)
	if err != nil {
		w.stop(fmt.Errorf("the connection to the pod has ended: %w", err))
	}
	return n, err
}

// item is a file, a directory or a link.
type item struct {
	from, to string
	remotefs.Attr
	there remotefs.Attr // what the destination has; Mode 0: nothing
}

func (i *item) dir() bool { return i.Mode&syscall.S_IFMT == syscall.S_IFDIR }

type job struct {
	src, dst *remotefs.Client
	memory   *semaphore.Weighted
	stop     context.CancelCauseFunc
	report   func(Stats)

	mu           sync.Mutex
	stats        Stats
	entries      int
	dirs         [][]*item // by depth
	below        []*item   // directories of the next depth
	files, links []*item
}

// run copies a file or a tree. In a directory, a file gets the name, and with keep also a directory.
func (j *job) run(ctx context.Context, top *item, name string, keep bool) (err error) {
	if top.Attr, err = j.src.Stat(ctx, top.from); err != nil {
		return api.Errorf(api.ExitUsage, "cannot read the source: %s", remotefs.Text(err))
	}
	if top.to == "." && (keep || !top.dir()) && !nameless(name) {
		top.to = name
	}
	if top.there, err = j.dst.Stat(ctx, top.to); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return api.Errorf(api.ExitUsage, "cannot read the destination: %s", remotefs.Text(err))
	}
	for j.add(top); len(j.below) > 0; {
		level := j.below
		j.dirs, j.below = append(j.dirs, level), nil
		j.each(ctx, level, j.enter)
	}
	j.stats.TotalFiles = len(j.files) + len(j.links)
	j.each(ctx, j.files, j.file)
	j.each(ctx, j.links, j.link)
	for _, level := range slices.Backward(j.dirs) {
		j.each(ctx, level, j.leave)
	}
	return nil
}

// each calls do for many items at once. An error concerns one item.
func (j *job) each(ctx context.Context, items []*item, do func(context.Context, *item) error) {
	var busy sync.WaitGroup
	defer busy.Wait()
	for _, i := range items {
		weight := int64(max(min(i.Size, fullWeight), minWeight))
		if j.memory.Acquire(ctx, weight) != nil {
			return
		}
		busy.Go(func() {
			defer j.memory.Release(weight)
			switch err := do(ctx, i); {
			case err == nil && !i.dir():
				j.update(func(s *Stats) { s.Files++ })
			case err != nil && ctx.Err() == nil:
				j.update(func(s *Stats) { s.note(i, 1, remotefs.Text(err)) })
			}
		})
	}
}

func (j *job) update(change func(*Stats)) {
	j.mu.Lock()
	defer j.mu.Unlock()
	change(&j.stats)
	j.report(j.stats)
}

func (s *Stats) note(i *item, failed int, text string) {
	s.Failed += failed
	if len(s.Notes) < maxNotes {
		s.Notes = append(s.Notes, i.from+": "+text)
	}
}

// enter creates a directory, in which this user can write whatever its mode will be, and adds what the source has in
// it.
func (j *job) enter(ctx context.Context, d *item) (err error) {
	var there []remotefs.Entry
	if d.there.Mode == 0 {
		err = j.do(ctx, remotefs.Request{Op: remotefs.OpMkdir, Path: d.to, Mode: d.Mode&0o777 | 0o700})
	} else {
		there, err = j.dst.List(ctx, d.to)
	}
	if err != nil {
		return err
	}
	entries, err := j.src.List(ctx, d.from)
	before := make(map[string]remotefs.Attr, len(there))
	for _, e := range there {
		before[e.Name] = e.Attr
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.entries += len(entries); j.entries > maxEntries || len(j.dirs) > maxDepth {
		j.stop(api.Errorf(api.ExitUsage, "the source has more than %d files or %d directories inside each other",
			maxEntries, maxDepth))
		return nil
	}
	for _, e := range entries {
		j.add(&item{path.Join(d.from, e.Name), path.Join(d.to, e.Name), e.Attr, before[e.Name]})
	}
	return err
}

// add plans what to do with an item. The caller holds mu, or is alone.
func (j *job) add(i *item) {
	is, was, name := i.Mode&syscall.S_IFMT, i.there.Mode&syscall.S_IFMT, path.Base(i.from)
	switch {
	case strings.HasSuffix(name, partSuffix):
		j.stats.note(i, 0, "skipping a part of an interrupted copy")
	case !filepath.IsLocal(name) || filepath.Base(name) != name: // on Windows
		j.stats.note(i, 1, "this machine cannot have a file of that name")
	case was != 0 && i.dir() != (was == syscall.S_IFDIR):
		j.stats.note(i, 1, "the source or the destination is a directory, and the other is not")
	case i.dir():
		j.below = append(j.below, i)
	case is == syscall.S_IFREG && was == is && i.Size == i.there.Size && i.Modify/1e9 == i.there.Modify/1e9:
		j.stats.Skipped++
	case is == syscall.S_IFREG:
		j.files = append(j.files, i)
		j.stats.TotalBytes += int64(i.Size)
	case is == syscall.S_IFLNK:
		j.links = append(j.links, i)
	default:
		j.stats.note(i, 0, "skipping what is neither a file nor a directory nor a link")
	}
}

// leave sets the mode and the time of a directory, unless the user only named it as the place for others.
func (j *job) leave(ctx context.Context, d *item) error {
	if d.to == "." {
		return nil
	}
	return j.set(ctx, d.to, d)
}

func (j *job) link(ctx context.Context, i *item) error {
	target, err := j.src.Do(ctx, remotefs.Request{Op: remotefs.OpReadlink, Path: i.from})
	if err == nil && i.there.Mode != 0 {
		err = j.do(ctx, remotefs.Request{Op: remotefs.OpRemove, Path: i.to})
	}
	if err != nil {
		return err
	}
	return j.do(ctx, remotefs.Request{Op: remotefs.OpSymlink, Path: i.to, To: string(target.Data)})
}

// file copies a file. It copies it once again if what an interrupted copy left was not the beginning of the source.
func (j *job) file(ctx context.Context, i *item) error {
	part := i.to + partSuffix
	for again := range 2 {
		resumed, same, err := j.attempt(ctx, i, part)
		switch {
		case err != nil:
			return err
		case same:
			return j.do(ctx, remotefs.Request{Op: remotefs.OpRename, Path: part, To: i.to})
		}
		if err := j.do(ctx, remotefs.Request{Op: remotefs.OpRemove, Path: part}); err != nil {
			return err
		}
		if !resumed || again > 0 {
			break
		}
		j.update(func(s *Stats) { s.TotalBytes += int64(i.Size) })
	}
	return errors.New("it changed while it was copied")
}

// attempt writes the part, and reports whether there was one, and whether it is now the same as the source.
func (j *job) attempt(ctx context.Context, i *item, part string) (resumed, same bool, err error) {
	var want, got remotefs.Answer
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() (err error) {
		want, err = j.src.Do(ctx, remotefs.Request{Op: remotefs.OpSum, Path: i.from})
		return err
	})
	g.Go(func() (err error) {
		if resumed, err = j.write(ctx, i, part); err != nil {
			return err
		}
		g.Go(func() error { return j.set(ctx, part, i) }) // in the same round trip as the sum
		got, err = j.dst.Do(ctx, remotefs.Request{Op: remotefs.OpSum, Path: part})
		return err
	})
	err = g.Wait()
	return resumed, bytes.Equal(want.Data, got.Data), err
}

// write writes what the part lacks. It sets the item's attributes to those that the source has now.
func (j *job) write(ctx context.Context, i *item, part string) (resumed bool, err error) {
	src, now, err := j.src.Open(ctx, i.from, remotefs.FlagRead, 0)
	if err != nil {
		return false, err
	}
	src.Use(&remotefs.Inode{Path: func() string { return i.from }})
	defer src.Close()
	dst, has, err := j.openPart(ctx, part)
	if err != nil {
		return false, err
	}
	inode := &remotefs.Inode{Path: func() string { return part }}
	dst.Use(inode)
	off := max(0, int64(min(has.Size, now.Size))-rewind)
	j.update(func(s *Stats) { s.TotalBytes -= off })
	i.Attr = now
	for size := int64(now.Size); err == nil && ctx.Err() == nil && off < size; {
		var data []byte
		data, err = src.Read(ctx, off, int(min(remotefs.MaxData-off%remotefs.MaxData, size-off)))
		if err != nil || len(data) == 0 {
			break
		}
		err = dst.Write(data, off)
		off += int64(len(data))
		j.update(func(s *Stats) { s.Bytes += int64(len(data)) })
	}
	err = cmp.Or(err, inode.Flush(j.dst))
	if err == nil && runtime.GOOS == "windows" { // where a file gets the time of its last write when it is closed
		err = j.do(ctx, inode.On(j.dst, remotefs.Request{Op: remotefs.OpClose}))
	}
	return has.Size > 0, cmp.Or(err, dst.Close(), ctx.Err())
}

// openPart opens a part. It replaces a file in which this user may not write, or what is no file.
func (j *job) openPart(ctx context.Context, part string) (*remotefs.File, remotefs.Attr, error) {
	f, has, err := j.dst.Open(ctx, part, remotefs.FlagWrite|remotefs.FlagCreate, 0o600)
	if err != nil && j.do(ctx, remotefs.Request{Op: remotefs.OpRemove, Path: part}) == nil {
		return j.dst.Open(ctx, part, remotefs.FlagWrite|remotefs.FlagCreate|remotefs.FlagExclusive, 0o600)
	}
	return f, has, err
}

func (j *job) set(ctx context.Context, p string, to *item) error {
	set := remotefs.Set{Mode: new(to.Mode & 0o777), Modify: &to.Modify}
	return j.do(ctx, remotefs.Request{Op: remotefs.OpSet, Path: p, Set: &set})
}

// do changes the destination.
func (j *job) do(ctx context.Context, r remotefs.Request) error {
	_, err := j.dst.Do(ctx, r)
	return err
}
