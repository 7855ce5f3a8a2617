package repotest

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// Programs one protocol version apart work together. The test builds the ends twice, as they are and with the next
// number, and lets the two talk: a laptop one step ahead with today's manager and agent, and one a step behind.
func TestNeighboursWork(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED: -short; it builds two versions of four packages")
	}
	b := newNeighbours(t)
	managers := map[bool]string{false: b.manager(t, false), true: b.manager(t, true)}
	for _, test := range []struct {
		name          string
		laptop, other bool // ahead
		protocol      int
	}{
		{"laptop ahead of the manager", true, false, b.protocol},
		{"laptop behind the manager", false, true, b.protocol},
		{"both ahead", true, true, b.protocol + 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			b.run(t, "laptop/connection", test.laptop, "^TestLaptopGreetsManagerOfAnotherBuild$",
				"KUBEVPN_TEST_GREETS="+managers[test.other], fmt.Sprint("KUBEVPN_TEST_PROTOCOL=", test.protocol))
		})
	}
	for _, pkg := range []string{"incluster/agent", "laptop/intercept", "incluster/manager/session", "laptop/connection"} { // with the lines of other versions
		t.Run(path.Base(pkg)+" ahead", func(t *testing.T) { b.run(t, pkg, true, "NeighbouringMinorVersion") })
	}
}

// neighbours builds test programs of today's protocol and of the next.
type neighbours struct {
	dir, overlay string
	protocol     int
	built        map[string]string
}

func newNeighbours(t *testing.T) *neighbours {
	t.Helper()
	b := &neighbours{dir: t.TempDir(), built: make(map[string]string)}
	source := filepath.Join(root(t), "internal", "api", "protocol.go")
	text, err := os.ReadFile(source)
	if err != nil {
		t.Fatal(err)
	}
	constant := regexp.MustCompile(`(?m)^const Protocol = (\d+)$`)
	found := constant.FindSubmatch(text)
	if found == nil {
		t.Fatalf("%s has no constant Protocol", source)
	}
	if b.protocol, err = strconv.Atoi(string(found[1])); err != nil {
		t.Fatal(err)
	}
	next := constant.ReplaceAll(text, fmt.Appendf(nil, "const Protocol = %d", b.protocol+1))
	next = regexp.MustCompile(`(?m)^const OldestProtocol = .*$`).ReplaceAll(next, fmt.Appendf(nil,
		"const OldestProtocol = %d", b.protocol))
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{source: filepath.Join(b.dir, "protocol.go")}})
	if err != nil {
		t.Fatal(err)
	}
	b.overlay = filepath.Join(b.dir, "overlay.json")
	for name, data := range map[string][]byte{"protocol.go": next, "overlay.json": overlay} {
		if err := os.WriteFile(filepath.Join(b.dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

// program returns the path of the test program of a package below internal.
func (b *neighbours) program(t *testing.T, pkg string, ahead bool) string {
	t.Helper()
	name := fmt.Sprint(path.Base(pkg), "-", ahead, ".test")
	program := filepath.Join(b.dir, name)
	if b.built[name] != "" {
		return program
	}
	args := []string{"test", "-c", "-o", program, "-ldflags=-s -w"} // debug information takes most of the linker's time
	if ahead {
		args = append(args, "-overlay", b.overlay)
	}
	cmd := exec.CommandContext(t.Context(), "go", append(args, "./internal/"+pkg)...)
	cmd.Dir = root(t)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building %s: %v: %s", name, err, out)
	}
	b.built[name] = program
	return program
}

// run runs the tests of a package that match a pattern; at least one must.
func (b *neighbours) run(t *testing.T, pkg string, ahead bool, pattern string, env ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), b.program(t, pkg, ahead), "-test.run="+pattern, "-test.v")
	cmd.Dir = filepath.Join(root(t), "internal", pkg)
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS") {
		t.Errorf("%v: %s", err, out)
	}
}

// manager runs a traffic manager until the test ends, and returns its address (childMain of
// internal/incluster/manager).
func (b *neighbours) manager(t *testing.T, ahead bool) (addr string) {
	t.Helper()
	cmd := exec.Command(b.program(t, "incluster/manager", ahead))
	cmd.Env = append(os.Environ(), "KUBEVPN_TEST_MANAGER=1")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(line)
}
