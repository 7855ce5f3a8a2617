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
	"strings"
	"testing"
)

// layers says how high each package is: imports point down, and packages of the same height do not import each
// other. A package below one of these (pkg/tun/tuntest) belongs to it.
var layers = map[string]int{
	"cmd": 50,

	"internal/cli":    40,
	"internal/daemon": 40,
	"internal/helper": 40,

	"internal/session":    30,
	"internal/manager":    30,
	"internal/agent":      30,
	"internal/install":    30,
	"internal/gateway":    30,
	"internal/intercept":  30,
	"internal/supervisor": 30,
	"internal/clone":      30,
	"internal/dev":        30,
	"internal/docker":     30,

	"internal/podenv":  21,
	"internal/cluster": 21,
	"internal/config":  21,
	"internal/api":     20, // the words that every part says to the others: it imports nothing of ours
	"internal/version": 20,
	"internal/trim":    20,

	"pkg/tun":         10,
	"pkg/transport":   10,
	"pkg/netstack":    10,
	"pkg/l3":          10,
	"pkg/balancer":    10,
	"pkg/dns":         10,
	"pkg/osdns":       10,
	"pkg/route":       10,
	"pkg/redirect":    10,
	"pkg/interceptor": 10,
	"pkg/door":        10,

	"pkg/sandbox":  11, // it makes its network with pkg/route
	"pkg/filesync": 10,

	"pkg/packet":     0,
	"pkg/rawio":      0,
	"pkg/match":      0,
	"pkg/ownertable": 0,
	"pkg/pid1":       0,
}

// outside are packages that are not part of the product: programs for its tests and its demo. They may import
// what they need; of the product, only tests may import them, and their own commands.
var outside = []string{"internal/lab", "internal/image", "internal/e2e", "internal/repotest", "internal/testenv"}

// exceptions are imports between equals, each with its reason.
var exceptions = map[[2]string]string{
	{"internal/session", "internal/install"}: "a session begins with finding the traffic manager, or installing it",
}

type pkg struct {
	ImportPath string
	Dir        string
	Imports    []string
	Deps       []string
	GoFiles    []string
}

// packages lists the module's packages, without test files.
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

// unit is the entry of layers or outside that a path within the module belongs to.
func unit(path string) string {
	best := ""
	consider := func(name string) {
		if (path == name || strings.HasPrefix(path, name+"/")) && len(name) > len(best) {
			best = name
		}
	}
	for name := range layers {
		consider(name)
	}
	for _, name := range outside {
		consider(name)
	}
	return best
}

func TestImportsPointDown(t *testing.T) {
	used := map[[2]string]bool{}
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, "kubevpn/")
		from := unit(path)
		if from == "" {
			t.Errorf("%s is in no layer: place it in layers_test.go", path)
			continue
		}
		if slices.Contains(outside, from) {
			continue
		}
		for _, imported := range p.Imports {
			target, ours := strings.CutPrefix(imported, "kubevpn/")
			if !ours {
				continue
			}
			to := unit(target)
			edge := [2]string{from, to}
			_, excepted := exceptions[edge]
			switch {
			case from == to:
			case excepted:
				used[edge] = true
			case slices.Contains(outside, to):
				if from != "cmd" {
					t.Errorf("%s imports %s, which is not part of the product", path, target)
				}
			case layers[to] == layers[from]:
				t.Errorf("%s imports %s: they are siblings, so what is above both has to bring them together", path, target)
			case layers[to] > layers[from]:
				t.Errorf("%s imports %s, which is above it", path, target)
			}
		}
	}
	for edge := range exceptions {
		if !used[edge] {
			t.Errorf("the exception %s → %s is used by nothing any more", edge[0], edge[1])
		}
	}
}

// Mechanism knows no Kubernetes and no command line, and the pod's program carries nothing of the laptop's.
func TestForbiddenDependencies(t *testing.T) {
	tests := []struct {
		under     string
		forbidden []string
		why       string
	}{
		{"kubevpn/pkg/", []string{"k8s.io/", "github.com/spf13/", "flag", "kubevpn/internal/"}, "pkg is mechanism"},
		{"kubevpn/cmd/traffic", []string{"gvisor.dev/", "kubevpn/internal/cli", "kubevpn/internal/daemon",
			"kubevpn/internal/helper", "kubevpn/internal/session", "kubevpn/internal/cluster"}, "the image does not carry the laptop's half"},
		{"kubevpn/internal/api", []string{"kubevpn/"}, "every part imports it"},
	}
	for _, p := range packages(t) {
		for _, tt := range tests {
			if !strings.HasPrefix(p.ImportPath, tt.under) {
				continue
			}
			dependencies := p.Deps
			if tt.under == "kubevpn/pkg/" {
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
