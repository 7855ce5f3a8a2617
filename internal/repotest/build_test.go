package repotest

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// Every package compiles on every system that kubevpn is for, also where a part of it does nothing but say so.
// The lab and the end-to-end suites, in the module test, run on Linux alone.
func TestCompilesElsewhere(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED: -short; compiling for other systems takes minutes the first time")
	}
	var product []string
	for _, p := range packages(t) {
		if len(p.GoFiles) > 0 {
			product = append(product, p.ImportPath)
		}
	}
	for _, system := range []string{"darwin/arm64", "windows/amd64"} {
		t.Run(strings.ReplaceAll(system, "/", "-"), func(t *testing.T) {
			goos, goarch, _ := strings.Cut(system, "/")
			cmd := exec.Command("go", append([]string{"build"}, product...)...) // several: nothing is written
			cmd.Dir = root(t)
			cmd.Env = append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0")
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
