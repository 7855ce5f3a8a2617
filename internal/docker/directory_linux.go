package docker

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
)

// newDirectory makes a run's directory in the first of places that is in memory and can be had, and removes what earlier runs have left
// there. left is what they have left that is root's: it is the caller's to remove.
func newDirectory(places []Place, warn func(string)) (d *directory, left []*directory, err error) {
	var why []string
	for _, p := range places {
		err := inMemory(filepath.Dir(p.RuntimeDir))
		if err == nil {
			if d, left, err = makeDirectory(p, warn); err == nil {
				return d, left, nil
			}
		}
		why = append(why, err.Error())
	}
	return nil, nil, api.Errorf(api.ExitEngine, "there is no directory in memory for the pod's Secrets: %s", strings.Join(why, "; ")).
		WithHint("mount a tmpfs at /dev/shm, or set XDG_RUNTIME_DIR to a directory of yours in one")
}

// inMemory refuses a directory whose files are on a disk.
func inMemory(dir string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return &fs.PathError{Op: "statfs", Path: dir, Err: err}
	}
	if st.Type != unix.TMPFS_MAGIC && st.Type != unix.RAMFS_MAGIC {
		return fmt.Errorf("%s is no tmpfs", dir)
	}
	return nil
}

// makeDirectory makes a run's directory while nobody sweeps, as it has no lock yet, and nobody removes the place.
func makeDirectory(p Place, warn func(string)) (_ *directory, left []*directory, err error) {
	all, err := enter(p)
	if err != nil {
		return nil, nil, err
	}
	defer all.Close()
	left = sweep(p, warn)
	var random [5]byte
	rand.Read(random[:]) // never fails (crypto/rand)
	d := &directory{place: p, base: p.base(), id: hex.EncodeToString(random[:])}
	if err = os.Mkdir(d.path(), 0o700); err == nil {
		d.lock, err = lock(d.path())
	}
	if err == nil {
		err = errors.Join(open(d.path(controlDir)), open(d.path(volumesDir)))
	}
	if err == nil {
		return d, left, nil
	}
	for _, one := range left {
		one.lock.Close()
	}
	return nil, nil, errors.Join(err, os.RemoveAll(d.path()), p.abandon())
}

// enterTries is how often a place may be gone again as soon as it was made.
const enterTries = 100

// enter makes the directory of all runs, and locks it.
func enter(p Place) (*os.File, error) {
	for tries := 1; ; tries++ {
		f, err := made(p)
		if err == nil || tries == enterTries || !errors.Is(err, fs.ErrNotExist) {
			return f, err
		}
		// The last of the other runs has ended meanwhile, and has removed it.
	}
}

// made is one try of enter's.
func made(p Place) (*os.File, error) {
	if err := p.MakeRuntimeDir(); err != nil {
		return nil, err
	}
	if err := inMemory(p.RuntimeDir); err != nil {
		return nil, err
	}
	if err := os.Mkdir(p.base(), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	return locked(p.base())
}

// locked opens the directory of all runs, and waits for its lock. An error of fs.ErrNotExist says that it was removed meanwhile.
func locked(base string) (*os.File, error) {
	f, err := os.Open(base)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("locking %s: %w", base, err), f.Close())
	}
	mine, err := f.Stat()
	if err == nil {
		var there fs.FileInfo
		if there, err = os.Stat(base); err == nil && !os.SameFile(mine, there) {
			err = &fs.PathError{Op: "lock", Path: base, Err: fs.ErrNotExist} // another one has been made
		}
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// abandon removes the directory of all runs, whose lock is held, if none is in it.
func (p Place) abandon() error {
	err := os.Remove(p.base())
	if err == nil && p.Own {
		err = os.Remove(p.RuntimeDir)
	}
	if errors.Is(err, fs.ErrExist) { // it is not empty
		return nil
	}
	return err
}

// open makes a directory that the users of containers may enter, which see it without those above it.
func open(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return os.Chmod(dir, 0o755) // whatever the umask
}

// lock takes the lock of a run's directory, if nobody has it.
func lock(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// sweep removes what runs have left whose kubevpn and whose network container were killed. left is what is root's, with its lock held:
// it is for nobody else to remove.
func sweep(p Place, warn func(string)) (left []*directory) {
	entries, err := os.ReadDir(p.base())
	if err != nil {
		warn(fmt.Sprintf("what earlier runs have left is not removed: %v", err))
		return nil
	}
	for _, e := range entries {
		if !validID(e.Name()) {
			continue
		}
		d := &directory{place: p, base: p.base(), id: e.Name()}
		d.lock, err = lock(d.path())
		if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, fs.ErrNotExist) {
			continue // it runs, or its network container has just removed it
		}
		if err == nil {
			if err = d.remove(); errors.Is(err, fs.ErrPermission) {
				left = append(left, d)
				continue
			}
			err = errors.Join(err, os.RemoveAll(d.path()), d.lock.Close())
		}
		if err != nil {
			warn(fmt.Sprintf("what an earlier run has left in %s is not removed: %v", d.path(), err))
		}
	}
	return left
}

func (d *directory) path(elements ...string) string {
	return filepath.Join(append([]string{d.base, d.id}, elements...)...)
}

// listen listens on a socket of the n-th container, which any user in there may connect to.
func (d *directory) listen(network string, n int, name string) (*net.UnixListener, error) {
	if err := open(d.control(n)); err != nil {
		return nil, err
	}
	at := filepath.Join(d.control(n), name)
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: at, Net: network})
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(at, 0o666); err != nil { // the directories above are the user's alone
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// remove removes the run's files. What is root's cannot be removed by others: that error is one of fs.ErrPermission.
func (d *directory) remove() error {
	return errors.Join(os.RemoveAll(d.path(controlDir)), os.RemoveAll(d.path(volumesDir)))
}

// close removes the directory, unless some of its files are left, and lets go of its lock. What no run needs any more is removed, too.
// Nobody sweeps meanwhile, and takes a lock that is removed.
func (d *directory) close() error {
	all, err := locked(d.base)
	if err == nil {
		defer all.Close()
		for _, name := range []string{d.path(lockName), d.path()} {
			if e := os.Remove(name); !errors.Is(e, fs.ErrNotExist) && !errors.Is(e, fs.ErrExist) {
				err = errors.Join(err, e)
			}
		}
		err = errors.Join(err, d.place.abandon())
	} else if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, d.lock.Close())
}
