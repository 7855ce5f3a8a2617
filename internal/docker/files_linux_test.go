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
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/podenv"
	"kubevpn/internal/testenv"
)

// keeping writes volumes in dir, and returns the end of the wire that kubevpn has.
func keeping(t *testing.T) (w *wire, dir string, kept <-chan error) {
	t.Helper()
	dir = t.TempDir()
	ours, theirs := net.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- keepFiles(theirs, dir) }()
	t.Cleanup(func() { ours.Close() })
	return newWire(ours), dir, ended
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
		if uid, gid, mode := owner(t, source(d, name, "")); uid != want.uid || gid != want.gid || mode != want.mode {
			t.Errorf("%s is %d:%d %v, want %+v", name, uid, gid, mode, want)
		}
	}
	for _, point := range v.Points {
		if _, _, mode := owner(t, source(d, "keys", point)); !mode.IsDir() {
			t.Errorf("%s is %v", point, mode)
		}
	}
	// What is mounted is a file of this time, not a link that leads elsewhere later.
	at := source(d, "keys", ask(order{Resolve: &position{"keys", "password"}}).Path)
	v.Files = v.Files[:1]
	v.Files[0].Data = []byte("three")
	ask(order{Volume: &v})
	if b, err := os.ReadFile(source(d, "keys", "password")); err != nil || string(b) != "three" {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := os.Stat(at); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s, of the volume as it was: %v", at, err)
	}
	if _, err := os.Stat(source(d, "keys", "token")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is gone: %v", err)
	}
	if _, err := w.ask(order{Resolve: &position{"keys", "token"}}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("resolving what is not there: %v", err)
	}
	if sub := ask(order{Resolve: &position{"scratch", "a/b"}}).Path; sub != "a/b" {
		t.Errorf("resolved to %q", sub)
	}
	if _, err := os.Stat(source(d, "scratch", "a/b")); err != nil {
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
}

// An image of another architecture gets an error that names it.
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

// A container that may write the directories on the way to a subPath could put a link there, which the engine follows as root.
func TestSubPathOfWhatAContainerWritesIsRefused(t *testing.T) {
	w, d, _ := keeping(t)
	if _, err := w.ask(order{Volume: &volume{Name: "scratch", Empty: true}}); err != nil {
		t.Fatal(err)
	}
	secret := t.TempDir()
	if err := os.WriteFile(filepath.Join(secret, "key"), []byte("root's"), 0o600); err != nil {
		t.Fatal(err)
	}
	var warned []string
	web := podenv.Mount{Path: "/cache", Volume: "scratch", SubPath: "a"}
	r := &run{Config: Config{Warn: func(s string) { warned = append(warned, s) }}, network: &networkContainer{files: w, volumes: d},
		mounts: map[string][]podenv.Mount{"web": {web}, "log": {{Path: "/scratch", Volume: "scratch"}}}}
	mounts, err := r.resolve(container{name: "web"})
	if err != nil {
		t.Fatal(err)
	}
	// The other container, which runs by now.
	if err := os.RemoveAll(source(d, "scratch", "a")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(secret, source(d, "scratch", "a")); err != nil {
		t.Fatal(err)
	}
	for _, m := range mounts {
		if b, err := os.ReadFile(filepath.Join(m.source, "key")); err == nil {
			t.Errorf("a mount at %s shows %q", m.path, b)
		}
	}
	if len(warned) != 1 || !strings.Contains(warned[0], "CVE-2017-1002101") || !strings.Contains(warned[0], "container log can write") {
		t.Errorf("warned %q", warned)
	}
}

func TestWriterOfWhatIsAboveASubPath(t *testing.T) {
	for _, tt := range []struct {
		name string
		log  podenv.Mount
		want string
	}{
		{"all of the volume", podenv.Mount{Volume: "scratch"}, "log"},
		{"a directory above", podenv.Mount{Volume: "scratch", SubPath: "a"}, "log"},
		{"all of it, read-only", podenv.Mount{Volume: "scratch", ReadOnly: true}, ""},
		{"another volume", podenv.Mount{Volume: "other"}, ""},
		{"the same directory", podenv.Mount{Volume: "scratch", SubPath: "a/b"}, ""},
		{"a directory beside", podenv.Mount{Volume: "scratch", SubPath: "a/bc"}, ""},
		{"a directory below", podenv.Mount{Volume: "scratch", SubPath: "a/b/c"}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			web := podenv.Mount{Volume: "scratch", SubPath: "a/b"}
			r := &run{mounts: map[string][]podenv.Mount{"web": {web}, "log": {tt.log}}}
			if got := r.writer("web", web); got != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
	r := &run{mounts: map[string][]podenv.Mount{"web": {{Volume: "scratch"}}}}
	if got := r.writer("log", podenv.Mount{Volume: "scratch"}); got != "" {
		t.Errorf("a mount without a subPath has the writer %s", got)
	}
	if got := r.writer("web", podenv.Mount{Volume: "scratch", SubPath: "a"}); got != "" {
		t.Errorf("a container is its own writer: %s", got)
	}
}
