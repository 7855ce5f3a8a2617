package cli

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra/doc"

	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/process/version"
)

var manPages = flag.String("man-pages", "", "write the man pages to this directory")

// TestManPages writes a man page for each command that has a page in docs/reference. scripts/release uses it, so that
// the program does not depend on a generator.
func TestManPages(t *testing.T) {
	dir := *manPages
	if dir == "" {
		dir = t.TempDir()
	}
	root := newRoot(&command.Factory{}, false)
	pages := referencePages(t, root)
	// A fixed date: the same source gives the same pages.
	header := &doc.GenManHeader{Section: "1", Source: "kubevpn " + version.String(), Manual: "kubevpn", Date: new(time.Unix(0, 0).UTC())}
	if err := doc.GenManTree(root, header, dir); err != nil {
		t.Fatal(err)
	}
	for name := range pages {
		page := strings.ReplaceAll(strings.TrimSuffix(name, ".md"), "_", "-") + ".1"
		text, err := os.ReadFile(filepath.Join(dir, page))
		if err != nil {
			t.Error(err)
		} else if !strings.Contains(string(text), ".SH SYNOPSIS") {
			t.Errorf("%s has no synopsis", page)
		}
	}
}
