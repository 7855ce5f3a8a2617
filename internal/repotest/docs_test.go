package repotest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// exitCodes are the constants Exit* of internal/api, by number.
func exitCodes(t *testing.T) map[int]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root(t), "internal/api/error.go"), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	codes := map[int]string{}
	for _, decl := range file.Decls {
		d, ok := decl.(*ast.GenDecl)
		if !ok || d.Tok != token.CONST {
			continue
		}
		for _, spec := range d.Specs {
			v := spec.(*ast.ValueSpec)
			n, err := strconv.Atoi(v.Values[0].(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			codes[n] = strings.TrimPrefix(v.Names[0].Name, "Exit")
		}
	}
	return codes
}

func TestExitCodesAreDocumented(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root(t), "docs/troubleshooting.md"))
	if err != nil {
		t.Fatal(err)
	}
	codes := exitCodes(t)
	if len(codes) < 10 {
		t.Fatalf("internal/api has %d exit codes: this test reads it wrongly", len(codes))
	}
	documented := map[int]bool{}
	for _, row := range regexp.MustCompile(`(?m)^\| (\d+) \| (\w+) \| (.+) \|$`).FindAllStringSubmatch(string(text), -1) {
		n, err := strconv.Atoi(row[1])
		if err != nil {
			t.Fatal(err)
		}
		if documented[n] {
			t.Errorf("docs/troubleshooting.md has exit code %d twice", n)
		}
		documented[n] = true
		if name := codes[n]; !strings.EqualFold(name, row[2]) {
			t.Errorf("docs/troubleshooting.md calls exit code %d %q, internal/api %q", n, row[2], name)
		}
	}
	for n, name := range codes {
		if !documented[n] {
			t.Errorf("docs/troubleshooting.md does not have exit code %d (%s)", n, name)
		}
	}
}

// Links between pages and to files of the repository lead somewhere.
func TestLinksLeadSomewhere(t *testing.T) {
	pages, err := filepath.Glob(filepath.Join(root(t), "docs/*.md"))
	if err != nil {
		t.Fatal(err)
	}
	pages = append(pages, filepath.Join(root(t), "README.md"))
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range regexp.MustCompile(`\]\(([^)#\s]+)[^)]*\)`).FindAllStringSubmatch(string(text), -1) {
			if strings.Contains(link[1], "://") || strings.HasPrefix(link[1], "mailto:") {
				continue
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), link[1])); err != nil {
				t.Errorf("%s links to %s: %v", filepath.Base(page), link[1], err)
			}
		}
	}
}
