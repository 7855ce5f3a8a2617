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

// layers says how high each package is: imports point down, and packages of the same height do not import each
// other. A package below one of these (pkg/datapath/tun/tuntest) belongs to it.
var layers = map[string]int{
	"cmd": 50,

	"internal/cli":    40,
	"internal/daemon": 40,
	"internal/helper": 40,

	"internal/connection": 30,
	"internal/manager":    30,
	"internal/agent":      30,
	"internal/install":    30,
	"internal/service":    30,
	"internal/gateway":    30,
	"internal/intercept":  30,
	"internal/supervisor": 30,
	"internal/clone":      30,
	"internal/why":        30,
	"internal/shadow":     30,
	"internal/dev":        31, // it runs programs, or containers by internal/docker
	"internal/docker":     30,
	"internal/report":     31, // it finds the traffic manager by internal/install
	"internal/page":       30,
	"internal/doctor":     32, // it asks what install, connection and service know

	"internal/netpolicy": 20,
	"internal/exchanges": 21,
	"internal/podenv":    21,
	"internal/cluster":   21,
	"internal/podconn":   22,
	"internal/podstatus": 21,
	"internal/workloads": 22,
	"internal/config":    21,
	"internal/api":       20, // the words that every part says to the others: it imports nothing of internal
	"internal/version":   20,
	"internal/footprint": 20,
	"internal/metrics":   21,

	"pkg/datapath/tun":        10,
	"pkg/datapath/netstack":   10,
	"pkg/datapath/packetlink": 10,
	"pkg/datapath/balancer":   10,
	"pkg/datapath/packet":     0,
	"pkg/datapath/routable":   0,

	"pkg/host/osdns":      10,
	"pkg/host/route":      10,
	"pkg/host/redirect":   10,
	"pkg/host/netfilter":  0,
	"pkg/host/sandbox":    11, // it makes its network with pkg/host/route
	"pkg/host/sockets":    0,
	"pkg/host/subreaper":  0,
	"pkg/host/unixsocket": 0,

	"pkg/wakeup": 0,
	"pkg/redact": 0,

	"pkg/wire/transport":    10,
	"pkg/wire/authlistener": 5, // whoever listens bounds its conns by it
	"pkg/wire/filesync":     10,
	"pkg/wire/nonblock":     0,
	"pkg/wire/sshjump":      10,

	"pkg/protocol/dns":         10,
	"pkg/protocol/interceptor": 10,
	"pkg/protocol/httpmatch":   0,
	"pkg/protocol/socks":       10,
}

// outside are packages that only tests import. The rest of what is not the product is the module in test, which the
// product cannot import.
var outside = []string{"internal/repotest", "internal/testenv"}

// exceptions are imports between equals, each with its reason.
var exceptions = map[[2]string]string{
	{"internal/connection", "internal/install"}: "a session begins with finding the traffic manager, or installing it",
}

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
				t.Errorf("%s imports %s, which is not part of the product", path, target)
			case layers[to] == layers[from]:
				t.Errorf("%s imports %s: they have the same height; a package above must connect them", path, target)
			case layers[to] > layers[from]:
				t.Errorf("%s imports %s, which is above it", path, target)
			}
		}
	}
	for edge := range exceptions {
		if !used[edge] {
			t.Errorf("no import uses the exception %s → %s", edge[0], edge[1])
		}
	}
}

// TestArchitectureListsEachPackageInItsLayer compares the table of docs/architecture.md with layers.
func TestArchitectureListsEachPackageInItsLayer(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root(t), "docs", "architecture.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "| layer | package | task |\n")
	table, _, _ = strings.Cut(table, "\n\n")
	documented, layer := map[string]int{}, 0
	for line := range strings.Lines(table) {
		cells := strings.Split(line, "|")
		if number, err := strconv.Atoi(strings.TrimSpace(cells[1])); err == nil {
			layer = number
		}
		for i, name := range strings.Split(cells[2], "`") {
			if i%2 == 1 {
				documented[name] = layer
			}
		}
	}
	want := map[string]int{"cmd/kubevpn": 5, "cmd/traffic": 5}
	for name, height := range layers {
		if name != "cmd" {
			want[name] = height / 10
		}
	}
	if diff := cmp.Diff(want, documented); diff != "" {
		t.Errorf("the table of layers in docs/architecture.md (-layers_test.go +table):\n%s", diff)
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
		{"kubevpn/cmd/traffic", []string{"gvisor.dev/", "kubevpn/internal/cli", "kubevpn/internal/daemon",
			"kubevpn/internal/helper", "kubevpn/internal/connection", "kubevpn/internal/cluster"}, "the image contains no code of the laptop"},
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
