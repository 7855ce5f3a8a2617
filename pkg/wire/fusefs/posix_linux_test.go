package fusefs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	gofs "io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/remotefs"
)

var (
	_ fs.NodeLookuper   = (*node)(nil)
	_ fs.NodeGetattrer  = (*node)(nil)
	_ fs.NodeSetattrer  = (*node)(nil)
	_ fs.NodeReaddirer  = (*node)(nil)
	_ fs.NodeReadlinker = (*node)(nil)
	_ fs.NodeOpener     = (*node)(nil)
	_ fs.NodeCreater    = (*node)(nil)
	_ fs.NodeMkdirer    = (*node)(nil)
	_ fs.NodeUnlinker   = (*node)(nil)
	_ fs.NodeRmdirer    = (*node)(nil)
	_ fs.NodeRenamer    = (*node)(nil)
	_ fs.NodeLinker     = (*node)(nil)
	_ fs.NodeSymlinker  = (*node)(nil)
	_ fs.NodeStatfser   = (*node)(nil)
	_ fs.NodeFsyncer    = (*node)(nil)
	_ fs.FileReader     = (*file)(nil)
	_ fs.FileWriter     = (*file)(nil)
	_ fs.FileFlusher    = (*file)(nil)
	_ fs.FileReleaser   = (*file)(nil)
	_ fs.FileGetlker    = (*file)(nil)
	_ fs.FileSetlker    = (*file)(nil)
	_ fs.FileSetlkwer   = (*file)(nil)
)

// program names what another process does to files: see run.
const program = "KUBEVPN_TEST_PROGRAM"

// run does something to a file in a process of its own.
func run(args []string) error {
	f, err := os.OpenFile(args[1], os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	all := unix.Flock_t{Type: unix.F_WRLCK, Start: 0, Len: 10}
	switch args[0] {
	case "append":
		for range 50 {
			if _, err := f.WriteString("line\n"); err != nil {
				return err
			}
		}
		return nil
	case "flock":
		return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	case "fcntl":
		return unix.FcntlFlock(f.Fd(), unix.F_SETLK, &all)
	case "wait":
		return unix.FcntlFlock(f.Fd(), unix.F_SETLKW, &all)
	}
	return errors.New("unknown")
}

// another starts a process that does something to a file. The result receives what it printed.
func another(t *testing.T, what, path string) (*exec.Cmd, <-chan string) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), program+"="+what+" "+path)
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	result := make(chan string, 1)
	go func() {
		_ = cmd.Wait()
		result <- out.String()
	}()
	return cmd, result
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func stat(t *testing.T, path string) (st syscall.Stat_t) {
	t.Helper()
	must(t, syscall.Lstat(path, &st))
	return st
}

// Each operation has the outcome of a local directory, and the expected one.
func TestErrorsAreThoseOfPOSIX(t *testing.T) {
	long := strings.Repeat("n", 256)
	deep := strings.Repeat("d/", 2100)
	setup := func(d string) {
		must(t, os.Mkdir(d+"dir", 0o755), os.Mkdir(d+"full", 0o755), os.Mkdir(d+"full/in", 0o755),
			os.WriteFile(d+"file", []byte("text"), 0o644), os.Symlink("loop", d+"loop"),
			os.Symlink("nothing", d+"dangling"), os.Symlink("dir", d+"link"))
	}
	open := func(name string, flags int) func(string) error {
		return func(d string) error {
			fd, err := unix.Open(d+name, flags, 0o644)
			if err == nil {
				unix.Close(fd)
			}
			return err
		}
	}
	now := []unix.Timespec{{Sec: 1}, {Sec: 2}}
	far, local := t.TempDir(), t.TempDir()+"/"
	near := mounted(t, far) + "/"
	setup(near)
	setup(local)
	for what, c := range map[string]struct {
		do   func(d string) error
		want error
	}{
		"open of nothing":           {open("nothing", unix.O_RDONLY), unix.ENOENT},
		"open below a file":         {open("file/x", unix.O_RDONLY), unix.ENOTDIR},
		"open of a long name":       {open(long, unix.O_RDONLY), unix.ENAMETOOLONG},
		"create with a long name":   {open(long, unix.O_CREAT|unix.O_WRONLY), unix.ENAMETOOLONG},
		"open of a long path":       {open(deep, unix.O_RDONLY), unix.ENAMETOOLONG},
		"open of a loop":            {open("loop", unix.O_RDONLY), unix.ELOOP},
		"open of a link, nofollow":  {open("link", unix.O_NOFOLLOW), unix.ELOOP},
		"open dir for writing":      {open("dir", unix.O_WRONLY), unix.EISDIR},
		"open file as directory":    {open("file", unix.O_DIRECTORY), unix.ENOTDIR},
		"exclusive open of a file":  {open("file", unix.O_CREAT|unix.O_EXCL|unix.O_RDWR), unix.EEXIST},
		"exclusive open of a link":  {open("dangling", unix.O_CREAT|unix.O_EXCL|unix.O_RDWR), unix.EEXIST},
		"mkdir over a file":         {func(d string) error { return unix.Mkdir(d+"file", 0o755) }, unix.EEXIST},
		"mkdir over a dangling":     {func(d string) error { return unix.Mkdir(d+"dangling", 0o755) }, unix.EEXIST},
		"mkdir below nothing":       {func(d string) error { return unix.Mkdir(d+"nothing/x", 0o755) }, unix.ENOENT},
		"mkdir below a file":        {func(d string) error { return unix.Mkdir(d+"file/x", 0o755) }, unix.ENOTDIR},
		"mkdir with a long name":    {func(d string) error { return unix.Mkdir(d+long, 0o755) }, unix.ENAMETOOLONG},
		"rmdir of a full directory": {func(d string) error { return unix.Rmdir(d + "full") }, unix.ENOTEMPTY},
		"rmdir of a file":           {func(d string) error { return unix.Rmdir(d + "file") }, unix.ENOTDIR},
		"rmdir of a link":           {func(d string) error { return unix.Rmdir(d + "link") }, unix.ENOTDIR},
		"rmdir of nothing":          {func(d string) error { return unix.Rmdir(d + "nothing") }, unix.ENOENT},
		"rmdir of dot":              {func(d string) error { return unix.Rmdir(d + "dir/.") }, unix.EINVAL},
		"unlink of a directory":     {func(d string) error { return unix.Unlink(d + "dir") }, unix.EISDIR},
		"unlink of nothing":         {func(d string) error { return unix.Unlink(d + "nothing") }, unix.ENOENT},
		"rename of nothing":         {func(d string) error { return unix.Rename(d+"nothing", d+"x") }, unix.ENOENT},
		"rename to a full dir":      {func(d string) error { return unix.Rename(d+"dir", d+"full") }, unix.ENOTEMPTY},
		"rename file to dir":        {func(d string) error { return unix.Rename(d+"file", d+"dir") }, unix.EISDIR},
		"rename dir to file":        {func(d string) error { return unix.Rename(d+"dir", d+"file") }, unix.ENOTDIR},
		"rename below itself":       {func(d string) error { return unix.Rename(d+"full", d+"full/x") }, unix.EINVAL},
		"rename to a long name":     {func(d string) error { return unix.Rename(d+"file", d+long) }, unix.ENAMETOOLONG},
		"link over a file":          {func(d string) error { return unix.Link(d+"file", d+"dir") }, unix.EEXIST},
		"link of a directory":       {func(d string) error { return unix.Link(d+"dir", d+"x") }, unix.EPERM},
		"link of nothing":           {func(d string) error { return unix.Link(d+"nothing", d+"x") }, unix.ENOENT},
		"symlink over a file":       {func(d string) error { return unix.Symlink("x", d+"file") }, unix.EEXIST},
		"symlink with a long name":  {func(d string) error { return unix.Symlink("x", d+long) }, unix.ENAMETOOLONG},
		"truncate of a directory":   {func(d string) error { return unix.Truncate(d+"dir", 1) }, unix.EISDIR},
		"truncate of nothing":       {func(d string) error { return unix.Truncate(d+"nothing", 1) }, unix.ENOENT},
		"truncate to -1":            {func(d string) error { return unix.Truncate(d+"file", -1) }, unix.EINVAL},
		"chmod of nothing":          {func(d string) error { return unix.Chmod(d+"dangling", 0o600) }, unix.ENOENT},
		"chmod of a loop":           {func(d string) error { return unix.Chmod(d+"loop", 0o600) }, unix.ELOOP},
		"readlink of a file": {func(d string) error {
			_, err := unix.Readlink(d+"file", make([]byte, 10))
			return err
		}, unix.EINVAL},
		"utimes of nothing": {func(d string) error {
			return unix.UtimesNanoAt(unix.AT_FDCWD, d+"nothing", now, 0)
		}, unix.ENOENT},
		"chdir to a file": {func(d string) error { return unix.Chdir(d + "file") }, unix.ENOTDIR},
	} {
		if err := c.do(local); err != c.want {
			t.Errorf("%s: %v in a local directory", what, err)
		}
		if err := c.do(near); err != c.want {
			t.Errorf("%s: %v, and not %v", what, err, c.want)
		}
	}
	if a, b := tree(t, near), tree(t, local); a != b {
		t.Errorf("the files are\n%s\nand locally\n%s", a, b)
	}
}

func TestReadOnlyMount(t *testing.T) {
	far := t.TempDir()
	must(t, os.WriteFile(far+"/file", []byte("text"), 0o644), os.Mkdir(far+"/dir", 0o755))
	near := mounted(t, "ro:"+far)
	for what, err := range map[string]error{
		"open":     func() error { _, err := os.OpenFile(near+"/file", os.O_WRONLY, 0); return err }(),
		"create":   os.WriteFile(near+"/new", nil, 0o644),
		"mkdir":    os.Mkdir(near+"/new", 0o755),
		"remove":   unix.Unlink(near + "/file"),
		"rmdir":    unix.Rmdir(near + "/dir"),
		"rename":   os.Rename(near+"/file", near+"/new"),
		"link":     os.Link(near+"/file", near+"/new"),
		"symlink":  os.Symlink("file", near+"/new"),
		"truncate": os.Truncate(near+"/file", 0),
		"chmod":    os.Chmod(near+"/file", 0o600),
		"utimes":   os.Chtimes(near+"/file", time.Now(), time.Now()),
	} {
		if !errors.Is(err, syscall.EROFS) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if text, err := os.ReadFile(near + "/file"); err != nil || string(text) != "text" {
		t.Errorf("read %q, %v", text, err)
	}
}

func TestEffectsAreThoseOfPOSIX(t *testing.T) {
	far := t.TempDir()
	must(t, os.WriteFile(far+"/other", []byte("text"), 0o644), os.Chown(far+"/other", 12345, 12345))
	near := mounted(t, far)
	t.Run("changes of a directory set its times", func(t *testing.T) {
		d := near + "/times"
		must(t, os.Mkdir(d, 0o755))
		last := stat(t, d)
		for what, do := range map[string]func() error{
			"create":  func() error { return os.WriteFile(d+"/file", nil, 0o644) },
			"mkdir":   func() error { return os.Mkdir(d+"/dir", 0o755) },
			"symlink": func() error { return os.Symlink("x", d+"/link") },
		} {
			time.Sleep(5 * time.Millisecond) // the clock of file times
			must(t, do())
			now := stat(t, d)
			if now.Mtim.Nano() <= last.Mtim.Nano() || now.Ctim.Nano() <= last.Ctim.Nano() {
				t.Errorf("%s changed no time", what)
			}
			last = now
		}
		for what, do := range map[string]func() error{
			"link":   func() error { return os.Link(d+"/file", d+"/second") },
			"rename": func() error { return os.Rename(d+"/second", d+"/third") },
			"unlink": func() error { return os.Remove(d + "/link") },
			"rmdir":  func() error { return os.Remove(d + "/dir") },
		} {
			time.Sleep(5 * time.Millisecond)
			if what == "rename" {
				must(t, os.WriteFile(d+"/second", nil, 0o644))
			} else if what == "link" {
				_ = os.Remove(d + "/second")
			}
			must(t, do())
			if now := stat(t, d); now.Mtim.Nano() <= last.Mtim.Nano() {
				t.Errorf("%s changed no time", what)
			} else {
				last = now
			}
		}
	})
	t.Run("links are counted", func(t *testing.T) {
		a, b := near+"/a", near+"/b"
		must(t, os.WriteFile(a, []byte("text"), 0o644), os.Link(a, b))
		if x, y := stat(t, a), stat(t, b); x.Nlink != 2 || y.Nlink != 2 || x.Ino != y.Ino {
			t.Errorf("%d and %d links", x.Nlink, y.Nlink)
		}
		must(t, os.WriteFile(b, []byte("other"), 0o644))
		if text, err := os.ReadFile(a); err != nil || string(text) != "other" {
			t.Errorf("read %q, %v", text, err)
		}
		must(t, os.Remove(a))
		if x := stat(t, b); x.Nlink != 1 {
			t.Errorf("%d links", x.Nlink)
		}
	})
	t.Run("a removed file stays open", func(t *testing.T) {
		f, err := os.OpenFile(near+"/gone", os.O_RDWR|os.O_CREATE, 0o600)
		must(t, err)
		defer f.Close()
		_, err = f.WriteString("text")
		must(t, err, os.Remove(near+"/gone"), os.WriteFile(near+"/gone", []byte("another"), 0o600))
		_, err = f.WriteString(" more")
		must(t, err, f.Chmod(0o640), f.Truncate(7), f.Sync())
		info, err := f.Stat()
		must(t, err)
		text, err := io.ReadAll(io.NewSectionReader(f, 0, 100))
		if err != nil || string(text) != "text mo" || info.Mode() != 0o640 || info.Sys().(*syscall.Stat_t).Nlink != 0 {
			t.Errorf("%q, %v, %v", text, info.Mode(), err)
		}
	})
	t.Run("a file that was replaced at the other end stays open", func(t *testing.T) {
		must(t, os.WriteFile(near+"/log", []byte("old"), 0o644), os.WriteFile(near+"/again", []byte("old"), 0o644))
		f, err := os.Open(near + "/log")
		must(t, err)
		defer f.Close()
		must(t, os.WriteFile(far+"/new", []byte("replaced"), 0o644), os.Rename(far+"/new", far+"/log"))
		// The new file has the same inode number, perhaps.
		must(t, os.Remove(far+"/again"), os.WriteFile(far+"/again", []byte("NEW"), 0o644))
		time.Sleep(1500 * time.Millisecond) // until it is not fresh
		if info, err := f.Stat(); err != nil || info.Size() != 3 {
			t.Errorf("%v, %v", info, err)
		}
		for name, want := range map[string]string{"log": "replaced", "again": "NEW"} {
			if text, err := os.ReadFile(near + "/" + name); err != nil || string(text) != want {
				t.Errorf("%q, %v", text, err)
			}
		}
	})
	t.Run("a removed directory has no files", func(t *testing.T) {
		must(t, os.Mkdir(near+"/dir", 0o755))
		d, err := os.Open(near + "/dir")
		must(t, err, os.Remove(near+"/dir"))
		defer d.Close()
		if names, err := d.Readdirnames(-1); len(names) > 0 {
			t.Errorf("%v, %v", names, err)
		}
		fd, err := unix.Openat(int(d.Fd()), "a", unix.O_RDONLY, 0)
		if err != unix.ENOENT {
			t.Errorf("%d, %v", fd, err)
		}
	})
	t.Run("files are open while their directory moves", func(t *testing.T) {
		must(t, os.MkdirAll(near+"/from/sub", 0o755))
		f, err := os.Create(near + "/from/sub/file")
		must(t, err)
		defer f.Close()
		must(t, os.Rename(near+"/from", near+"/to"), os.Mkdir(near+"/from", 0o755))
		_, err = f.WriteString("text")
		must(t, err, f.Chmod(0o600), f.Sync())
		if text, err := os.ReadFile(near + "/to/sub/file"); err != nil || string(text) != "text" {
			t.Errorf("%q, %v", text, err)
		}
		if st := stat(t, near+"/to/sub/file"); st.Mode&0o777 != 0o600 {
			t.Errorf("mode %o", st.Mode)
		}
	})
	t.Run("modes and times", func(t *testing.T) {
		p := near + "/modes"
		must(t, os.WriteFile(p, nil, 0o666))
		defer syscall.Umask(syscall.Umask(0))
		must(t, os.WriteFile(near+"/open", nil, 0o666), os.Mkdir(near+"/wide", 0o777))
		if a, b := stat(t, near+"/open"), stat(t, near+"/wide"); a.Mode&0o7777 != 0o666 || b.Mode&0o7777 != 0o777 {
			t.Errorf("modes %o and %o", a.Mode, b.Mode)
		}
		must(t, unix.Chmod(p, 0o4751))
		if st := stat(t, p); st.Mode&0o7777 != 0o4751 {
			t.Errorf("mode %o", st.Mode)
		}
		at := []unix.Timespec{{Sec: 1_000_000_000, Nsec: 123_456_789}, {Nsec: unix.UTIME_OMIT}}
		before := stat(t, p)
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, p, at, 0))
		if st := stat(t, p); st.Atim.Nano() != 1_000_000_000_123_456_789 || st.Mtim != before.Mtim {
			t.Errorf("times %v and %v", st.Atim, st.Mtim)
		}
		must(t, os.Symlink("nothing", near+"/times-link"))
		at[1] = unix.Timespec{Sec: 5, Nsec: 7}
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, near+"/times-link", at, unix.AT_SYMLINK_NOFOLLOW))
		if st := stat(t, near+"/times-link"); st.Mtim.Nano() != 5_000_000_007 {
			t.Errorf("time %v", st.Mtim)
		}
		now := []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Nsec: unix.UTIME_NOW}}
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, p, now, 0))
		if st := stat(t, p); time.Since(time.Unix(0, st.Mtim.Nano())).Abs() > time.Minute {
			t.Errorf("time %v", st.Mtim)
		}
	})
	t.Run("owners", func(t *testing.T) {
		p := far + "/other"
		if st := stat(t, near+"/other"); st.Uid != uint32(os.Geteuid()) {
			t.Errorf("user %d", st.Uid)
		}
		if text, err := os.ReadFile(near + "/other"); err != nil || string(text) != "text" {
			t.Errorf("read %q, %v", text, err)
		}
		if err := unix.Chown(near+"/other", 1, -1); err != unix.EPERM {
			t.Errorf("chown: %v", err)
		}
		if err := unix.Chown(near+"/other", -1, 1); err != unix.EPERM {
			t.Errorf("chgrp: %v", err)
		}
		must(t, unix.Chown(near+"/other", os.Geteuid(), os.Getegid()))
		if st := stat(t, p); st.Uid != 12345 {
			t.Errorf("the owner is now %d", st.Uid)
		}
	})
	t.Run("directories have a list and can be written to the disk", func(t *testing.T) {
		must(t, os.Mkdir(near+"/many", 0o755))
		for n := range 2000 {
			must(t, os.WriteFile(fmt.Sprintf("%s/many/%d", far, n), nil, 0o644))
		}
		entries, err := os.ReadDir(near + "/many")
		if err != nil || len(entries) != 2000 {
			t.Errorf("%d entries, %v", len(entries), err)
		}
		d, err := os.Open(near + "/many")
		must(t, err, d.Sync(), d.Close())
		var st unix.Statfs_t
		if err := unix.Statfs(near, &st); err != nil || st.Blocks == 0 || st.Namelen != 255 {
			t.Errorf("%+v, %v", st, err)
		}
	})
	t.Run("names that are not UTF-8", func(t *testing.T) {
		must(t, os.WriteFile(near+"/\xff\xfe", nil, 0o644))
		entries, err := os.ReadDir(near)
		if err != nil || !slices.ContainsFunc(entries, func(e gofs.DirEntry) bool { return e.Name() == "\xff\xfe" }) {
			t.Errorf("%v, %v", entries, err)
		}
	})
}

func TestMemoryMappings(t *testing.T) {
	t.Parallel()
	far := t.TempDir()
	near := mounted(t, far)
	text := bytes.Repeat([]byte("0123456789abcdef"), 40_000)
	must(t, os.WriteFile(far+"/file", text, 0o644))
	f, err := os.OpenFile(near+"/file", os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	m, err := unix.Mmap(int(f.Fd()), 0, len(text), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)
	if !bytes.Equal(m, text) {
		t.Error("the mapping has other content")
	}
	copy(m[300_000:], "changed")
	must(t, unix.Msync(m, unix.MS_SYNC), unix.Munmap(m))
	copy(text[300_000:], "changed")
	if got, err := os.ReadFile(far + "/file"); err != nil || !bytes.Equal(got, text) {
		t.Errorf("the file has other content, %v", err)
	}
}

func TestAppendsOfTwoProcessesDoNotMix(t *testing.T) {
	t.Parallel()
	far := t.TempDir()
	near := mounted(t, far)
	_, a := another(t, "append", near+"/log")
	_, b := another(t, "append", near+"/log")
	if x, y := <-a, <-b; x != "<nil>" || y != "<nil>" {
		t.Errorf("%s, %s", x, y)
	}
	if text, err := os.ReadFile(far + "/log"); err != nil || string(text) != strings.Repeat("line\n", 100) {
		t.Errorf("%d bytes, %v", len(text), err)
	}
}

func TestLocksOfTwoProcesses(t *testing.T) {
	t.Parallel()
	near := mounted(t, t.TempDir())
	p := near + "/lock"
	f, err := os.OpenFile(p, os.O_RDWR|os.O_CREATE, 0o644)
	must(t, err)
	defer f.Close()
	does := func(what, want string) {
		t.Helper()
		if _, result := another(t, what, p); true {
			if got := <-result; got != want {
				t.Errorf("%s in another process: %s", what, got)
			}
		}
	}
	busy := syscall.EAGAIN.Error()
	must(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	does("flock", busy)
	must(t, unix.Flock(int(f.Fd()), unix.LOCK_UN))
	does("flock", "<nil>")
	must(t, unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: 10, Len: 10}))
	does("fcntl", "<nil>")
	must(t, unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: 5, Len: 1}))
	does("fcntl", busy)
	waiting, result := another(t, "wait", p)
	waits(t, waiting.Process.Pid)
	must(t, unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_UNLCK, Start: 5, Len: 1}))
	if got := <-result; got != "<nil>" {
		t.Errorf("waiting for a lock: %s", got)
	}
	must(t, unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: 5, Len: 1}))
	waiting, result = another(t, "wait", p)
	waits(t, waiting.Process.Pid)
	must(t, waiting.Process.Kill())
	select {
	case <-result:
	case <-time.After(5 * time.Second):
		t.Error("a process that waits for a lock cannot be killed")
	}
}

func TestInterruptEndsAnOperationThatIsNotAnswered(t *testing.T) {
	t.Parallel()
	near := mounted(t, "stuck:"+t.TempDir())
	var work sync.WaitGroup
	for _, what := range [][]string{{"cat", near + "/file"}, {"ls", near}, {"mkdir", near + "/dir"}} {
		cmd := exec.Command(what[0], what[1:]...)
		must(t, cmd.Start())
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		work.Go(func() {
			time.Sleep(100 * time.Millisecond)
			_ = cmd.Process.Signal(os.Interrupt)
			select {
			case <-ended:
			case <-time.After(5 * time.Second):
				t.Errorf("%v goes on", what)
			}
		})
	}
	work.Wait()
}

// A mount may end before it is served: the program has ended.
func TestMountThatHasEndedIsNoError(t *testing.T) {
	testenv.NeedRoot(t)
	at := t.TempDir()
	device, err := os.OpenFile("/dev/fuse", os.O_RDWR|unix.O_CLOEXEC, 0)
	must(t, err)
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d", device.Fd(), os.Geteuid(), os.Getegid())
	must(t, unix.Mount("kubevpn", at, "fuse", unix.MS_NOSUID|unix.MS_NODEV, options))
	must(t, unix.Unmount(at, unix.MNT_DETACH))
	if err := Serve(device, remotefs.NewClient()); err != nil {
		t.Error(err)
	}
	null, err := os.Open(os.DevNull)
	must(t, err)
	if err := Serve(null, remotefs.NewClient()); err == nil {
		t.Error("what is no mount is served")
	}
}

func TestKilledServer(t *testing.T) {
	t.Parallel()
	near, server := mountedBy(t, t.TempDir())
	must(t, os.WriteFile(near+"/file", []byte("text"), 0o644))
	f, err := os.OpenFile(near+"/file", os.O_RDWR, 0)
	must(t, err)
	must(t, server.Signal(syscall.SIGSTOP))
	for stopped := false; !stopped; time.Sleep(time.Millisecond) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", server.Pid))
		must(t, err)
		stopped = strings.Contains(string(text), ") T ")
	}
	result := make(chan error, 1)
	go func() {
		var st unix.Stat_t
		result <- unix.Stat(near+"/nothing", &st)
	}()
	time.Sleep(50 * time.Millisecond)
	must(t, server.Kill())
	gone := func(err error) bool {
		return errors.Is(err, syscall.ENOTCONN) || errors.Is(err, syscall.ECONNABORTED) || errors.Is(err, syscall.EIO)
	}
	select {
	case err := <-result:
		if !gone(err) {
			t.Errorf("the operation on the way: %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("the operation on the way goes on")
	}
	if _, err := os.Open(near + "/file"); !gone(err) {
		t.Errorf("open: %v", err)
	}
	if _, err := f.WriteAt([]byte("x"), 0); !gone(err) {
		t.Errorf("write: %v", err)
	}
	f.Close()
}

// waits returns when a thread of the process is within fcntl(2).
func waits(t *testing.T, pid int) {
	t.Helper()
	testenv.Eventually(t, 10*time.Second, func() error {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", pid))
		for _, file := range threads {
			if text, _ := os.ReadFile(file); bytes.HasPrefix(text, fmt.Appendf(nil, "%d ", unix.SYS_FCNTL)) {
				return nil
			}
		}
		return fmt.Errorf("no thread of %d waits: %w", pid, err)
	})
}
