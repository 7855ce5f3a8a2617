package testenv

import (
	"os"
	"path/filepath"
	"testing"
)

// ResolvedRoot returns the directory in which lib/systemd/systemd-resolved is: this machine's root if it is installed,
// else where pkg/host/osdns/testdata/fetch-resolved.sh puts it. The test is skipped if it is nowhere.
func ResolvedRoot(t testing.TB) string {
	t.Helper()
	const program = "/lib/systemd/systemd-resolved"
	if _, err := os.Stat(program); err == nil {
		return "/"
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(cache, "kubevpn/systemd-resolved")
	if _, err := os.Stat(dir); err != nil {
		t.Log("no systemd-resolved; pkg/host/osdns/testdata/fetch-resolved.sh fetches it without installing it")
	}
	NeedPrograms(t, dir+program)
	return dir
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
