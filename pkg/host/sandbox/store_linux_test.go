package sandbox

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"kubevpn/internal/testenv"
)

func TestStoreGivesFilesTheOwnersOfThePod(t *testing.T) {
	testenv.NeedRoot(t)
	dir := t.TempDir()
	s, err := openStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	write := func(v Volume) {
		t.Helper()
		if err := s.write(v); err != nil {
			t.Fatal(err)
		}
	}
	group := int64(3000)
	v := Volume{Name: "keys", Dirs: []string{"in/it", "more"}, Group: &group, Files: []File{
		{Path: "password", Mode: 0o400, Data: []byte("one")}, {Path: "token", Mode: 0o600, Owner: 1000, Data: []byte("two")},
	}}
	write(v)
	write(Volume{Name: "scratch", Empty: true})
	for name, want := range map[string]struct {
		uid, gid uint32
		mode     fs.FileMode
	}{
		"keys": {0, 3000, 0o755 | fs.ModeDir | fs.ModeSetgid}, "keys/password": {0, 3000, 0o440},
		"keys/token": {1000, 3000, 0o640}, "scratch": {0, 0, 0o777 | fs.ModeDir},
	} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if st := info.Sys().(*syscall.Stat_t); st.Uid != want.uid || st.Gid != want.gid || info.Mode() != want.mode {
			t.Errorf("%s is %d:%d %v, want %+v", name, st.Uid, st.Gid, info.Mode(), want)
		}
	}
	for _, mountPoint := range v.Dirs {
		if info, err := os.Stat(filepath.Join(dir, "keys", mountPoint)); err != nil || !info.IsDir() {
			t.Errorf("%s: %v, %v", mountPoint, info, err)
		}
	}
	at, err := s.resolve(position{"keys", "password"})
	if err != nil {
		t.Fatal(err)
	}
	v.Files = v.Files[:1]
	v.Files[0].Data = []byte("three")
	write(v)
	if b, err := os.ReadFile(filepath.Join(dir, "keys", "password")); err != nil || string(b) != "three" {
		t.Errorf("after an update: %q, %v", b, err)
	}
	for _, gone := range []string{at, "token"} {
		if _, err := os.Stat(filepath.Join(dir, "keys", gone)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s after an update: %v", gone, err)
		}
	}
	if _, err := s.resolve(position{"keys", "token"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("resolving a missing file: %v", err)
	}
	if at, err := s.resolve(position{"scratch", "a/b"}); err != nil || at != "a/b" {
		t.Errorf("resolved to %q, %v", at, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "scratch", "a/b")); err != nil {
		t.Error(err)
	}
	for _, bad := range []Volume{{Name: "../x"}, {Name: "x", Files: []File{{Path: "../y"}}}} {
		if err := s.write(bad); err == nil {
			t.Errorf("%+v was written", bad)
		}
	}
	if _, err := s.resolve(position{"none", "x"}); err == nil {
		t.Error("a path of an unknown volume was resolved")
	}
}

// A store writes only in its directory, for every input.
func FuzzStore(f *testing.F) {
	for _, seed := range []string{
		`{"name":"keys","files":[{"path":"password","mode":256,"data":"b25l"}],"dirs":["in/it"]}`,
		`{"name":"scratch","empty":true}`, `{"name":"../x"}`, `{"name":"x","files":[{"path":"../../y"}]}`,
		`{"name":"x","empty":true,"dirs":["../../z","/z"]}`, `{"name":".."}`, `{"name":"x"}`, `{`,
	} {
		f.Add([]byte(seed), "a/b")
		f.Add([]byte(seed), "../..")
	}
	f.Fuzz(func(t *testing.T, volume []byte, sub string) {
		outside := t.TempDir()
		volumes := filepath.Join(outside, "a", "b")
		if err := os.MkdirAll(volumes, 0o755); err != nil {
			t.Fatal(err)
		}
		s, err := openStore(volumes)
		if err != nil {
			t.Fatal(err)
		}
		defer s.root.Close()
		var v Volume
		if err := json.Unmarshal(volume, &v); err != nil {
			return
		}
		for range 2 { // the store may reject the volume
			_ = s.write(v)
			_, _ = s.resolve(position{v.Name, sub})
			v.Files = nil
		}
		for _, w := range s.writers {
			w.root.Close()
		}
		if err := filepath.WalkDir(outside, func(name string, _ fs.DirEntry, err error) error {
			if !strings.HasPrefix(volumes+"/", name+"/") && !strings.HasPrefix(name, volumes+"/") {
				t.Errorf("the store created %s", name)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	})
}
