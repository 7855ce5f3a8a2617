package sandbox_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/host/sandbox"
)

func sh(script string, mounts ...sandbox.Mount) sandbox.Config {
	cfg := config("sh", "-c", script)
	cfg.Mounts = mounts
	return cfg
}

func TestFilesAreAtTheirPaths(t *testing.T) {
	source := t.TempDir()
	write(t, source+"/key", "value of key\n")
	file := write(t, t.TempDir()+"/file", "value of file\n")
	existing := t.TempDir()
	write(t, existing+"/hidden", "hidden")
	write(t, existing+"/file", "covered\n")
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(existing+"/missing", link); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		path string
		file bool // mount the file, not the directory
	}{
		{"missing-in-root", "/sandbox-test-config", false},
		{"deeply-missing-in-root", "/sandbox-test-a/b/c", false},
		{"file-missing-in-root", "/sandbox-test-file", true},
		{"missing-in-etc", "/etc/sandbox-test/app", false},
		{"file-missing-in-etc", "/etc/sandbox-test.yaml", true},
		{"service-account", "/var/run/secrets/kubernetes.io/serviceaccount", false},
		{"unreadable-parent", "/root/.sandbox-test/aws", false},
		{"missing-in-tmp", "/tmp/sandbox-test-podinfo", false},
		{"existing-directory", existing, false},
		{"existing-file", existing + "/file", true},
		{"directory-for-a-file", existing + "/file", false},
		{"file-for-a-directory", existing, true},
		{"below-a-file", existing + "/file/below/it", false},
		{"dangling-link", link, false},
		{"existing-in-etc", "/etc/hosts", true},
		{"system-directory", "/etc", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, before := os.Lstat(tt.path)
			for _, readOnly := range []bool{false, true} {
				m, show, want := sandbox.Mount{Path: tt.path, Source: source, ReadOnly: readOnly}, tt.path+"/key", "value of key\n"
				if tt.file {
					m.Source, show, want = file, tt.path, "value of file\n"
				}
				out := run(t, sh(fmt.Sprintf("cat %s; if echo >>%[1]s; then echo written; fi 2>&1", show), m))
				got, ok := strings.CutPrefix(out, want)
				if !ok {
					t.Fatalf("read %q", out)
				}
				if wrote := strings.Contains(got, "written"); wrote == readOnly || readOnly && !strings.Contains(got, "Read-only") {
					t.Errorf("read-only %v: %q", readOnly, got)
				}
				write(t, source+"/key", "value of key\n")
				write(t, file, "value of file\n")
			}
			if _, after := os.Lstat(tt.path); (before == nil) != (after == nil) {
				t.Errorf("%s: before %v, after %v", tt.path, before, after)
			}
		})
	}
}

func TestManyMountsAtOnce(t *testing.T) {
	d := t.TempDir()
	var mounts []sandbox.Mount
	var script strings.Builder
	for i, path := range []string{"/etc/sandbox-test/a", "/etc/sandbox-test/b", "/sandbox-test/x", "/sandbox-test/y", "/etc/sandbox-test-c",
		"/sandbox-test/x/within", "/sandbox-test/x/within/deep/er", "/var/run/secrets/a", "/run/secrets/b"} {
		source := fmt.Sprintf("%s/%d", d, i)
		write(t, source+"/key", path+"\n")
		mounts = append([]sandbox.Mount{{Path: path, Source: source}}, mounts...)
		fmt.Fprintf(&script, "test \"$(cat %s/key)\" = %[1]s || echo %[1]s: $(cat %[1]s/key)\n", path)
	}
	if out := run(t, sh(script.String(), mounts...)); out != "" {
		t.Error(out)
	}
	if _, err := os.Stat(d + "/2/within"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a directory was made in a source: %v", err)
	}
}

func TestOtherPathsAreAsOutside(t *testing.T) {
	source, home := t.TempDir(), t.TempDir()
	cfg := sh(fmt.Sprintf(`
		stat -L -c '%%d %%i %%n' /etc/passwd /etc /usr/bin /usr/bin/env /dev/null /dev/pts /sys/kernel %[1]s /var/lib
		echo through >%[1]s/written
		mkdir %[1]s/directory
		test -S %[1]s/socket && echo socket
		python3 -c "import socket; s=socket.socket(socket.AF_UNIX); s.connect('%[1]s/socket'); print(s.recv(100).decode())"
		pwd
	`, home), sandbox.Mount{Path: "/etc/sandbox-test/x", Source: source}, sandbox.Mount{Path: "/sandbox-test", Source: source})
	cfg.Dir = home
	unixSocket(t, home+"/socket")
	out := run(t, cfg)
	for _, path := range []string{"/etc/passwd", "/usr/bin", "/usr/bin/env", "/dev/null", "/dev/pts", "/sys/kernel", home, "/var/lib"} {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			t.Fatal(err)
		}
		if line := fmt.Sprintf("%d %d %s\n", st.Dev, st.Ino, path); !strings.Contains(out, line) {
			t.Errorf("not as outside: want %s in\n%s", line, out)
		}
	}
	if !strings.HasSuffix(out, "socket\nhello from outside\n"+home+"\n") {
		t.Errorf("%s", out)
	}
	if b, err := os.ReadFile(home + "/written"); err != nil || string(b) != "through\n" {
		t.Errorf("written %q, %v", b, err)
	}
	info, err := os.Stat(home + "/directory")
	if err != nil || int(info.Sys().(*unixStat).Uid) != os.Getuid() {
		t.Errorf("the directory that was made: %+v, %v", info, err)
	}
}

// The test updates a volume as the kubelet does for a Secret: keys are links to ..data/key, and a rename replaces
// ..data.
func TestUpdateIsSeen(t *testing.T) {
	source := t.TempDir()
	write(t, source+"/..1/key", "one\n")
	for from, to := range map[string]string{"..data": "..1", "key": "..data/key"} {
		if err := os.Symlink(to, source+"/"+from); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{"/sandbox-test/config", "/etc/sandbox-test/config"} {
		r := start(t, sh(fmt.Sprintf("while sleep 0.02; do cat %s/key; done", path), sandbox.Mount{Path: path, Source: source, ReadOnly: true}))
		r.await("one")
		write(t, source+"/..2/key", "two\n")
		if err := errors.Join(os.Symlink("..2", source+"/..tmp"), os.Rename(source+"/..tmp", source+"/..data"), os.RemoveAll(source+"/..1")); err != nil {
			t.Fatal(err)
		}
		r.await("two")
		if err := r.Signal(unix.SIGKILL); err != nil {
			t.Error(err)
		}
		r.Wait()
		write(t, source+"/..1/key", "one\n")
		if err := errors.Join(os.Symlink("..1", source+"/..tmp"), os.Rename(source+"/..tmp", source+"/..data"), os.RemoveAll(source+"/..2")); err != nil {
			t.Fatal(err)
		}
	}
}

func TestMirrorFollowsTheDirectory(t *testing.T) {
	dir, source := t.TempDir(), t.TempDir()
	write(t, dir+"/stays", "stays\n")
	write(t, dir+"/goes", "goes\n")
	write(t, dir+"/changes", "old\n")
	write(t, dir+"/directory/file", "in a directory\n")
	write(t, source+"/key", "key\n")
	r := start(t, sh(fmt.Sprintf(`cd %s; echo own >own; echo own >taken; while sleep 0.02; do echo $(ls) $(cat * 2>/dev/null) .; done`, dir),
		sandbox.Mount{Path: dir + "/mounted/here", Source: source}))
	r.await("changes directory goes mounted own stays taken old goes own stays own .")
	write(t, dir+"/changed", "new\n")
	write(t, dir+"/taken", "outside\n") // the program has created this name
	write(t, dir+"/mounted", "outside\n")
	if err := errors.Join(os.Rename(dir+"/changed", dir+"/changes"), os.Remove(dir+"/goes"), os.RemoveAll(dir+"/directory"), os.Mkdir(dir+"/made", 0o755)); err != nil {
		t.Fatal(err)
	}
	r.await("changes made mounted own stays taken new own stays own .")
	if err := r.Signal(unix.SIGKILL); err != nil {
		t.Error(err)
	}
	r.Wait()
	if _, err := os.Stat(dir + "/own"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the program's own file in a mirror: %v", err)
	}
}

func TestStartFailsWithoutTheSourceOfAMount(t *testing.T) {
	cfg := sh("true", sandbox.Mount{Path: "/sandbox-test", Source: "/sandbox-test-nothing"})
	s, err := sandbox.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Start(t.Context()); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "/sandbox-test-nothing") {
		t.Errorf("Start: %v", err)
	}
}

func TestProcShowsOnlyOwnProcesses(t *testing.T) {
	testenv.NeedPrograms(t, "python3")
	out := run(t, config("python3", "-c", `
import os
pid = os.readlink("/proc/self")
print(os.getpid() == int(pid), set(p for p in os.listdir("/proc") if p.isdigit()) == {"1", pid})`))
	if out != "True True\n" {
		t.Error(out)
	}
}
