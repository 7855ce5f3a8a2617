package remotefs

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"syscall"
	"time"
)

const (
	chunk  = MaxData
	window = 16 // chunks that are asked for ahead, and writes that are on the way: 2 MiB, 160 Mb/s at 100 ms
	// small is the most content that an answer to OpOpen has, in bytes.
	small = 64 << 10
	// lockPause is the time between two attempts to lock what others hold.
	lockPause = 50 * time.Millisecond
)

// File is an open file. Reads in order are asked for ahead. Writes return before they have arrived, except appends;
// they belong to the Inode that all Files of a file share. Its methods are safe for concurrent use.
type File struct {
	c      *Client
	s      *session
	inode  *Inode
	handle uint64
	flags  int

	mu      sync.Mutex
	version uint64             // of the Inode, to which chunks belong
	next    int64              // where the last read ended
	reach   int64              // how many chunks to ask for ahead
	chunks  map[int64]*pending // by number
}

// pending is a request on the way, for any number of waiters.
type pending struct {
	answer   <-chan Answer // nil: data is there
	from, to int64         // the range of a write
	once     sync.Once
	data     []byte
	err      error
}

func (p *pending) wait() ([]byte, error) {
	p.once.Do(func() {
		if p.answer != nil {
			var got Answer
			got, p.err = wait(context.Background(), p.answer)
			p.data = got.Data
		}
	})
	return p.data, p.err
}

// Inode is a file that may be open, with writes that are on the way. The zero value, with Path, is one.
type Inode struct {
	Path func() string // where the file is now; "": nowhere

	mu      sync.Mutex
	open    []*File
	writes  []*pending
	version uint64 // counts the writes
	err     error  // of one that failed; the next Flush returns it
}

// Open opens a file, with the flags of OpOpen. Use attaches it to an Inode.
func (c *Client) Open(ctx context.Context, p string, flags int, mode uint32) (*File, Attr, error) {
	r := Request{Op: OpOpen, Path: p, Flags: flags, Mode: mode}
	if flags&(FlagRead|FlagWrite) == FlagRead {
		r.Size = small
	}
	s, a, err := c.ask(ctx, r)
	attr, err := attrIn(a, err)
	if err != nil {
		return nil, attr, err
	}
	if flags&(FlagCreate|FlagTruncate) != 0 {
		c.changed(&r, &attr)
	}
	f := &File{c: c, s: s, handle: a.Handle, flags: flags, chunks: make(map[int64]*pending)}
	if r.Size > 0 && attr.Size <= small && uint64(len(a.Data)) == attr.Size {
		f.chunks[0] = &pending{data: a.Data}
	}
	return f, attr, nil
}

// Use makes the file one of the Inode's. It is called once, before other methods.
func (f *File) Use(i *Inode) {
	i.mu.Lock()
	defer i.mu.Unlock()
	f.inode, f.version = i, i.version
	i.open = append(i.open, f)
}

// Read returns up to n bytes at an offset; fewer only at the end of the file.
func (f *File) Read(ctx context.Context, off int64, n int) ([]byte, error) {
	if err := f.inode.Settle(f.c); err != nil {
		return nil, err
	}
	wanted, ok := f.ahead(off, n)
	if !ok {
		a, err := wait(ctx, f.s.start(Request{Op: OpRead, Handle: f.handle, Offset: off, Size: n}))
		return a.Data, err
	}
	var all []byte
	at := off - off%chunk
	for _, w := range wanted {
		data, err := w.wait()
		if err != nil {
			return nil, err
		}
		from, to := max(off-at, 0), min(off+int64(n)-at, int64(len(data)))
		if from < to {
			all = append(all, data[from:to]...)
		}
		if len(data) < chunk { // the next read at the end of the file asks again: the file may have grown
			f.mu.Lock()
			delete(f.chunks, at/chunk)
			f.mu.Unlock()
			break
		}
		at += chunk
	}
	return all, nil
}

// ahead returns the chunks of a read that follows the last one, and asks for more. ok is false for any other read.
func (f *File) ahead(off int64, n int) (wanted []*pending, ok bool) {
	now := f.inode.at()
	f.mu.Lock()
	defer f.mu.Unlock()
	first, last := off/chunk, (off+int64(n)-1)/chunk
	if f.version != now {
		f.version = now
		clear(f.chunks)
	}
	known := f.chunks[first] != nil
	follows := known || off == f.next
	f.next = off + int64(n)
	if !follows {
		clear(f.chunks)
		f.reach = 0
		return nil, false
	}
	if !known || first > 0 && f.chunks[first-1] != nil {
		f.reach = min(2*f.reach+1, window) // who reads the beginning only does not wait for more
	}
	for number := range f.chunks {
		if number < first {
			delete(f.chunks, number)
		}
	}
	whole := f.chunks[0] != nil && f.chunks[0].answer == nil // all of the file
	for number := first; number <= last+f.reach; number++ {
		if whole && number > 0 {
			break
		}
		if f.chunks[number] == nil {
			r := Request{Op: OpRead, Handle: f.handle, Offset: number * chunk, Size: chunk}
			f.chunks[number] = &pending{answer: f.s.start(r)}
		}
		if number <= last {
			wanted = append(wanted, f.chunks[number])
		}
	}
	return wanted, true
}

// Write writes at an offset, or at the end if the file was opened for that. Flush returns errors of writes that were on
// the way. Write does not keep data.
func (f *File) Write(data []byte, off int64) error {
	r := Request{Op: OpWrite, Handle: f.handle, Offset: off, Data: data, Flags: f.flags & FlagAppend}
	to := off + int64(len(data))
	if r.Flags != 0 {
		off, to = 0, end
	}
	if err := f.inode.settle(f.c, off, to); err != nil { // the Server carries out requests in any order
		return err
	}
	w := &pending{answer: f.s.start(r), from: off, to: to}
	i := f.inode
	i.mu.Lock()
	i.version++
	i.writes = append(i.writes, w)
	oldest := i.writes[0]
	busy := len(i.writes) > window
	i.mu.Unlock()
	switch {
	case r.Flags != 0:
		return i.settle(f.c, 0, end)
	case busy:
		return i.settle(f.c, oldest.from, oldest.to)
	}
	return nil
}

// end is after every offset.
const end = int64(1) << 62

// at returns the version.
func (i *Inode) at() uint64 {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.version
}

// settle waits for the writes to a range.
func (i *Inode) settle(c *Client, from, to int64) (failed error) {
	i.mu.Lock()
	var those []*pending
	for _, w := range i.writes {
		if w.from < to && from < w.to {
			those = append(those, w)
		}
	}
	i.mu.Unlock()
	if those == nil {
		return nil
	}
	for _, w := range those {
		_, err := w.wait()
		failed = cmp.Or(failed, err)
	}
	i.mu.Lock()
	i.err = cmp.Or(i.err, failed)
	i.writes = slices.DeleteFunc(i.writes, func(w *pending) bool { return slices.Contains(those, w) })
	i.mu.Unlock()
	c.Changed(i.Path())
	return failed
}

// Settle waits until all writes to the file have arrived, so that its attributes are those after them. It keeps an
// error for Flush.
func (i *Inode) Settle(c *Client) error { return i.settle(c, 0, end) }

// Resized says that attributes of the file were set.
func (i *Inode) Resized(s *Set) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if s.Size != nil {
		i.version++
	}
}

// Flush waits until all writes to the file have arrived, and returns the error of one that failed, once.
func (i *Inode) Flush(c *Client) error {
	err := i.settle(c, 0, end)
	i.mu.Lock()
	defer i.mu.Unlock()
	err, i.err = cmp.Or(err, i.err), nil
	return err
}

// On completes a request about the file. It uses an open one if the file has no path any more; to change its size, also
// if one is open for writing: the file's mode may have changed.
func (i *Inode) On(c *Client, r Request) Request {
	r.Path = i.Path()
	resizes := r.Set != nil && r.Set.Size != nil
	c.mu.Lock()
	now := c.server
	c.mu.Unlock()
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, f := range i.open {
		if f.s == now && (resizes && f.flags&FlagWrite != 0 || r.Path == "") {
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
	_, err := wait(ctx, f.s.start(Request{Op: OpFsync, Handle: f.handle}))
	return err
}

// Lock sets, removes or looks for a lock of the file. It returns EAGAIN if somebody else has it, or with patient waits
// for that. What it looked for is the first result.
func (f *File) Lock(ctx context.Context, l Lock, patient bool) (*Lock, error) {
	for {
		a, err := wait(ctx, f.s.start(Request{Op: OpLock, Handle: f.handle, Lock: &l}))
		if !patient || err != syscall.EAGAIN && err != syscall.EACCES {
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
