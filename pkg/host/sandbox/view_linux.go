package sandbox

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A view builds the file system of the program from a copy of the laptop's, in the mount namespace of this process.
//
//	1  /proc of the new PID namespace
//	2  mirror /, if a mount needs a missing directory below it (pivot_root)
//	3  open the sources, before a mount can cover them
//	4  mount, ordered by path: over an existing path, or in a mirror of the nearest parent
//	5  resolv.conf, hosts and nsswitch.conf
//	6  make mirrors of read-only directories read-only
type view struct {
	log     func(level slog.Level, message string, attrs ...string)
	files   func(at string, device *os.File) // passes on the device of a remote mount
	mirrors []*mirror

	names map[string]mirrored // of resolv.conf and hosts, by path, except of those that a mount replaces
}

// mirrored is the name of a file in a mirror.
type mirrored struct {
	in *mirror
	at string
}

// The files of name resolution.
const (
	resolvConfFile = "/etc/resolv.conf"
	hostsFile      = "/etc/hosts"
)

// build mounts everything. trees are the sources of mounts of volumes; build closes them.
func (v *view) build(mounts []Mount, trees map[Mount]int, names bool) error {
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		v.log(slog.LevelDebug, "cannot mount /proc; the sandbox shows the laptop's", "err", err.Error())
	}
	mounts = slices.Clone(mounts)
	// A mount within another comes after it.
	slices.SortStableFunc(mounts, func(a, b Mount) int { return strings.Compare(a.Path+"/", b.Path+"/") })
	if err := v.mirrorRoot(mounts); err != nil {
		return err
	}
	sources := make([]int, len(mounts))
	for i, m := range mounts {
		fd, err := trees[m], error(nil)
		switch {
		case m.Remote:
			fd, err = v.remote(m)
		case m.Volume == "":
			fd, err = unix.Open(m.Source, unix.O_PATH|unix.O_CLOEXEC, 0)
		}
		if err != nil {
			return &fs.PathError{Op: "open", Path: cmp.Or(m.Source, m.Path), Err: err}
		}
		defer unix.Close(fd)
		sources[i] = fd
	}
	for i, m := range mounts {
		if err := v.mount(m, sources[i]); err != nil {
			return fmt.Errorf("mounting %s at %s: %w", m.Source+m.Volume, m.Path, err)
		}
	}
	if names {
		if err := v.nameResolution(mounts); err != nil {
			return fmt.Errorf("configuring name resolution in the sandbox: %w", err)
		}
	}
	for _, m := range v.mirrors {
		if err := m.finish(); err != nil {
			return err
		}
	}
	return nil
}

// mirrorRoot mirrors the root directory if a mount needs a missing directory below it.
func (v *view) mirrorRoot(mounts []Mount) error {
	for _, m := range mounts {
		p, err := locate(m.Path)
		if err != nil {
			return err
		}
		if p.dir == "/" && (len(p.rest) > 0 || p.file != "") {
			m, err := newRootMirror(v.log)
			if err != nil {
				return fmt.Errorf("mirroring /: %w", err)
			}
			v.mirrors = append(v.mirrors, m)
			return nil
		}
	}
	return nil
}

// mount mounts the file or directory of the descriptor source at m.Path.
func (v *view) mount(m Mount, source int) error {
	isDir := m.Remote // which would not answer before it is served
	if !isDir {
		var st unix.Stat_t
		if err := unix.Fstat(source, &st); err != nil {
			return err
		}
		isDir = st.Mode&unix.S_IFMT == unix.S_IFDIR
	}
	p, err := locate(m.Path)
	if err != nil {
		return err
	}
	// A directory replaces a file, and a file a directory.
	switch {
	case isDir && p.file != "":
		p.rest, p.file = []string{p.file}, ""
	case !isDir && p.file == "" && len(p.rest) == 0:
		if p.dir == "/" {
			return unix.EISDIR
		}
		p = location{dir: path.Dir(p.dir), rest: []string{path.Base(p.dir)}}
	}
	target := path.Join(p.dir, p.file)
	if len(p.rest) > 0 {
		if target, err = v.make(p, isDir); err != nil {
			return err
		}
	}
	if m.Volume != "" || m.Remote {
		err = unix.MoveMount(source, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH)
	} else {
		err = unix.Mount(descriptor(source), target, "", unix.MS_BIND|unix.MS_REC, "")
	}
	if err != nil {
		return err
	}
	if m.Remote {
		// Until it is served, and asked, the kernel takes the directory for one of root, which this user may not
		// change.
		_, err := os.Stat(target)
		return err
	}
	if m.ReadOnly {
		return makeReadOnly(target)
	}
	return nil
}

// remote returns a detached mount of a FUSE file system, whose device it passes on.
func (v *view) remote(m Mount) (mount int, err error) {
	device, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	defer device.Close()
	fsfd, err := unix.Fsopen("fuse", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fsfd)
	for key, value := range map[string]string{
		"source": "kubevpn", "rootmode": "40000", "fd": strconv.Itoa(int(device.Fd())),
		"user_id": strconv.Itoa(os.Geteuid()), "group_id": strconv.Itoa(os.Getegid()),
	} {
		if err := unix.FsconfigSetString(fsfd, key, value); err != nil {
			return 0, fmt.Errorf("setting %s of a FUSE file system: %w", key, err)
		}
	}
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return 0, fmt.Errorf("creating a FUSE file system: %w", err)
	}
	attributes := unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV
	if m.ReadOnly {
		attributes |= unix.MOUNT_ATTR_RDONLY
	}
	if mount, err = unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, attributes); err == nil {
		v.files(m.Path, device)
	}
	return mount, err
}

// make creates the missing elements of a location in a mirror; the last one is a directory or an empty file.
func (v *view) make(p location, isDir bool) (string, error) {
	m, err := v.mirrorOf(p.dir)
	if err != nil {
		return "", err
	}
	below := strings.Trim(strings.TrimPrefix(p.dir, m.path), "/")
	if below == "" {
		if err := m.reserve(p.rest[0]); err != nil {
			return "", err
		}
	}
	at := below
	for i, element := range p.rest {
		at = path.Join(at, element)
		if i == len(p.rest)-1 && !isDir {
			err = m.createFile(at, nil)
		} else if err = unix.Mkdirat(m.tree, at, 0o755); errors.Is(err, unix.EEXIST) {
			err = nil // created for another mount
		}
		if err != nil {
			return "", fmt.Errorf("creating %s in a mirror: %w", path.Join(m.path, at), err)
		}
	}
	return p.path(), nil
}

func (p location) path() string { return path.Join(p.dir, p.file, path.Join(p.rest...)) }

// mirrorOf returns the mirror that contains dir, or mirrors dir. dir has no symbolic links.
func (v *view) mirrorOf(dir string) (*mirror, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return nil, &fs.PathError{Op: "stat", Path: dir, Err: err}
	}
	for _, m := range v.mirrors {
		if m.device == st.Dev { // dir is m.path, or a directory that make created below it
			return m, nil
		}
	}
	m, err := newMirror(dir, v.log)
	if err != nil {
		return nil, fmt.Errorf("mirroring %s: %w", dir, err)
	}
	v.mirrors = append(v.mirrors, m)
	return m, nil
}

// nameResolution creates the files that make the program ask the nameservers of setNames, and none before. They are
// files of a mirror and not mounts: the kernel removes a mount when its mount point is replaced outside, as resolvers
// and DHCP clients do whenever the laptop changes networks.
func (v *view) nameResolution(mounts []Mount) error {
	const nsswitch = "/etc/nsswitch.conf"
	files := map[string]string{resolvConfFile: ""}
	for name, change := range map[string]func(string) string{
		nsswitch: hostsByDNS, hostsFile: func(text string) string { return text },
	} {
		if b, err := os.ReadFile(name); err == nil {
			files[name] = change(string(b))
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	v.names = map[string]mirrored{}
	for name, content := range files {
		if slices.ContainsFunc(mounts, func(m Mount) bool { return m.Path == name }) {
			continue
		}
		to, err := v.reserve(name)
		if err != nil {
			return err
		}
		if err := to.in.createFile(to.at, []byte(content)); err != nil {
			return err
		}
		v.names[name] = to
	}
	// glibc asks nscd first, if it runs.
	const nscd = "/run/nscd"
	if info, err := os.Stat(nscd); err == nil && info.IsDir() {
		return unix.Mount("tmpfs", nscd, "tmpfs", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, "mode=0755")
	}
	return nil
}

// reserve reserves the name of a file in a mirror.
func (v *view) reserve(name string) (mirrored, error) {
	p, err := locate(path.Dir(name))
	if err != nil {
		return mirrored{}, err
	}
	if len(p.rest) > 0 || p.file != "" {
		return mirrored{}, &fs.PathError{Op: "enter", Path: path.Dir(name), Err: unix.ENOTDIR}
	}
	m, err := v.mirrorOf(p.dir)
	if err != nil {
		return mirrored{}, err
	}
	if err := m.reserve(path.Base(name)); err != nil {
		return mirrored{}, err
	}
	return mirrored{m, path.Join(strings.Trim(strings.TrimPrefix(p.dir, m.path), "/"), path.Base(name))}, nil
}

// setNames makes the program ask network.DNS, and gives it network.Hosts. It replaces the files atomically.
func (v *view) setNames(network *Network) error {
	for name, content := range map[string]string{resolvConfFile: network.resolvConf(), hostsFile: network.hostsFile()} {
		to, ok := v.names[name]
		if !ok || content == "" {
			continue // a mount replaces it, or it stays
		}
		if err := to.in.replaceFile(to.at, []byte(content)); err != nil {
			return err
		}
	}
	return nil
}

// makeReadOnly makes a mount read-only and keeps its other flags: a user namespace may not clear flags of the laptop's
// mount, such as noexec or nodev.
func makeReadOnly(name string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(name, &st); err != nil {
		return err
	}
	flags := uintptr(unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY)
	for have, flag := range map[int64]uintptr{
		unix.ST_NOSUID: unix.MS_NOSUID, unix.ST_NODEV: unix.MS_NODEV, unix.ST_NOEXEC: unix.MS_NOEXEC,
		unix.ST_NOATIME: unix.MS_NOATIME, unix.ST_NODIRATIME: unix.MS_NODIRATIME, unix.ST_RELATIME: unix.MS_RELATIME,
	} {
		if int64(st.Flags)&have != 0 {
			flags |= flag
		}
	}
	return unix.Mount("", name, "", flags, "")
}

// descriptor returns a path that refers to the open file of fd.
func descriptor(fd int) string { return fmt.Sprintf("/proc/self/fd/%d", fd) }
