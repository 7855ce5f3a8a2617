package docker

import (
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/testenv"
)

// keeping serves the files of a new run, and gives the end that kubevpn has.
func keeping(t *testing.T) (*wire, *directory, <-chan error) {
	t.Helper()
	d, err := makeDirectory(t.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
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
	v := volume{Name: "keys", Group: pointer(int64(3000)), Files: []file{
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
	base := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	dead, err := makeDirectory(base, log)
	if err != nil {
		t.Fatal(err)
	}
	alive, err := makeDirectory(base, log)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(base, "not-ours"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	dead.lock.Close()
	third, err := makeDirectory(base, log)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]bool{dead.path(): false, alive.path(): true, third.path(): true, filepath.Join(base, "not-ours"): true} {
		if _, err := os.Stat(path); (err == nil) != want {
			t.Errorf("%s: %v, want it there: %v", path, err, want)
		}
	}
	if err := errors.Join(alive.remove(), third.remove()); err != nil {
		t.Error(err)
	}
}

func TestDirectoryIsInMemory(t *testing.T) {
	disk := config.Paths{RuntimeDir: "/proc/kubevpn"}
	_, err := newDirectory([]config.Paths{disk}, slog.New(slog.DiscardHandler))
	var e *api.Error
	if !errors.As(err, &e) || e.Code != api.ExitEngine || !strings.Contains(e.Message, "no tmpfs") {
		t.Errorf("%v", err)
	}
	if inMemory("/dev/shm") != nil {
		t.Skip("SKIPPED: /dev/shm is no tmpfs")
	}
	dir, err := os.MkdirTemp("/dev/shm", "kubevpn-test-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	old := unix.Umask(0o077)
	d, err := newDirectory([]config.Paths{disk, {RuntimeDir: filepath.Join(dir, "mine")}}, slog.New(slog.DiscardHandler))
	unix.Umask(old)
	if err != nil {
		t.Fatal(err)
	}
	defer d.remove()
	for path, want := range map[string]fs.FileMode{d.path(): 0o700, d.path(volumesDir): 0o755, d.path(controlDir): 0o755} {
		if _, _, mode := owner(t, path); mode.Perm() != want {
			t.Errorf("%s has mode %v, want %v", path, mode.Perm(), want)
		}
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
