package cli

import (
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestGroupsDoNotImportEachOther: a group of commands imports only what all groups share.
func TestGroupsDoNotImportEachOther(t *testing.T) {
	const here = "kubevpn/internal/laptop/cli"
	files, err := filepath.Glob("*/*.go")
	if err != nil {
		t.Fatal(err)
	}
	below := map[string][]string{"term": nil, "daemonclient": nil, "command": {"term", "daemonclient"}}
	groups := map[string]bool{}
	for _, file := range files {
		folder := filepath.Dir(file)
		allowed, shared := below[folder]
		if !shared {
			groups[folder] = true
			allowed = []string{"term", "daemonclient", "command"}
		}
		source, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range source.Imports {
			path := strings.Trim(i.Path.Value, `"`)
			if name, ok := strings.CutPrefix(path, here+"/"); path == here || ok && !slices.Contains(allowed, name) {
				t.Errorf("%s imports %s", file, path)
			}
		}
	}
	if len(groups) != len(commandGroups()) {
		t.Errorf("folders of commands: %v, want %d", groups, len(commandGroups()))
	}
}
