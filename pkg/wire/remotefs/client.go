package remotefs

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sync/singleflight"
)

const (
	// Fresh is how long a Client believes what it knows of attributes and directories.
	Fresh = time.Second
	// MaxWait is how long a request waits for a Server.
	MaxWait = 10 * time.Second
	// few and many are how many entries a Client asks for at once, 75 bytes each: List more, because who lists a
	// directory often goes through those below, too.
	few, many = 1024, maxListed
	// grace is how long a request goes on after its context has ended. Some programs have timers, and do not expect
	// that a file operation returns EINTR.
	grace = time.Second
)

// Client asks a Server. Its methods are safe for concurrent use. Their errors are syscall.Errno, with the numbers of
// Linux: EIO if there is no Server for a while (MaxWait), and for a file that was opened at an earlier one; EINTR if
// their context has ended.
type Client struct {
	mu      sync.Mutex
	server  *session          // nil: there is none
	served  chan struct{}     // closed when there is the next one
	dirs    map[string]*known // by path
	changes uint64            // how often this Client has changed something
	early   early
	looking singleflight.Group
}

// known is a directory that the Server has listed. Client.mu guards it.
type known struct {
	at time.Time
	// Links is 0 in attributes that have changed since. Mode is 0 if there may be another file, or none.
	entries map[string]Attr
	order   []string // the names, sorted; nil: not yet. Those of later changes are missing
}

// NewClient returns a Client without a Server.
func NewClient() *Client {
	return &Client{dirs: make(map[string]*known), served: make(chan struct{})}
}

// Serve lets the Client ask the Server at the other end of conn, until the stream or ctx ends. It owns conn. The Server
// of a later call takes the place of an earlier one.
func (c *Client) Serve(ctx context.Context, conn io.ReadWriteCloser) error {
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	s := &session{stream: newStream(conn), calls: make(map[uint64]*call), room: semaphore.NewWeighted(window * chunk)}
	use := func(before, now *session) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if now != nil {
			close(c.served)
			c.served = make(chan struct{})
		}
		if now != nil || c.server == before {
			c.server = now
		}
		c.changes++
		clear(c.dirs)
		c.early = early{files: make(map[string]earlyFile)}
	}
	use(nil, s)
	err := s.run()
	use(s, nil)
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("the remote files have gone: %w", err)
}

// session is one stream to a Server.
type session struct {
	*stream
	room *semaphore.Weighted // bytes of writes on the way

	mu    sync.Mutex
	last  uint64
	calls map[uint64]*call // by ID; nil: the stream has ended
	work  sync.WaitGroup
}

// call is a request on the way, for any number of waiters.
type call struct {
	done     chan struct{} // closed when the answer is there
	answer   Answer
	from, to int64 // the range of a write
}

// Text describes an error of a Client. The numbers are those of Linux, and mean something else on Windows.
func Text(err error) string {
	texts := map[error]string{syscall.Errno(1): "operation not permitted", syscall.Errno(5): "input/output error",
		syscall.Errno(13): "permission denied", syscall.Errno(16): "another program uses it",
		syscall.Errno(20): "not a directory", syscall.Errno(28): "no space left on device",
		syscall.Errno(30): "read-only file system"}
	return cmp.Or(texts[err], err.Error())
}

// Await returns the next value of a channel, or EINTR a while after ctx has ended.
func Await[T any](ctx context.Context, values <-chan T) (v T, err error) {
	select {
	case v = <-values:
		return v, nil
	case <-ctx.Done():
	}
	select {
	case v = <-values:
	case <-time.After(grace):
		err = syscall.EINTR
	}
	return v, err
}

// wait returns the answer, or its error.
func (w *call) wait(ctx context.Context) (Answer, error) {
	if _, err := Await(ctx, w.done); err != nil {
		return Answer{}, err
	}
	if w.answer.Errno != 0 {
		return Answer{}, syscall.Errno(w.answer.Errno)
	}
	return w.answer, nil
}

// run receives answers until the stream ends. It closes the stream.
func (s *session) run() error {
	var err error
	for err == nil {
		var a Answer
		err = s.receive(maxAnswer, &a)
		s.mu.Lock()
		if w := s.calls[a.ID]; err == nil && w != nil && len(a.Data) <= MaxData {
			delete(s.calls, a.ID)
			s.end(w, a)
		} else {
			err = cmp.Or(err, errFrame)
		}
		s.mu.Unlock()
	}
	s.Close()
	s.mu.Lock()
	for _, w := range s.calls {
		s.end(w, gone)
	}
	s.calls = nil
	s.mu.Unlock()
	s.work.Wait()
	return err
}

// gone is the answer of a Server that is not there.
var gone = Answer{Errno: uint32(syscall.EIO)}

// end gives an answer to those who wait for it.
func (s *session) end(w *call, a Answer) {
	w.answer = a
	s.room.Release(w.to - w.from)
	close(w.done)
}

// start sends a request, and does not keep its data. It waits while too much is on the way.
func (s *session) start(r Request) *call {
	size := int64(len(r.Data))
	w := &call{done: make(chan struct{}), from: r.Offset, to: r.Offset + size}
	if size > 0 { // others do not wait behind those that do
		_ = s.room.Acquire(context.Background(), size) // this context does not end
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.calls == nil {
		s.end(w, gone)
		return w
	}
	s.last++
	s.calls[s.last], r.ID = w, s.last
	frame, onTheWay := frame(&r, len(r.Data)), len(s.calls)
	s.work.Go(func() { s.send(frame, onTheWay) }) // nobody waits for a slow stream uninterruptibly
	return w
}

// ask sends a request and waits for its answer. It returns the session, too.
func (c *Client) ask(ctx context.Context, r Request) (*session, Answer, error) {
	for late := time.After(MaxWait); ; {
		c.mu.Lock()
		s, served := c.server, c.served
		c.mu.Unlock()
		if s != nil {
			a, err := s.start(r).wait(ctx)
			return s, a, err
		}
		select {
		case <-served:
		case <-ctx.Done():
			return nil, Answer{}, syscall.EINTR
		case <-late:
			return nil, Answer{}, syscall.EIO
		}
	}
}

// Do carries out a request that opens no file.
func (c *Client) Do(ctx context.Context, r Request) (Answer, error) {
	_, a, err := c.ask(ctx, r)
	if r.changes() && err == nil {
		c.changed(&r, a.Attr)
	}
	return a, err
}

// DoAttr is Do for a request whose answer has attributes. It uses Stat for those of a path.
func (c *Client) DoAttr(ctx context.Context, r Request) (Attr, error) {
	if r.Op == OpStat && r.Handle == 0 {
		return c.Stat(ctx, r.Path)
	}
	return attrIn(c.Do(ctx, r))
}

func attrIn(a Answer, err error) (Attr, error) {
	if a.Attr == nil {
		return Attr{}, cmp.Or(err, error(syscall.EIO))
	}
	return *a.Attr, err
}

// changed notes what a request has done.
func (c *Client) changed(r *Request, a *Attr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changes++
	for n, p := range []string{path.Dir(r.Path), path.Dir(r.To), r.Path, r.To} { // To: where a link leads perhaps
		switch e, ok := c.entry(p); {
		case ok && e.Links > 1 && !e.dir():
			clear(c.dirs) // the file has other names
		case n > 1 && (r.Op == OpRemove || r.Op == OpRename):
			c.set(p, Attr{})
			maps.DeleteFunc(c.dirs, func(d string, _ *known) bool { return d == p || strings.HasPrefix(d, p+"/") })
		case ok:
			e.Links = 0
			c.set(p, e)
		}
	}
	made := r.Path
	if r.Op == OpLink {
		made = r.To
	}
	if a != nil {
		c.set(made, *a)
	}
}

// Changed says that the content of a file has changed.
func (c *Client) Changed(p string) { c.changed(&Request{Op: OpWrite, Path: p}, nil) }

func (a Attr) dir() bool { return a.Mode&syscall.S_IFMT == syscall.S_IFDIR }

// entry returns what is known of a path. The caller holds mu.
func (c *Client) entry(p string) (a Attr, ok bool) {
	if d := c.dirs[path.Dir(p)]; d != nil {
		a, ok = d.entries[path.Base(p)]
	}
	return a, ok
}

// set notes attributes. The caller holds mu.
func (c *Client) set(p string, a Attr) {
	if d := c.dirs[path.Dir(p)]; d != nil && p != "." && p != "" {
		d.entries[path.Base(p)] = a
	}
}

// Stat returns the attributes of a path, or ENOENT. It lists the directory if it does not know it: programs seldom ask
// for one file.
func (c *Client) Stat(ctx context.Context, p string) (a Attr, err error) {
	if p != "." {
		var there bool
		err := c.look(ctx, path.Dir(p), few, func(d *known) bool {
			a, there = d.entries[path.Base(p)]
			return true
		})
		switch {
		case err == syscall.EACCES || err == syscall.EFBIG: // it cannot be listed
		case err != nil || a.Links > 0:
			return a, err
		case !there && len(path.Base(p)) > maxName:
			return a, syscall.ENAMETOOLONG
		case !there:
			return a, syscall.ENOENT
		}
	}
	return attrIn(c.Do(ctx, Request{Op: OpStat, Path: p}))
}

// List returns the entries of a directory, sorted by name. Attributes may be older than those of Stat, and their Links
// are 0 then.
func (c *Client) List(ctx context.Context, p string) (entries []Entry, err error) {
	err = c.look(ctx, p, many, func(d *known) bool {
		entries = nil
		for _, name := range slices.Sorted(maps.Keys(d.entries)) {
			entries = append(entries, Entry{Name: name, Attr: d.entries[name]})
		}
		return !slices.ContainsFunc(entries, func(e Entry) bool { return e.Attr.Mode == 0 })
	})
	return entries, err
}

// look calls see with a directory, with mu held. It asks the Server if what the Client knows is not fresh, or see
// returns false.
func (c *Client) look(ctx context.Context, p string, size int, see func(*known) bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.changes
	if d := c.dirs[p]; d != nil && time.Since(d.at) < Fresh && see(d) {
		return nil
	}
	c.mu.Unlock()
	// Nobody joins a request that began before a change: it may not show that.
	ask := func() (any, error) { return c.askDir(p, size, before) }
	a, err := Await(ctx, c.looking.DoChan(fmt.Sprint(before, p), ask))
	c.mu.Lock()
	if err = cmp.Or(err, a.Err); err == nil {
		see(a.Val.(*known))
	}
	return err
}

// askDir asks for a directory, and remembers what it gets unless the Client has changed something meanwhile.
func (c *Client) askDir(p string, size int, before uint64) (*known, error) {
	_, a, err := c.ask(context.Background(), Request{Op: OpList, Path: p, Size: size})
	if err != nil {
		return nil, err
	}
	all := make(map[string]*known, len(a.Dirs))
	for _, d := range a.Dirs {
		all[d.Path] = &known{at: time.Now(), entries: make(map[string]Attr, len(d.Entries))}
		for _, e := range d.Entries {
			if !validName(e.Name) {
				return nil, syscall.EIO
			}
			all[d.Path].entries[e.Name] = e.Attr
		}
	}
	if len(a.Dirs) == 0 || a.Dirs[0].Path != p {
		return nil, syscall.EIO
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.changes == before {
		maps.DeleteFunc(c.dirs, func(_ string, d *known) bool { return time.Since(d.at) >= Fresh })
		maps.Copy(c.dirs, all)
	}
	return all[p], nil
}
