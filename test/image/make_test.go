package image

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/testenv"
)

// hidden lists files of this machine's packages and of this machine itself.
var hidden = []string{"/usr/sbin/xtables-nft-multi", "/usr/sbin/xtables-legacy-multi", "/usr/lib/x86_64-linux-gnu/xtables",
	"/usr/lib/aarch64-linux-gnu/xtables", "/var/lib/dpkg", "/etc/debian_version", "/usr/lib/os-release", "/usr/share/doc"}

// TestImageIsReproducible builds the product's image twice: once here, and once in namespaces with another path, host
// name, environment and file times, and without the machine's packages. Namespaces share the machine's clock, so the
// second build only runs later.
func TestImageIsReproducible(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the product for two architectures")
	}
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "make", "unshare", "git")
	ref := newRegistry(t) + "/kubevpn:1"
	here := pushProduct(t, copySource(t, time.Now()), ref, "exec \"$@\"", nil)

	cache, err := cacheDir()
	if err != nil {
		t.Fatal(err)
	}
	home := t.TempDir()
	if err := os.CopyFS(filepath.Join(home, "kubevpn/debian"), os.DirFS(cache)); err != nil {
		t.Fatal(err)
	}
	hide := "hostname elsewhere; mount -t tmpfs none /mnt; mkdir /mnt/empty; touch /mnt/file\n" +
		"for path in " + strings.Join(hidden, " ") + "; do\n" +
		"  if [ -d $path ]; then mount --bind /mnt/empty $path; elif [ -e $path ]; then mount --bind /mnt/file $path; fi\n" +
		"done\n" +
		"umask 077\nexec \"$@\""
	there := pushProduct(t, copySource(t, time.Unix(1e9, 0)), ref, hide,
		[]string{"XDG_CACHE_HOME=" + home, "TZ=Asia/Tokyo", "LC_ALL=C", "LOGNAME=somebody", "SOURCE_DATE_EPOCH=1"})
	if here != there {
		t.Errorf("the same source became %s and %s", here, there)
	}
}

// pushProduct runs `make push-image` with further arguments in a copy of the repository, in mount and UTS namespaces
// that the shell script prepares. It returns the reference by digest.
func pushProduct(t *testing.T, source, ref, script string, env []string, args ...string) string {
	t.Helper()
	command := append([]string{"--mount", "--uts", "sh", "-ec", script, "sh", "make", "-s", "push-image", "IMAGE=" + ref}, args...)
	cmd := exec.CommandContext(t.Context(), "unshare", command...)
	cmd.Dir = source
	for _, name := range []string{"GOCACHE", "GOMODCACHE", "GOPATH"} { // they may be below a cache folder or a home
		value, err := exec.CommandContext(t.Context(), "go", "env", name).Output()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Env = append(cmd.Env, name+"="+strings.TrimSpace(string(value)))
	}
	cmd.Env = append(append(os.Environ(), cmd.Env...), env...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("make push-image: %v\n%s", err, &stderr)
	}
	pushed := strings.TrimSpace(string(out))
	if line := "image: " + pushed + "\n"; !strings.Contains(pushed, "@sha256:") || !strings.Contains(stderr.String(), line) {
		t.Fatalf("make push-image printed %q and\n%s", out, &stderr)
	}
	return pushed
}

// copySource copies the repository's files, as they are in the working tree, to a separate path.
func copySource(t *testing.T, modified time.Time) string {
	t.Helper()
	top, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	cmd.Dir = top
	list, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name := range strings.SplitSeq(strings.TrimRight(string(list), "\x00"), "\x00") {
		content, err := os.ReadFile(filepath.Join(top, name))
		if os.IsNotExist(err) {
			continue // deleted and not committed
		}
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(dir, name)
		mode := fs.FileMode(0o644)
		if info, err := os.Stat(filepath.Join(top, name)); err == nil {
			mode = info.Mode()
		}
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, content, mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(file, modified, modified); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}
