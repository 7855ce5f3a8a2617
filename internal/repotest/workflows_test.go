package repotest

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The workflows run targets of the Makefile, so that everybody can repeat what they do. Exceptions prepare a runner.
func TestWorkflowsOnlyCallMake(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(root(t), "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(root(t), ".github/workflows/*.y*ml"))
	if err != nil || len(files) < 4 {
		t.Fatalf("got the workflows %v, %v", files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?m)^\s*(?:- )?run: (.*)$`).FindAllStringSubmatch(string(text), -1) {
			words := strings.Fields(m[1])
			switch {
			case strings.HasPrefix(m[1], "git config --global --add safe.directory "):
			case len(words) < 2 || words[0] != "make":
				t.Errorf("%s runs %q and not make", filepath.Base(file), m[1])
			case !regexp.MustCompile(`(?m)^(?:[\w-]+ )*` + words[1] + `(?: [\w-]+)*:`).Match(makefile):
				t.Errorf("%s: the Makefile has no target %s", filepath.Base(file), words[1])
			}
		}
	}
}
