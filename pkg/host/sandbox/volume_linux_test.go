package sandbox_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/sandbox"
)

// A volume is at its path, changes as a whole while the program runs, and leaves nothing on the laptop's disk.
func TestVolumeIsInMemoryAndChangesAsAWhole(t *testing.T) {
	for _, path := range []string{"/sandbox-test/config", "/etc/sandbox-test/config", filepath.Join(t.TempDir(), "config")} {
		cfg := sh(fmt.Sprintf(`stat -f -c %%T %[1]s; ls %[1]s; stat -L -c '%%a %%u' %[1]s/key; cat %[1]s/deep/er; cat /sandbox-test/one; (echo x >%[1]s/own) 2>&- || echo no; echo x >/sandbox-test/empty/own && echo yes
while sleep 0.02; do echo $(cat %[1]s/key %[1]s/other 2>&1); done`, path),
			sandbox.Mount{Path: path, Volume: "config", ReadOnly: true},
			sandbox.Mount{Path: "/sandbox-test/one", Volume: "config", SubPath: "deep/er"},
			sandbox.Mount{Path: "/sandbox-test/empty", Volume: "empty", SubPath: "made/here"})
		cfg.Volumes = []sandbox.Volume{
			{Name: "config", Files: []sandbox.File{{Path: "key", Mode: 0o440, Data: []byte("one\n")}, {Path: "deep/er", Mode: 0o644, Data: []byte("deep\n")}}},
			{Name: "empty"},
		}
		r := start(t, cfg)
		r.await(fmt.Sprintf("tmpfs\ndeep\nkey\n440 %d\ndeep\ndeep\nno\nyes\n", os.Getuid()))
		r.await("one cat: " + path + "/other: No such file or directory")
		if err := r.Update(t.Context(), sandbox.Volume{Name: "config", Files: []sandbox.File{{Path: "other", Mode: 0o644, Data: []byte("two")}}}); err != nil {
			t.Fatal(err)
		}
		r.await("cat: " + path + "/key: No such file or directory two")
		if err := r.Update(t.Context(), sandbox.Volume{Name: "none"}); err == nil || !strings.HasSuffix(err.Error(), `there is no volume "none"`) {
			t.Errorf("%v", err)
		}
		if err := r.Signal(unix.SIGKILL); err != nil {
			t.Error(err)
		}
		if _, err := r.Wait(); err != nil {
			t.Error(err)
		}
		if err := r.Update(t.Context(), cfg.Volumes[0]); err == nil {
			t.Error("Update succeeded after the end of the sandbox")
		}
	}
	for _, name := range []string{"config", "empty"} {
		if _, err := os.Lstat(filepath.Join(os.TempDir(), name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("on the laptop: %v", err)
		}
	}
}

func TestImpossibleVolumesAreRejected(t *testing.T) {
	file := func(path string) []sandbox.File { return []sandbox.File{{Path: path}} }
	for _, tt := range []struct {
		name    string
		volumes []sandbox.Volume
		mount   sandbox.Mount
		want    string
	}{
		{"no name", []sandbox.Volume{{}}, sandbox.Mount{}, `"" is not a valid volume name`},
		{"a path", []sandbox.Volume{{Name: "a/b"}}, sandbox.Mount{}, `"a/b" is not a valid volume name`},
		{"twice", []sandbox.Volume{{Name: "a"}, {Name: "a"}}, sandbox.Mount{}, "two volumes a"},
		{"out of it", []sandbox.Volume{{Name: "a", Files: file("../b")}}, sandbox.Mount{}, `volume a: "../b" is not a valid file path`},
		{"our own", []sandbox.Volume{{Name: "a", Files: file("..data")}}, sandbox.Mount{}, `volume a: "..data" is not a valid file path`},
		{"a file twice", []sandbox.Volume{{Name: "a", Files: append(file("b"), file("b")...)}}, sandbox.Mount{}, "volume a contains the file b twice"},
		{"no such volume", nil, sandbox.Mount{Path: "/a", Volume: "b"}, `mounting at /a: there is no volume "b"`},
		{"both", []sandbox.Volume{{Name: "b"}}, sandbox.Mount{Path: "/a", Volume: "b", Source: "/c"}, `mounting at /a: a mount needs either the source "/c" or the volume "b" with a relative path, not ""`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := config("true")
			cfg.Volumes = tt.volumes
			if tt.mount.Path != "" {
				cfg.Mounts = []sandbox.Mount{tt.mount}
			}
			if _, err := sandbox.New(cfg); err == nil || err.Error() != tt.want {
				t.Errorf("%v, want %s", err, tt.want)
			}
		})
	}
}
