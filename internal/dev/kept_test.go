package dev

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// docs/dev.md names every variable that keeps this machine's value, with the reason.
func TestKeptVariablesAreDocumented(t *testing.T) {
	var want strings.Builder
	for _, k := range kept {
		want.WriteString("| `" + strings.Join(strings.Fields(k.names), "` `") + "` | " + k.why + " |\n")
	}
	text, err := os.ReadFile("../../docs/dev.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "| variables that keep this machine's value | because |\n|---|---|\n")
	table, _, _ = strings.Cut(table, "\n\n")
	if diff := cmp.Diff(want.String(), table+"\n"); diff != "" {
		t.Errorf("the table of docs/dev.md: -want +got\n%s\nwant:\n%s", diff, want.String())
	}
}

func TestKeptVariablesAreNamedOnce(t *testing.T) {
	seen := map[string]bool{}
	for _, k := range kept {
		for _, name := range strings.Fields(k.names) {
			if seen[name] {
				t.Errorf("%s is in the list twice", name)
			}
			seen[name] = true
		}
	}
}
