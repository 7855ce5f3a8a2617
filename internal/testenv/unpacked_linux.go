package testenv

import (
	"os"
	"path/filepath"
	"testing"
)

// Unpacked returns the directory in which scripts/unpack puts a Debian package. The test is skipped unless the
// package's program is there. Its path is relative to the directory.
func Unpacked(t testing.TB, debian, program string) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(cache, "kubevpn", debian)
	if _, err := os.Stat(dir); err != nil {
		t.Logf("no %s; `scripts/unpack %s` fetches it without installing it", debian, debian)
	}
	NeedPrograms(t, filepath.Join(dir, program))
	return dir
}

// ResolvedRoot returns the directory in which lib/systemd/systemd-resolved is: this machine's root if it is installed,
// else the unpacked package. The test is skipped if it is nowhere.
func ResolvedRoot(t testing.TB) string {
	t.Helper()
	const program = "/lib/systemd/systemd-resolved"
	if _, err := os.Stat(program); err == nil {
		return "/"
	}
	return Unpacked(t, "systemd-resolved", program)
}

// ResolvedLibraries returns the directory of libraries for what is in a directory that ResolvedRoot returned.
func ResolvedLibraries(t testing.TB, root string) string {
	t.Helper()
	if root == "/" {
		return ""
	}
	found, err := filepath.Glob(root + "/usr/lib/*/systemd")
	if err != nil || len(found) != 1 {
		t.Fatalf("libsystemd-shared: %v, %v", found, err)
	}
	return found[0]
}
