package repotest

import (
	"fmt"
	"go/ast"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"
)

// TestRetiredWordsAreNotUsed reads the retired words of docs/glossary.md and looks for them in file names, identifiers,
// comments, string literals and documents. The changelog may name what an older version called a thing.
func TestRetiredWordsAreNotUsed(t *testing.T) {
	retired := retiredWords(t)
	report := func(where, text string) {
		if word := retired.FindString(text); word != "" {
			t.Errorf("%s: %q is retired; docs/glossary.md has the word for it", where, word)
		}
	}
	fset := token.NewFileSet()
	for _, s := range sources(t, fset) {
		report(s.path, words(s.path))
		at := func(p token.Pos) string { return fmt.Sprintf("%s:%d", s.path, fset.Position(p).Line) }
		for _, group := range s.file.Comments {
			report(at(group.Pos()), group.Text())
		}
		var inspect func(n ast.Node) bool
		inspect = func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.SelectorExpr: // the name may be another module's; ours is reported where it is declared
				ast.Inspect(n.X, inspect)
				return false
			case *ast.Ident:
				report(at(n.Pos()), words(n.Name))
			case *ast.BasicLit:
				if text, err := strconv.Unquote(n.Value); err == nil && n.Kind == token.STRING {
					report(at(n.Pos()), text)
				}
			}
			return true
		}
		ast.Inspect(s.file, inspect)
	}
	for path, text := range documents(t) {
		if path == "CHANGELOG.md" || path == "docs/glossary.md" {
			continue
		}
		for i, line := range strings.Split(text, "\n") {
			report(fmt.Sprintf("%s:%d", path, i+1), line)
		}
	}
}

// retiredWords returns an expression that finds any word of the table "Retired words", also in the plural.
func retiredWords(t *testing.T) *regexp.Regexp {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root(t), "docs/glossary.md"))
	if err != nil {
		t.Fatal(err)
	}
	var alternatives []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| .+ \\|$").FindAllStringSubmatch(string(text), -1) {
		alternatives = append(alternatives, regexp.QuoteMeta(row[1]))
	}
	if len(alternatives) < 10 || !slices.IsSorted(alternatives) {
		t.Fatalf("docs/glossary.md retires %q: want at least ten words, sorted", alternatives)
	}
	return regexp.MustCompile(`(?i)\b(` + strings.Join(alternatives, "|") + `)(e?s)?\b`)
}

// words spells an identifier or a path as words: "newPodIP" as "new Pod IP".
func words(name string) string {
	var b strings.Builder
	runes := []rune(name)
	for i, r := range runes {
		boundary := i > 0 && unicode.IsUpper(r) && (!unicode.IsUpper(runes[i-1]) || i+1 < len(runes) && unicode.IsLower(runes[i+1]))
		switch {
		case !unicode.IsLetter(r):
			b.WriteByte(' ')
			continue
		case boundary:
			b.WriteByte(' ')
		}
		b.WriteRune(r)
	}
	return b.String()
}

// documents returns the text files that people read, by path: documents, scripts, and the scripts of tests.
func documents(t *testing.T) map[string]string {
	t.Helper()
	top := root(t)
	out := map[string]string{}
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(top, path)
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == ".git" || rel == "bin"):
			return filepath.SkipDir
		case d.IsDir():
			return nil
		}
		switch filepath.Ext(path) {
		case ".md", ".txtar", ".txt", ".yaml", ".yml", ".sh":
		default:
			if filepath.Dir(rel) != "scripts" && rel != "Makefile" {
				return nil
			}
		}
		text, err := os.ReadFile(path)
		out[filepath.ToSlash(rel)] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestWordsSplitIdentifiers(t *testing.T) {
	for name, want := range map[string]string{
		"newPodIP": "new Pod IP", "TCPConns": "TCP Conns", "pkg/l3/flow_test.go": "pkg l  flow test go", "HTTPServer": "HTTP Server",
	} {
		if got := words(name); got != want {
			t.Errorf("words(%q) = %q, want %q", name, got, want)
		}
	}
}
