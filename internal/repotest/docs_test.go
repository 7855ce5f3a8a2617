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
	pages := 0
	for page, text := range documents(t) {
		if filepath.Ext(page) != ".md" {
			continue
		}
		pages++
		for _, link := range regexp.MustCompile(`\]\(([^)#\s]+)[^)]*\)`).FindAllStringSubmatch(text, -1) {
			if strings.Contains(link[1], "://") || strings.HasPrefix(link[1], "mailto:") {
				continue
			}
			if _, err := os.Stat(filepath.Join(root(t), filepath.Dir(page), link[1])); err != nil {
				t.Errorf("%s links to %s: %v", page, link[1], err)
			}
		}
	}
	if pages < 45 {
		t.Errorf("only %d pages: this test reads them wrongly", pages)
	}
}

// docs/security.md names the test of each defence. Every one of them exists.
func TestTestsInSecurityTableExist(t *testing.T) {
	tests := map[string]bool{}
	for _, s := range sources(t, token.NewFileSet()) {
		for _, decl := range s.file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && strings.HasSuffix(s.path, "_test.go") {
				tests[f.Name.Name] = true
			}
		}
	}
	text, err := os.ReadFile(filepath.Join(root(t), "docs/security.md"))
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`((?:Test|Fuzz)[A-Z]\\w+)`").FindAllStringSubmatch(string(text), -1)
	if len(named) < 50 {
		t.Errorf("docs/security.md names %d tests: this test reads it wrongly", len(named))
	}
	for _, m := range named {
		if !tests[m[1]] {
			t.Errorf("docs/security.md names %s, and there is no such test", m[1])
		}
	}
}

// The documents that lead a reader through the code name files, functions and methods. Every one of them exists, in the
// file that is named beside it.
func TestNamesInDocumentsExist(t *testing.T) {
	declared := map[string]map[string]bool{} // by "(*T).m", "(T).m", "f" or "T": the files
	for _, s := range sources(t, token.NewFileSet()) {
		ast.Inspect(s.file, func(n ast.Node) bool {
			name := ""
			switch n := n.(type) {
			case *ast.FuncDecl:
				name = funcName(n)
			case *ast.TypeSpec:
				name = n.Name.Name
			default:
				return true
			}
			if declared[name] == nil {
				declared[name] = map[string]bool{}
			}
			declared[name][s.path] = true
			return false
		})
	}
	checked := 0
	for _, page := range []string{"CONTRIBUTING.md", "docs/architecture.md"} {
		text, err := os.ReadFile(filepath.Join(root(t), page))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile("`((?:cmd|internal|pkg|test|scripts|docs)/[\\w./-]+)`").FindAllStringSubmatch(string(text), -1) {
			checked++
			if _, err := os.Stat(filepath.Join(root(t), m[1])); err != nil {
				t.Errorf("%s names %s: %v", page, m[1], err)
			}
		}
		for _, m := range regexp.MustCompile("`(\\(\\*?\\w+\\)\\.\\w+)`").FindAllStringSubmatch(string(text), -1) {
			checked++
			if declared[m[1]] == nil {
				t.Errorf("%s names the method %s, and there is none", page, m[1])
			}
		}
		for _, m := range regexp.MustCompile("`((?:\\(\\*?\\w+\\)\\.)?\\w+)`\\s(?:in\\s)?\\(?`([\\w/]+\\.go)`").FindAllStringSubmatch(string(text), -1) {
			checked++
			if strings.Contains(m[2], "/") && !declared[m[1]][m[2]] {
				t.Errorf("%s says that %s is in %s, and it is not", page, m[1], m[2])
			}
		}
	}
	if checked < 100 {
		t.Errorf("the documents name %d files and functions: this test reads them wrongly", checked)
	}
}

// funcName spells a function as the documents do: f, (T).m or (*T).m.
func funcName(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}
	expr, star := f.Recv.List[0].Type, ""
	if pointer, ok := expr.(*ast.StarExpr); ok {
		expr, star = pointer.X, "*"
	}
	if generic, ok := expr.(*ast.IndexExpr); ok {
		expr = generic.X
	}
	name, ok := expr.(*ast.Ident)
	if !ok {
		return f.Name.Name
	}
	return "(" + star + name.Name + ")." + f.Name.Name
}
