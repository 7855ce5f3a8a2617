// Package testenv is between a test and the machine it runs on: what the test needs of it, a namespace to change things
// in, programs to run. A test that cannot run here is skipped loudly, and under CI=true it fails: on CI nothing that can
// run is skipped.
package testenv

import (
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
)

// NeedRoot ends the test unless it runs on Linux as root, which network namespaces and TUN devices need.
func NeedRoot(t testing.TB) {
	t.Helper()
	if runtime.GOOS != "linux" {
		missing(t, "Linux (this is "+runtime.GOOS+")")
	}
	if os.Geteuid() != 0 {
		missing(t, "root")
	}
}

// NeedPrograms ends the test unless every program is in PATH.
func NeedPrograms(t testing.TB, names ...string) {
	t.Helper()
	for _, name := range names {
		if _, err := exec.LookPath(name); err != nil {
			missing(t, "the program "+name)
		}
	}
}

// Run executes one command line, which is split at spaces, and returns what it prints. The test ends unless it succeeds.
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
		t.Fatalf("this test needs %s, and on CI nothing is skipped", what)
	}
	t.Skipf("SKIPPED: this test needs %s", what)
}
