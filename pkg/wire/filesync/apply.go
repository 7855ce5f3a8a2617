package filesync

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// errHolds explains why a directory cannot become a file.
var errHolds = errors.New("it is a directory that contains files that are not from the laptop")

// receiver is one connection of a Target.
type receiver struct {
	target *Target
	w      *wire
	destination
	inRound bool
	round   Batch
	failed  []Failure // of this round
	current *incoming // the file that is being received, or nil
}

// incoming is a file whose content is being received.
type incoming struct {
	name string // on the wire
	path string // below the root
	entry
	temp string
	f    *os.File // nil: it could not be created or written, which was recorded, or it is in its place
}

// apply carries out a frame. Its error ends the connection; a failure with one path does not.
func (r *receiver) apply(k kind, payload []byte) error {
	r.inRound = true
	if r.current != nil {
		return r.applyContent(k, payload)
	}
	switch k {
	case kindEntry:
		name, e, err := parseEntry(payload)
		if err != nil {
			return err
		}
		if len(r.target.has) >= maxEntries {
			return fmt.Errorf("%w: more than %d paths", errProtocol, maxEntries)
		}
		path, err := r.local(name)
		if err != nil {
			return err
		}
		return r.receive(name, path, e)
	case kindRemove:
		path, err := r.local(string(payload))
		if err != nil {
			return err
		}
		r.remove(string(payload), path)
		return nil
	case kindEnd:
		if len(payload) != 1 {
			return fmt.Errorf("%w: a round without its end", errProtocol)
		}
		return r.endRound(payload[0] == 1)
	}
	return fmt.Errorf("%w: a frame of kind %d", errProtocol, k)
}

// applyContent carries out a frame about the content of the current file.
func (r *receiver) applyContent(k kind, payload []byte) error {
	c := r.current
	switch k {
	case kindData:
		if c.f != nil {
			if _, err := c.f.Write(payload); err != nil {
				r.fail(c.name, err)
				r.removeTemp()
			}
		}
		return nil
	case kindPut:
		if c.f != nil {
			r.stored(c.name, c.path, c.entry, r.put(c))
		}
		r.abandon()
		return nil
	case kindDiscard:
		r.abandon()
		return nil
	}
	return fmt.Errorf("%w: a frame of kind %d within a file", errProtocol, k)
}

// receive creates a directory or a link, or starts a file.
func (r *receiver) receive(name, path string, e entry) error {
	var err error
	switch e.kind {
	case file:
		r.current = &incoming{name: name, path: path, entry: e, temp: tempName(path)}
		if err := r.create(r.current); err != nil {
			r.fail(name, err)
		}
		return nil
	case dir:
		err = r.makeDir(path, e)
	case symlink:
		err = r.makeLink(name, path, e)
	default:
		return fmt.Errorf("%w: an entry of kind %q", errProtocol, e.kind)
	}
	r.stored(name, path, e, err)
	return nil
}

// stored records the result of an entry.
func (r *receiver) stored(name, path string, e entry, err error) {
	var now entry
	if err == nil {
		now, err = r.stat(path)
	}
	if err != nil {
		r.fail(name, err)
		return
	}
	r.target.has[name] = received{e, now}
	r.round.Files++
	r.round.Bytes += e.size
	r.target.done.Files++
	r.target.done.Bytes += e.size
}

func tempName(path string) string {
	return filepath.Join(filepath.Dir(path), tempPrefix+rand.Text())
}

// inParent calls do, which creates something in the directory of a path, and creates that directory if it is missing:
// the container may have removed it.
func (r *receiver) inParent(path string, do func() error) error {
	err := do()
	if errors.Is(err, fs.ErrNotExist) && r.root.MkdirAll(filepath.Dir(path), 0o755) == nil {
		err = do()
	}
	return err
}

// create creates the temporary file.
func (r *receiver) create(c *incoming) error {
	return r.inParent(c.path, func() (err error) {
		c.f, err = r.root.OpenFile(c.temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		return err
	})
}

// put moves a complete file into its place.
func (r *receiver) put(c *incoming) error {
	err := errors.Join(c.f.Chmod(c.perm), c.f.Close())
	if err == nil {
		err = r.root.Chtimes(c.temp, time.Time{}, time.Unix(0, c.mtime))
	}
	if err == nil {
		err = r.replace(c.name, c.path, c.temp)
	}
	if err == nil {
		c.f = nil
	}
	return err
}

// abandon ends the current file, and removes it unless it was put into its place.
func (r *receiver) abandon() {
	if r.current != nil {
		r.removeTemp()
		r.current = nil
	}
}

func (r *receiver) removeTemp() {
	c := r.current
	if c.f == nil {
		return
	}
	_ = c.f.Close() // it may be closed
	c.f = nil
	if err := r.root.Remove(c.temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.target.cfg.Logger.Warn("cannot remove a temporary file", "path", c.temp, "err", err)
	}
}

// replace renames a temporary file or link to the path of an entry.
func (r *receiver) replace(name, path, temp string) error {
	if info, err := r.root.Lstat(path); err == nil && info.IsDir() {
		if err := r.clear(name, path); err != nil {
			return err
		}
	}
	return r.root.Rename(temp, path)
}

// clear removes a directory and everything that a Source sent into it.
func (r *receiver) clear(name, path string) error {
	var below []string
	for other := range r.target.has {
		if strings.HasPrefix(other, name+"/") {
			below = append(below, other)
		}
	}
	slices.Sort(below)
	for _, other := range slices.Backward(below) {
		r.remove(other, other)
	}
	if err := r.root.Remove(path); err != nil {
		if r.holds(path) {
			return errHolds
		}
		return err
	}
	return nil
}

func (r *receiver) makeDir(path string, e entry) error {
	perm := e.perm | ownerAll
	info, err := r.root.Lstat(path)
	exists := err == nil && info.IsDir()
	if err == nil && !exists {
		if err := r.root.Remove(path); err != nil {
			return err
		}
	}
	if !exists {
		if err := r.inParent(path, func() error { return r.root.Mkdir(path, perm) }); err != nil {
			return err
		}
	}
	if exists && info.Mode().Perm() == perm {
		return nil
	}
	return r.root.Chmod(path, perm) // that of Mkdir is subject to the umask
}

func (r *receiver) makeLink(name, path string, e entry) error {
	temp := tempName(path)
	if err := r.inParent(path, func() error { return r.root.Symlink(e.link, temp) }); err != nil {
		return err
	}
	err := r.replace(name, path, temp)
	if err != nil {
		err = errors.Join(err, r.root.Remove(temp))
	}
	return err
}

// remove removes an entry that a Source sent as name; path is its path below the root. A directory that contains
// anything else stays.
func (r *receiver) remove(name, path string) {
	if _, ok := r.target.has[name]; !ok {
		return
	}
	switch err := r.root.Remove(path); {
	case err == nil:
		r.round.Removed++
		r.target.done.Removed++
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR), r.holds(path):
	default:
		r.fail(name, err)
		return
	}
	delete(r.target.has, name)
}

func (r *receiver) fail(name string, err error) {
	r.failed = append(r.failed, Failure{name, bareError(err)})
}
