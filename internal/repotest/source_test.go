package repotest

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// source is one file of Go code of the repository, nested modules included.
type source struct {
	path string // within the repository
	text []byte
	file *ast.File
}

func sources(t *testing.T, fset *token.FileSet) []source {
	t.Helper()
	top := root(t)
	var out []source
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); name == "testdata" || name == "bin" || path != top && strings.ContainsAny(name[:1], "._") {
				return filepath.SkipDir
			}
			return nil
		}
		if filepath.Ext(path) != ".go" {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(fset, path, text, parser.ParseComments)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(top, path)
		out = append(out, source{filepath.ToSlash(rel), text, file})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestSourcesAreFormatted(t *testing.T) {
	for _, s := range sources(t, token.NewFileSet()) {
		want, err := format.Source(s.text)
		if err != nil {
			t.Errorf("%s: %v", s.path, err)
		} else if !bytes.Equal(want, s.text) {
			t.Errorf("%s is not formatted: run gofmt -w on it", s.path)
		}
	}
}

func TestPackagesAreDocumented(t *testing.T) {
	docs := map[string]string{} // by folder
	for _, s := range sources(t, token.NewFileSet()) {
		if strings.HasSuffix(s.path, "_test.go") {
			continue
		}
		dir := filepath.Dir(s.path)
		docs[dir] += s.file.Doc.Text()
	}
	for _, dir := range slices.Sorted(maps.Keys(docs)) {
		if strings.TrimSpace(docs[dir]) == "" {
			t.Errorf("%s has no package comment: say what it is for, and where it sits in the flow", dir)
		}
	}
}

// Importing a package changes nothing and starts nothing, so it has no init function and no variable that
// changes. A package may declare errors, tables that are only read, and pools of buffers.
func TestNoInitAndNoMutableGlobals(t *testing.T) {
	fset := token.NewFileSet()
	folders := map[string][]source{}
	for _, s := range sources(t, fset) {
		if !strings.HasSuffix(s.path, "_test.go") {
			dir := filepath.Dir(s.path)
			folders[dir] = append(folders[dir], s)
		}
	}
	for _, dir := range slices.Sorted(maps.Keys(folders)) {
		globals := map[string]bool{}
		for _, s := range folders[dir] {
			for _, problem := range declarations(fset, s.file, globals) {
				t.Error(problem)
			}
		}
		for _, s := range folders[dir] {
			for _, problem := range mutations(fset, s.file, globals) {
				t.Error(problem)
			}
		}
	}
}

// declarations collects the file's package-level variables in globals, except pools and embedded files, and
// reports those that have no initial value, and init functions.
func declarations(fset *token.FileSet, file *ast.File, globals map[string]bool) (problems []string) {
	for _, decl := range file.Decls {
		if f, ok := decl.(*ast.FuncDecl); ok && f.Name.Name == "init" && f.Recv == nil {
			problems = append(problems, fmt.Sprintf("%s: an init function; call it from main", fset.Position(f.Pos())))
		}
		for _, v := range variables(decl) {
			if isPool(v.Type) || len(v.Values) == 1 && isPool(typeOf(v.Values[0])) {
				continue
			}
			for _, name := range v.Names {
				globals[name.Name] = name.Name != "_"
			}
			if len(v.Values) == 0 {
				problems = append(problems, fmt.Sprintf("%s: variable %s begins empty, so it is there to change", fset.Position(v.Pos()), v.Names[0].Name))
			}
		}
	}
	return problems
}

// variables are those that a declaration declares, without embedded files.
func variables(decl ast.Decl) (out []*ast.ValueSpec) {
	d, ok := decl.(*ast.GenDecl)
	if !ok || d.Tok != token.VAR || strings.HasPrefix(directive(d.Doc), "//go:embed") {
		return nil
	}
	for _, spec := range d.Specs {
		if v := spec.(*ast.ValueSpec); !strings.HasPrefix(directive(v.Doc), "//go:embed") {
			out = append(out, v)
		}
	}
	return out
}

// typeOf is the type of a composite literal, else nil.
func typeOf(e ast.Expr) ast.Expr {
	if c, ok := e.(*ast.CompositeLit); ok {
		return c.Type
	}
	return nil
}

// directive is the last line of a comment group as it was written.
func directive(g *ast.CommentGroup) string {
	if g == nil {
		return ""
	}
	return g.List[len(g.List)-1].Text
}

// isPool says whether the type is a sync.Pool, or an array of them.
func isPool(e ast.Expr) bool {
	if a, ok := e.(*ast.ArrayType); ok {
		e = a.Elt
	}
	s, ok := e.(*ast.SelectorExpr)
	return ok && s.Sel.Name == "Pool"
}

// mutations reports where a package-level variable is assigned, counted, or has its address taken.
func mutations(fset *token.FileSet, file *ast.File, globals map[string]bool) (problems []string) {
	tops := map[any]bool{}
	for _, decl := range file.Decls {
		for _, v := range variables(decl) {
			tops[v] = true
		}
	}
	report := func(e ast.Expr) {
		if name := global(e, globals, tops); name != "" {
			problems = append(problems, fmt.Sprintf("%s: the package-level variable %s is changed here", fset.Position(e.Pos()), name))
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.AssignStmt:
			if n.Tok != token.DEFINE {
				for _, e := range n.Lhs {
					report(e)
				}
			}
		case *ast.IncDecStmt:
			report(n.X)
		case *ast.UnaryExpr:
			if n.Op == token.AND {
				report(n.X)
			}
		case *ast.CallExpr:
			if f, ok := n.Fun.(*ast.Ident); ok && (f.Name == "delete" || f.Name == "clear" || f.Name == "copy") && f.Obj == nil {
				report(n.Args[0])
			}
		}
		return true
	})
	return problems
}

// global is the package-level variable that contains e, or "". The parser resolves names within a file. A name that it
// leaves unresolved belongs to the package, and so does one whose declaration is in tops.
func global(e ast.Expr, globals map[string]bool, tops map[any]bool) string {
	for {
		switch x := e.(type) {
		case *ast.SelectorExpr:
			e = x.X
		case *ast.IndexExpr:
			e = x.X
		case *ast.StarExpr:
			e = x.X
		case *ast.ParenExpr:
			e = x.X
		case *ast.Ident:
			if globals[x.Name] && (x.Obj == nil || tops[x.Obj.Decl]) {
				return x.Name
			}
			return ""
		default:
			return ""
		}
	}
}

// The check itself: each of these is found, and what is allowed is not.
func TestMutableGlobalsAreFound(t *testing.T) {
	tests := []struct {
		name, code string
		want       int
	}{
		{"error", `var errX = errors.New("x"); func f() error { return errX }`, 0},
		{"table", `var names = map[int]string{1: "a"}; func f() string { return names[1] }`, 0},
		{"pool", `var p = sync.Pool{}; var q [3]sync.Pool; func f() { a := &p; b := &q[1]; _, _ = a, b }`, 0},
		{"embedded", "//go:embed f\nvar text string", 0},
		{"shadowed", `var n = 1; func f(n int) { n = 2; var m int; m++ }`, 0},
		{"init", `func init() {}`, 1},
		{"method-init", `type T int; func (T) init() {}`, 0},
		{"empty", `var mu sync.Mutex`, 1},
		{"assigned", `var n = 1; func f() { n = 2 }`, 1},
		{"counted", `var n = 1; func f() { n++ }`, 1},
		{"field", `var s = T{}; func f() { s.a.b = 2 }`, 1},
		{"entry", `var m = map[int]int{}; func f() { m[1] = 2; delete(m, 1) }`, 2},
		{"address", `var n = 1; func f() *int { return &n }`, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			fset := token.NewFileSet()
			file, err := parser.ParseFile(fset, "x.go", "package x\n"+tt.code, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			globals := map[string]bool{}
			got := declarations(fset, file, globals)
			got = append(got, mutations(fset, file, globals)...)
			if len(got) != tt.want {
				t.Errorf("found %q, want %d", got, tt.want)
			}
		})
	}
}
