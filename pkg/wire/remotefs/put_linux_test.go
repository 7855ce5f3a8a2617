package remotefs

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"kubevpn/internal/testenv"
)

// names returns the names in a directory.
func names(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return strings.Join(all, " ")
}

// A file or a link takes the place of another at once, and nothing stays beside it, whether it succeeds or not.
func TestPutReplacesAtOnce(t *testing.T) {
	dir := t.TempDir()
	c, _ := pair(t, dir, false)
	write(t, dir+"/file", "old")
	for _, err := range []error{os.Symlink("nowhere", dir+"/link"), os.Mkdir(dir+"/dir", 0o755), os.Chmod(dir+"/file", 0o400)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	set := &Set{Mode: new(uint32(0o640)), Modify: new(int64(1e18 + 5))}
	for _, tt := range []struct {
		r    Request
		want error
	}{
		{Request{Path: "file", Data: []byte("new"), Set: set}, nil},
		{Request{Path: "link", Data: []byte("new"), Set: set}, nil},
		{Request{Path: "to", To: "anywhere/../else"}, nil},
		{Request{Path: "to", To: "file"}, nil},
		{Request{Path: "empty", Set: set}, nil},
		{Request{Path: "dir", Data: []byte("new"), Set: set}, syscall.EISDIR},
		{Request{Path: "dir", To: "file"}, syscall.EISDIR},
		{Request{Path: "none/file", Data: []byte("new"), Set: set}, syscall.ENOENT},
		{Request{Path: "file/below", Data: []byte("new"), Set: set}, syscall.ENOTDIR},
		{Request{Path: "../file", Data: []byte("new"), Set: set}, syscall.EIO},
		{Request{Path: "..", Data: []byte("new"), Set: set}, syscall.EINVAL},
		{Request{Path: "unset", Data: []byte("new")}, syscall.EINVAL},
		{Request{Path: "file", Handle: 12345, Set: set}, syscall.EBADF},
	} {
		tt.r.Op = OpPut
		attr, err := c.DoAttr(t.Context(), tt.r)
		wantErr(t, tt.r.Path, err, tt.want)
		if err == nil && tt.r.Set != nil && (attr.Mode != syscall.S_IFREG|0o640 || attr.Modify != *set.Modify || attr.Size != uint64(len(tt.r.Data))) {
			t.Errorf("%s: %+v", tt.r.Path, attr)
		}
	}
	to, err := os.Readlink(dir + "/to")
	if got := content(t, c, "file") + content(t, c, "link") + to; got != "newnewfile" || err != nil {
		t.Errorf("there is %q, %v", got, err)
	}
	if got := names(t, dir); got != "dir empty file link to" {
		t.Errorf("there are %s", got)
	}
	if got := names(t, filepath.Dir(dir)); got != filepath.Base(dir) {
		t.Errorf("outside there are %s", got)
	}
}

// What is written aside has its name when it is put there, and is removed otherwise.
func TestFileAsideIsRemovedUnlessItIsPut(t *testing.T) {
	dir := t.TempDir()
	c := NewClient()
	stop := serve(t, c, dir, false, &pipe{})
	write(t, dir+"/file", "old")
	if err := os.Mkdir(dir+"/dir", 0o755); err != nil {
		t.Fatal(err)
	}
	aside := func(at string) (*File, *Inode) {
		i := &Inode{Path: func() string { return at }}
		f := open(t, c, i, at, FlagWrite|FlagAside)
		if err := f.Write([]byte("new"), 0); err != nil {
			t.Fatal(err)
		}
		return f, i
	}
	put := Request{Op: OpPut, Set: &Set{Mode: new(uint32(0o600)), Modify: new(int64)}}
	f, i := aside("file")
	if err := i.Flush(c); err != nil || content(t, c, "file") != "old" {
		t.Errorf("there is %q, %v", content(t, c, "file"), err)
	}
	attr, err := c.DoAttr(t.Context(), i.On(c, put))
	if err != nil || attr.Size != 3 || content(t, c, "file") != "new" {
		t.Errorf("%+v, %v", attr, err)
	}
	wantErr(t, "close", f.Close(), nil)

	f, i = aside("dir")
	_, err = c.Do(t.Context(), i.On(c, put))
	wantErr(t, "in the place of a directory", err, syscall.EISDIR)
	if _, err := c.Do(t.Context(), Request{Op: OpRemove, Path: "dir", Flags: FlagDir}); err != nil {
		t.Fatal(err)
	}
	_, err = c.Do(t.Context(), i.On(c, put)) // once more
	wantErr(t, "when it is gone", err, nil)
	wantErr(t, "close", f.Close(), nil)

	f, _ = aside("given-up")
	wantErr(t, "close", f.Close(), nil)
	testenv.Until(t, "it is removed", func() bool { return names(t, dir) == "dir file" })
	aside("cut-off")
	if got := names(t, dir); !strings.HasPrefix(got, AsidePrefix) {
		t.Errorf("there are %s", got)
	}
	stop()
	if got := names(t, dir); got != "dir file" {
		t.Errorf("there are %s", got)
	}
}

// Who serves the files is told, and a Server without an owner answers.
func TestSyncedIsTold(t *testing.T) {
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	server, err := NewServer(root, true)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var told []bool
	server.Synced = func(changes, all bool) {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, changes, all)
	}
	for n, want := range [][2]bool{{true, false}, {false, true}, {true, true}} {
		if _, err := server.do(&Request{Op: OpSynced, Path: ".", Flags: 1 + n}); err != nil {
			t.Fatal(err)
		}
		if got := [2]bool(told[2*n:]); got != want {
			t.Errorf("%d: %v", 1+n, got)
		}
	}
	server.close()
	c, _ := pair(t, t.TempDir(), false)
	if _, err := c.Do(t.Context(), Request{Op: OpSynced, Path: "."}); err != nil {
		t.Error(err)
	}
}
