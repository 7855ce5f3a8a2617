package repotest

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// floors are the folders of the product from the top down. A package imports its own folder, and folders of lower
// floors: so internal/laptop and internal/incluster never import each other. pkg has floors of its own.
var floors = [][]string{
	{"cmd"},
	{"internal/laptop", "internal/incluster"},
	{"internal/inspect"},
	{"internal/kube", "internal/config"},
	{"internal/api", "internal/process"},
	{"pkg/datapath", "pkg/protocol"},
	{"pkg/wire"},
	{"pkg/host"},
	{"pkg/redact", "pkg/wakeup"},
}

// outside are packages that only tests import. The rest of what is not the product is the module in test, which the
// product cannot import.
var outside = []string{"internal/incluster/manager/managertest", "internal/repotest", "internal/testenv"}

type pkg struct {
	ImportPath string
	Dir        string
	Imports    []string
	Deps       []string
	GoFiles    []string
}

// packages lists the product's packages, without test files.
func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,Imports,Deps,GoFiles", "./...")
	cmd.Dir = root(t)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	var ps []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			return ps
		}
		if err != nil {
			t.Fatal(err)
		}
		ps = append(ps, p)
	}
}

// root is the repository's root.
func root(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Dir(filepath.Dir(dir))
}

// within reports whether a package within the module is in a folder.
func within(path, folder string) bool { return path == folder || strings.HasPrefix(path, folder+"/") }

// place returns the folder of floors that contains a package, and its floor, counted from the top; -1: none.
func place(path string) (folder string, floor int) {
	for floor, folders := range floors {
		for _, folder := range folders {
			if within(path, folder) {
				return folder, floor
			}
		}
	}
	return "", -1
}

func TestImportsPointDown(t *testing.T) {
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, "kubevpn/")
		if slices.ContainsFunc(outside, func(o string) bool { return within(path, o) }) {
			continue
		}
		from, floor := place(path)
		if floor < 0 {
			t.Errorf("%s is in no folder of floors", path)
			continue
		}
		for _, imported := range p.Imports {
			target, ours := strings.CutPrefix(imported, "kubevpn/")
			if !ours {
				continue
			}
			to, below := place(target)
			switch {
			case below < 0:
				t.Errorf("%s imports %s, which is not part of the product", path, target)
			case to != from && below <= floor:
				t.Errorf("%s imports %s: %s is not below %s", path, target, to, from)
			}
		}
	}
}

// TestArchitectureListsEachPackage compares the table of docs/architecture.md with the packages and their floors. A
// package whose folder has a package belongs to that one.
func TestArchitectureListsEachPackage(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root(t), "docs", "architecture.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "| floor | package | task |\n")
	table, _, _ = strings.Cut(table, "\n\n")
	documented, floor := map[string]int{}, -1
	for line := range strings.Lines(table) {
		cells := strings.Split(line, "|")
		if number, err := strconv.Atoi(strings.TrimSpace(cells[1])); err == nil {
			floor = number
		}
		for i, name := range strings.Split(cells[2], "`") {
			if i%2 == 1 {
				documented[name] = floor
			}
		}
	}
	all := packages(t)
	want := map[string]int{}
	for _, p := range all {
		path := strings.TrimPrefix(p.ImportPath, "kubevpn/")
		part := slices.ContainsFunc(all, func(o pkg) bool { return strings.HasPrefix(p.ImportPath, o.ImportPath+"/") })
		if _, at := place(path); at >= 0 && !part {
			want[path] = len(floors) - 1 - at
		}
	}
	if diff := cmp.Diff(want, documented); diff != "" {
		t.Errorf("the table of docs/architecture.md (-packages +table):\n%s", diff)
	}
}

// Packages below pkg know neither Kubernetes nor the command line. The program of the pods contains no code of the
// laptop.
func TestForbiddenDependencies(t *testing.T) {
	tests := []struct {
		under     string
		forbidden []string
		why       string
	}{
		{"kubevpn/pkg/", []string{"k8s.io/", "github.com/spf13/", "flag", "kubevpn/internal/"}, "pkg is mechanism"},
		{"kubevpn/cmd/traffic", []string{"gvisor.dev/", "kubevpn/internal/laptop/", "kubevpn/internal/kube/"},
			"the image contains no code of the laptop"},
		{"kubevpn/cmd/kubevpn", []string{"kubevpn/internal/incluster/"}, "the laptop's program contains no code of the image"},
		{"kubevpn/internal/api", []string{"kubevpn/internal/"}, "every part imports it"},
		{"kubevpn/internal/", []string{"text/template", "html/template"}, "the linker then keeps all methods: 20 MB of program"},
	}
	for _, p := range packages(t) {
		for _, tt := range tests {
			if !strings.HasPrefix(p.ImportPath, tt.under) {
				continue
			}
			dependencies := p.Deps
			if strings.HasSuffix(tt.under, "/") {
				dependencies = p.Imports // what a library of others uses is its own business
			}
			for _, dep := range dependencies {
				for _, f := range tt.forbidden {
					if dep == f || strings.HasSuffix(f, "/") && strings.HasPrefix(dep, f) {
						t.Errorf("%s depends on %s: %s", p.ImportPath, dep, tt.why)
					}
				}
			}
		}
	}
}
