//go:build e2e && release && linux

package e2e

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"kubevpn/test/lab"
)

// maxCommands is the number of commands after which a Service must answer in docs/getting-started.md.
const maxCommands = 5

// TestGettingStarted follows "With a release" of docs/getting-started.md on a clean Debian: with the files that
// `make release-snapshot` makes of a release whose image is in the lab's registry.
func TestGettingStarted(t *testing.T) {
	w := newWorld(t, lab.Config{Name: "e2e-start", ProxyMode: lab.ProxyIPTables}, []suite{{"start", nil}})
	address, images := w.Config().Registry().String(), registryHandler()
	listener, err := w.Listen("router", "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	serveHTTP(t, listener, images)
	version := makeRelease(t, images, address)
	m := newCleanMachine(t, w, version)
	commands := shellLines(t, filepath.Join(moduleRoot(t), "docs", "getting-started.md"))
	if len(commands) < 3 || len(commands) > maxCommands {
		t.Fatalf("the page has the commands %q, want at most %d", commands, maxCommands)
	}
	answer := ""
	for _, command := range commands {
		if command == "sh install.sh" {
			command += " --from ." // instead of the release's page
		}
		answer = m.must(t, strings.ReplaceAll(command, "VERSION", version))
	}
	if !strings.Contains(answer, `"host":"web-`) {
		t.Errorf("%s: %s", commands[len(commands)-1], answer)
	}
	m.must(t, "kubevpn disconnect --all && kubevpn quit && kubevpn uninstall")
	if left := w.installed(t); left != "" {
		t.Errorf("left:\n%s", left)
	}
}

// makeRelease pushes the image into images, makes a release that names the image on host, and returns the version.
func makeRelease(t *testing.T, images http.Handler, host string) string {
	t.Helper()
	here := httptest.NewServer(images)
	defer here.Close()
	root := moduleRoot(t)
	run := func(args ...string) string {
		cmd := exec.CommandContext(t.Context(), "make", append([]string{"-s"}, args...)...)
		cmd.Dir, cmd.Stderr = root, os.Stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("make %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return strings.TrimSpace(string(out))
	}
	pushed := run("push-image", "IMAGE="+strings.TrimPrefix(here.URL, "http://")+"/kubevpn:1")
	_, path, ok := strings.Cut(pushed[strings.LastIndex(pushed, "\n")+1:], "/")
	if !ok {
		t.Fatalf("make push-image printed %q", pushed)
	}
	run("release-snapshot", "IMAGE="+host+"/"+path)
	metadata, err := os.ReadFile(filepath.Join(root, "bin", "dist", "metadata.json"))
	if err != nil {
		t.Fatal(err)
	}
	var release struct{ Version string }
	if err := json.Unmarshal(metadata, &release); err != nil {
		t.Fatal(err)
	}
	return release.Version
}

// cleanMachine is a Debian with nothing but curl, on the network of the lab's laptop. Each command mounts its
// file systems in its own namespace.
type cleanMachine struct {
	*world
	root string
}

// newCleanMachine creates the machine. The home of root contains a kubeconfig and the files that a user downloads from
// the page of a release.
func newCleanMachine(t *testing.T, w *world, version string) *cleanMachine {
	t.Helper()
	m := &cleanMachine{world: w, root: filepath.Join(t.TempDir(), "root")}
	cmd := exec.CommandContext(t.Context(), "debootstrap", "--variant=minbase", "--include=ca-certificates,curl", "bookworm", m.root)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("debootstrap: %v\n%s", err, out)
	}
	kubeconfig, err := w.Kubeconfig(lab.Admin)
	if err != nil {
		t.Fatal(err)
	}
	dist := filepath.Join(moduleRoot(t), "bin", "dist")
	for from, to := range map[string]string{
		kubeconfig: "root/.kube/config",
		filepath.Join(dist, "kubevpn_"+version+"_linux_"+runtime.GOARCH+".tar.gz"): "root/",
		filepath.Join(dist, "checksums.txt"):                                       "root/",
		filepath.Join(dist, "install.sh"):                                          "root/",
	} {
		to = filepath.Join(m.root, to) + to[len(strings.TrimRight(to, "/")):]
		if out, err := exec.CommandContext(t.Context(), "install", "-D", "-m", "0700", from, to).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	resolv, err := w.Command(t.Context(), "laptop", "cat", "/etc/resolv.conf")
	if err != nil {
		t.Fatal(err)
	}
	content, err := resolv.Output()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(m.root, "etc", "resolv.conf"), content, 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if out, err := m.run(context.WithoutCancel(t.Context()), t, "command -v kubevpn && kubevpn quit || true"); err != nil {
			t.Errorf("kubevpn quit: %v\n%s", err, out)
		}
	})
	return m
}

// run runs a line of shell as root of the machine, in root's home.
func (m *cleanMachine) run(ctx context.Context, t *testing.T, line string) (string, error) {
	t.Helper()
	const enter = `set -e
for dir in proc sys dev; do mount --rbind "/$dir" "$1/$dir"; done
exec env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin KUBEVPN_YES=true \
	chroot "$1" sh -c "cd && $2"`
	cmd, err := m.Command(ctx, "laptop", "unshare", "--mount", "--propagation", "private", "sh", "-c", enter, "sh", m.root, line)
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (m *cleanMachine) must(t *testing.T, line string) string {
	t.Helper()
	out, err := m.run(t.Context(), t, line)
	if err != nil {
		t.Fatalf("%s: %v\n%s", line, err, out)
	}
	t.Logf("%s\n%s", line, out)
	return out
}
