package docker

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/testenv"
)

// inShm is a directory in memory.
func inShm(t *testing.T) string {
	t.Helper()
	if inMemory("/dev/shm") != nil {
		t.Skip("SKIPPED: /dev/shm is no tmpfs")
	}
	dir, err := os.MkdirTemp("/dev/shm", "kubevpn-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// newRun is the directory of a run, beside which nothing is to be left.
func newRun(t *testing.T, p Place) *directory {
	t.Helper()
	d, left, err := makeDirectory(p, func(s string) { t.Error(s) })
	if err != nil || left != nil {
		t.Fatal(left, err)
	}
	return d
}

// as does something on a thread that is another user's meanwhile.
func as(t *testing.T, user uintptr, do func()) {
	t.Helper()
	become := func(effective uintptr) {
		for _, call := range []uintptr{unix.SYS_SETRESGID, unix.SYS_SETRESUID} { // of this thread alone, other than syscall.Setresuid
			if effective == 0 {
				call = unix.SYS_SETRESGID + unix.SYS_SETRESUID - call // in the opposite order
			}
			if _, _, err := unix.RawSyscall(call, effective, effective, 0); err != 0 {
				t.Fatal(err)
			}
		}
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	become(user)
	defer become(0)
	do()
}

// keeping serves the files of a new run, and gives the end that kubevpn has.
func keeping(t *testing.T) (*wire, *directory, <-chan error) {
	t.Helper()
	d := newRun(t, Place{Paths: config.Paths{RuntimeDir: inShm(t)}})
	near, far := net.Pipe()
	kept := make(chan error, 1)
	go func() { kept <- keepFiles(far, d.base, d.id) }()
	t.Cleanup(func() {
		near.Close()
		d.lock.Close()
	})
	return newWire(near), d, kept
}

func owner(t *testing.T, name string) (uid, gid uint32, mode fs.FileMode) {
	t.Helper()
	info, err := os.Stat(name)
	if err != nil {
		t.Fatal(err)
	}
	st := info.Sys().(*syscall.Stat_t)
	return st.Uid, st.Gid, info.Mode()
}

func TestKeepFiles(t *testing.T) {
	testenv.NeedRoot(t) // files get owners
	w, d, kept := keeping(t)
	ask := func(o order) report {
		t.Helper()
		r, err := w.ask(o)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	v := volume{Name: "keys", Points: []string{"in/it", "more"}, Group: pointer(int64(3000)), Files: []file{
		{Path: "password", Mode: 0o400, Data: []byte("one")}, {Path: "token", Mode: 0o600, Owner: 1000, Data: []byte("two")},
	}}
	ask(order{Volume: &v})
	ask(order{Volume: &volume{Name: "scratch", Empty: true}})
	for name, want := range map[string]struct {
		uid, gid uint32
		mode     fs.FileMode
	}{"keys/password": {0, 3000, 0o440}, "keys/token": {1000, 3000, 0o640}, "scratch": {0, 0, 0o777 | fs.ModeDir}} {
		if uid, gid, mode := owner(t, d.source(name, "")); uid != want.uid || gid != want.gid || mode != want.mode {
			t.Errorf("%s is %d:%d %v, want %+v", name, uid, gid, mode, want)
		}
	}
	for _, point := range v.Points {
		if _, _, mode := owner(t, d.source("keys", point)); !mode.IsDir() {
			t.Errorf("%s is %v", point, mode)
		}
	}
	// What is mounted is a file of this time, not a link that leads elsewhere later.
	at := d.source("keys", ask(order{Resolve: &position{"keys", "password"}}).Path)
	v.Files = v.Files[:1]
	v.Files[0].Data = []byte("three")
	ask(order{Volume: &v})
	if b, err := os.ReadFile(d.source("keys", "password")); err != nil || string(b) != "three" {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := os.Stat(at); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s, of the volume as it was: %v", at, err)
	}
	if _, err := os.Stat(d.source("keys", "token")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is gone: %v", err)
	}
	if _, err := w.ask(order{Resolve: &position{"keys", "token"}}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("resolving what is not there: %v", err)
	}
	if sub := ask(order{Resolve: &position{"scratch", "a/b"}}).Path; sub != "a/b" {
		t.Errorf("resolved to %q", sub)
	}
	if _, err := os.Stat(d.source("scratch", "a/b")); err != nil {
		t.Error(err)
	}
	for _, bad := range []order{{Volume: &volume{Name: "../x"}}, {Volume: &volume{Name: "x", Files: []file{{Path: "../y"}}}}, {Resolve: &position{"none", "x"}}} {
		if _, err := w.ask(bad); err == nil {
			t.Errorf("%+v was done", bad)
		}
	}
	w.conn.Close()
	if err := <-kept; err != nil {
		t.Error(err)
	}
	if err := removeFiles(d.base, d.id); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(d.base); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestRemoveFilesOfNoRun(t *testing.T) {
	base := t.TempDir()
	for _, id := range []string{"", ".", "..", "../x", "0123456789/..", "012345678Z"} {
		if err := removeFiles(base, id); err == nil {
			t.Errorf("%q was removed", id)
		}
	}
	if _, err := os.Stat(base); err != nil {
		t.Error(err)
	}
}

// What a run has left whose kubevpn is gone is removed by the next; what belongs to one that lives is not.
func TestSweep(t *testing.T) {
	p := Place{Paths: config.Paths{RuntimeDir: inShm(t)}}
	dead, alive := newRun(t, p), newRun(t, p)
	if err := os.WriteFile(filepath.Join(p.base(), "not-ours"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	dead.lock.Close()
	third := newRun(t, p)
	for path, want := range map[string]bool{dead.path(): false, alive.path(): true, third.path(): true, filepath.Join(p.base(), "not-ours"): true} {
		if _, err := os.Stat(path); (err == nil) != want {
			t.Errorf("%s: %v, want it there: %v", path, err, want)
		}
	}
	if err := errors.Join(alive.remove(), alive.close(), third.remove(), third.close()); err != nil {
		t.Error(err)
	}
}

// What is root's is left to who can remove it, and to nobody else meanwhile.
func TestSweepOfRoot(t *testing.T) {
	testenv.NeedRoot(t) // to become another user
	dir := inShm(t)
	const user = 12345
	if err := os.Chown(dir, user, user); err != nil {
		t.Fatal(err)
	}
	p := Place{Paths: config.Paths{RuntimeDir: filepath.Join(dir, "mine")}}
	var dead *directory
	as(t, user, func() {
		dead = newRun(t, p)
		dead.lock.Close()
	})
	if err := os.MkdirAll(filepath.Join(dead.path(volumesDir), "keys"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dead.path(volumesDir), "keys/password"), nil, 0o400); err != nil {
		t.Fatal(err)
	}
	as(t, user, func() {
		one, left, err := makeDirectory(p, func(s string) { t.Error(s) })
		if err != nil || len(left) != 1 || left[0].id != dead.id {
			t.Fatal(left, err)
		}
		other := newRun(t, p) // to which it is none of its business
		if err := removeFiles(p.base(), left[0].id); !errors.Is(err, fs.ErrPermission) {
			t.Error(err)
		}
		if err := errors.Join(left[0].lock.Close(), one.remove(), one.close(), other.remove(), other.close()); err != nil {
			t.Error(err)
		}
	})
	if left, err := os.ReadDir(p.base()); err != nil || len(left) != 1 {
		t.Errorf("left: %v, %v", left, err)
	}
	if err := removeFiles(p.base(), dead.id); err != nil {
		t.Error(err)
	}
}

// The last run leaves no directory behind, however many begin and end at once.
func TestNothingIsLeft(t *testing.T) {
	for _, own := range []bool{true, false} {
		p := Place{Paths: config.Paths{RuntimeDir: filepath.Join(inShm(t), "mine")}, Own: own}
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				for range 50 {
					d, left, err := makeDirectory(p, func(s string) { t.Error(s) })
					if err != nil || left != nil {
						t.Error(left, err)
						return
					}
					if _, err := os.Stat(d.path(volumesDir)); err != nil {
						t.Error(err)
					}
					if err := errors.Join(d.remove(), d.close()); err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
		if _, err := os.Stat(p.base()); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the directory of all runs: %v", err)
		}
		if _, err := os.Stat(p.RuntimeDir); errors.Is(err, fs.ErrNotExist) != own {
			t.Errorf("that above it, ours alone: %v: %v", own, err)
		}
	}
}

func TestDirectoryIsInMemory(t *testing.T) {
	disk := Place{Paths: config.Paths{RuntimeDir: "/proc/kubevpn"}}
	nobody := func(string) {}
	_, _, err := newDirectory([]Place{disk}, nobody)
	var e *api.Error
	if !errors.As(err, &e) || e.Code != api.ExitEngine || !strings.Contains(e.Message, "no tmpfs") {
		t.Errorf("%v", err)
	}
	dir := inShm(t)
	if err := os.Mkdir(filepath.Join(dir, "open"), 0o777); err != nil {
		t.Fatal(err)
	}
	old := unix.Umask(0o077)
	d, _, err := newDirectory([]Place{disk, {Paths: config.Paths{RuntimeDir: filepath.Join(dir, "open")}}, {Paths: config.Paths{RuntimeDir: filepath.Join(dir, "mine")}}}, nobody)
	unix.Umask(old)
	if err != nil {
		t.Fatal(err)
	}
	defer d.lock.Close()
	for path, want := range map[string]fs.FileMode{filepath.Join(dir, "mine"): 0o700, d.path(): 0o700, d.path(volumesDir): 0o755, d.path(controlDir): 0o755} {
		if _, _, mode := owner(t, path); mode.Perm() != want {
			t.Errorf("%s has mode %v, want %v", path, mode.Perm(), want)
		}
	}
}

// An image of another architecture is no riddle.
func TestForeignImage(t *testing.T) {
	c := container{name: "web", image: "app:1"}
	failed := fmt.Errorf("starting /app: %w", syscall.ENOEXEC)
	for architecture, want := range map[string]bool{"s390x": true, runtime.GOARCH: false} {
		c.of.Architecture = architecture
		e := api.AsError(c.notStarted(failed, false))
		if strings.Contains(e.Hint, architecture) != want || !strings.Contains(e.Message, "exec format error") {
			t.Errorf("%s: %s\n%s", architecture, e.Message, e.Hint)
		}
	}
}

func TestIsProxy(t *testing.T) {
	got := slices.DeleteFunc([]string{"HTTP_PROXY=x", "https_proxy=x", "NO_PROXY=", "PROXY=1", "MY_HTTP_PROXY=2", "all_proxy=x", "HOME=/"}, isProxy)
	if diff := cmp.Diff([]string{"PROXY=1", "MY_HTTP_PROXY=2", "HOME=/"}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestPrefixer(t *testing.T) {
	var out strings.Builder
	r := &run{plan: testPlan(t, Config{TTY: true})}
	p := r.prefixed("log", &out)
	for _, text := range []string{"one\ntw", "o\r\n", "three"} {
		if _, err := p.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	p.flush()
	if want := "[log] one\r\n[log] two\r\n[log] three\r\n"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}

func TestMerge(t *testing.T) {
	got := strings.Join(merge([]string{"PATH=/bin", "A=image"}, []string{"A=pod", "B=pod", "B=mine"}), " ")
	if want := "PATH=/bin A=pod B=mine"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
