package filesync

import (
	"errors"
	"io"
	"io/fs"
	"os"
)

// send writes a plan. It returns the entries that the target then has, unless it reports a failure.
func (se *sender) send(p plan, result *Batch) (map[string]entry, error) {
	sent := make(map[string]entry, len(p.send))
	for _, name := range p.send {
		e := se.tree.entries[name]
		if e.kind == file {
			ok, err := se.sendFile(name, &e, result)
			if err != nil {
				return nil, err
			}
			if !ok {
				continue
			}
		} else if err := se.w.sendEntry(name, e); err != nil {
			return nil, err
		}
		sent[name] = e
	}
	for _, name := range p.remove {
		if err := se.w.send(kindRemove, []byte(name)); err != nil {
			return nil, err
		}
	}
	complete := byte(0)
	if !se.completed && len(se.changing) == 0 {
		complete = 1
	}
	return sent, se.w.send(kindEnd, []byte{complete})
}

// sendFile sends a file as it is now, which it stores in e. It reports whether the target keeps it. The error is one of
// sending; one of reading goes to the result.
func (se *sender) sendFile(name string, e *entry, result *Batch) (kept bool, err error) {
	f, err := os.Open(se.tree.full(name))
	if err != nil {
		se.unread(name, *e, err, result)
		return false, nil
	}
	defer f.Close()
	now, err := statFile(f)
	if err != nil {
		se.unread(name, *e, err, result)
		return false, nil
	}
	*e = now
	se.tree.entries[name] = now
	if err := se.w.sendEntry(name, *e); err != nil {
		return false, err
	}
	to := &contentWriter{w: se.w}
	n, readErr := io.CopyBuffer(to, io.LimitReader(f, e.size), se.buf[:])
	if to.err != nil {
		return false, to.err
	}
	after, statErr := statFile(f)
	steady := readErr == nil && statErr == nil && n == e.size && after == now
	if steady {
		delete(se.changing, name)
	} else if readErr != nil {
		se.unread(name, *e, readErr, result)
	}
	if steady || readErr == nil && n == e.size && !se.later(name) {
		delete(se.changing, name)
		return true, se.w.send(kindPut, nil)
	}
	return false, se.w.send(kindDiscard, nil)
}

// errNoFile means that something else took the place of a file.
var errNoFile = errors.New("not a regular file any more")

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

// unread notes that a file could not be read. It marks a path that is gone or no regular file to be read again.
func (se *sender) unread(name string, e entry, err error, result *Batch) {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errNoFile) {
		se.tree.watch.mark(name, 0)
		return
	}
	se.rejected[name] = e
	result.Failed = addFailure(result.Failed, name, err)
}

// contentWriter sends its input as data frames. It keeps the error, because io.Copy does not tell it from a read error.
type contentWriter struct {
	w   *wire
	err error
}

func (c *contentWriter) Write(b []byte) (int, error) {
	c.err = c.w.send(kindData, b)
	return len(b), c.err
}
