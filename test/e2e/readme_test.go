//go:build e2e && linux

package e2e

import (
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"

	"kubevpn/test/lab"
)

// The commands of the README that this suite does not run, and the tests that run them.
var runElsewhere = map[string]string{
	"make demo":      "TestREADMEDemoShowsThePage",
	"make demo-down": "TestREADMEDemoShowsThePage",
	"make build":     "make image and make install need it",
	"make test":      "it runs this suite",
	"make bench":     "it takes minutes, and has no pass criteria",
}

// readmeSuite runs the commands of README.md's shell blocks in order: make on this machine, the others on the laptop. A
// registry of this test replaces the one that the README names, and the lab's workload the reader's. The image is for
// this machine's nodes: scripts/nightly release compiles it for both architectures, which takes minutes.
func readmeSuite(t *testing.T, w *world) {
	reg := httptest.NewServer(registry.New())
	defer reg.Close()
	host := strings.TrimPrefix(reg.URL, "http://")
	root := moduleRoot(t)
	prefix := t.TempDir()
	l := w.newLaptop(t, lab.Admin)
	l.uninstall(t)
	replace := strings.NewReplacer("registry.example", host, "kubevpn ", filepath.Join(prefix, "bin", "kubevpn")+" ",
		".:/app", t.TempDir()+":/app --command /echo", "go run ./cmd/web", "printenv HOSTNAME")

	ran, exported := 0, ""
	for _, command := range readmeCommands(t, filepath.Join(root, "README.md")) {
		if _, ok := runElsewhere[command]; ok {
			continue
		}
		ran++
		command = replace.Replace(command)
		if strings.HasPrefix(command, "export ") {
			exported += command + "; "
			continue
		}
		if strings.HasPrefix(command, "make ") {
			cmd := exec.CommandContext(t.Context(), "sh", "-c", command)
			cmd.Dir = root
			cmd.Env = append(os.Environ(), "PREFIX="+prefix, "ARCHS="+runtime.GOARCH)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", command, err, out)
			}
			if image, ok := strings.CutPrefix(command, "make push-image "); ok {
				l.loadFrom(t, root, image)
			}
			continue
		}
		if r := l.sh(t, "%s", exported+command); r.code != 0 || r.stdout == "" && !strings.Contains(command, "disconnect") {
			t.Fatal(r)
		}
	}
	if ran < 9 {
		t.Errorf("only %d commands of the README were run", ran)
	}
	l.uninstall(t)
}

// loadFrom loads the image that the README pushed into the nodes, which cannot reach a registry on this machine.
func (l *laptop) loadFrom(t *testing.T, root, image string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "make", "image", image)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("make image %s: %v\n%s", image, err, out)
	}
	if err := l.Load(t.Context(), filepath.Join(root, "bin", "kubevpn-image.tar")); err != nil {
		t.Fatal(err)
	}
}

// uninstall removes everything of kubevpn from the cluster.
func (l *laptop) uninstall(t *testing.T) {
	t.Helper()
	if r := l.run(t, "kubevpn", "uninstall"); r.code != 0 {
		t.Fatal(r)
	}
}

// readmeCommands returns the lines of the blocks marked sh, without comments.
func readmeCommands(t *testing.T, file string) (commands []string) {
	t.Helper()
	for _, line := range shellLines(t, file) {
		command, _, _ := strings.Cut(line, " #")
		commands = append(commands, strings.TrimSpace(command))
	}
	return commands
}

// shellLines returns the lines of the blocks marked sh.
func shellLines(t *testing.T, file string) (lines []string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	inside := false
	for line := range strings.Lines(string(text)) {
		switch line = strings.TrimSpace(line); {
		case line == "```sh":
			inside = true
		case strings.HasPrefix(line, "```"):
			inside = false
		case inside:
			lines = append(lines, line)
		}
	}
	return lines
}

func moduleRoot(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "kubevpn").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// TestREADMEDemoShowsThePage runs the commands of the README that show kubevpn on a cluster of this machine, and records
// the README's picture again on that cluster.
func TestREADMEDemoShowsThePage(t *testing.T) {
	if only := os.Getenv(suiteVariable); only != "" {
		t.Skipf("only the suite %s is selected", only)
	}
	root := moduleRoot(t)
	down := func() {
		cmd := exec.Command("make", "demo-down")
		cmd.Dir = root
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("make demo-down: %v\n%s", err, out)
		}
	}
	defer down()
	cmd := exec.CommandContext(t.Context(), "make", "demo")
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("make demo: %v\n%s", err, out)
	}
	for _, want := range []string{
		"lab \"demo\" is up", "Connected", "by the Service's name", "by its ClusterIP", "by a pod's IP", `"host":"web-`,
		"Links, routes, rules, firewall and resolv.conf are as they were before connect.",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("make demo does not show %q", want)
		}
	}
	if t.Failed() {
		t.Logf("%s", out)
	}
	// As `make picture`, which also builds.
	cmd = exec.CommandContext(t.Context(), "go", "run", "-C", "test", "./e2e/demo", "-check",
		"-picture", "../docs/first-minute.svg", "localhost/kubevpn:demo")
	cmd.Dir = root
	began := time.Now()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	t.Logf("the picture took %v", time.Since(began).Round(time.Second))
}
