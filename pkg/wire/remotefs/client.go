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

	"golang.org/x/sync/singleflight"
)

const (
	// Fresh is how long a Client believes what it knows of attributes and directories.
	Fresh = time.Second
	// MaxWait is how long a request waits for a Server.
	MaxWait = 10 * time.Second
	// maxAsked is how many entries a Client asks for at once: an answer of about 200 KiB.
	maxAsked = 2048
)

// Client asks a Server. Its methods are safe for concurrent use. Their errors are syscall.Errno, with the numbers of
// Linux: EIO if there is no Server for a while (MaxWait), and for a file that was opened at an earlier one.
type Client struct {
	mu      sync.Mutex
	server  *session          // nil: there is none
	served  chan struct{}     // closed while there is one
	dirs    map[string]*known // by path
	changes uint64            // how often this Client has changed something

	looking singleflight.Group // requests for directories
}

// known is a directory that the Server has listed. Client.mu guards it.
type known struct {
	at      time.Time
	entries map[string]entry
}

// entry is a name in a directory. Of a stale one only the type is known.
type entry struct {
	Attr
	stale bool
}

// NewClient returns a Client without a Server.
func NewClient() *Client {
	return &Client{dirs: make(map[string]*known), served: make(chan struct{})}
}

// Serve lets the Client ask the Server at the other end of conn, until the stream or ctx ends. It owns conn.
func (c *Client) Serve(ctx context.Context, conn io.ReadWriteCloser) error {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	s := &session{conn: conn, w: newWire(conn, maxAnswer), waiting: make(map[uint64]chan<- Answer)}
	use := func(now *session) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.server = now
		if now != nil {
			close(c.served)
		} else {
			c.served = make(chan struct{})
		}
		c.changes++
		clear(c.dirs)
	}
	use(s)
	err := s.listen()
	use(nil)
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("the remote files have gone: %w", err)
}

// session is one stream to a Server.
type session struct {
	conn io.Closer
	w    *wire

	mu      sync.Mutex
	last    uint64
	waiting map[uint64]chan<- Answer // nil: the stream has ended
}

// listen receives answers until the stream ends.
func (s *session) listen() error {
	for {
		var a Answer
		if err := s.w.receive(&a); err != nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			for _, w := range s.waiting {
				close(w)
			}
			s.waiting = nil
			return err
		}
		s.mu.Lock()
		w := s.waiting[a.ID]
		delete(s.waiting, a.ID)
		s.mu.Unlock()
		if w != nil {
			w <- a // it has room for one
		}
	}
}

// start sends a request. The channel receives the answer, or is closed when the stream has ended.
func (s *session) start(r Request) <-chan Answer {
	answer := make(chan Answer, 1)
	s.mu.Lock()
	if s.waiting == nil {
		s.mu.Unlock()
		close(answer)
		return answer
	}
	s.last++
	r.ID = s.last
	s.waiting[r.ID] = answer
	s.mu.Unlock()
	if s.w.send(&r) != nil {
		s.conn.Close() // listen ends, and closes the channel
	}
	return answer
}

// wait returns an answer, or its error.
func wait(ctx context.Context, answer <-chan Answer) (Answer, error) {
	select {
	case a, ok := <-answer:
		switch {
		case !ok:
			return a, syscall.EIO
		case a.Errno != 0:
			return a, syscall.Errno(a.Errno)
		}
		return a, nil
	case <-ctx.Done():
		return Answer{}, syscall.EINTR
	}
}

// ask sends a request and waits for its answer. It returns the session, too.
func (c *Client) ask(ctx context.Context, r Request) (*session, Answer, error) {
	c.mu.Lock()
	served := c.served
	c.mu.Unlock()
	select {
	case <-served:
	case <-ctx.Done():
		return nil, Answer{}, syscall.EINTR
	case <-time.After(MaxWait):
		return nil, Answer{}, syscall.EIO
	}
	c.mu.Lock()
	s := c.server
	c.mu.Unlock()
	if s == nil {
		return nil, Answer{}, syscall.EIO // it has just gone
	}
	a, err := wait(ctx, s.start(r))
	return s, a, err
}

// Do carries out a request that opens no file.
func (c *Client) Do(ctx context.Context, r Request) (Answer, error) {
	_, a, err := c.ask(ctx, r)
	if r.changes() && err == nil {
		c.changed(&r, a.Attr)
	}
	return a, err
}

// DoAttr is Do for a request whose answer has attributes.
func (c *Client) DoAttr(ctx context.Context, r Request) (Attr, error) {
	a, err := c.Do(ctx, r)
	return attrIn(a, err)
}

func attrIn(a Answer, err error) (Attr, error) {
	switch {
	case err != nil:
		return Attr{}, err
	case a.Attr == nil:
		return Attr{}, syscall.EIO
	}
	return *a.Attr, nil
}

// changed notes what a request has done.
func (c *Client) changed(r *Request, a *Attr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changes++
	at := r.Path
	switch before, _ := c.entry(at); r.Op {
	case OpRemove:
		c.stale(at) // its other names
		c.forget(at)
	case OpRename:
		c.stale(r.To)
		c.forget(at)
		c.forget(r.To)
		c.set(r.To, entry{before.Attr, true})
		if before.Links == 0 { // it was not known
			delete(c.dirs, path.Dir(r.To))
		}
	case OpLink, OpSet, OpOpen:
		c.stale(at)
		at = cmp.Or(r.To, at)
	}
	if a != nil && at != "" {
		c.set(at, entry{*a, false})
	}
	if r.Op != OpSet {
		c.stale(path.Dir(r.Path))
	}
	if r.To != "" && r.Op != OpSymlink {
		c.stale(path.Dir(r.To))
	}
}

// Changed says that the content of a file has changed.
func (c *Client) Changed(p string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changes++
	c.stale(p)
}

// The methods below expect that the caller holds mu.

func (e entry) dir() bool { return e.Mode&syscall.S_IFMT == syscall.S_IFDIR }

func (c *Client) entry(p string) (e entry, ok bool) {
	if d := c.dirs[path.Dir(p)]; d != nil && p != "" {
		e, ok = d.entries[path.Base(p)]
	}
	return e, ok
}

func (c *Client) set(p string, e entry) {
	if d := c.dirs[path.Dir(p)]; d != nil && p != "." {
		d.entries[path.Base(p)] = e
	}
}

// stale says that attributes have changed: of each name that a file has.
func (c *Client) stale(p string) {
	e, ok := c.entry(p)
	switch {
	case ok && e.Links > 1 && !e.dir():
		clear(c.dirs)
	case ok:
		e.stale = true
		c.set(p, e)
	}
}

// forget forgets that there is a path, and what is below.
func (c *Client) forget(p string) {
	e, ok := c.entry(p)
	if !ok {
		return
	}
	delete(c.dirs[path.Dir(p)].entries, path.Base(p))
	if e.dir() {
		maps.DeleteFunc(c.dirs, func(d string, _ *known) bool { return d == p || strings.HasPrefix(d, p+"/") })
	}
}

// Stat returns the attributes of a path, or ENOENT. It lists the directory if it does not know it: programs seldom ask
// for one file.
func (c *Client) Stat(ctx context.Context, p string) (Attr, error) {
	if p != "." {
		var e entry
		var there bool
		err := c.look(ctx, path.Dir(p), func(d *known) { e, there = d.entries[path.Base(p)] })
		switch {
		case err == nil && !there:
			return Attr{}, syscall.ENOENT
		case err == nil && !e.stale:
			return e.Attr, nil
		}
	}
	c.mu.Lock()
	before := c.changes
	c.mu.Unlock()
	a, err := c.DoAttr(ctx, Request{Op: OpStat, Path: p})
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil && c.changes == before {
		c.set(p, entry{a, false})
	}
	return a, err
}

// List returns the entries of a directory, sorted by name. Attributes may be older than those of Stat.
func (c *Client) List(ctx context.Context, p string) (entries []Entry, err error) {
	err = c.look(ctx, p, func(d *known) {
		for _, name := range slices.Sorted(maps.Keys(d.entries)) {
			entries = append(entries, Entry{name, d.entries[name].Attr})
		}
	})
	return entries, err
}

// look calls see with a directory, with mu held. It asks the Server if what the Client knows is not fresh.
func (c *Client) look(ctx context.Context, p string, see func(*known)) error {
	c.mu.Lock()
	before := c.changes
	if d := c.dirs[p]; d != nil && time.Since(d.at) < Fresh {
		defer c.mu.Unlock()
		see(d)
		return nil
	}
	c.mu.Unlock()
	// Nobody joins a request that began before a change: it may not show that.
	answer := c.looking.DoChan(fmt.Sprint(before, p), func() (any, error) { return c.askDir(p, before) })
	select {
	case a := <-answer:
		if a.Err != nil {
			return a.Err
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		see(a.Val.(*known))
		return nil
	case <-ctx.Done():
		return syscall.EINTR
	}
}

// askDir asks for a directory, and remembers what it gets unless the Client has changed something meanwhile.
func (c *Client) askDir(p string, before uint64) (*known, error) {
	_, a, err := c.ask(context.Background(), Request{Op: OpList, Path: p, Size: maxAsked})
	if err != nil {
		return nil, err
	}
	if len(a.Dirs) == 0 || a.Dirs[0].Path != p {
		return nil, syscall.EIO
	}
	now := time.Now()
	all := make([]*known, len(a.Dirs))
	for n, d := range a.Dirs {
		all[n] = &known{at: now, entries: make(map[string]entry, len(d.Entries))}
		for _, e := range d.Entries {
			if validName(e.Name) {
				all[n].entries[e.Name] = entry{e.Attr, false}
			}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.changes == before {
		maps.DeleteFunc(c.dirs, func(_ string, d *known) bool { return now.Sub(d.at) >= Fresh })
		for n, d := range a.Dirs {
			c.dirs[d.Path] = all[n]
		}
	}
	return all[0], nil
}
