// Package testenv prepares the machine for a test: it checks requirements, creates namespaces and runs programs. A test
// whose requirements are missing is skipped with a message; with CI=true it fails.
package testenv

import (
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
)

// NeedRoot skips the test unless it runs on Linux as root, which network namespaces and TUN devices need.
func NeedRoot(t testing.TB) {
	t.Helper()
	if runtime.GOOS != "linux" {
		missing(t, "Linux (this is "+runtime.GOOS+")")
	}
	if os.Geteuid() != 0 {
		missing(t, "root")
	}
}

// NeedFUSE skips the test on machines where this user may not use FUSE.
func NeedFUSE(t testing.TB) {
	t.Helper()
	device, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		missing(t, "/dev/fuse")
	}
	device.Close()
}

// NeedPrograms skips the test unless every program is in PATH.
func NeedPrograms(t testing.TB, names ...string) {
	t.Helper()
	for _, name := range names {
		if _, err := exec.LookPath(name); err != nil {
			missing(t, "the program "+name)
		}
	}
}

// Run executes one command line, split at spaces, and returns its output. It fails the test if the command fails.
func Run(t testing.TB, line string) string {
	t.Helper()
	f := strings.Fields(line)
	out, err := exec.Command(f[0], f[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", line, err, out)
	}
	return string(out)
}

func missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("this test needs %s, and CI must not skip it", what)
	}
	t.Skipf("SKIPPED: this test needs %s", what)
}
