package osdns

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// journal edits one file, resolv.conf, so that the edit can be undone whenever the process ends.
//
//	           journal     temporary      rename                     remove
//	original ──────────▶ ──────────────▶ ────────▶ edited ▶ original ────────▶ original
//	         (fsync)      (fsync)         (fsync dir)    (the same way)  journal
//
// The process may be killed at each arrow. While there is a journal, undo sees from the file's content whether it is
// the original, edited, or another program's. It replaces only the edited one. If the file is a mount point, as in
// containers, rename cannot replace it, so the journal writes it in place. The edited content is then at least as long
// as the original: one write replaces all of it, and no reader sees a part.
//
// The journal holds a lock in the same directory from edit to undo, so that Recover does not touch the file of a
// running process. The kernel releases the lock when the process ends.
type journal struct {
	path string // of the file to edit
	dir  string // root's own: journal and lock
	lock *os.File
	last *entry
	step func(string) // tests: called after each step on disk
}

// errBusy means that another running kubevpn process has edited the file.
var errBusy = errors.New("another kubevpn process has edited it")

// errDamaged means that the journal is unreadable. undo has set it aside, and left the file as it is.
var errDamaged = errors.New("it is damaged and no longer used: look at resolv.conf")

// left reports whether undo left the file as it is, for good.
func left(err error) bool { return errors.Is(err, errForeign) || errors.Is(err, errDamaged) }

// errForeign means that another program has written the file meanwhile. The journal leaves it as it is.
var errForeign = errors.New("another program has changed it meanwhile: leaving its version")

func (j *journal) file() string     { return filepath.Join(j.dir, "resolv.conf.json") }
func (j *journal) lockFile() string { return filepath.Join(j.dir, "lock") }
func (j *journal) temporary() string {
	return filepath.Join(filepath.Dir(j.path), ".resolv.conf.kubevpn")
}

func (j *journal) done(step string) {
	if j.step != nil {
		j.step(step)
	}
}

// take locks the directory, and undoes the edit of a process that ended without Close.
func (j *journal) take() error {
	if j.lock != nil {
		return nil
	}
	if err := j.acquire(); err != nil {
		return err
	}
	if err := j.undo(); err != nil && !left(err) {
		j.release()
		return err
	}
	return nil
}

// acquire locks the directory. It creates the directory if necessary.
func (j *journal) acquire() error {
	if err := os.MkdirAll(j.dir, 0o700); err != nil {
		return err
	}
	if err := ownDirectory(j.dir); err != nil {
		return err
	}
	f, err := os.OpenFile(j.lockFile(), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("%s: %w", j.path, errBusy)
		}
		return err
	}
	j.lock = f
	return nil
}

func (j *journal) release() {
	if j.lock != nil {
		j.lock.Close()
		j.lock = nil
	}
}

// ownDirectory returns an error for a directory that another user owns or can write to.
func ownDirectory(dir string) error {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return &fs.PathError{Op: "lstat", Path: dir, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0 {
		return fmt.Errorf("%s is not a directory that only its owner, uid %d, can write to", dir, os.Geteuid())
	}
	return nil
}

// original returns the file's content without the edit; nil if there was no file. If foreign is true, another program
// has written the file since the edit.
func (j *journal) original() (content []byte, foreign bool, err error) {
	now, err := os.ReadFile(j.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, false, err
	}
	if j.last == nil {
		return now, false, nil
	}
	if !bytes.Equal(now, j.last.Ours) {
		return now, true, nil
	}
	return j.last.Content, false, nil
}

// edit replaces the file's content, and holds the lock until undo.
func (j *journal) edit(ours []byte) error {
	if err := j.take(); err != nil {
		return err
	}
	if j.last != nil {
		if err := j.undo(); err != nil && !left(err) {
			return err
		}
	}
	e, err := snapshot(j.path)
	if err != nil {
		j.release()
		return fmt.Errorf("reading %s: %w", j.path, err)
	}
	for len(ours) < len(e.Content) {
		ours = append(ours, '\n')
	}
	e.Ours = ours
	if err := j.write(e); err != nil {
		j.release()
		return fmt.Errorf("writing the journal: %w", err)
	}
	j.last = e
	j.done("journaled")
	if err := j.replace(ours, e, nil); err != nil {
		return errors.Join(fmt.Errorf("writing %s: %w", j.path, err), j.undo())
	}
	j.done("edited")
	return nil
}

// close undoes the edit and releases the lock. It reports errForeign if there was nothing to undo.
func (j *journal) close() error {
	if j.lock == nil {
		return nil
	}
	err := j.undo()
	if err == nil || left(err) {
		j.release()
	}
	return err
}

// undo restores the original if the file is the edited one, and removes the journal. The caller holds the lock.
func (j *journal) undo() error {
	e, err := j.read()
	if err != nil || e == nil {
		return err
	}
	if err := os.Remove(j.temporary()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	now, err := snapshot(e.Path)
	if err != nil {
		return fmt.Errorf("reading %s: %w", e.Path, err)
	}
	state := e.compare(now)
	if state == fileOurs {
		if err := e.restore(j); err != nil {
			return fmt.Errorf("restoring %s: %w", e.Path, err)
		}
	}
	j.done("restored")
	if err := os.Remove(j.file()); err != nil {
		return err
	}
	j.last = nil
	if err := syncDir(j.dir); err != nil {
		return err
	}
	j.done("forgotten")
	if state == fileForeign {
		return fmt.Errorf("%s: %w", e.Path, errForeign)
	}
	return nil
}

func (e *entry) restore(j *journal) error {
	switch {
	case e.Missing:
		if err := os.Remove(e.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	case e.Symlink != "":
		if err := os.Symlink(e.Symlink, j.temporary()); err != nil {
			return err
		}
		if err := errors.Join(os.Lchown(j.temporary(), e.UID, e.GID), e.setTimes(j.temporary())); err != nil {
			return err
		}
		j.done("temporary")
		if err := os.Rename(j.temporary(), e.Path); err != nil {
			return err
		}
	default:
		return j.replace(e.Content, e, e.setTimes)
	}
	return syncDir(filepath.Dir(e.Path))
}

// replace writes the file's content, and sets the entry's mode, owner and attributes. times also restores its times.
func (j *journal) replace(content []byte, e *entry, times func(path string) error) error {
	tmp := j.temporary()
	err := writeSync(tmp, content, func(f *os.File) error {
		mode, uid, gid := fs.FileMode(e.Mode), e.UID, e.GID
		if e.Missing || e.Symlink != "" {
			mode, uid, gid = 0o644, os.Geteuid(), os.Getegid()
		}
		if uid != os.Geteuid() || gid != os.Getegid() {
			if err := f.Chown(uid, gid); err != nil {
				return err
			}
		}
		for name, value := range e.Xattrs {
			// Best effort: a label that the file system does not take does not make DNS fail.
			_ = unix.Fsetxattr(int(f.Fd()), name, value, 0)
		}
		return f.Chmod(mode)
	})
	if err == nil && times != nil {
		err = times(tmp)
	}
	if err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	j.done("temporary")
	err = os.Rename(tmp, j.path)
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EXDEV) {
		if err := os.Remove(tmp); err != nil {
			return err
		}
		return j.overwrite(content, times)
	}
	if err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	j.done("renamed")
	return syncDir(filepath.Dir(j.path))
}

// overwrite writes a file in place: rename cannot replace a mount point.
func (j *journal) overwrite(content []byte, times func(path string) error) error {
	f, err := os.OpenFile(j.path, os.O_WRONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteAt(content, 0); err != nil {
		return err
	}
	j.done("overwritten")
	if err := f.Truncate(int64(len(content))); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if times != nil {
		return times(j.path)
	}
	return nil
}

func (e *entry) setTimes(path string) error {
	ts := []unix.Timespec{unix.NsecToTimespec(e.Atime), unix.NsecToTimespec(e.Mtime)}
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, path, ts, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &fs.PathError{Op: "utimensat", Path: path, Err: err}
	}
	return nil
}

func (j *journal) write(e *entry) error {
	b, err := json.Marshal(e)
	if err != nil {
		return err
	}
	tmp := j.file() + ".tmp"
	if err := writeSync(tmp, b, nil); err != nil {
		return err
	}
	if err := os.Rename(tmp, j.file()); err != nil {
		return err
	}
	return syncDir(j.dir)
}

// read returns the journal's entry; nil if there is none. It sets a damaged journal aside, which would otherwise keep
// the helpers of all users from starting.
func (j *journal) read() (*entry, error) {
	b, err := os.ReadFile(j.file())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	e := &entry{}
	if err := json.Unmarshal(b, e); err == nil && e.Path == j.path {
		return e, nil
	}
	aside := j.file() + ".damaged"
	if err := os.Rename(j.file(), aside); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("journal %s: %w", aside, errDamaged)
}

func writeSync(path string, content []byte, prepare func(*os.File) error) (err error) {
	// A killed process may have left a temporary file. O_EXCL ensures that this one is new.
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := f.Write(content); err != nil {
		return err
	}
	if prepare != nil {
		if err := prepare(f); err != nil {
			return err
		}
	}
	return f.Sync()
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
