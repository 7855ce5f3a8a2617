package osdns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
)

const (
	originalConf = "# home\nsearch home.example\nnameserver 192.0.2.1\n\n\n# a long tail of comments that makes the original longer than ours ....................\n"
	oursConf     = header + "\nnameserver 198.19.255.53\n"
)

// journalRole edits the file and undoes it. It kills itself at the step that the environment names.
func journalRole() int {
	j := &journal{path: os.Getenv("JOURNAL_PATH"), dir: os.Getenv("JOURNAL_DIR")}
	n, at := 0, os.Getenv("JOURNAL_KILL")
	j.step = func(step string) {
		n++
		if fmt.Sprintf("%d", n) == at {
			unix.Kill(os.Getpid(), unix.SIGKILL)
			select {}
		}
	}
	if err := j.edit([]byte(oursConf)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := j.close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Printf("%d", n)
	return 0
}

// describe returns everything about a path that undo restores.
func describe(t *testing.T, path string) string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); errors.Is(err, unix.ENOENT) {
		return "missing"
	} else if err != nil {
		t.Fatal(err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		target, err := os.Readlink(path)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("link to %s, uid %d, mtime %d", target, st.Uid, st.Mtim.Nano())
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	xattr := make([]byte, 100)
	n, _ := unix.Lgetxattr(path, "user.test", xattr)
	return fmt.Sprintf("mode %o, uid %d, gid %d, mtime %d, xattr %q\n%s", st.Mode, st.Uid, st.Gid, st.Mtim.Nano(), xattr[:max(n, 0)], b)
}

// fixtures returns functions that create each kind of resolv.conf.
func fixtures(t *testing.T) map[string]func(t *testing.T, path string) {
	old := time.Date(2024, 2, 29, 12, 0, 0, 123456789, time.UTC)
	return map[string]func(t *testing.T, path string){
		"file": func(t *testing.T, path string) {
			write(t, path, originalConf, 0o640)
			if os.Geteuid() == 0 {
				if err := os.Chown(path, 12345, 54321); err != nil {
					t.Fatal(err)
				}
			}
			_ = unix.Setxattr(path, "user.test", []byte("label"), 0) // not every file system supports it
			if err := os.Chtimes(path, old, old); err != nil {
				t.Fatal(err)
			}
		},
		"empty": func(t *testing.T, path string) { write(t, path, "", 0o644) },
		"symlink": func(t *testing.T, path string) {
			write(t, path+".target", originalConf, 0o644)
			symlink(t, filepath.Base(path)+".target", path, old)
		},
		"dangling": func(t *testing.T, path string) { symlink(t, "../run/nowhere", path, old) },
		"missing":  func(t *testing.T, path string) {},
	}
}

func write(t *testing.T, path, content string, mode fs.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
}

func symlink(t *testing.T, target, path string, when time.Time) {
	t.Helper()
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
	ts := []unix.Timespec{unix.NsecToTimespec(when.UnixNano()), unix.NsecToTimespec(when.UnixNano())}
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, path, ts, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		t.Fatal(err)
	}
}

func stateDir(t *testing.T) string {
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestUndoRestoresTheFile(t *testing.T) {
	for name, prepare := range fixtures(t) {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "resolv.conf")
			prepare(t, path)
			before := describe(t, path)
			j := &journal{path: path, dir: stateDir(t)}
			if err := j.edit([]byte(oursConf)); err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile(path)
			if err != nil || strings.TrimRight(string(got), "\n") != strings.TrimRight(oursConf, "\n") {
				t.Fatalf("the file contains %q, %v", got, err)
			}
			other := &journal{path: path, dir: j.dir}
			if err := other.edit([]byte(oursConf)); !errors.Is(err, errBusy) {
				t.Errorf("a second edit gives %v, want errBusy", err)
			}
			if did, err := Recover(Options{ResolvConf: path, StateDir: j.dir}); did != "" || err != nil {
				t.Errorf("Recover while the editor lives: %q, %v", did, err)
			}
			if err := j.close(); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(before, describe(t, path)); diff != "" {
				t.Errorf("-before +after\n%s", diff)
			}
			leftovers(t, dir, j.dir)
		})
	}
}

// leftovers fails the test if a directory contains more than resolv.conf, its target and the lock.
func leftovers(t *testing.T, dirs ...string) {
	t.Helper()
	for _, d := range dirs {
		entries, err := os.ReadDir(d)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			switch e.Name() {
			case "resolv.conf", "resolv.conf.target", "lock":
			default:
				t.Errorf("left behind: %s/%s", d, e.Name())
			}
		}
	}
}

// killAtEachStep runs journalRole so that it dies at step 1, 2, and so on, until it completes. After each run it
// checks that Recover restores the original.
func killAtEachStep(t *testing.T, prepare func() (path string), steps int) {
	t.Helper()
	for n := 1; ; n++ {
		path := prepare()
		before := describe(t, path)
		state := stateDir(t)
		cmd := child("journal")
		cmd.Env = append(cmd.Env, "JOURNAL_PATH="+path, "JOURNAL_DIR="+state, fmt.Sprintf("JOURNAL_KILL=%d", n))
		out, err := cmd.Output()
		did, rerr := Recover(Options{ResolvConf: path, StateDir: state})
		if rerr != nil {
			t.Errorf("killed at step %d: Recover: %v", n, rerr)
		}
		if diff := cmp.Diff(before, describe(t, path)); diff != "" {
			t.Errorf("killed at step %d, Recover said %q: -before +after\n%s", n, did, diff)
		}
		leftovers(t, filepath.Dir(path), state)
		if did, err := Recover(Options{ResolvConf: path, StateDir: state}); did != "" || err != nil {
			t.Errorf("Recover again: %q, %v", did, err)
		}
		if err != nil && cmd.ProcessState.ExitCode() != -1 {
			t.Fatalf("the role failed instead of being killed at step %d: %v", n, err)
		}
		if err == nil {
			if n != steps+1 {
				t.Errorf("the role has %s steps, want %d", out, steps)
			}
			return
		}
	}
}

func TestUndoWorksAfterAKillAtEachStep(t *testing.T) {
	steps := map[string]int{"file": 8, "empty": 8, "symlink": 7, "dangling": 7, "missing": 6}
	for name, prepare := range fixtures(t) {
		t.Run(name, func(t *testing.T) {
			killAtEachStep(t, func() string {
				path := filepath.Join(t.TempDir(), "resolv.conf")
				prepare(t, path)
				return path
			}, steps[name])
		})
	}
}

func TestUndoInPlaceWorksAfterAKillAtEachStep(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	// As in a container, resolv.conf is a mount point, which rename cannot replace.
	killAtEachStep(t, func() string {
		dir := t.TempDir()
		path := filepath.Join(dir, "resolv.conf")
		source := filepath.Join(t.TempDir(), "resolv.conf")
		fixtures(t)["file"](t, source)
		write(t, path, "", 0o644)
		testenv.Run(t, "mount --bind "+source+" "+path)
		t.Cleanup(func() { testenv.Run(t, "umount "+path) })
		return path
	}, 8)
}

func TestUndoKeepsTheFilesOfOthers(t *testing.T) {
	tests := map[string]func(t *testing.T, path string){
		"rewritten": func(t *testing.T, path string) { write(t, path, "nameserver 203.0.113.1\n", 0o600) },
		"renamed": func(t *testing.T, path string) {
			write(t, path+".target", "nameserver 203.0.113.1\n", 0o600)
			if err := os.Rename(path+".target", path); err != nil {
				t.Fatal(err)
			}
		},
		"removed": func(t *testing.T, path string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		},
		"linked": func(t *testing.T, path string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			symlink(t, "elsewhere", path, time.Unix(1, 2))
		},
	}
	for name, meddle := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "resolv.conf")
			fixtures(t)["file"](t, path)
			j := &journal{path: path, dir: stateDir(t)}
			if err := j.edit([]byte(oursConf)); err != nil {
				t.Fatal(err)
			}
			meddle(t, path)
			theirs := describe(t, path)
			if _, foreign, err := j.original(); !foreign || err != nil {
				t.Errorf("foreign %v, %v", foreign, err)
			}
			if err := j.close(); !errors.Is(err, errForeign) {
				t.Errorf("close gives %v, want errForeign", err)
			}
			if diff := cmp.Diff(theirs, describe(t, path)); diff != "" {
				t.Errorf("-theirs +after\n%s", diff)
			}
			leftovers(t, dir, j.dir)
		})
	}
}

func TestJournalRequiresAPrivateDirectory(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "resolv.conf")
	write(t, path, originalConf, 0o644)
	open := filepath.Join(dir, "open")
	if err := os.Mkdir(open, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(stateDir(t), filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"open", "link"} {
		j := &journal{path: path, dir: filepath.Join(dir, d)}
		if err := j.edit([]byte(oursConf)); err == nil || !strings.Contains(err.Error(), "is not a directory that only its owner") {
			t.Errorf("%s: %v", d, err)
		}
	}
	if got, _ := os.ReadFile(path); string(got) != originalConf {
		t.Errorf("edited without a journal: %q", got)
	}
}

func FuzzJournalFile(f *testing.F) {
	f.Add([]byte(`{"path":"/etc/resolv.conf","content":"YQ==","mode":420,"ours":"Yg=="}`))
	f.Add([]byte(`{`))
	f.Fuzz(func(t *testing.T, b []byte) {
		dir := t.TempDir()
		path := filepath.Join(dir, "resolv.conf")
		write(t, path, originalConf, 0o644)
		state := stateDir(t)
		j := &journal{path: path, dir: state}
		write(t, j.file(), string(b), 0o600)
		_, err := Recover(Options{ResolvConf: path, StateDir: state})
		got, rerr := os.ReadFile(path)
		if rerr != nil || string(got) != originalConf {
			t.Errorf("a journal of another file changed this one (Recover: %v): %q, %v", err, got, rerr)
		}
	})
}

// A journal that nobody can read must not keep all helpers from starting.
func TestRecoverSetsADamagedJournalAside(t *testing.T) {
	for name, content := range map[string]string{
		"empty": "", "cut": "{", "null": "null", "of another file": `{"path":"/etc/passwd","missing":true,"ours":""}`,
	} {
		t.Run(name, func(t *testing.T) {
			opt := testOptions(t, "nameserver 192.0.2.1\n")
			if err := os.Mkdir(opt.StateDir, 0o700); err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(opt.StateDir, "resolv.conf.json")
			write(t, file, content, 0o600)
			before, err := snapshot(opt.ResolvConf)
			if err != nil {
				t.Fatal(err)
			}
			did, err := Recover(opt)
			if want := "journal " + file + ".damaged: it is damaged and no longer used"; err != nil || !strings.HasPrefix(did, want) {
				t.Errorf("got %q, %v; want %s", did, err, want)
			}
			if now, err := snapshot(opt.ResolvConf); err != nil || !now.same(before) {
				t.Errorf("the file has changed: %v", err)
			}
			if aside, err := os.ReadFile(file + ".damaged"); err != nil || string(aside) != content {
				t.Errorf("set aside: %q, %v", aside, err)
			}
			if did, err := Recover(opt); did != "" || err != nil {
				t.Errorf("the second time: %q, %v", did, err)
			}
			write(t, file, content, 0o600) // an edit does not need Recover first
			j := &journal{path: opt.ResolvConf, dir: opt.StateDir}
			if err := j.edit([]byte("nameserver 192.0.2.2\n")); err != nil {
				t.Fatal(err)
			}
			if err := j.close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}
