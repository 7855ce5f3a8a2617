package cli

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kubevpn/internal/laptop/cli/command"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
	"github.com/spf13/pflag"
)

var updateReference = flag.Bool("update-reference", false, "write docs/reference from the commands")

// referenceDir holds one page per command. Run `make docs` after a change to a command or flag.
const referenceDir = "../../../docs/reference"

// TestReferenceIsGeneratedFromCommands compares docs/reference with the commands.
func TestReferenceIsGeneratedFromCommands(t *testing.T) {
	pages := referencePages(t, newRoot(&command.Factory{}, false))
	if len(pages) < 15 {
		t.Fatalf("only %d commands have a page", len(pages))
	}
	if *updateReference {
		writeReference(t, pages)
	}
	present, err := filepath.Glob(filepath.Join(referenceDir, "kubevpn*.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range present {
		if _, ok := pages[filepath.Base(path)]; !ok {
			t.Errorf("%s describes no command; run `make docs`", path)
		}
	}
	for name, want := range pages {
		got, err := os.ReadFile(filepath.Join(referenceDir, name))
		if err != nil {
			t.Errorf("%v; run `make docs`", err)
			continue
		}
		if diff := cmp.Diff(want, string(got)); diff != "" {
			t.Errorf("docs/reference/%s differs from the command; run `make docs` (-command +page):\n%s", name, diff)
		}
	}
}

// TestFlagsAreDescribedWithoutBackquotes: pflag takes text in backquotes as the name of the value.
func TestFlagsAreDescribedWithoutBackquotes(t *testing.T) {
	var check func(*cobra.Command)
	check = func(cmd *cobra.Command) {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if strings.Contains(f.Usage, "`") {
				t.Errorf("%s --%s: %s", cmd.CommandPath(), f.Name, f.Usage)
			}
		})
		for _, sub := range cmd.Commands() {
			check(sub)
		}
	}
	check(newRoot(&command.Factory{}, false))
}

// referencePages renders cmd and every visible command below it, keyed by file name.
func referencePages(t *testing.T, cmd *cobra.Command) map[string]string {
	t.Helper()
	pages := map[string]string{}
	var render func(*cobra.Command)
	render = func(cmd *cobra.Command) {
		cmd.DisableAutoGenTag = true
		var page bytes.Buffer
		if err := doc.GenMarkdown(cmd, &page); err != nil {
			t.Fatal(err)
		}
		name := strings.ReplaceAll(cmd.CommandPath(), " ", "_") + ".md"
		pages[name] = inSections(cmd, strings.TrimRight(page.String(), "\n")+"\n")
		for _, sub := range cmd.Commands() {
			if sub.IsAvailableCommand() {
				render(sub)
			}
		}
	}
	render(cmd)
	return pages
}

// inSections replaces the flags of a page, which cobra lists in two blocks, by those in sections.
func inSections(cmd *cobra.Command, page string) string {
	begin := strings.Index(page, "### Options\n")
	end := strings.Index(page, "### SEE ALSO\n")
	if begin < 0 || end < begin {
		return page
	}
	var flags strings.Builder
	for title, set := range command.Sections(cmd) {
		fmt.Fprintf(&flags, "### %s\n\n```\n%s```\n\n", title, set.FlagUsages())
	}
	return page[:begin] + flags.String() + page[end:]
}

func writeReference(t *testing.T, pages map[string]string) {
	t.Helper()
	present, err := filepath.Glob(filepath.Join(referenceDir, "kubevpn*.md")) // other tests own the rest
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range present {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	for name, page := range pages {
		if err := os.WriteFile(filepath.Join(referenceDir, name), []byte(page), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
