package remotefs

import (
	"context"
	"maps"
	"path"
	"slices"
	"syscall"
	"time"
)

// maxEarly is how many small files are opened early: 64 of them are 4 MiB at most.
const maxEarly = 64

// early are small files that were opened before anybody asked for them. Programs such as git, grep and tar read the
// files of a directory in order, and would otherwise wait a round trip for each.
//
//	open d/a, open d/b ─▶ they are in order ─▶ OpOpen of d/c, d/d, ... ─▶ open d/c: its answer is there
//
// Client.mu guards it.
type early struct {
	last  string // the path that was opened last
	reach int    // how many files to open early
	files map[string]earlyFile
}

type earlyFile struct {
	*call
	s       *session
	changes uint64 // what the Client had changed by then
	at      time.Time
}

// take returns the answer for a file that was opened early, if it still is what the file has. It then opens more.
func (c *Client) take(ctx context.Context, p string) (*session, Answer, bool) {
	c.mu.Lock()
	f, ok := c.early.files[p]
	delete(c.early.files, p)
	c.openEarly(p)
	ok = ok && f.changes == c.changes && time.Since(f.at) < Fresh
	c.mu.Unlock()
	if f.call == nil {
		return nil, Answer{}, false
	}
	if ok {
		a, err := f.wait(ctx)
		if err == nil && a.Attr != nil && uint64(len(a.Data)) == a.Attr.Size {
			return f.s, a, true
		}
	}
	f.drop()
	return nil, Answer{}, false
}

// drop closes a file that nobody wanted.
func (f earlyFile) drop() {
	f.s.work.Go(func() {
		if <-f.done; f.answer.Handle != 0 {
			f.s.start(Request{Op: OpClose, Handle: f.answer.Handle})
		}
	})
}

// openEarly opens files that follow a path, if paths were opened in order. The caller holds mu.
func (c *Client) openEarly(p string) {
	e := &c.early
	for name, f := range e.files {
		if f.changes != c.changes || time.Since(f.at) >= Fresh {
			f.drop()
			delete(e.files, name)
		}
	}
	last := e.last
	e.last = p
	d := c.dirs[path.Dir(p)]
	if d == nil || c.server == nil {
		return
	}
	if d.order == nil {
		d.order = slices.Sorted(maps.Keys(d.entries))
	}
	n, _ := slices.BinarySearch(d.order, path.Base(p))
	before, _ := slices.BinarySearch(d.order, path.Base(last))
	switch {
	case path.Dir(last) == path.Dir(p) && before < n && n-before <= 3: // others are no files, or not wanted
		e.reach = min(2*e.reach+1, maxEarly)
	case path.Dir(last) == path.Dir(p) || n > 3: // another directory may go on
		e.reach = 0
	}
	for _, name := range d.order[min(n+1, len(d.order)):min(n+1+e.reach, len(d.order))] {
		next := path.Join(path.Dir(p), name)
		a := d.entries[name]
		_, asked := e.files[next]
		if asked || a.Links == 0 || a.Mode&syscall.S_IFMT != syscall.S_IFREG || a.Size > small {
			continue
		}
		r := Request{Op: OpOpen, Path: next, Flags: FlagRead, Size: small}
		e.files[next] = earlyFile{c.server.start(r), c.server, c.changes, time.Now()}
	}
}
