//go:build release && linux

package release

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// packaged lists the files that both packages install.
var packaged = []string{
	"usr/bin/kubevpn", "usr/share/man/man1/kubevpn.1.gz", "usr/share/bash-completion/completions/kubevpn",
	"usr/share/fish/vendor_completions.d/kubevpn.fish", "usr/share/doc/kubevpn/copyright",
}

func TestDebInstallsAndRemovesCleanly(t *testing.T) {
	need(t, "dpkg")
	root := t.TempDir()
	for _, file := range []string{"var/lib/dpkg/status", "var/lib/dpkg/available"} {
		touch(t, filepath.Join(root, file))
	}
	dpkg := func(args ...string) {
		run(t, "dpkg", append([]string{"--root=" + root, "--log=" + filepath.Join(root, "dpkg.log"), "--force-script-chrootless",
			"--force-not-root"}, args...)...)
	}
	dpkg("--install", packageOf(t, "deb"))
	checkInstalled(t, root)
	dpkg("--purge", "kubevpn")
	checkRemoved(t, root)
}

func TestRPMInstallsAndRemovesCleanly(t *testing.T) {
	need(t, "rpm")
	root := t.TempDir()
	run(t, "rpm", "--root", root, "--initdb")
	run(t, "rpm", "--root", root, "--install", "--nodeps", packageOf(t, "rpm"))
	checkInstalled(t, root)
	run(t, "rpm", "--root", root, "--erase", "kubevpn")
	checkRemoved(t, root)
}

// packageOf returns the path of this machine's package.
func packageOf(t *testing.T, format string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dist, "kubevpn*_linux_"+runtime.GOARCH+"."+format))
	if err != nil || len(files) != 1 {
		t.Fatalf("got %v, want one package: %v", files, err)
	}
	path, err := filepath.Abs(files[0])
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func checkInstalled(t *testing.T, root string) {
	t.Helper()
	for _, file := range packaged {
		if _, err := os.Stat(filepath.Join(root, file)); err != nil {
			t.Error(err)
		}
	}
	checkVersion(t, filepath.Join(root, "usr/bin/kubevpn"))
}

// checkRemoved fails if a file below usr is left, or a file anywhere has the name of the package.
func checkRemoved(t *testing.T, root string) {
	t.Helper()
	var left []string
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel := strings.TrimPrefix(path, root+"/")
		if strings.Contains(rel, "kubevpn") || strings.HasPrefix(rel, "usr/") && !d.IsDir() {
			left = append(left, rel)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if slices.Sort(left); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func checkVersion(t *testing.T, program string) {
	t.Helper()
	if out := run(t, program, "version"); !strings.Contains(out, version(t)) {
		t.Errorf("%s says %q, want %s", program, out, version(t))
	}
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}

func need(t *testing.T, program string) {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		t.Skipf("SKIPPED: %s is missing", program)
	}
}

func touch(t *testing.T, file string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, file, nil)
}
