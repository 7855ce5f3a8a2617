package remotefs

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	chunk  = MaxData
	window = 16 // chunks that are asked for ahead of a file, or are on the way to be written: 160 Mb/s at 100 ms
	slack  = 8  // chunks by which reads that are in order may change places: the kernel has several on the way
	// small is the most content that an answer to OpOpen has, in bytes.
	small = 64 << 10
	// lockPause is the time between two attempts to lock what others hold.
	lockPause = 50 * time.Millisecond
	// end is after every offset.
	end = int64(1) << 62
)

// File is an open file. Reads in order are asked for ahead. Writes return before they have arrived, except appends;
// they belong to the Inode that all Files of a file share. Its methods are safe for concurrent use.
type File struct {
	c      *Client
	s      *session
	inode  *Inode
	handle uint64
	flags  int
	size   int64 // when it was opened

	mu      sync.Mutex
	version uint64          // of the Inode, to which chunks belong
	next    int64           // where the last read ended
	reach   int64           // how many chunks to ask for ahead
	chunks  map[int64]*call // by number
}

// Inode is a file that may be open, with writes that are on the way. The zero value, with Path, is one.
type Inode struct {
	Path func() string // where the file is now; "": nowhere

	version atomic.Uint64 // counts changes of the content that have arrived

	mu     sync.Mutex
	open   []*File
	writes []*call
	err    error // of a write that failed; the next Flush returns it
}

// Open opens a file, with the flags of OpOpen. Use attaches it to an Inode.
func (c *Client) Open(ctx context.Context, p string, flags int, mode uint32) (*File, Attr, error) {
	r := Request{Op: OpOpen, Path: p, Flags: flags, Mode: mode}
	if !r.changes() {
		r.Size = small
	}
	var s *session
	var a Answer
	var err error
	there := false
	if r.Size > 0 {
		s, a, there = c.take(ctx, p)
	}
	if !there {
		s, a, err = c.ask(ctx, r)
	}
	attr, err := attrIn(a, err)
	if err != nil {
		return nil, attr, err
	}
	if flags&(FlagCreate|FlagTruncate) != 0 {
		c.changed(&r, &attr)
	}
	f := &File{c: c, s: s, handle: a.Handle, flags: flags, size: int64(attr.Size), chunks: make(map[int64]*call)}
	if len(a.Data) > 0 && uint64(len(a.Data)) == attr.Size {
		f.chunks[0] = &call{done: make(chan struct{}), answer: a}
		close(f.chunks[0].done)
	}
	return f, attr, nil
}

// Use makes the file one of the Inode's. It is called once, before other methods.
func (f *File) Use(i *Inode) {
	i.mu.Lock()
	defer i.mu.Unlock()
	f.inode, f.version = i, i.version.Load()
	i.open = append(i.open, f)
}

// ask sends a request about the open file and waits for its answer.
func (f *File) ask(ctx context.Context, r Request) (Answer, error) {
	r.Handle = f.handle
	return f.s.start(r).wait(ctx)
}

// Read returns up to n bytes at an offset; fewer only at the end of the file.
func (f *File) Read(ctx context.Context, off int64, n int) (all []byte, err error) {
	if err := f.inode.Settle(f.c); err != nil {
		return nil, err
	}
	wanted := f.ahead(off, n)
	if wanted == nil {
		a, err := f.ask(ctx, Request{Op: OpRead, Offset: off, Size: n})
		return a.Data[:min(n, len(a.Data))], err
	}
	skip := int(off % chunk)
	for _, w := range wanted {
		a, err := w.wait(ctx)
		size := len(a.Data)
		if err != nil || size < chunk { // the next read at the end of the file asks again: the file may have grown
			f.mu.Lock()
			clear(f.chunks)
			f.mu.Unlock()
		}
		if err != nil {
			return nil, err
		}
		all = append(all, a.Data[min(skip, size):min(skip+n-len(all), size)]...)
		if skip = 0; size < chunk {
			break
		}
	}
	return all, nil
}

// ahead returns the chunks of a read in order, and asks for more. It returns nil for any other read.
func (f *File) ahead(off int64, n int) (wanted []*call) {
	f.mu.Lock()
	defer f.mu.Unlock()
	first, last := off/chunk, (off+int64(n)-1)/chunk
	if now := f.inode.version.Load(); f.version != now {
		f.version = now
		clear(f.chunks)
	}
	known := f.chunks[first] != nil
	near := f.next-slack*chunk <= off && off <= f.next+slack*chunk
	f.next = off + int64(n)
	if !known && !near {
		f.reach = 0
		clear(f.chunks)
		return nil
	}
	if !known || f.chunks[first-1] != nil {
		f.reach = min(2*f.reach+1, window) // who reads the beginning only does not wait for more
	}
	maps.DeleteFunc(f.chunks, func(n int64, _ *call) bool { return n < first-slack || n > last+window+slack })
	for n := first; n <= last || n <= last+f.reach && n*chunk < f.size; n++ {
		if f.chunks[n] == nil {
			f.chunks[n] = f.s.start(Request{Op: OpRead, Handle: f.handle, Offset: n * chunk, Size: chunk})
		}
		if n <= last {
			wanted = append(wanted, f.chunks[n])
		}
	}
	return wanted
}

// Write writes at an offset, or at the end if the file was opened for that. Flush returns errors of writes that were on
// the way. Write does not keep data.
func (f *File) Write(data []byte, off int64) error {
	r := Request{Op: OpWrite, Handle: f.handle, Offset: off, Data: data, Flags: f.flags & FlagAppend}
	from, to, i := off, off+int64(len(data)), f.inode
	if r.Flags != 0 {
		from, to = 0, end
	}
	if err := i.settle(f.c, from, to); err != nil { // the Server carries out requests in any order
		return err
	}
	w := f.s.start(r)
	i.mu.Lock()
	i.writes = append(i.writes, w)
	i.mu.Unlock()
	if r.Flags != 0 {
		return i.Settle(f.c)
	}
	return nil
}

// settle waits for the writes to a range. It returns the error of one of them, or of one that has failed meanwhile.
func (i *Inode) settle(c *Client, from, to int64) (failed error) {
	i.mu.Lock()
	var those []*call
	for _, w := range i.writes {
		select {
		case <-w.done:
			those = append(those, w)
		default:
			if w.from < to && from < w.to {
				those = append(those, w)
			}
		}
	}
	i.mu.Unlock()
	if those == nil {
		return nil
	}
	for _, w := range those {
		_, err := w.wait(context.Background())
		failed = cmp.Or(failed, err)
	}
	i.version.Add(1)
	i.mu.Lock()
	i.err = cmp.Or(i.err, failed)
	i.writes = slices.DeleteFunc(i.writes, func(w *call) bool { return slices.Contains(those, w) })
	i.mu.Unlock()
	c.Changed(i.Path())
	return failed
}

// Settle waits until all writes to the file have arrived, so that its attributes are those after them. It keeps an
// error for Flush.
func (i *Inode) Settle(c *Client) error { return i.settle(c, 0, end) }

// Resized says that attributes of the file were set.
func (i *Inode) Resized(s *Set) {
	if s.Size != nil {
		i.version.Add(1)
	}
}

// Flush waits until all writes to the file have arrived, and returns the error of one that failed, once.
func (i *Inode) Flush(c *Client) error {
	err := i.Settle(c)
	i.mu.Lock()
	defer i.mu.Unlock()
	err, i.err = cmp.Or(err, i.err), nil
	return err
}

// On completes a request about the file. It uses an open one if there is one, and the path otherwise: another file may
// be there by now. One that is open for writing is the best: its size can be set whatever the file's mode is.
func (i *Inode) On(c *Client, r Request) Request {
	r.Path = i.Path()
	c.mu.Lock()
	now := c.server
	c.mu.Unlock()
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, f := range i.open {
		if f.s == now && (r.Handle == 0 || f.flags&FlagWrite != 0) {
			r.Handle = f.handle
		}
	}
	return r
}

// Fsync is Flush, and makes the other end write to its disk.
func (f *File) Fsync(ctx context.Context) error {
	if err := f.inode.Flush(f.c); err != nil {
		return err
	}
	_, err := f.ask(ctx, Request{Op: OpFsync})
	return err
}

// Lock sets, removes or looks for a lock of the file. It returns EAGAIN if somebody else has it for a while, or with
// patient waits for that. What it looked for is the first result.
func (f *File) Lock(ctx context.Context, l Lock, patient bool) (*Lock, error) {
	for n := 0; ; n++ {
		a, err := f.ask(ctx, Request{Op: OpLock, Lock: &l})
		if !patient && n > 0 || err != syscall.EAGAIN && err != syscall.EACCES { // who had it may just have closed it
			return a.Lock, err
		}
		select {
		case <-time.After(lockPause): // the Server does not wait: others' requests would wait behind it
		case <-ctx.Done():
			return nil, syscall.EINTR
		}
	}
}

// Close closes the file. It returns the error of a write that was on the way, and otherwise does not wait.
func (f *File) Close() error {
	err := f.inode.Flush(f.c)
	f.inode.mu.Lock()
	f.inode.open = slices.DeleteFunc(f.inode.open, func(o *File) bool { return o == f })
	f.inode.mu.Unlock()
	f.s.start(Request{Op: OpClose, Handle: f.handle})
	return err
}
