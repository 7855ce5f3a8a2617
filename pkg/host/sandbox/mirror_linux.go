package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// A mirror is a tmpfs that covers a directory and shows its entries: it copies symbolic links and bind-mounts
// everything else. Mounts can add names to it that the directory does not contain.
type mirror struct {
	log      func(level slog.Level, message string, attrs ...string)
	path     string
	at       string // where the tmpfs is mounted: path, except while newRootMirror runs
	original int    // O_PATH: the mirrored directory
	tree     int    // O_PATH: the root of the tmpfs, through a private mount that stays writable
	device   uint64
	covered  map[string]int // O_PATH: entries that a mount hides from original
	follows  bool           // whether changes of original appear in the mirror
	empty    bool           // the user may not read original
	writable bool           // whether the program may create files in it

	shown    map[string]entryID // entries copied from original
	reserved map[string]bool    // names that belong to mounts and files of the sandbox
}

// entryID distinguishes an entry from a later one with the same name.
type entryID struct {
	kind   uint32
	device uint64
	inode  uint64
	target string // of a symbolic link
}

// newMirror mounts a mirror over dir.
func newMirror(dir string, log func(slog.Level, string, ...string)) (*mirror, error) {
	original, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	m := &mirror{log: log, path: dir, at: dir, original: original, follows: true}
	return m, m.fill()
}

// newRootMirror mirrors / and makes the mirror the root directory of this process. It unmounts the old root, so the
// mirror does not follow it.
func newRootMirror(log func(slog.Level, string, ...string)) (*mirror, error) {
	entries, err := os.ReadDir("/")
	if err != nil {
		return nil, err
	}
	// Mount the mirror on any directory first, except /proc, which descriptor needs.
	stage := slices.IndexFunc(entries, func(e fs.DirEntry) bool { return e.IsDir() && e.Name() != "proc" })
	if stage < 0 {
		return nil, errors.New("it contains no directory")
	}
	name := entries[stage].Name()
	covered, err := unix.Open("/"+name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(covered)
	original, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(original)
	m := &mirror{log: log, path: "/", at: "/" + name, original: original, covered: map[string]int{name: covered}}
	if err := m.fill(); err != nil {
		return nil, err
	}
	if err := os.Chdir(m.at); err != nil {
		return nil, err
	}
	// With the same directory for both arguments, pivot_root mounts the old root on the new one, where it can be
	// unmounted.
	if err := unix.PivotRoot(".", "."); err != nil {
		return nil, fmt.Errorf("pivot_root: %w", err)
	}
	if err := unix.Fchdir(original); err != nil {
		return nil, err
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return nil, fmt.Errorf("unmounting the old root: %w", err)
	}
	m.at = "/"
	return m, os.Chdir("/")
}

// fill mounts the tmpfs and adds the entries of the directory.
func (m *mirror) fill() error {
	m.shown, m.reserved = map[string]entryID{}, map[string]bool{}
	var st unix.Stat_t
	if err := unix.Fstat(m.original, &st); err != nil {
		return err
	}
	m.writable = unix.Access(descriptor(m.original), unix.W_OK) == nil
	mode := st.Mode & 0o7777
	if m.empty = unix.Access(descriptor(m.original), unix.R_OK|unix.X_OK) != nil; m.empty {
		mode, m.follows = 0o755, false // no entry can be shown; the program must reach the mounts in it
	}
	if err := unix.Mount("tmpfs", m.at, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV,
		fmt.Sprintf("mode=%04o", mode)); err != nil {
		return fmt.Errorf("mounting a tmpfs: %w", err)
	}
	tree, err := unix.OpenTree(unix.AT_FDCWD, m.at, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("cloning the mount of a tmpfs: %w", err)
	}
	m.tree = tree
	if err := unix.Fstat(tree, &st); err != nil {
		return err
	}
	m.device = st.Dev
	if m.empty {
		return nil
	}
	return m.sync()
}

// sync makes the mirror equal to the directory. It logs and omits an entry that it cannot show.
func (m *mirror) sync() error {
	dir, err := os.Open(descriptor(m.original))
	if err != nil {
		return err
	}
	names, err := dir.Readdirnames(-1)
	dir.Close()
	if err != nil {
		return err
	}
	present := make(map[string]bool, len(names))
	for _, name := range names {
		present[name] = true
		if m.reserved[name] {
			continue
		}
		if err := m.show(name); err != nil && !errors.Is(err, unix.ENOENT) { // ENOENT: removed meanwhile
			m.log(slog.LevelDebug, "entry not shown in the sandbox", "path", path.Join(m.path, name), "err",
				err.Error())
		}
	}
	for name := range m.shown {
		if !present[name] {
			if err := m.hide(name); err != nil {
				m.log(slog.LevelDebug, "removed entry still shown in the sandbox", "path", path.Join(m.path, name),
					"err", err.Error())
			}
		}
	}
	return nil
}

// show adds or replaces one entry.
func (m *mirror) show(name string) error {
	fd, ok := m.covered[name]
	if !ok {
		var err error
		if fd, err = unix.Openat(m.original, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0); err != nil {
			return err
		}
		defer unix.Close(fd)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	id := entryID{kind: st.Mode & unix.S_IFMT, device: st.Dev, inode: st.Ino}
	if id.kind == unix.S_IFLNK {
		buf := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(fd, "", buf)
		if err != nil {
			return err
		}
		id.target = string(buf[:n])
	}
	if have, ok := m.shown[name]; ok {
		if have == id {
			return nil
		}
		if err := m.hide(name); err != nil {
			return err
		}
	}
	if err := m.add(name, id, fd); errors.Is(err, unix.EEXIST) {
		return nil // created by the program
	} else if err != nil {
		return err
	}
	m.shown[name] = id
	return nil
}

func (m *mirror) add(name string, id entryID, fd int) error {
	var err error
	switch id.kind {
	case unix.S_IFLNK:
		return unix.Symlinkat(id.target, m.tree, name)
	case unix.S_IFDIR:
		err = unix.Mkdirat(m.tree, name, 0o755)
	default:
		err = m.createFile(name, nil)
	}
	if err != nil {
		return err
	}
	if err := unix.Mount(descriptor(fd), path.Join(m.at, name), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return errors.Join(err, m.remove(name, id))
	}
	return nil
}

// hide removes an entry.
func (m *mirror) hide(name string) error {
	id := m.shown[name]
	if id.kind != unix.S_IFLNK {
		err := unix.Unmount(path.Join(m.at, name), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: nothing is mounted any more
			return err
		}
	}
	delete(m.shown, name)
	if err := m.remove(name, id); !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

func (m *mirror) remove(name string, id entryID) error {
	flags := 0
	if id.kind == unix.S_IFDIR {
		flags = unix.AT_REMOVEDIR
	}
	return unix.Unlinkat(m.tree, name, flags)
}

// reserve keeps a name for a mount or file of the sandbox, and hides the entry that has it.
func (m *mirror) reserve(name string) error {
	m.reserved[name] = true
	if _, ok := m.shown[name]; ok {
		return m.hide(name)
	}
	return nil
}

func (m *mirror) createFile(name string, content []byte) error {
	fd, err := unix.Openat(m.tree, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.Write(content)
	return errors.Join(err, f.Close())
}

// replaceFile atomically replaces a file that createFile created.
func (m *mirror) replaceFile(name string, content []byte) error {
	next := name + ".next"
	if err := unix.Unlinkat(m.tree, next, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return &fs.PathError{Op: "remove", Path: next, Err: err}
	}
	if err := m.createFile(next, content); err != nil {
		return &fs.PathError{Op: "write", Path: next, Err: err}
	}
	if err := unix.Renameat(m.tree, next, m.tree, name); err != nil {
		return &fs.PathError{Op: "rename", Path: next, Err: err}
	}
	return nil
}

// finish makes the mirror read-only if the user may not write to the directory.
func (m *mirror) finish() error {
	if m.writable {
		level := slog.LevelWarn
		if os.Getuid() == 0 { // root may write everywhere, and rarely means to in /run or /etc
			level = slog.LevelInfo
		}
		m.log(level, "new files in this directory exist only inside the sandbox and end with it", "dir", m.path)
		return nil
	}
	return makeReadOnly(m.path)
}

// followPause is the pause after a sync, so that one sync covers many changes.
const followPause = 20 * time.Millisecond

// follow applies changes of the mirrored directories to the mirrors. It returns after an error.
func (v *view) follow() {
	if err := v.tryFollow(); err != nil {
		v.log(slog.LevelWarn, "the sandbox does not show later changes of directories on the laptop", "err",
			err.Error())
	}
}

func (v *view) tryFollow() error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return err
	}
	changes := os.NewFile(uintptr(fd), "inotify")
	defer changes.Close()
	var following []*mirror
	for _, m := range v.mirrors {
		if !m.follows {
			continue
		}
		const changed = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO
		if _, err := unix.InotifyAddWatch(fd, descriptor(m.original), changed|unix.IN_ONLYDIR); err != nil {
			return &fs.PathError{Op: "watch", Path: m.path, Err: err}
		}
		following = append(following, m)
	}
	events := make([]byte, 64<<10) // of any of them
	for len(following) > 0 {
		for _, m := range following { // at first too: changes between fill and the watch sent no event
			if err := m.sync(); err != nil {
				return &fs.PathError{Op: "follow", Path: m.path, Err: err}
			}
		}
		time.Sleep(followPause)
		if _, err := changes.Read(events); err != nil {
			return err
		}
	}
	return nil
}
