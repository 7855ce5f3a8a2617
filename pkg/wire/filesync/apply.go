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

// errHolds is why a directory cannot become a file.
var errHolds = errors.New("it is a directory that contains files that are not from the laptop")

// receiver is one connection of a Target.
type receiver struct {
	target *Target
	w      *wire
	place
	inRound bool
	round   doneReport
	failed  []Failure // of this round
	current *incoming // the file that is being received, or nil
}

// incoming is a file whose content is being received.
type incoming struct {
	name string
	entry
	temp string
	f    *os.File // nil: it could not be created, which has been noted
}

// apply does what a frame says. Its error ends the connection; a failure with one path does not.
func (r *receiver) apply(k kind, payload []byte) error {
	r.inRound = true
	if r.current != nil {
		switch k {
		case kindData:
			r.write(payload)
			return nil
		case kindPut:
			r.finish()
			return nil
		case kindDiscard:
			r.abandon()
			return nil
		}
		return fmt.Errorf("%w: a frame of kind %d within a file", errProtocol, k)
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
		return r.receive(name, e)
	case kindRemove:
		name := string(payload)
		if err := checkPath(name); err != nil {
			return err
		}
		r.remove(name)
		return nil
	case kindEnd:
		if len(payload) != 1 {
			return fmt.Errorf("%w: a round without its end", errProtocol)
		}
		return r.endRound(payload[0] == 1)
	}
	return fmt.Errorf("%w: a frame of kind %d", errProtocol, k)
}

// receive creates a directory or a link, or starts a file.
func (r *receiver) receive(name string, e entry) error {
	path, err := r.local(name)
	switch e.kind {
	case file:
		r.current = &incoming{name: name, entry: e}
		if err == nil {
			err = r.create(path)
		}
		if err != nil {
			r.fail(name, err)
		}
		return nil
	case dir:
		if err == nil {
			err = r.makeDir(path, e)
		}
	case link:
		if err == nil {
			err = r.makeLink(name, path, e)
		}
	default:
		return fmt.Errorf("%w: an entry of kind %q", errProtocol, e.kind)
	}
	r.stored(name, path, e, err)
	return nil
}

// stored notes what became of an entry.
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

// create creates the temporary file of the current one.
func (r *receiver) create(path string) error {
	c := r.current
	c.temp = tempName(path)
	return r.inParent(path, func() (err error) {
		c.f, err = r.root.OpenFile(c.temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		return err
	})
}

func (r *receiver) write(b []byte) {
	if r.current.f == nil {
		return
	}
	if _, err := r.current.f.Write(b); err != nil {
		r.fail(r.current.name, err)
		r.removeTemp()
	}
}

// finish puts the current file into its place.
func (r *receiver) finish() {
	c := r.current
	defer r.abandon()
	if c.f == nil {
		return
	}
	path, err := r.local(c.name)
	if err == nil {
		err = errors.Join(c.f.Chmod(r.mode(path, c.perm)), c.f.Close())
	}
	if err == nil {
		err = r.root.Chtimes(c.temp, time.Time{}, time.Unix(0, c.mtime))
	}
	if err == nil {
		err = r.replace(c.name, path, c.temp)
	}
	if err == nil {
		c.f = nil
	}
	r.stored(c.name, path, c.entry, err)
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

// mode returns the permissions of a new file: those of the source's, or of the file that it replaces if the source has
// none.
func (r *receiver) mode(path string, perm fs.FileMode) fs.FileMode {
	if !r.noModes {
		return perm
	}
	if info, err := r.root.Lstat(path); err == nil && info.Mode().IsRegular() {
		return info.Mode().Perm()
	}
	return 0o644
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
		r.remove(other)
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
	if r.noModes {
		perm = 0o755
	}
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
	if r.noModes || exists && info.Mode().Perm() == perm {
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

// remove removes a path that a Source sent. A directory that contains anything else stays.
func (r *receiver) remove(name string) {
	if _, ok := r.target.has[name]; !ok {
		return
	}
	path, err := r.local(name)
	if err == nil {
		err = r.root.Remove(path)
	}
	switch {
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
