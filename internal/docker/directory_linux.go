package docker

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
)

// newDirectory makes a run's directory in the first of dirs that is in memory, and removes what earlier runs have left there.
func newDirectory(dirs []config.Paths, log *slog.Logger) (*directory, error) {
	var why []string
	for _, dir := range dirs {
		if err := inMemory(filepath.Dir(dir.RuntimeDir)); err != nil {
			why = append(why, err.Error())
			continue
		}
		if err := dir.MakeRuntimeDir(); err != nil {
			return nil, err
		}
		if err := inMemory(dir.RuntimeDir); err != nil {
			return nil, err
		}
		return makeDirectory(filepath.Join(dir.RuntimeDir, "docker"), log)
	}
	return nil, api.Errorf(api.ExitEngine, "there is no directory in memory for the pod's Secrets: %s", strings.Join(why, "; ")).
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

func makeDirectory(base string, log *slog.Logger) (*directory, error) {
	if err := os.MkdirAll(base, 0o700); err != nil {
		return nil, err
	}
	// Nobody sweeps a directory that has no lock yet.
	all, err := os.Open(base)
	if err != nil {
		return nil, err
	}
	defer all.Close()
	if err := unix.Flock(int(all.Fd()), unix.LOCK_EX); err != nil {
		return nil, fmt.Errorf("locking %s: %w", base, err)
	}
	sweep(base, log)
	var random [5]byte
	if _, err := rand.Read(random[:]); err != nil {
		return nil, err
	}
	d := &directory{base: base, id: hex.EncodeToString(random[:])}
	if err := os.Mkdir(d.path(), 0o700); err != nil {
		return nil, err
	}
	if d.lock, err = lock(d.path()); err == nil {
		err = errors.Join(open(d.path(controlDir)), open(d.path(volumesDir)))
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(d.path()))
	}
	return d, nil
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

// sweep removes what runs have left whose kubevpn and whose network container were killed.
func sweep(base string, log *slog.Logger) {
	entries, err := os.ReadDir(base)
	if err != nil {
		log.Warn("looking for what earlier runs have left", "err", err)
		return
	}
	for _, e := range entries {
		dir := filepath.Join(base, e.Name())
		if !validID(e.Name()) {
			continue
		}
		f, err := lock(dir)
		if errors.Is(err, unix.EWOULDBLOCK) {
			continue // it runs
		}
		if err == nil {
			err = errors.Join(os.RemoveAll(dir), f.Close())
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			log.Warn("removing what an earlier run has left", "directory", dir, "err", err)
		}
	}
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

// remove removes it. What is root's cannot be removed by others: that error is one of fs.ErrPermission.
func (d *directory) remove() error { return errors.Join(os.RemoveAll(d.path()), d.lock.Close()) }
